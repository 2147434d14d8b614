"""Asynchronous execution: streams that are in no order but that of events."""

import pytest
import torch
import zoo
from harness import ATOL, RTOL, Learner, assert_same, assert_tensors_same, ours, run
from test_evaluation import Averaging, validate
from test_momentum_teachers import Distilled, check
from torch import nn
from zoo_runs import expected, train

from second_device.late import late
from second_device.play import Event, Stream, play, stream


class FrozenBetween(Learner):
    """All layers are frozen when a batch begins, and trained within it; the last one is the smallest."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)])
        self.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.requires_grad_(True)
        found = batch
        for layer in self.layers:
            found = layer(found).tanh()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = found.square().mean()
        self.manual_backward(loss)
        optimizer.step()
        self.requires_grad_(False)
        return loss.detach()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


HOME = torch.device("played", 0)


@pytest.fixture
def idle(monkeypatch):
    """Nothing is done until the host waits; then in the order of streams' first operations."""
    with late("idle") as made:
        play(monkeypatch)
        yield made


@pytest.mark.parametrize("waits", [True, False])
def test_streams_are_in_the_order_of_events_alone(idle, waits):
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
def test_memory_is_its_streams_again_at_once(idle, same):
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


# ------------------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n, e in zoo.ENTRIES.items() if n != "mlp" and not e.other)],
)
def test_every_model_equals_plain(name, devices, queues):
    wanted = expected(name, False, 3)
    result = train(name, False, 2, num_microbatches=3)
    assert_same(wanted, result, rtol=2 * RTOL, atol=2 * ATOL)
    assert queues.streams.delays, "everything was done at once"


def test_weights_are_uploaded_when_user_code_goes_on(devices, idle):
    """It may write to them then, and a copy that has only been asked for would read what it writes."""
    module, data = Averaging(zoo.make_module("mlp").model), zoo.make_batches("mlp", 2)
    plain, found = (validate(strategy, module, data) for strategy in ("auto", ours()))
    assert_tensors_same(plain, found)


def test_a_step_follows_what_user_code_has_enqueued_before_it(devices, idle):
    """It may still read what the step before has left, whose memory this one uses again."""
    module, data = FrozenBetween(), list(torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)))
    plain, result = run("auto", module, data), run(ours(layers=["Linear"]), module, data)
    assert_same(plain, result)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("queues", ["newest first"], indirect=True)
def test_a_teacher_that_is_updated_behind_its_call(queues):
    """The weights of a call without a backward were written to while they were on their way to the worker."""
    check(Distilled("lists", "stu"), 1)
