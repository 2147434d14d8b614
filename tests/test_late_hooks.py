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
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from lightning_roundpipe.config import RoundPipeError

Register = Callable[["Recorded", Any], Any]
"""Is given the module and its optimizer; may return a handle."""


class Recorded(zoo.PlainClassifier):
    """A module on which hooks leave what they have seen."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.seen: list[Any] = []
        self.handle: Any = None


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


def several_gradients(module: Recorded, optimizer: Any) -> Any:
    blocks = module.model.blocks
    parameters = [blocks[0].up.weight, blocks[2].down.weight]
    return torch.autograd.graph.register_multi_grad_hook(
        parameters, lambda grads: module.seen.append([float(g.norm()) for g in grads])
    )


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


def after_each_optimizers_step(module: Recorded, optimizer: Any) -> Any:
    return torch_optimizer.register_optimizer_step_post_hook(
        lambda *_: module.seen.append(float(module.model.stem.weight.norm()))
    )


def replaced_step(module: Recorded, optimizer: Any) -> None:
    own = optimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        found = own(closure)
        with torch.no_grad():
            module.model.stem.weight.add_(0.01)
        module.seen.append(float(module.model.stem.weight.norm()))
        return found

    optimizer.step = types.MethodType(step, optimizer)


def replaced_zero_grad(module: Recorded, optimizer: Any) -> None:
    own = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        module.seen.append(float(module.model.head.weight.norm()))
        own(set_to_none)

    optimizer.zero_grad = zero_grad


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


LATE: dict[str, Register] = {
    f.__name__: f
    for f in (
        doubled, after_accumulation, several_gradients, before_the_step, after_the_step, after_each_optimizers_step,
        replaced_step, replaced_zero_grad, hook_of_the_module, another_callback,
    )
}  # fmt: skip


class Later(pl.Callback):
    """Registers something between batches, and takes it away again where that is asked for."""

    roundpipe_looks_away = True

    def __init__(self, register: Register, first: int, last: int = 99, at: str = "start") -> None:
        self.register, self.first, self.last, self.at = register, first, last, at

    def _act(self, module: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            module.handle = self.register(module, module.optimizers().optimizer)
        if batch_idx == self.last and module.handle is not None:
            module.handle.remove()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.at == "start":
            self._act(pl_module, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.at == "end":
            self._act(pl_module, batch_idx + 1)


@pytest.fixture(autouse=True)
def no_hook_stays() -> Any:
    yield
    torch_optimizer._global_optimizer_post_hooks.clear()


def both(register: Register, first: int, microbatches: int, devices: int = 1, **kwargs: Any) -> tuple[Result, Result]:
    batches = zoo.make_batches("mlp", count=kwargs.pop("count", 5), samples=8)
    when = {key: kwargs.pop(key) for key in ("last", "at") if key in kwargs}
    results = []
    for strategy, workers in (
        ("auto", 1),
        (ours(num_microbatches=microbatches, **kwargs.pop("strategy", {})), devices),
    ):
        torch_optimizer._global_optimizer_post_hooks.clear()
        module = made()
        late = Later(register, first, **when)
        results.append(run(strategy, module, batches, devices=workers, watch=False, callbacks=[late], **kwargs))
    return results[0], results[1]


def made() -> Recorded:
    module = zoo.make_module("mlp")
    torch.manual_seed(7)
    return Recorded(module.model)


def assert_alike(plain: Result, other: Result) -> None:
    assert_same(plain, other)
    seen, found = plain.module.seen, other.module.seen  # type: ignore[union-attr]
    assert seen and len(seen) == len(found), (seen, found)
    assert found == [pytest.approx(value, rel=1e-4) for value in seen]


@pytest.mark.parametrize("name", ["after_accumulation", "before_the_step", "replaced_step", "another_callback"])
def test_what_is_registered_between_batches_runs(name: str) -> None:
    assert_alike(*both(LATE[name], 3, 2))


@pytest.mark.slow
@pytest.mark.parametrize("at", ["start", "end"])
@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", LATE)
def test_it_runs_with_all_numbers_of_parts(name: str, microbatches: int, devices: int, at: str) -> None:
    assert_alike(*both(LATE[name], 2, microbatches, devices, at=at))


@pytest.mark.slow
def test_it_may_be_taken_away_again() -> None:
    plain, other = both(doubled, 1, 2, 2, last=3)
    assert_alike(plain, other)
    assert len(other.module.seen) == 2  # type: ignore[union-attr]


def test_with_staleness_it_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"staleness=1.*'model\.head\.weight' has a hook"):
        both(doubled, 3, 2, strategy={"staleness": 1})


class Within(Recorded):
    register: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            type(self).register(self, self.optimizers().optimizer)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("register", "error"),
    [
        (doubled, r"register_hook was called on a parameter.*on_train_batch_start"),
        (after_accumulation, r"register_post_accumulate_grad_hook was called on a parameter.*on_train_batch_start"),
        (after_the_step, r"SGD has a step hook, which was registered or replaced within the batch.*Do it between"),
        (replaced_step, r"step\(\) of SGD was replaced in the instance, which was .*Do it between batches"),
        (hook_of_the_module, r"overrides on_before_optimizer_step, which was |attribute 'on_before_optimizer_step' of"),
    ],
)
def test_within_training_step_it_is_refused(register: Register, error: str, microbatches: int) -> None:
    module = type("Net", (Within,), {"register": staticmethod(register)})(made().model)
    with pytest.raises(RoundPipeError, match=error):
        run(ours(num_microbatches=microbatches), module, zoo.make_batches("mlp"), watch=False)
