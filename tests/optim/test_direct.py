"""Adam and AdamW by their kernel alone: when that is taken, and that nothing which changes between steps is missed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer

SHAPES = [(7, 5), (33,), (), (130, 9), (8, 8)]
STEPS = 8


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tensors this small gain nothing from several threads, which spin while they wait for each other."""
    torch.set_num_threads(1)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int, masters: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(m.shape, generator=generator, dtype=m.dtype) for m in masters]


class Steps:
    """Masters stepped one after another within a step; counts those that torch's own ``step()`` has stepped."""

    def __init__(self, optimizer: Optimizer, masters: list[nn.Parameter]) -> None:
        self.optimizer, self.masters = optimizer, masters
        self.partial = PartialOptimizer(optimizer, masters)
        self.roundabout = 0
        self._run = self.partial._run
        self.partial._run = self._counting  # type: ignore[method-assign]

    def _counting(self, groups: list[dict[str, Any]], state: Any) -> None:
        self.roundabout += sum(len(group["params"]) for group in groups)
        self._run(groups, state)

    def step(self, grads: list[Tensor]) -> int:
        """Returns: how many of them torch has stepped."""
        self.roundabout = 0
        hyperparameters = Hyperparameters.of(self.optimizer)
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers want to see that it was called
        with self.partial.prepared(hyperparameters):
            for master, grad in zip(self.masters, grads, strict=True):
                self.partial.step(hyperparameters, {id(master): grad})
        return self.roundabout


def plain_step(optimizer: Optimizer, masters: list[nn.Parameter], grads: list[Tensor]) -> None:
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad.clone()
    optimizer.step()


def same_bits(ours: Any, plain: Any) -> bool:
    if isinstance(plain, Tensor):
        return ours.dtype == plain.dtype and ours.shape == plain.shape and torch.equal(ours, plain)
    return bool(ours.keys() == plain.keys() and all(same_bits(ours[key], value) for key, value in plain.items()))


DIRECT = [
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.Adam, {"fused": True, "amsgrad": True}),
]
ROUNDABOUT = [
    (optim.AdamW, {"fused": False}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01), "fused": True}),
    (optim.NAdam, {}),
]


@pytest.mark.parametrize(("cls", "options"), DIRECT)
def test_it_is_taken_from_the_second_step_on(cls: type[optim.Adam], options: dict[str, Any]) -> None:
    masters = parameters()
    steps = Steps(cls(masters, **options), masters)
    taken = [steps.step(gradients(step, masters)) for step in range(3)]
    assert taken == [len(masters), 0, 0]


@pytest.mark.parametrize(("cls", "options"), ROUNDABOUT)
def test_it_is_not_taken_where_the_users_kernel_is_another(cls: Any, options: dict[str, Any]) -> None:
    masters = parameters()
    steps = Steps(cls(masters, **options), masters)
    assert [steps.step(gradients(step, masters)) for step in range(3)] == [len(masters)] * 3


def nothing(optimizer: Optimizer, masters: list[nn.Parameter]) -> None:
    pass


def hyperparameters(optimizer: Optimizer, masters: list[nn.Parameter]) -> None:
    optimizer.param_groups[1].update(lr=0.05, betas=(0.7, 0.8), eps=1e-5, weight_decay=0.3, maximize=True)


def moved_between_groups(optimizer: Optimizer, masters: list[nn.Parameter]) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def state_loaded(optimizer: Optimizer, masters: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def state_forgotten(optimizer: Optimizer, masters: list[nn.Parameter]) -> None:
    del optimizer.state[masters[0]]


def state_replaced(optimizer: Optimizer, masters: list[nn.Parameter]) -> None:
    optimizer.state[masters[3]] = {key: value * 2 for key, value in optimizer.state[masters[3]].items()}


def tensor_replaced(optimizer: Optimizer, masters: list[nn.Parameter]) -> None:
    optimizer.state[masters[3]]["exp_avg"] = optimizer.state[masters[3]]["exp_avg"] * 2


def masters_elsewhere(optimizer: Optimizer, masters: list[nn.Parameter]) -> None:
    masters[0].data = masters[0].data * 2


CHANGES = [
    nothing, hyperparameters, moved_between_groups, state_loaded, state_forgotten, state_replaced, tensor_replaced,
    masters_elsewhere,
]  # fmt: skip
Change = Callable[[Optimizer, list[nn.Parameter]], None]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_seen_to_the_bit(change: Change) -> None:
    masters, plain = parameters(), parameters()
    ours, other = (
        optim.AdamW([{"params": ps[:3], "lr": 0.02}, {"params": ps[3:], "weight_decay": 0.0}], amsgrad=True, fused=f)
        for ps, f in ((masters, None), (plain, True))
    )
    steps = Steps(ours, masters)
    schedulers = [LambdaLR(o, lambda step: 0.7**step) for o in (ours, other)]
    for step in range(STEPS):
        if step == STEPS // 2:
            change(ours, masters)
            change(other, plain)
        grads = gradients(step, masters)
        steps.step([g.clone() for g in grads])
        plain_step(other, plain, grads)
        for scheduler in schedulers:
            scheduler.step()
        for master, expected in zip(masters, plain, strict=True):
            assert torch.equal(master, expected)
        assert same_bits(ours.state_dict()["state"], other.state_dict()["state"])
