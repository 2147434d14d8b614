"""Order, time and errors of emulated streams."""

# Tensor.backward and the like have no types.
# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from patience import PATIENCE_S, join, longer_each_try, until

from lightning_roundpipe.devices import Device, StreamAborted, StreamError, emulated_link, emulated_streams

MakeDevice = Callable[..., Device]
COPY_STREAMS = ["weights_up", "activations_up", "arrivals_up", "activations_down", "gradients_down"]


@pytest.mark.parametrize("name", COPY_STREAMS)
@longer_each_try
def test_copy_is_asynchronous_and_its_event_says_when_it_is_done(make: MakeDevice, name: str, times: float) -> None:
    device = make(latency=0.1 * times)
    dst, src = torch.zeros(4), torch.arange(4.0)
    stream = getattr(device, name)
    stream.copy(dst, src)
    event = stream.record()
    assert not event.done()
    assert dst.tolist() == [0, 0, 0, 0]
    event.wait()
    assert event.done()
    assert dst.tolist() == [0, 1, 2, 3]


def test_a_stream_is_first_in_first_out(make: MakeDevice) -> None:
    device = make(delay_seed=0)
    dst = torch.zeros(100)
    for i in range(50):
        device.weights_up.copy(dst, torch.full((100,), float(i)))
    device.weights_up.synchronize()
    assert dst.eq(49).all()


