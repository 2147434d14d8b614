"""``RoundPipeMonitor``: its figures, and one warning for each thing that makes training slow.

Layers here take time without using a core (`emulated_work`), so steps take what was planned whatever else the machine
does, unless a test makes something slow.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import MemoryLogger, loader, ours, quiet, run, trainer_of
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeMonitor, RoundPipeWarning, step_monitor
from lightning_roundpipe.devices import emulated_work
from lightning_roundpipe.diagnosis import StepTimes, critical_path, diagnose, link_use, planned_step, stall_seconds

FORWARD_S, BACKWARD_S = 0.004, 0.008
WIDTH = 16


class _TakeTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        emulated_work(forward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        emulated_work(ctx.backward_s)
        return grad * 1.0, None, None


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return _TakeTime.apply(self.linear(x), FORWARD_S, BACKWARD_S)  # type: ignore[no-untyped-call,no-any-return]


class Slow(pl.LightningModule):
    """Eight blocks of equal length. Subclasses and arguments make something slow."""

    roundpipe_looks_away = True

    def __init__(self, width: int = WIDTH, code_s: float = 0.0, rate: float = 1e-3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        self.code_s, self.rate = code_s, rate

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 5:
                time.sleep(self.code_s)
            batch = block(batch)
        return (batch**2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class SlowSGD(torch.optim.SGD):
    """Its steps take as long for each parameter as a large model's do."""

    independent_parameters = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        time.sleep(0.02 * sum(p.grad is not None for group in self.param_groups for p in group["params"]))
        return result


class SlowUpdates(Slow):
    def configure_optimizers(self) -> Any:
        return SlowSGD(self.parameters(), lr=1e-3)


class SlowBatches:
    """A data loader that takes its time."""

    def __init__(self, batches: Sequence[Tensor], seconds: float) -> None:
        self.batches, self.seconds = batches, seconds

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


class SlowHook(pl.Callback):
    roundpipe_looks_away = True

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.2)


@pytest.fixture(autouse=True)
def enough_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices compute at once, as these layers use no core."""
    monkeypatch.setattr(step_monitor, "concurrent_devices", lambda: 4)


def fit(
    module: pl.LightningModule,
    strategy: Any,
    steps: int = 7,
    data: Callable[[list[Tensor]], Any] = loader,
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> tuple[RoundPipeMonitor, list[str], MemoryLogger]:
    """Train; return the monitor, the warnings that it gave, and what was logged."""
    monitor, logger = RoundPipeMonitor(every_n_steps=4), MemoryLogger()
    width = next(module.parameters()).shape[-1]
    batches = [torch.randn(8, width) for _ in range(steps)]
    trainer = trainer_of(strategy, devices=4, callbacks=[*callbacks, monitor], logger=logger, **options)
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data(batches))
    said = [str(w.message) for w in caught if issubclass(w.category, RoundPipeWarning) and "longer than" in str(w.message)]
    return monitor, said, logger


# -- causes ------------------------------------------------------------------------------------------------------------


def test_as_planned_there_is_no_warning() -> None:
    monitor, said, _ = fit(Slow(), ours(num_microbatches=4))
    assert monitor.diagnosis is not None
    assert not said, monitor.diagnosis
    assert monitor.diagnosis.planned_s == pytest.approx(monitor.diagnosis.step_s, rel=0.4)


SLOW: dict[str, tuple[Callable[[], dict[str, Any]], str, str, str]] = {
    "link": (
        lambda: {"module": Slow(width=256), "strategy": ours(num_microbatches=4, emulation={"bandwidth": 8e6})},
        "link", "Waiting for copies, most of them weights", "batch_size=",
    ),
    "loader": (
        lambda: {"module": Slow(), "strategy": ours(num_microbatches=4), "data": lambda b: SlowBatches(b, 0.3)},
        "data loader", "Waiting for the next batch", "num_workers=",
    ),
    "code of the step": (
        lambda: {"module": Slow(code_s=0.05), "strategy": ours(num_microbatches=4)},
        "user code", "most of it between layers 'blocks.4' and 'blocks.5'", "num_microbatches=",
    ),
    "hook": (
        lambda: {"module": Slow(), "strategy": ours(num_microbatches=4), "callbacks": [SlowHook()]},
        "user code", "Code between two steps (hooks, callbacks, loggers)", "profiler='simple'",
    ),
    "uneven plan": (
        lambda: {
            "module": Slow(),
            "strategy": ours(num_microbatches=4, plan="forward 0-5; fused 6-7; backward 0-5; round 4"),
        },
        "imbalance", "(the longest: backward, blocks.0 … blocks.5)", "Leave plan= out",
    ),
    "optimizer": (
        lambda: {"module": SlowUpdates(), "strategy": ours(num_microbatches=4)},
        "host", "Waiting for weights that the optimizer has not updated yet", "staleness=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("slow", SLOW)
def test_the_warning_names_the_cause_and_the_setting(slow: str) -> None:
    make, cause, what, setting = SLOW[slow]
    monitor, said, _ = fit(**make())
    assert monitor.diagnosis is not None
    assert monitor.diagnosis.cause == cause, (monitor.diagnosis.lost_s, str(monitor.diagnosis))
    [text] = said
    assert text == f"roundpipe: {monitor.diagnosis}" or f"Cause: {cause}." in text
    assert what in text and setting in text
    taken, planned = monitor.diagnosis.step_s, monitor.diagnosis.planned_s
    assert taken > 1.2 * planned
