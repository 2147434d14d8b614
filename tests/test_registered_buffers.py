"""Buffers that layers register, replace or delete in their forward come home, and are found there by all microbatches.

Parameters and modules that a forward registers are refused: nothing else has them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_same, halves, ours, per_call, run
from torch import Tensor, nn
from traps import Block, Net

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.hints import Hints

SETUPS = [(1, None), (3, None), (3, halves(5))]
"""Microbatches and plans."""


class Registering(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.change(self, x)
        return super().forward(y)

    change: Any = staticmethod(lambda self, x: x)


def once(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "seen"):
        self.register_buffer("seen", torch.full((3,), 2.0))
    return x * self.seen.sum()


def lazily(self: Any, x: Tensor) -> Tensor:
    """As rotary caches do."""
    if self.inner._buffers.get("seen") is None:
        self.inner.register_buffer("seen", torch.linspace(1, 2, x.shape[-1]), persistent=False)
    return x * self.inner.seen


def counting(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "seen"):
        self.register_buffer("seen", torch.zeros(()))
    self.seen += 1
    return x * (1 + 0.1 * self.seen)


def growing(self: Any, x: Tensor) -> Tensor:
    held = self._buffers.get("seen")
    if held is None or len(held) < 5:
        self.register_buffer("seen", torch.ones(1 if held is None else len(held) + 1))
    return x * self.seen.sum()


def deleting(self: Any, x: Tensor) -> Tensor:
    if hasattr(self, "table"):
        del self.table
    return x


def train(change: Callable[[Any, Tensor], Tensor], strategy: Any, wrap: Any = zoo.PlainClassifier) -> Any:
    torch.manual_seed(5)
    net = Net(Registering)
    block: Any = net.blocks[1]
    block.change = change
    block.register_buffer("table", torch.ones(2))
    devices = 1 if strategy == "auto" else 2
    # A buffer that is new by the next batch has the strategy set up again, and the optimizer's thread with it.
    result = run(strategy, wrap(net), zoo.make_batches("mlp", 4), devices=devices, blocking=True)
    assert result.module is not None
    return result, {name for name, _ in result.module.named_buffers()}


@pytest.mark.parametrize(("microbatches", "plan"), SETUPS)
@pytest.mark.parametrize("change", [once, lazily, deleting])
def test_it_comes_home(change: Any, microbatches: int, plan: str | None) -> None:
    plain, expected = train(change, "auto")
    mine, names = train(change, ours(num_microbatches=microbatches, plan=plan))
    assert names == expected and mine.state.keys() == plain.state.keys()
    assert_same(mine, plain)


@pytest.mark.parametrize("change", [counting, growing])
def test_what_changes_is_the_same_with_one_microbatch(change: Any) -> None:
    plain, expected = train(change, "auto")
    mine, names = train(change, ours(num_microbatches=1))
    assert names == expected
    assert_same(mine, plain)


class Reading(zoo.PlainClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.model.blocks[1].seen.sum()  # type: ignore[union-attr, index, operator]


class InStep(zoo.PlainClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        block: Any = self.model.blocks[1]  # type: ignore[union-attr, index]
        if batch_idx == 1 and not hasattr(block, "seen"):
            block.register_buffer("seen", torch.full((3,), 1.5))
        return super().training_step(batch, batch_idx)


class Between(zoo.PlainClassifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.blocks[1].register_buffer("seen", torch.full((3,), 1.5))  # type: ignore[union-attr, index, operator]


class Late(zoo.PlainClassifier):
    """The layer reads a flag that no comparison of attributes sees."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        FLAG[0] = batch_idx == 2


FLAG = [False]


def where_there(self: Any, x: Tensor) -> Tensor:
    return x * self.seen.sum() if hasattr(self, "seen") else x


def by_flag(self: Any, x: Tensor) -> Tensor:
    if FLAG[0] and not hasattr(self, "seen"):
        self.register_buffer("seen", torch.full((3,), 2.0))
    return x


@pytest.mark.parametrize(("microbatches", "plan"), SETUPS)
@pytest.mark.parametrize(
    ("module", "change"), [(Reading, once), (InStep, where_there), (Between, where_there), (Late, by_flag)]
)
def test_user_code_and_later_batches(module: Any, change: Any, microbatches: int, plan: str | None) -> None:
    plain, expected = train(change, "auto", module)
    mine, names = train(change, ours(num_microbatches=microbatches, plan=plan), module)
    assert names == expected and "model.blocks.1.seen" in names
    assert_same(mine, plain)


def a_parameter(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "added"):
        self.added = nn.Parameter(torch.ones(3))
    return x


def a_module(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "added"):
        self.added = nn.Linear(2, 2)
    return x


