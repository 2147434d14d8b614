"""`torch.utils.checkpoint` around layers and the code between them equals plain Lightning, of both kinds."""

import pytest
from checkpointed import KINDS, PLACES, HeadAndLoss, Nested, OneBlockTwice, TwoBlocks, batches, build
from harness import assert_same, ours, run

from lightning_roundpipe.config import RoundPipeError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_equals_plain(place, kind):
    module = build(place, kind)
    plain = run("auto", module, batches())
    assert_same(plain, run(ours(num_microbatches=2), module, batches(), devices=3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [OneBlockTwice, Nested])
def test_draws_what_the_forward_has_drawn(place, kind):
    """In layers and between them: without checkpoints, the numbers are the same."""
    results = [
        run(ours(num_microbatches=2), build(place, each, dropout=0.4), batches(), devices=2) for each in ("", kind)
    ]
    assert_same(*results)


@pytest.mark.parametrize(
    "plan",
    [
        "forward 0-1 2; fused 3-4; backward 2 0-1; round 2",
        "forward 0 1 2 3; fused 4; backward 3 2 1 0; round 2; recompute ahead",
    ],
)
def test_under_other_plans(plan):
    """Layers are called again where no slot has their weights."""
    module = build(TwoBlocks, "not reentrant", dropout=0.4)
    expected = run(ours(num_microbatches=4), build(TwoBlocks, dropout=0.4), batches(), devices=2)
    assert_same(expected, run(ours(num_microbatches=4, plan=plan), module, batches(), devices=2))


def test_a_layer_that_only_a_backward_calls_is_refused():
    class Late(HeadAndLoss):
        def step(self, x, y):
            h = self.stem(x)
            h.register_hook(lambda grad: self.blocks[0](grad).detach())
            return self.loss(h, y)

    with pytest.raises(RoundPipeError, match=r"layer 'blocks\.0' was called in a backward"):
        run(ours(num_microbatches=2), build(Late, "reentrant"), batches(), devices=2)
