"""Layers that begin to do something else after some steps.

In the first steps, a layer only returns tensors of its own. From `LATE` on it does something else, of which nothing
tells the engine.
"""

import pytest
import zoo
from harness import assert_plain, halves, ours, run, seeded
from traps import Block, Net

from lightning_roundpipe.config import RoundPipeError

STEPS, LATE = 7, 5
CALLS = 5


class Clock:
    """The number of the step, which layers read without the engine's knowledge."""

    step = 0

    @classmethod
    def is_late(cls):
        return cls.step >= LATE


class Steps(zoo.PlainClassifier):
    """Its hook may look at weights, so that a step ends before the clock moves on."""

    def on_train_batch_start(self, batch, batch_idx):
        Clock.step = batch_idx


class Turning(Block):
    """A block that turns into something else."""

    def forward(self, x):
        return type(self).late(self, x) if Clock.is_late() else super().forward(x)


def module_of(late):
    with seeded(5):
        return Steps(Net(type("Turning", (Turning,), {"late": late})))


def usual(block, x):
    return Block.forward(block, x)


def sets_an_attribute(block, x):
    block.aux = x.detach().mean()
    return usual(block, x)


def fills_a_list(block, x):
    block.flag = [*(block.flag if isinstance(block.flag, list) else []), 1.0]
    return usual(block, x)


def returns_its_input(block, x):
    return x


def returns_a_view_of_its_input(block, x):
    return x.view(-1, x.shape[-1])


def writes_to_its_argument(block, x):
    return usual(block, x.add_(1.0))


def keeps_a_graph(block, x):
    block.aux = block.other(x)
    return usual(block, x)


OPTIONS = {"num_microbatches": 3, "plan": halves(CALLS)}


@pytest.mark.parametrize(
    "late",
    [
        sets_an_attribute,
        fills_a_list,
        returns_its_input,
        returns_a_view_of_its_input,
        writes_to_its_argument,
        keeps_a_graph,
    ],
)
def test_what_a_layer_does_later_equals_plain_training(late):
    assert_plain(module_of(late), zoo.make_batches("mlp")[0], OPTIONS, steps=STEPS)


def of_data_that_it_only_read(block):
    data = block.inner.weight.data
    if Clock.is_late():
        data.mul_(0.5)


def test_a_write_to_weights_that_begins_to_change_them_is_refused():
    class Writing(Block):
        def forward(self, x):
            of_data_that_it_only_read(self)
            return super().forward(x)

    with seeded(5):
        module = Steps(Net(Writing))
    with pytest.raises(RoundPipeError, match="writes to its own parameters while it runs"):
        run(ours(**OPTIONS), module, zoo.make_batches("mlp")[0], steps=STEPS, devices=2)
