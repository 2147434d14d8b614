"""Asynchronous execution: streams that are in no order but that of events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from harness import ATOL, RTOL, assert_same, assert_tensors_same, ours, run
from test_evaluation import Averaging, validate
from test_manual import FrozenBetween
from without import take_out
from zoo_runs import expected, train

from second_device.late import Late, late
from second_device.play import Event, Stream, play, stream

HOME = torch.device("played", 0)


@pytest.fixture
def queues() -> Iterator[Late]:
    with late(0) as made:
        yield made


@pytest.fixture
def idle(queues: Late, monkeypatch: pytest.MonkeyPatch) -> Late:
    """Nothing is done until the host waits; then in the order of streams' first operations."""
    monkeypatch.setattr(queues.streams._drawn, "random", lambda: 0.7)
    play(monkeypatch)
    return queues


def _pinned(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).pin_memory()


def test_what_is_enqueued_is_done_later(idle: Late) -> None:
    y = (torch.full((1000,), 2.0).to(HOME, non_blocking=True) * 3).sum().add_(1).reshape(1)
    host = torch.zeros(1, pin_memory=True)
    host.copy_(y, non_blocking=True)
    assert host.item() == 0.0
    assert y.item() == 6001.0 and host.item() == 6001.0


def test_copies_read_pinned_memory_when_they_are_done_and_other_memory_at_once(idle: Late) -> None:
    pinned, other = _pinned(1.0), torch.ones(1)
    copies = [host.to(HOME, non_blocking=True) for host in (other, pinned)]
    other.fill_(2.0), pinned.fill_(2.0)
    assert [copy.item() for copy in copies] == [1.0, 2.0]


@pytest.mark.parametrize("waits", [True, False])
def test_streams_are_in_the_order_of_events_alone(idle: Late, waits: bool) -> None:
    first, second, event = Stream(HOME), Stream(HOME), Event()
    with stream(first):
        read = torch.zeros(1, device=HOME)
    with stream(second):
        x = torch.ones(1, device=HOME)
        second.synchronize()
        x += 1
        event.record(second)
    if waits:
        first.wait_event(event)
    with stream(first):
        read.copy_(x)
    assert not event.query()
    first.synchronize()
    event.synchronize()
    assert event.query()
    with stream(first):
        assert (read.item() == 2.0) is waits


@pytest.mark.parametrize("same", [True, False])
def test_memory_is_its_streams_again_at_once(idle: Late, same: bool) -> None:
    """Another stream that still reads it finds other numbers."""
    first, second = Stream(HOME), Stream(HOME)
    with stream(first):
        torch.zeros(1, device=HOME)  # which makes it the first one to go on
    with stream(second):
        read = torch.zeros(5, device=HOME)
        x = torch.ones(5, device=HOME) if same else None
    second.synchronize()
    with stream(first):
        x = torch.ones(5, device=HOME) if x is None else x
        start = x.data_ptr()
        first.synchronize()
    with stream(second):
        read += x
    del x
    with stream(first):
        y = torch.full((5,), 7.0, device=HOME)
        assert (y.data_ptr() == start) is not same
        first.synchronize()
    with stream(second):
        assert read.tolist() == [1.0 if same else 7.0] * 5


def test_a_result_that_the_host_waited_for_is_in_the_order_of_its_stream(idle: Late) -> None:
    """Another thread may have queued what still reads its memory, between the wait and the result."""
    with stream(Stream(HOME)):
        read, x = torch.zeros(5, device=HOME), torch.ones(5, device=HOME)
        start = x.data_ptr()
        read += x
        del x
        result = idle.placed(torch.full((5,), 7.0), 0)
        assert result.data_ptr() == start
        assert read.tolist() == [1.0] * 5 and result.tolist() == [7.0] * 5


def test_draws_are_in_the_order_of_the_host(idle: Late) -> None:
    torch.manual_seed(1)
    expected = [torch.rand(3, device=HOME).tolist() for _ in range(2)]
    torch.manual_seed(1)
    first, second = Stream(HOME), Stream(HOME)
    with stream(second):
        torch.zeros(1, device=HOME)  # which is done before all of the other stream
    with stream(first):
        one = torch.rand(3, device=HOME)
    with stream(second):
        other = torch.rand(3, device=HOME)
        found = other.tolist()
    with stream(first):
        assert [one.tolist(), found] == expected