@longer_each_try
def test_a_copy_stream_waits_for_another_ones_event(make_all: Callable[..., list[Device]], times: float) -> None:
    slow, fast = make_all(2, bandwidth=1000 / times)
    host, arrived = torch.zeros(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    slow.activations_down.copy(host, torch.ones(200, dtype=torch.uint8))  # arrives after 0.2 s
    before = time.perf_counter()
    fast.activations_up.wait(slow.activations_down.record())
    fast.activations_up.copy(arrived, host)
    assert time.perf_counter() - before < 0.15 * times, "the caller was blocked"
    fast.activations_up.synchronize()
    assert arrived.eq(1).all()
    assert time.perf_counter() - before > 0.35 * times, "the second transfer did not come after the first"


def test_compute_is_the_calling_thread(make: MakeDevice) -> None:
    device = make(latency=0.1)
    dst = torch.zeros(4)
    device.weights_up.copy(dst, torch.ones(4))
    device.compute.wait(device.weights_up.record())
    assert dst.eq(1).all()
    device.compute.copy(dst, torch.full((4,), 2.0))
    assert dst.eq(2).all()
    assert device.compute.record().done()


@longer_each_try
def test_bandwidth_is_shared_within_a_direction_and_not_between_them(make: MakeDevice, times: float) -> None:
    device = make(bandwidth=100_000 / times)
    a, b = torch.zeros(10_000, dtype=torch.uint8), torch.zeros(10_000, dtype=torch.uint8)

    def seconds(*names: str) -> float:
        start = time.perf_counter()
        for name in names:
            getattr(device, name).copy(a.clone(), b)
        events = [getattr(device, name).record(timed=True) for name in names]
        for event in events:
            event.wait()
        return float(max(event.time() for event in events) - start) / times

    assert 0.095 < seconds("weights_up") < 0.19
    assert 0.195 < seconds("weights_up", "activations_up") < 0.38
    assert 0.195 < seconds("activations_down", "gradients_down") < 0.38
    assert 0.095 < seconds("weights_up", "gradients_down") < 0.19


@longer_each_try
def test_chunks_of_one_stream_do_not_starve_the_other(make: MakeDevice, times: float) -> None:
    device = make(bandwidth=100_000 / times)
    chunk = torch.zeros(2_000, dtype=torch.uint8)  # 20 ms
    for _ in range(20):
        device.weights_up.copy(chunk.clone(), chunk)
    device.activations_up.copy(chunk.clone(), chunk)
    activation, weights = device.activations_up.record(timed=True), device.weights_up.record(timed=True)
    weights.wait()
    assert activation.done()
    assert activation.time() < weights.time() - 0.2 * times


@longer_each_try
def test_latency_comes_before_each_copy(make: MakeDevice, times: float) -> None:
    device = make(latency=0.05 * times)
    start = time.perf_counter()
    for _ in range(3):
        device.weights_up.copy(torch.zeros(1), torch.ones(1))
    event = device.weights_up.record(timed=True)
    event.wait()
    assert 0.15 <= (event.time() - start) / times < 0.3


@longer_each_try
def test_events_tell_time_only_if_asked_for(make: MakeDevice, times: float) -> None:
    device = make(latency=0.1 * times)
    before = time.perf_counter()
    assert before <= device.compute.record(timed=True).time() <= time.perf_counter()
    with pytest.raises(RuntimeError, match="timed=True"):
        device.compute.record().time()
    device.weights_up.copy(torch.zeros(1), torch.ones(1))
    event = device.weights_up.record(timed=True)
    with pytest.raises(RuntimeError, match="wait for it"):
        event.time()
    event.wait()
    assert event.time() > before + 0.1 * times


@pytest.mark.parametrize("dst_inference", [False, True])
@pytest.mark.parametrize("src_inference", [False, True])
@pytest.mark.parametrize("name", ["compute", "weights_up"])
def test_copies_go_past_autograd(make: MakeDevice, name: str, dst_inference: bool, src_inference: bool) -> None:
    with torch.inference_mode(dst_inference):
        dst = torch.zeros(3, 4).t()  # not contiguous: the other way of copying
    with torch.inference_mode(src_inference):
        src = torch.arange(12.0).view(4, 3)
    stream = getattr(make(), name)
    if dst_inference:
        stream.copy(dst, src)
        stream.synchronize()
    else:
        version = dst.requires_grad_()._version
        square = dst * dst  # saves dst, so backward would raise if its version had moved
        stream.copy(dst, src)
        stream.synchronize()
        assert dst._version == version
        square.sum().backward()
    assert torch.equal(dst.detach(), src)


def test_expanded_and_strided_tensors_are_copied_as_they_are(make: MakeDevice) -> None:
    device = make()
    mask = torch.arange(4.0).view(1, 1, 1, 4).expand(2, 1, 3, 4)
    host = device.host_like(mask)
    assert host.stride() == mask.stride()
    assert host.untyped_storage().nbytes() == 16
    permuted = torch.randn(2, 3, 4).permute(2, 0, 1)
    saved = device.host_like(permuted)
    assert saved.stride() == permuted.stride()
    device.activations_down.copy(host, mask)
    device.activations_down.copy(saved, permuted)
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    plain = torch.empty(3, dtype=torch.complex64)
    device.activations_down.copy(plain, conjugate)
    device.activations_down.synchronize()
    assert torch.equal(host, mask)
    assert torch.equal(saved, permuted)
    assert torch.equal(plain, conjugate)
    with pytest.raises(ValueError, match="expanded"):
        device.activations_down.copy(host, mask.contiguous())


@pytest.mark.parametrize("src", [torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(1)])
def test_a_copy_never_broadcasts_or_converts(make: MakeDevice, src: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="equal shapes and dtypes"):
        make().weights_up.copy(torch.zeros(4), src)


def test_a_finished_copy_keeps_nothing_alive(make: MakeDevice) -> None:
    device = make()
    tensors = [torch.zeros(4), torch.zeros(4)]
    device.weights_up.copy(*tensors)  # and nothing after it, which would push it out of the thread's hands
    storage = tensors[0].untyped_storage()._weak_ref()
    tensors.clear()
    try:
        until(lambda: torch.UntypedStorage._expired(storage))
    finally:
        torch.UntypedStorage._free_weak_ref(storage)


def test_delays_depend_on_seed_device_and_stream_only() -> None:
    def first(seed: int, name: str) -> list[float]:
        delays = emulated_link.Delays(seed, name)
        return [delays.next() for _ in range(20)]

    assert first(1, "0/weights_up") == first(1, "0/weights_up")
    assert first(1, "0/weights_up") != first(2, "0/weights_up")
    assert first(1, "0/weights_up") != first(1, "1/weights_up")
    assert all(0 <= delay <= 0.002 for delay in first(1, "x"))


@longer_each_try
def test_delays_are_slept_by_copies_and_permits(
    make: MakeDevice, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    monkeypatch.setattr(emulated_link.Delays, "next", lambda self: 0.1 * times)
    device = make(delay_seed=0)
    start = time.perf_counter()
    device.weights_up.copy(torch.zeros(1), torch.ones(1))
    device.weights_up.synchronize()
    assert 0.1 <= (time.perf_counter() - start) / times < 0.19
    with device.acquire_core():
        assert time.perf_counter() - start >= 0.2 * times


def test_an_error_reaches_every_waiter_and_later_caller(make_all: Callable[..., list[Device]]) -> None:
    device, other = make_all(2, latency=1e-6)  # or a small copy would be done in this thread
    moves, go = [], threading.Event()

    def fail(dst: torch.Tensor, src: torch.Tensor) -> None:
        go.wait(PATIENCE_S)
        moves.append(dst)
        raise ZeroDivisionError("the link broke")

    dst = torch.zeros(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_streams, "move", fail)
        before = device.weights_up.record()
        device.weights_up.copy(dst, torch.ones(1))
        device.weights_up.copy(dst, torch.ones(1))
        event = device.weights_up.record(timed=True)
        other.activations_up.wait(event)  # a stream that waits for failed work has failed
        other.activations_up.copy(dst, torch.ones(1))
        elsewhere = other.activations_up.record()
        go.set()
        for failed in (event, event, elsewhere):
            with pytest.raises(StreamError, match=r"^roundpipe-dev0-weights_up failed.*the link broke") as caught:
                failed.wait()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(moves) == 1, "work after the error was done"
    assert event.done()
    before.wait()  # what came before the error is as good as ever
    with pytest.raises(StreamError, match="the link broke"):
        event.time()
    with pytest.raises(StreamError, match="the link broke"):
        device.compute.wait(event)
    for stream in (device.weights_up, other.activations_up):
        with pytest.raises(StreamError, match="the link broke"):
            stream.copy(dst, torch.ones(1))
        with pytest.raises(StreamError, match="the link broke"):
            stream.record()
    device.activations_up.synchronize()  # the other streams go on
    device.reset()
    device.weights_up.copy(dst, torch.ones(1))
    device.weights_up.synchronize()
    assert dst.item() == 1


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_abort_wakes_waiters_and_stops_later_ones_until_reset(make: MakeDevice) -> None:
    device = make(bandwidth=1000)
    dst = torch.zeros(100_000, dtype=torch.uint8)  # 100 s
    device.weights_up.copy(dst, torch.ones_like(dst))
    event, reached = device.weights_up.record(), device.compute.record()
    device.activations_down.wait(event)
    waiters = [in_thread(event.wait), in_thread(event.wait), in_thread(device.activations_down.synchronize)]
    time.sleep(0.05)
    assert all(thread.is_alive() for thread, _ in waiters)
    device.abort()
    for thread, errors in waiters:
        join([thread])
        assert [type(error) for error in errors] == [StreamAborted]
    with pytest.raises(StreamAborted), device.acquire_core():
        pass
    for stream in (device.compute, device.weights_up):
        calls: list[Callable[[], object]] = [
            stream.record,
            stream.synchronize,
            lambda stream=stream: stream.copy(dst, dst),  # type: ignore[misc]
            lambda stream=stream: stream.wait(reached),  # type: ignore[misc]
        ]
        for call in [*calls, event.wait, reached.wait]:
            with pytest.raises(StreamAborted):
                call()
    device.reset()
    with pytest.raises(StreamAborted):
        event.wait()  # its work was dropped, and stays so
    small = torch.zeros(10, dtype=torch.uint8)
    start = time.perf_counter()
    device.weights_up.copy(small, torch.ones_like(small))
    device.compute.wait(device.weights_up.record())
    assert small.eq(1).all()
    assert time.perf_counter() - start < 90, "the aborted transfer still occupies the link"


def test_abort_of_the_waiting_stream_is_enough(make_all: Callable[..., list[Device]]) -> None:
    waited_for, waiting = make_all(2, bandwidth=1000)
    big = torch.zeros(100_000, dtype=torch.uint8)
    waited_for.activations_down.copy(big, big.clone())
    waiting.activations_up.wait(waited_for.activations_down.record())
    thread, errors = in_thread(waiting.activations_up.synchronize)
    blocked, compute_errors = in_thread(lambda: waiting.compute.wait(waited_for.activations_down.record()))
    time.sleep(0.05)
    waiting.abort()
    join([thread, blocked])
    assert isinstance(errors[0], StreamAborted)
    assert isinstance(compute_errors[0], StreamAborted)
    waiting.reset()
    waiting.activations_up.synchronize()


def our_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("roundpipe-dev"))


def test_threads_start_on_first_use_and_close_joins_them(make: MakeDevice) -> None:
    device = make(bandwidth=1000)
    assert our_threads() == []
    device.weights_up.record()
    device.gradients_down.record()
    assert our_threads() == ["roundpipe-dev0-gradients_down", "roundpipe-dev0-weights_up"]
    big = torch.zeros(100_000, dtype=torch.uint8)
    device.weights_up.copy(big, big.clone())  # would take 100 s
    pending = device.weights_up.record()
    waiter, errors = in_thread(pending.wait)
    device.close()
    assert our_threads() == []
    join([waiter])
    assert isinstance(errors[0], StreamAborted)
    with pytest.raises(StreamAborted, match="closed"):
        device.weights_up.record()
    assert our_threads() == []
    device.close()
    device.abort()
    with pytest.raises(StreamAborted, match="closed"):
        device.compute.record()


def test_recorded_times_survive_close(make: MakeDevice) -> None:
    device = make()
    events = [device.compute.record(timed=True), device.weights_up.record(timed=True)]
    events[1].wait()
    device.close()
    assert events[0].time() <= events[1].time()


def test_poison(make: MakeDevice) -> None:
    device, silent = make(poison=True), make()
    for stream in (device.compute, device.weights_up):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            buffer = torch.zeros(4, 2, dtype=dtype, requires_grad=True)
            stream.poison(buffer[:2])
            stream.synchronize()
            assert buffer[:2].isnan().all()
            assert buffer[2:].eq(0).all()
        with torch.inference_mode():
            buffer = torch.zeros(4)
            stream.poison(buffer)
        stream.synchronize()
        assert buffer.isnan().all()
    untouched = torch.zeros(3)
    silent.weights_up.poison(untouched)
    silent.weights_up.synchronize()
    assert untouched.eq(0).all()


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_what_a_failed_copy_leaves_keeps_none_of_its_tensors(
    make: MakeDevice, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Without a run of the collector, while somebody holds the event or the error."""
    device = make(latency=PATIENCE_S if how == "aborted" else 0.0)
    if how == "failed":
        monkeypatch.setattr(emulated_link.ctypes, "memmove", None)
    dst, src = torch.zeros(10, dtype=torch.uint8), torch.ones(10, dtype=torch.uint8)
    kept = [weakref.ref(dst.untyped_storage()), weakref.ref(src.untyped_storage())]
    gc.disable()
    try:
        device.weights_up.copy(dst, src)
        if how == "aborted":
            event = device.weights_up.record()
            device.abort()
        del dst, src
        with pytest.raises((StreamAborted, StreamError)) as error:
            (event if how == "aborted" else device.weights_up.record()).wait()
        device.abort()
        device.reset()
        assert [ref() is None for ref in kept] == [True, True], error
    finally:
        gc.enable()
