"""The mode that is active in user code: stand-ins for masters, host tensors that follow, counted targets."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_roundpipe.batches.weights import TargetCounts
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.user_code.mode import UserCodeMode


def mode(*masters, targets=None):
    ids = {id(p) for p in masters}
    return UserCodeMode(ids, lambda master: master, train=True, accelerator=None, targets=targets)


def test_gradients_of_masters_go_to_stand_ins():
    """Microbatches that added into one ``.grad`` would add in the order in which threads happen to run."""
    weight, bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    user_code = mode(weight, bias)
    with user_code:
        (F.linear(torch.ones(2, 3), weight) + torch.stack([bias, bias])).sum().backward()
    assert weight.grad is None and bias.grad is None
    grads = {id(p): g for p, g in user_code.proxies.gradients()}
    assert grads[id(weight)].tolist() == [[2.0] * 3] * 3 and grads[id(bias)].tolist() == [2.0] * 3


def logits():
    return torch.zeros(4, 5, requires_grad=True)


def counting():
    return mode(targets=TargetCounts())


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda x: F.cross_entropy(x, torch.tensor([1, 2, -100, 3])), [3.0]),
        (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 0, 3]), ignore_index=0), [2.0]),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 1, 0]), weight=torch.tensor([1.0, 3, 0, 0, 0])), [8.0]),
        (lambda x: F.cross_entropy(x, torch.full((4, 5), 0.2)), [4.0]),
        (lambda x: nn.CrossEntropyLoss()(x, torch.tensor([1, 2, 3, 3])), [4.0]),
        (lambda x: F.nll_loss(x.log_softmax(1), torch.tensor([1, 2, -100, -100])), [2.0]),
        (lambda x: F.cross_entropy(x, torch.tensor([1, 2, 3, 3]), reduction="none"), []),
        (lambda x: F.cross_entropy(x.detach(), torch.tensor([1, 2, 3, 3])), []),
    ],
)
def test_counted_targets(loss, count):
    """Behind the returned loss, of whatever else is computed with it."""
    user_code = counting()
    with user_code:
        found = loss(logits())
        F.cross_entropy(logits(), torch.tensor([1, -100, -100, -100]))  # is not in the loss
    if count:
        assert [user_code.targets.behind(found * 2)] == count
    else:
        with pytest.raises(RoundPipeError, match="made with none"):
            user_code.targets.behind(found.sum())


def test_several_means_may_have_one_count():
    user_code, x = counting(), logits()
    with user_code:
        loss = sum(F.cross_entropy(x, torch.tensor(labels)) for labels in ([1, -100, 2, 3], [1, 2, -100, 3]))
    assert user_code.targets.behind(loss) == 3
