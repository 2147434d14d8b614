"""Adam and AdamW by their kernel alone: when that is taken, and that nothing which changes between steps is missed."""

from __future__ import annotations

import copy
import weakref
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
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"amsgrad": True, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.Adam, {"fused": True, "amsgrad": True}),
]
ROUNDABOUT = [
    (optim.AdamW, {"fused": False}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.AdamW, {"lr": torch.tensor(0.01), "fused": True}),
    (optim.Adam, {"foreach": False}),
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


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_seen_to_the_bit(change: Change, amsgrad: bool) -> None:
    masters, plain = parameters(), parameters()
    ours, other = (
        optim.AdamW([{"params": ps[:3], "lr": 0.02}, {"params": ps[3:], "weight_decay": 0.0}], amsgrad=amsgrad, fused=f)
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


def test_parameters_that_come_later_are_stepped_in_their_group() -> None:
    masters, plain = parameters(), parameters()
    ours, other = (optim.AdamW(ps[:3], fused=f) for ps, f in ((masters, None), (plain, True)))
    for step in range(STEPS):
        if step == STEPS // 2:
            for optimizer, ps in ((ours, masters), (other, plain)):
                optimizer.add_param_group({"params": ps[3:], "lr": 0.05})
        grads = gradients(step, masters)
        Steps(ours, masters).step([g.clone() for g in grads])
        plain_step(other, plain, grads)
    for master, expected in zip(masters, plain, strict=True):
        assert torch.equal(master, expected)


def transposed(tensor: Tensor) -> Tensor:
    """The same numbers in another layout."""
    return tensor.t().contiguous().t()


MISFITS: dict[str, Callable[[Any], None]] = {
    "average": lambda state: state.update(exp_avg=transposed(state["exp_avg"])),
    "averages' memory": lambda state: setattr(state["exp_avg"], "data", transposed(state["exp_avg"])),
    "squares": lambda state: state.update(exp_avg_sq=transposed(state["exp_avg_sq"])),
    "maxima": lambda state: state.update(max_exp_avg_sq=transposed(state["max_exp_avg_sq"])),
    "dtype": lambda state: state.update(exp_avg_sq=state["exp_avg_sq"].double()),
    "count": lambda state: state.update(step=state["step"].double()),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_state_that_the_kernel_cannot_walk_through_is_left_to_torch(what: str) -> None:
    masters, plain = parameters()[-1:], parameters()[-1:]
    ours, other = (optim.AdamW(ps, amsgrad=True, foreach=f) for ps, f in ((masters, None), (plain, False)))
    steps = Steps(ours, masters)
    for step in range(STEPS):
        if step == STEPS // 2:
            MISFITS[what](ours.state[masters[0]])
        grads = gradients(step, masters)
        roundabout = steps.step([g.clone() for g in grads])
        plain_step(other, plain, grads)
        assert roundabout == (step == 0 or step >= STEPS // 2)
    torch.testing.assert_close(masters, plain, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_the_kernel_cannot_walk_through_is_left_to_torch() -> None:
    masters, plain = parameters()[-1:], parameters()[-1:]
    ours, other = optim.AdamW(masters), optim.AdamW(plain)
    steps = Steps(ours, masters)
    for step in range(STEPS):
        grads = [transposed(gradients(step, masters)[0])]
        assert steps.step(grads) == 1
        plain_step(other, plain, grads)
    torch.testing.assert_close(masters, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_what_gradient_scalers_leave_to_the_optimizer_is_left_to_torch(name: str) -> None:
    masters, plain = parameters(), parameters()
    ours, other = (optim.AdamW(ps, fused=True) for ps in (masters, plain))
    steps = Steps(ours, masters)
    for step in range(3):
        grads = gradients(step, masters)
        for optimizer in (ours, other):
            setattr(optimizer, name, torch.tensor(float(step == 2)) if name == "found_inf" else torch.tensor(4.0))
        steps.step([g.clone() for g in grads])
        plain_step(other, plain, grads)
    for master, expected in zip(masters, plain, strict=True):
        assert torch.equal(master, expected)


def test_after_a_step_nothing_is_kept_of_the_state() -> None:
    masters = parameters()
    optimizer = optim.AdamW(masters)
    steps = Steps(optimizer, masters)
    for step in range(2):
        steps.step(gradients(step, masters))
    memory = weakref.ref(optimizer.state[masters[0]]["exp_avg"].untyped_storage())
    optimizer.state.clear()
    assert memory() is None


def test_without_grad_mode_or_with_it_nothing_is_recorded() -> None:
    masters = parameters()
    steps = Steps(optim.AdamW(masters), masters)
    for step in range(3):
        with torch.set_grad_enabled(step == 2):
            grads = [g.requires_grad_(step == 1) for g in gradients(step, masters)]
            assert steps.step(grads) == (0 if step == 2 else len(masters))
    assert all(m.is_leaf and m.requires_grad and m.grad_fn is None for m in masters)


@pytest.mark.parametrize(("cls", "options"), DIRECT)
def test_parts_of_a_parameter_change_no_bit(cls: type[Optimizer], options: dict[str, Any]) -> None:
    """If they begin at multiples of a cache line; and the counter of steps counts once."""
    ours, plain = parameters(), parameters()
    first, second = cls(ours, lr=0.1, **options), cls(plain, lr=0.1, **{"fused": True} | options)
    partial = PartialOptimizer(first, ours)
    for step in range(STEPS):
        grads = gradients(step, ours)
        plain_step(second, plain, grads)
        values = Hyperparameters.of(first)
        with partial.prepared(values):
            assert partial.steps_parts(values, map(id, ours)) == (step > 0), "there is no state to cut yet"
            for master, grad in zip(ours, grads, strict=True):
                if not step:
                    partial.step(values, {id(master): grad})
                    continue
                for start in range(0, grad.numel(), 32):
                    end = min(start + 32, grad.numel())
                    partial.step_part(values, id(master), grad.view(-1)[start:end], start, end)
    for mine, other in zip(ours, plain, strict=True):
        assert same_bits(mine.detach(), other.detach()) and same_bits(first.state[mine], second.state[other])
