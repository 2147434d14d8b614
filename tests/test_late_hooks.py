"""Hooks that user code registers when training runs already: they run as in plain training, or are refused by name."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import Result, assert_same, ours, run
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError

Register = Callable[["Recorded", Any], Any]
"""Is given the module and its optimizer."""


class Recorded(zoo.PlainClassifier):
    """A module on which hooks leave what they have seen."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.seen: list[Any] = []


def doubled(module: Recorded, optimizer: Any) -> Any:
    def hook(grad: Tensor) -> Tensor:
        module.seen.append(float(grad.norm()))
        return grad * 2

    return module.model.head.weight.register_hook(hook)


def after_accumulation(module: Recorded, optimizer: Any) -> Any:
    def hook(parameter: Tensor) -> None:
        module.seen.append(float(parameter.grad.norm()))
        parameter.grad.clamp_(-0.01, 0.01)

    return module.model.blocks[1].up.weight.register_post_accumulate_grad_hook(hook)


def before_the_step(module: Recorded, optimizer: Any) -> Any:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        module.seen.append(float(sum(p.norm() for p in parameters)))

    return optimizer.register_step_pre_hook(hook)


def after_the_step(module: Recorded, optimizer: Any) -> Any:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            module.model.head.weight.mul_(0.9)
        module.seen.append(float(module.model.stem.weight.norm()))

    return optimizer.register_step_post_hook(hook)


def replaced_step(module: Recorded, optimizer: Any) -> None:
    own = optimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        found = own(closure)
        with torch.no_grad():
            module.model.stem.weight.add_(0.01)
        module.seen.append(float(module.model.stem.weight.norm()))
        return found

    optimizer.step = types.MethodType(step, optimizer)


def hook_of_the_module(module: Recorded, optimizer: Any) -> None:
    def on_before_optimizer_step(optimizer: Any) -> None:
        module.seen.append(float(module.model.head.bias.grad.norm()))
        module.model.head.bias.grad.zero_()

    module.on_before_optimizer_step = on_before_optimizer_step  # type: ignore[method-assign]


class Norms(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.seen.append([float(p.grad.norm()) for p in pl_module.parameters()])


def another_callback(module: Recorded, optimizer: Any) -> None:
    module.trainer.callbacks.append(Norms())  # type: ignore[attr-defined]


LATE: list[Register] = [
    doubled, after_accumulation, before_the_step, after_the_step, replaced_step, hook_of_the_module, another_callback,
]  # fmt: skip


class Later(pl.Callback):
    """Registers something between batches."""

    roundpipe_passive_hooks = True

    def __init__(self, register: Register, at: int) -> None:
        self.register, self.at = register, at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.register(pl_module, pl_module.optimizers().optimizer)


def both(register: Register, at: int, **strategy: Any) -> tuple[Result, Result]:
    batches = zoo.make_batches("mlp", count=5, samples=8)
    plain, other = (
        run(chosen, made(), batches, devices=devices, watch=False, callbacks=[Later(register, at)])
        for chosen, devices in (("auto", 1), (ours(num_microbatches=2, **strategy), 2))
    )
    return plain, other


def made() -> Recorded:
    module = zoo.make_module("mlp")
    torch.manual_seed(7)
    return Recorded(module.model)


def assert_alike(plain: Result, other: Result) -> None:
    assert_same(plain, other)
    seen, found = plain.module.seen, other.module.seen  # type: ignore[union-attr]
    assert seen and len(seen) == len(found), (seen, found)
    assert found == [pytest.approx(value, rel=1e-4) for value in seen]


@pytest.mark.parametrize("register", LATE)
def test_what_is_registered_between_batches_runs(register: Register) -> None:
    assert_alike(*both(register, 3))


class Within(Recorded):
    register: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            type(self).register(self, self.optimizers().optimizer)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("register", "error"),
    [
        (doubled, r"register_hook was called on a parameter.*on_train_batch_start"),
        (after_accumulation, r"register_post_accumulate_grad_hook was called on a parameter.*on_train_batch_start"),
        (after_the_step, r"SGD has a step hook .* It was registered or replaced within the batch.*Do it between"),
        (replaced_step, r"the step method of SGD was replaced. It was .*Do it between batches"),
        (hook_of_the_module, r"overrides on_before_optimizer_step.* It was |attribute 'on_before_optimizer_step' of"),
    ],
)
def test_within_training_step_it_is_refused(register: Register, error: str) -> None:
    module = type("Net", (Within,), {"register": staticmethod(register)})(made().model)
    with pytest.raises(RoundPipeError, match=error):
        run(ours(num_microbatches=2), module, zoo.make_batches("mlp"), watch=False)
