"""Asynchronous execution: streams that are in no order but that of events."""

import pytest
import torch
import zoo
from harness import ATOL, RTOL, Learner, assert_same, assert_tensors_same, ours, run
from test_evaluation import Averaging, validate
from test_momentum_teachers import Distilled, check
from torch import nn
from zoo_runs import expected, train


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


idle = pytest.mark.parametrize("queues", ["idle"], indirect=True)
"""Nothing is done until the host waits; then in the order of streams' first operations."""
OTHERS = [name for name, entry in zoo.ENTRIES.items() if name not in ("mlp", "recurrent") and not entry.other]
"""Recurrent layers have kernels of their own on a device that is not the host, which the device type has not."""


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_model_equals_plain(name, devices, queues):
    wanted = expected(name, False, 3)
    result = train(name, False, 2, num_microbatches=3)
    assert_same(wanted, result, rtol=2 * RTOL, atol=2 * ATOL)
    assert queues.streams.delays, "everything was done at once"


@idle
def test_weights_are_uploaded_when_user_code_goes_on(devices, queues):
    """It may write to them then, and a copy that has only been asked for would read what it writes."""
    module, data = Averaging(zoo.make_module("mlp").model), zoo.make_batches("mlp", 2)
    plain, found = (validate(strategy, module, data) for strategy in ("auto", ours()))
    assert_tensors_same(plain, found)


@idle
def test_a_step_follows_what_user_code_has_enqueued_before_it(devices, queues):
    """It may still read what the step before has left, whose memory this one uses again."""
    module, data = FrozenBetween(), list(torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)))
    plain, result = run("auto", module, data), run(ours(layers=["Linear"]), module, data)
    assert_same(plain, result)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("queues", ["newest first"], indirect=True)
def test_a_teacher_that_is_updated_behind_its_call(queues):
    """The weights of a call without a backward were written to while they were on their way to the worker."""
    check(Distilled("lists", "stu"), 1)
