"""Weights that training_step itself writes to: momentum teachers, projections. One microbatch trains as plain training.

With several, each of which would write, they are refused by name.
"""

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_plain, ours, run

from lightning_roundpipe.config import RoundPipeError


def each(function):
    def update(teacher, student):
        with torch.no_grad():
            for k, q in zip(teacher.parameters(), student.parameters(), strict=True):
                function(k, q)

    return update


def set_data(k, q):
    k.data = k.data * 0.9 + q.data * 0.1


def write_data(k, q):
    k.data.mul_(0.9).add_(q.data, alpha=0.1)


def lists(teacher, student):
    torch._foreach_lerp_([k.data for k in teacher.parameters()], [q.detach() for q in student.parameters()], 0.1)


def state(teacher, student):
    now = student.state_dict()
    teacher.load_state_dict({name: 0.9 * value + 0.1 * now[name] for name, value in teacher.state_dict().items()})


UPDATES = {"set data": each(set_data), "write data": each(write_data), "lists": lists, "state": state}


class Distilled(pl.LightningModule):
    def __init__(self, update, order):
        super().__init__()
        self.student = zoo.make_module("mlp").model
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.teacher.head.weight.data.add_(0.1)
        self.how, self.order = update, order

    def update(self):
        UPDATES[self.how](self.teacher, self.student)

    def training_step(self, batch, batch_idx):
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

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def check(module, devices):
    assert_plain(module, zoo.make_batches("mlp", count=4, samples=8), {"num_microbatches": 1}, devices=devices)


@pytest.mark.parametrize(
    ("update", "order"), [("set data", "ust"), ("write data", "sut"), ("lists", "stu"), ("state", "tust")]
)
def test_a_teacher(update, order):
    """Of which the first layer is on its way to the worker already where the update comes between the calls."""
    check(Distilled(update, order), 1)


class Projected(zoo.PlainClassifier):
    """Trained weights are normalised in the step, before they are used."""

    way = "data"

    def training_step(self, batch, batch_idx):
        head = self.model.head
        if self.way == "data":
            head.weight.data = F.normalize(head.weight.data, dim=1)
        else:
            with torch.no_grad():
                head.weight.div_(head.weight.norm(dim=1, keepdim=True))
        return super().training_step(batch, batch_idx)


class Late(Projected):
    """A trained layer whose call is over."""

    def training_step(self, batch, batch_idx):
        loss, _ = self.loss_and_logits(batch)
        self.model.head.weight.data.clamp_(-0.05, 0.05)
        return loss


@pytest.mark.parametrize("way", ["data", "in place"])
def test_a_projection(way):
    kind = type("Projected", (Projected,), {"way": way})
    check(kind(zoo.make_module("mlp").model), 2)


def test_weights_whose_backward_is_still_to_come_are_refused():
    module = Late(zoo.make_module("mlp").model)
    with pytest.raises(RoundPipeError, match=r"'model\.head' were written to within training_step, after a call"):
        run(ours(num_microbatches=1), module, zoo.make_batches("mlp"))
