"""Order, time and errors of emulated streams."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from patience import PATIENCE_S, longer_each_try

from lightning_roundpipe.devices import StreamAborted, StreamError, emulated_streams


@pytest.mark.parametrize("name", ["weights_up", "gradients_down"])
@longer_each_try
def test_copy_is_asynchronous_and_its_event_says_when_it_is_done(make, name, times):
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


@longer_each_try
def test_bandwidth_is_shared_within_a_direction_and_not_between_them(make, times):
    device = make(bandwidth=100_000 / times)
    a, b = torch.zeros(10_000, dtype=torch.uint8), torch.zeros(10_000, dtype=torch.uint8)

    def seconds(*names):
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


@pytest.mark.parametrize("dst_inference", [False, True])
@pytest.mark.parametrize("src_inference", [False, True])
@pytest.mark.parametrize("name", ["compute", "weights_up"])
def test_copies_go_past_autograd(make, name, dst_inference, src_inference):
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


def test_expanded_and_strided_tensors_are_copied_as_they_are(make):
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
def test_a_copy_never_broadcasts_or_converts(make, src):
    with pytest.raises(ValueError, match="equal shapes and dtypes"):
        make().weights_up.copy(torch.zeros(4), src)


def test_an_error_reaches_every_waiter_and_later_caller(make_all):
    device, other = make_all(2, latency=1e-6)  # or a small copy would be done in this thread
    moves, go = [], threading.Event()

    def fail(dst, src):
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


def test_abort_wakes_waiters_and_stops_later_ones_until_reset(make):
    device = make(bandwidth=1000)
    dst = torch.zeros(100_000, dtype=torch.uint8)  # 100 s
    device.weights_up.copy(dst, torch.ones_like(dst))
    event, reached = device.weights_up.record(), device.compute.record()
    device.activations_down.wait(event)
    with ThreadPoolExecutor(3) as threads:
        waiters = [threads.submit(wait) for wait in (event.wait, event.wait, device.activations_down.synchronize)]
        time.sleep(0.05)
        assert not any(waiter.done() for waiter in waiters)
        device.abort()
        assert [type(waiter.exception(PATIENCE_S)) for waiter in waiters] == [StreamAborted] * 3
    with pytest.raises(StreamAborted), device.acquire_core():
        pass
    for stream in (device.compute, device.weights_up):
        calls = [
            stream.record,
            stream.synchronize,
            lambda stream=stream: stream.copy(dst, dst),
            lambda stream=stream: stream.wait(reached),
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


def our_threads():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("roundpipe-dev"))


def test_threads_start_on_first_use_and_close_joins_them(make):
    device = make(bandwidth=1000)
    assert our_threads() == []
    device.weights_up.record()
    device.gradients_down.record()
    assert our_threads() == ["roundpipe-dev0-gradients_down", "roundpipe-dev0-weights_up"]
    big = torch.zeros(100_000, dtype=torch.uint8)
    device.weights_up.copy(big, big.clone())  # would take 100 s
    pending = device.weights_up.record()
    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(pending.wait)
        device.close()
        assert our_threads() == []
        assert isinstance(waiter.exception(PATIENCE_S), StreamAborted)
    with pytest.raises(StreamAborted, match="closed"):
        device.weights_up.record()
    assert our_threads() == []
    device.close()
    device.abort()
    with pytest.raises(StreamAborted, match="closed"):
        device.compute.record()
