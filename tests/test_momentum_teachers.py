"""Weights that training_step itself writes to: momentum teachers, projections. One microbatch trains as plain training.

With several, each of which would write, they are refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_same, ours, run
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError

Update = Callable[[nn.Module, nn.Module], None]


def each(function: Callable[[nn.Parameter, nn.Parameter], None]) -> Update:
    def update(teacher: nn.Module, student: nn.Module) -> None:
        with torch.no_grad():
            for k, q in zip(teacher.parameters(), student.parameters(), strict=True):
                function(k, q)

    return update


def set_data(k: nn.Parameter, q: nn.Parameter) -> None:
    k.data = k.data * 0.9 + q.data * 0.1


def write_data(k: nn.Parameter, q: nn.Parameter) -> None:
    k.data.mul_(0.9).add_(q.data, alpha=0.1)


def lists(teacher: nn.Module, student: nn.Module) -> None:
    torch._foreach_lerp_([k.data for k in teacher.parameters()], [q.detach() for q in student.parameters()], 0.1)


def state(teacher: nn.Module, student: nn.Module) -> None:
    now = student.state_dict()
    teacher.load_state_dict({name: 0.9 * value + 0.1 * now[name] for name, value in teacher.state_dict().items()})


UPDATES: dict[str, Update] = {
    "set data": each(set_data),
    "write data": each(write_data),
    "lists": lists,
    "state": state,
}


class Distilled(pl.LightningModule):
    def __init__(self, update: str, order: str) -> None:
        super().__init__()
        self.student = zoo.make_module("mlp").model
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.teacher.head.weight.data.add_(0.1)  # type: ignore[union-attr]
        self.how, self.order = update, order

    def update(self) -> None:
        UPDATES[self.how](self.teacher, self.student)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for what in self.order:
            if what == "s":
                found = self.student(batch["x"])
            elif what == "t":
                with torch.no_grad():
                    wanted = self.teacher(batch["x"])
            else:
                self.update()
        loss = F.mse_loss(found, wanted)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def check(module: pl.LightningModule, devices: int) -> None:
    batches = zoo.make_batches("mlp", count=4, samples=8)
    plain = run("auto", module, batches)
    assert_same(plain, run(ours(num_microbatches=1), module, batches, devices=devices))


def built(update: str, order: str) -> Distilled:
    return Distilled(update, order)


@pytest.mark.parametrize(
    ("update", "order"), [("set data", "ust"), ("write data", "sut"), ("lists", "stu"), ("state", "tust")]
)
def test_a_teacher(update: str, order: str) -> None:
    """Of which the first layer is on its way to the worker already where the update comes between the calls."""
    check(built(update, order), 1)


class Projected(zoo.PlainClassifier):
    """Trained weights are normalised in the step, before they are used."""

    way = "data"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        head = self.model.head  # type: ignore[union-attr]
        if self.way == "data":
            head.weight.data = F.normalize(head.weight.data, dim=1)
        else:
            with torch.no_grad():
                head.weight.div_(head.weight.norm(dim=1, keepdim=True))
        return super().training_step(batch, batch_idx)


class Late(Projected):
    """A trained layer whose call is over."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _ = self.loss_and_logits(batch)
        self.model.head.weight.data.clamp_(-0.05, 0.05)  # type: ignore[union-attr]
        return loss


@pytest.mark.parametrize("way", ["data", "in place"])
def test_a_projection(way: str) -> None:
    kind = type("Projected", (Projected,), {"way": way})
    check(kind(zoo.make_module("mlp").model), 2)


def test_weights_whose_backward_is_still_to_come_are_refused() -> None:
    module = Late(zoo.make_module("mlp").model)
    with pytest.raises(RoundPipeError, match=r"'model\.head' were written to within training_step, after a call"):
        run(ours(num_microbatches=1), module, zoo.make_batches("mlp"))