def another_parameter(self: Any, x: Tensor) -> Tensor:
    self.inner.weight = nn.Parameter(self.inner.weight.detach() * 1.1)
    return x


def an_equal_parameter(self: Any, x: Tensor) -> Tensor:
    """After it was used: its gradient is not lost."""
    y = self.inner(x)
    self.inner.weight = nn.Parameter(self.inner.weight.detach().clone())
    return y


def a_frozen_parameter(self: Any, x: Tensor) -> Tensor:
    self.inner.register_parameter("weight", nn.Parameter(self.inner.weight.detach(), requires_grad=False))
    return x


def an_equal_module(self: Any, x: Tensor) -> Tensor:
    self.inner = copy.deepcopy(self.inner)
    return x


def a_parameter_later(self: Any, x: Tensor) -> Tensor:
    return a_parameter(self, x) if FLAG[0] else x


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (a_parameter, "parameter 'added' of its Registering"),
        (a_module, "module 'added' of its Registering"),
        (another_parameter, "parameter 'weight' of its Linear"),
        (an_equal_parameter, "parameter 'weight' of its Linear"),
        (a_frozen_parameter, "parameter 'weight' of its Linear"),
        (an_equal_module, "module 'inner' of its Registering"),
        (a_parameter_later, "parameter 'added' of its Registering"),
    ],
)
def test_parameters_and_modules_are_refused(change: Any, what: str, microbatches: int) -> None:
    with pytest.raises(RoundPipeError, match=f"layer 'model.blocks.1' registers, replaces or removes the {what}"):
        train(change, ours(num_microbatches=microbatches), Late)


def a_stateless_module(self: Any, x: Tensor) -> Tensor:
    self.act = nn.Tanh()
    return self.act(x)


def test_modules_without_tensors_may_be_made_anew() -> None:
    assert_same(train(a_stateless_module, ours(num_microbatches=3))[0], train(a_stateless_module, "auto")[0])


class Averages(nn.Module):
    """Computes with a running mean of what it is given."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x - self.mean)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return out.tanh()  # type: ignore[no-any-return]


class AveragesTwice(pl.LightningModule):
    """Calls one layer before and after another one."""

    def __init__(self) -> None:
        super().__init__()
        self.averages, self.linear = Averages(), nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.averages(self.linear(self.averages(batch))).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_plan_that_tears_the_changes_of_a_buffer_is_refused() -> None:
    """A microbatch's second call would find what the first calls of later ones have left."""
    module, batches = AveragesTwice(), list(torch.randn(9, 2, 8))
    strategy = ours(plan=per_call(3), layers=["Averages", "Linear"])
    with pytest.raises(
        ValueError, match=r"buffer 'mean' of Averages .* plan must have these calls in one forward stage"
    ):
        run(strategy, module, batches, devices=2, accumulate_grad_batches=3)


class UsesAverages(pl.LightningModule):
    """Reads or writes, between layers, a buffer that a layer changes."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *, since: int = 0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.averages, self.linears = Averages(), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.use, self.since = use, since
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.averages(batch)
        for linear in self.linears:
            h = linear(h)
        if batch_idx >= self.since:
            h = self.use(h, self.averages.mean)
        return h.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@torch.no_grad()
def writes(h: Tensor, mean: Tensor) -> Tensor:
    mean.add_(h.mean(0))
    return h


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reads": lambda h, mean: h * mean,
    "reads a view": lambda h, mean: h * mean[:1],
    "asks for a number": lambda h, mean: h * float(mean.sum()),
    "writes": writes,
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why microbatches run one after another."""
    texts: list[str] = []
    monkeypatch.setattr(Hints, "say", lambda self, key, text: texts.append(text) if key == "order" else None)
    return texts


@pytest.mark.parametrize("use", USES)
def test_buffers_that_code_between_layers_uses(use: str, said: list[str]) -> None:
    """A microbatch found what later ones had left there."""
    batches = list(torch.randn(12, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    expected, trained = (
        run(strategy, UsesAverages(USES[use]), batches, devices=devices, accumulate_grad_batches=4)
        for strategy, devices in (("auto", 1), (ours(), 2))
    )
    assert len(said) == 1 and "code between layers reads or writes it" in said[0]
    for name, value in expected.state.items():
        torch.testing.assert_close(trained.state[name], value)


def test_a_later_batch_that_uses_such_a_buffer_first_is_named(said: list[str]) -> None:
    """It runs by the plan; those behind it run in order."""
    batches = list(torch.randn(16, 2, 8, dtype=torch.float64))
    trained = run(ours(), UsesAverages(USES["reads"], since=8), batches, devices=2, accumulate_grad_batches=4)
    assert trained.report is not None and trained.report["profiled"]
    assert len(said) == 1 and "which this window is the first to do" in said[0]