def test_a_copy_between_devices_is_in_the_order_of_both(idle: Late) -> None:
    x = torch.ones(1, device="played:1") + 1
    y = x.to("played:0", non_blocking=True)
    x.fill_(5.0)
    assert y.item() == 2.0 and x.item() == 5.0


def test_what_fails_is_raised_where_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="failed on the device"), late(0):
        x = torch.ones(3, device=HOME)[torch.full((1,), 9, device=HOME)]
        x.item()


# ------------------------------------------------------------------------------------------------------- whole steps

FAST = {"mlp"}


def marked(name: str) -> Any:
    return name if name in FAST else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [marked(name) for name in zoo.ENTRIES])
def test_every_model_equals_plain(name: str, devices: list[Any], queues: Late) -> None:
    wanted = expected(name, False, 3)
    result = train(name, False, 2, num_microbatches=3)
    assert_same(wanted, result, rtol=2 * RTOL, atol=2 * ATOL)
    assert queues.streams.delays, "everything was done at once"


WAITS = {
    "the end of a call before what it made travels": ("engine.activations:_downloaded", "stream.wait(made)"),
    "what a call is given": ("engine.worker:Worker.follow", "self.device.compute.wait(event)"),
    "a download before its upload": ("engine.activations:upload", "stream.wait(saved.ready)"),
    "a backward before its gradients travel": ("engine.worker:Worker._send", "stream.wait(end)"),
    "gradients before they are used": ("memory.grad_buffers:HostGradSums.take", "self.wait()"),
    "copies before their memory goes": ("devices.cuda_streams:CudaStream.copy", "self.keep(to, of)"),
    "a call before what was brought for it goes": (
        "engine.activations:Activations.drop",
        "device.free_after_compute([here.arriving.tensor for here in gone if here.lent])",
    ),
}
"""Lines that order streams, or keep memory until a stream is done with it."""
PLAN = "forward 0-1 2; fused 3-5; backward 2 0-1; round 3"


@pytest.mark.parametrize(
    "what", [w if w.startswith("gradients") else pytest.param(w, marks=pytest.mark.slow) for w in WAITS]
)
def test_a_wait_that_is_missing_shows_in_the_numbers(what: str, devices: list[Any]) -> None:
    assert any(_noticed(what, seed) for seed in range(8))


def _noticed(what: str, seed: int) -> bool:
    wanted = expected("mlp", False, 3)
    with pytest.MonkeyPatch.context() as patch:
        take_out(patch, *WAITS[what])
        try:
            with late(seed):
                result = train("mlp", False, 2, num_microbatches=3, plan=PLAN)
            assert_same(wanted, result, rtol=2 * RTOL, atol=2 * ATOL)
        except (AssertionError, RuntimeError):
            return True
    return False


def test_nothing_shows_while_all_are_there(devices: list[Any]) -> None:
    """Or the tests above would say nothing."""
    with late(0):
        result = train("mlp", False, 2, num_microbatches=3, plan=PLAN)
    assert_same(expected("mlp", False, 3), result, rtol=2 * RTOL, atol=2 * ATOL)


def test_weights_are_uploaded_when_user_code_goes_on(devices: list[Any], idle: Late) -> None:
    """It may write to them then, and a copy that has only been asked for would read what it writes."""
    module, data = Averaging(zoo.make_module("mlp").model), zoo.make_batches("mlp", 2)
    plain, found = (validate(strategy, module, data) for strategy in ("auto", ours()))
    assert_tensors_same(plain, found)


def test_a_step_follows_what_user_code_has_enqueued_before_it(devices: list[Any], idle: Late) -> None:
    """It may still read what the step before has left, whose memory this one uses again."""
    module, data = FrozenBetween(), list(torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)))
    plain, result = run("auto", module, data), run(ours(layers=["Linear"]), module, data)
    assert_same(plain, result)
