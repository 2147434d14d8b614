"""A recomputation whose outputs are not of the kind of the forward's is refused."""

import itertools

import pytest
import traps
import zoo
from harness import ours, run, seeded

from lightning_roundpipe.config import RoundPipeError

CALLS = itertools.count()


class Alternates(traps.Block):
    """Returns something else every second time."""

    def forward(self, x):
        x = super().forward(x)
        return self.odd(x) if next(CALLS) % 2 else x

    def odd(self, x):
        raise NotImplementedError


class OtherShape(Alternates):
    def odd(self, x):
        return x[:1]


class OtherDtype(Alternates):
    def odd(self, x):
        return x.double()


class OtherNumber(Alternates):
    def odd(self, x):
        return x, x * 2


@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("block", [OtherShape, OtherDtype, OtherNumber])
def test_outputs_of_another_kind_are_refused(block, microbatches, devices):
    global CALLS
    CALLS = itertools.count()
    with seeded(5):
        net = traps.Net(block)
    net.blocks = net.blocks[:1]
    module = zoo.PlainClassifier(net)
    strategy = ours(num_microbatches=microbatches, layers=["Linear", block.__name__])
    with pytest.raises(RoundPipeError, match=r"layer 'model\.blocks\.0' returned .* when it was recomputed"):
        run(strategy, module, zoo.make_batches("mlp", count=2), devices=devices)
