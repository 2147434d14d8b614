"""One arena of a kind instead of two: the same bits, less memory, and nothing is uploaded or summed too early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
from harness import assert_identical, assert_same, ours, run
from test_overlap import BATCHES, Gate, Gated
from torch import Tensor, nn

from lightning_roundpipe.planning.memory import BOTH, SINGLE
from lightning_roundpipe.planning.schedule import Arenas, Plan
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.weight_uploads import WeightUploads
from lightning_roundpipe.runtime.core.worker import Worker

PLAN = Plan.parse("forward 0 1 2; fused 3; backward 2 1 0; round 2")
ALL: tuple[Arenas, ...] = (BOTH, (2, 1), (1, 2), SINGLE)


def fit(plan: Plan, devices: int = 2, **options: object) -> harness.Result:
    strategy = ours(num_microbatches=2, layers=["Layer"], plan=str(plan), watchdog_timeout=60, **options)
    return run(strategy, Gated(Gate(-1)), BATCHES, devices=devices, watch=False)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_arenas_change_no_bit(devices: int, staleness: int) -> None:
    results = [fit(PLAN.with_arenas(arenas), devices, staleness=staleness) for arenas in ALL]
    for result in results[1:]:
        assert_identical(results[0], result)


def test_each_arena_that_is_left_out_is_saved() -> None:
    """By what is counted and by what is planned, on a worker that holds little else."""
    counted, planned = [], []
    for arenas in ALL:
        report = fit(PLAN.with_arenas(arenas)).report
        assert report is not None
        counted.append(max(report["peak_device_bytes"]))
        planned.append(report["planned_device_bytes"])
    for found in (counted, planned):
        assert found[0] > max(found[1:3]) and min(found[1:3]) > found[3], found
    assert all(few <= plan for few, plan in zip(counted, planned, strict=True))


@pytest.mark.parametrize("arenas", [BOTH, (1, 2)])
def test_weights_wait_for_the_end_of_the_slot_before(arenas: Arenas, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single arena no upload is enqueued while a slot is open; with two, that of the next one is."""
    open_slots: dict[int, Slot] = {}
    early = 0
    opened, closed, upload = Worker.open, Worker.close_slot, WeightUploads.upload

    def open_it(worker: Worker, slot: Slot, following: Slot | None = None) -> bool:
        if slot.arena is None:
            worker.prepare(slot)
        open_slots[worker.index] = slot
        return opened(worker, slot, following)

    def close(worker: Worker, slot: Slot) -> None:
        del open_slots[worker.index]
        closed(worker, slot)

    def up(uploads: WeightUploads, slot: Slot, *args: object, **kwargs: object) -> None:
        nonlocal early
        early += open_slots.get(uploads.device.index, slot) is not slot
        upload(uploads, slot, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "open", open_it)
    monkeypatch.setattr(Worker, "close_slot", close)
    monkeypatch.setattr(WeightUploads, "upload", up)
    fit(PLAN.with_arenas(arenas))
    assert (early > 0) == (arenas == BOTH)


@pytest.mark.slow
def test_a_budget_with_room_for_single_arenas_only_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two of each kind do not fit, training goes on with one, and the plan says so."""
    report = fit(PLAN).report
    assert report is not None
    both, single = (
        fit(PLAN.with_arenas(arenas)).report["planned_device_bytes"]  # type: ignore[index]
        for arenas in (BOTH, SINGLE)
    )
    strategy = ours(num_microbatches=2, layers=["Layer"], memory_budget=(both + single) // 2, round_microbatches=2)
    result = run(strategy, Gated(Gate(-1)), BATCHES, devices=2, watch=False)
    assert result.report is not None and "single" in result.report["plan"]
    assert max(result.report["peak_device_bytes"]) <= (both + single) // 2
    assert_same(fit(replace(PLAN)), result)
    with pytest.raises(ValueError, match="add '; single weights gradients'"):
        fit(PLAN, memory_budget=single + 1)
    fit(PLAN.with_arenas(SINGLE), memory_budget=single + 1)


class Blocks(pl.LightningModule):
    """Equal layers, one of whose biases is frozen at first."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(layers))
        self.layers[0].bias.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unfreezes(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            module.layers[0].bias.requires_grad_(True)


def test_a_plan_that_is_made_anew_has_arenas_of_its_own() -> None:
    """Single arenas of a large stage do not stay beside two of a layer while the next plan is learned."""
    plan = "forward none; fused 0-7; backward none; round 2; single weights gradients"
    batches = list(torch.randn(5, 4, 128, generator=torch.Generator().manual_seed(0)))

    def train(memory: int | None) -> harness.Result:
        budget = None if memory is None else 1.0
        strategy = ours(
            num_microbatches=2, layers=["Linear"], plan=plan, memory_budget=budget, emulation={"memory": memory}
        )
        torch.manual_seed(0)
        return run(strategy, Blocks(8), batches, callbacks=[Unfreezes()], watch=False)

    free = train(None)
    assert free.report is not None
    assert_identical(free, train(free.report["planned_device_bytes"] + 4096))


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_first_batch_fits_where_the_plan_does(by_hand: bool) -> None:
    """Before there is a plan, arenas for a layer leave room for what it computes with."""
    plan = "forward 0 1 2; fused 3; backward 2 1 0; round 2; single weights gradients"
    batches = list(torch.randn(2, 100, 128, generator=torch.Generator().manual_seed(0)))

    def train(memory: int | None, plan: str | None) -> harness.Result:
        strategy = ours(num_microbatches=2, layers=["Linear"], plan=plan, emulation={"memory": memory})
        torch.manual_seed(0)
        return run(strategy, Blocks(4), batches, watch=False)

    free = train(None, plan)
    assert free.report is not None
    needed = free.report["planned_device_bytes"]
    tight = train(int(needed / 0.9) + 4096, plan if by_hand else None)
    assert tight.report is not None and max(tight.report["peak_device_bytes"]) <= needed + 4096
    assert_same(free, tight)
