"""The mode that is active in glue: stand-ins for masters, host tensors that follow, counted targets."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime import glue
from lightning_roundpipe.runtime.glue import GlueMode, check_counts


def mode(*masters: nn.Parameter, accelerator: str | None = None) -> GlueMode:
    return GlueMode({id(p) for p in masters}, lambda master: master, train=True, accelerator=accelerator)


def test_gradients_of_masters_go_to_stand_ins() -> None:
    """Microbatches that added into one ``.grad`` would add in the order in which threads happen to run."""
    weight, bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    glue = mode(weight, bias)
    with glue:
        (F.linear(torch.ones(2, 3), weight) + torch.stack([bias, bias])).sum().backward()
    assert weight.grad is None and bias.grad is None
    grads = {id(p): g for p, g in glue.proxies.gradients()}
    assert grads[id(weight)].tolist() == [[2.0] * 3] * 3 and grads[id(bias)].tolist() == [2.0] * 3


def test_other_parameters_are_left_alone() -> None:
    stranger = nn.Parameter(torch.ones(2))
    with mode():
        (stranger * 2).sum().backward()
    assert stranger.grad is not None


def logits() -> torch.Tensor:
    return torch.zeros(4, 5, requires_grad=True)


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
def test_counted_targets(loss, count: list[float]) -> None:  # type: ignore[no-untyped-def]
    glue = mode()
    with glue:
        loss(logits())
    assert glue.counts == count


def counted(*counts: float) -> GlueMode:
    glue = mode()
    glue.counts = list(counts)
    return glue


def test_counts_that_give_no_single_weight_are_refused() -> None:
    check_counts([counted(3, 6), counted(1, 2)])  # both spread alike
    with pytest.raises(RoundPipeError, match="loss_weight"):
        check_counts([counted(3, 5), counted(1, 2)])
    with pytest.raises(RoundPipeError, match="loss_weight"):
        check_counts([counted(3), counted()])


def test_a_sum_is_refused() -> None:
    glue = mode()
    with glue:
        F.cross_entropy(logits(), torch.tensor([1, 2, 3, 3]), reduction="sum")
    with pytest.raises(RoundPipeError, match="reduction='sum'"):
        check_counts([glue, glue])


class TestHostTensorsFollow:
    """The device type "meta" stands for an accelerator: torch refuses to mix it with the CPU as it does with a GPU."""

    def test_to_the_tensor_that_they_meet(self) -> None:
        there = torch.ones(2, 3, device="meta")
        with mode(accelerator="meta"):
            assert (there + torch.ones(3)).device.type == "meta"
            assert torch.cat([torch.ones(2, 3), there]).device.type == "meta"
            assert (there + torch.tensor(2.0)).device.type == "meta"

    def test_masters_through_one_differentiable_copy(self) -> None:
        weight = nn.Parameter(torch.ones(3))
        glue = mode(weight, accelerator="meta")
        there = torch.ones(2, 3, device="meta")
        with glue:
            out = there * weight + weight
        assert out.device.type == "meta" and out.requires_grad
        assert len(glue.proxies._moved) == 1

    def test_and_tensors_of_other_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They go to the GPU that the microbatch is on, as they would have been there without the strategy."""
        skip, newest, scale = (torch.ones(2, 3, device="meta") for _ in range(3))
        homes = {id(skip): torch.device("meta", 0), id(newest): torch.device("meta", 1)}
        carried: list[tuple[bool, torch.device]] = []
        monkeypatch.setattr(glue, "_home", lambda t: homes.get(id(t), torch.device("meta", 2)))
        monkeypatch.setattr(glue, "_carry", lambda t, where: (carried.append((t is skip, where)), t)[1])
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
        with mode(accelerator="meta"):
            torch.add(skip, newest)
            torch.cat([newest, skip])
            newest.add_(skip)
            assert carried == [(True, torch.device("meta", 1))] * 3
            skip.mul_(newest)  # what is written to stays
            assert carried[3:] == [(False, torch.device("meta", 0))]
            torch.stack([skip, scale])  # neither is where the microbatch is
            assert carried[4:] == [(True, torch.device("meta", 2))]
            torch.add(newest, newest)
        assert len(carried) == 5

    def test_but_not_what_is_written_to(self) -> None:
        host = torch.zeros(3)
        with mode(accelerator="meta"), contextlib.suppress(RuntimeError):
            host.add_(torch.ones(3, device="meta"))
        assert host.device.type == "cpu"
