"""Slots made as calls come: any order of calls is right, and what was foreseen is only faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_identical, assert_same, ours, run
from torch import Tensor, nn

from lightning_roundpipe.runtime.core.slots_on_arrival import SlotsOnArrival
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.worker import Worker


class Recorded:
    """What slots on arrival ask for, as text: phase and call."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.slots = SlotsOnArrival(
            self._make, self._note("prepare"), self._note("cancel"), self._note("open"), self._note("close")
        )

    def _make(self, phase: Any, microbatch: int, call: int, layer: Any, sums: Any) -> Slot:
        return Slot(0, 0, 0, phase, range(call, call + 1), [layer], {}, [microbatch])

    def _note(self, what: str) -> Any:
        return lambda slot: self.events.append(f"{what} {slot.phase} {slot.calls[0]}")

    def forward(self, call: int) -> Slot:
        return self.slots.forward(0, call, f"layer{call}")  # type: ignore[arg-type]

    def backward(self, call: int) -> Slot:
        return self.slots.backward(0, call, f"layer{call}", None)  # type: ignore[arg-type]

    def fused(self, call: int) -> Slot:
        return self.slots.fused(0, call, f"layer{call}", None)  # type: ignore[arg-type]

    def foresee(self, phase: Any, call: int) -> None:
        self.slots.foresee(0, phase, call, f"layer{call}", None)  # type: ignore[arg-type]


def test_a_slot_for_each_call_closed_after_it() -> None:
    it = Recorded()
    it.slots.after(0, it.forward(7), 7)
    it.slots.after(0, it.backward(7), 7)
    it.slots.finish(0)
    assert it.events == [
        *("prepare forward 7", "open forward 7", "close forward 7"),
        *("prepare backward 7", "open backward 7", "close backward 7"),
    ]


def test_what_was_foreseen_is_prepared_once() -> None:
    it = Recorded()
    it.foresee("forward", 1)
    it.foresee("forward", 1)
    it.slots.after(0, it.forward(1), 1)
    assert it.events == ["prepare forward 1", "open forward 1", "close forward 1"]


@pytest.mark.parametrize(("phase", "call"), [("forward", 2), ("fused", 1), ("backward", 1)])
def test_what_was_foreseen_wrongly_is_cancelled(phase: Any, call: int) -> None:
    it = Recorded()
    it.foresee(phase, call)
    it.forward(1)
    assert it.events == [f"prepare {phase} {call}", f"cancel {phase} {call}", "prepare forward 1", "open forward 1"]


def test_what_was_foreseen_and_never_came_is_cancelled() -> None:
    it = Recorded()
    it.foresee("backward", 3)
    it.slots.finish(0)
    assert it.events == ["prepare backward 3", "cancel backward 3"]


def test_a_held_slot_is_that_of_the_backward() -> None:
    it = Recorded()
    slot = it.fused(4)
    it.slots.after(0, slot, 4)
    assert it.slots.keeps_graph(4)
    assert not it.slots.keeps_graph(3)
    assert it.backward(4) is slot
    it.slots.after(0, slot, 4)
    it.slots.finish(0)
    assert it.events == ["prepare fused 4", "open fused 4", "close fused 4"]


@pytest.mark.parametrize("how", ["forward", "backward", "finish"])
def test_a_held_slot_is_let_go_by_whatever_else_comes(how: str) -> None:
    it = Recorded()
    it.slots.after(0, it.fused(4), 4)
    if how == "finish":
        it.slots.finish(0)
    else:
        getattr(it, how)(2)
    assert it.events[:3] == ["prepare fused 4", "open fused 4", "close fused 4"]
    assert not it.slots.keeps_graph(4)


# ---------------------------------------------------------------------------------------------- with one microbatch


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + self.by


class Roads(zoo.PlainClassifier):
    """Takes the way through its layers that the batch says, and then perhaps one more call behind the head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.shift = Shift()

    WAYS = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3), (3, 3, 3), ())

    def loss_and_logits(self, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
        way, kind = int(batch["way"][0]), int(batch["kind"][0])
        h = self.model.stem(batch["x"])
        for i in self.WAYS[way]:
            h = self.model.blocks[i](h)
        logits = self.model.head(h)
        if kind == 1:  # the head was not the last call
            logits = logits + 0.1 * self.model.head(self.model.blocks[0](h))
        if kind == 2:  # the head has no backward
            logits = logits.detach() + h[:, :5]
        if kind == 3:  # what the last layer was given is written to, which its own backward never looks at
            given, logits = logits, self.shift(logits)
            given.mul_(0)
        return F.cross_entropy(logits, batch["y"]), logits


LAYERS = ["Linear", "ResidualBlock", "Shift"]


def _batches(*steps: tuple[int, int]) -> list[zoo.Batch]:
    batches = zoo.make_batches("mlp", len(steps))
    return [
        batch | {"way": torch.full((6,), way), "kind": torch.full((6,), kind)}
        for batch, (way, kind) in zip(batches, steps, strict=True)
    ]


WANDERING = _batches(
    (0, 0), (0, 0), (1, 0), (1, 1), (1, 0), (2, 2), (2, 0), (2, 3), (2, 3), (3, 0), (3, 1), (4, 0), (4, 2)
)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_any_way_is_right(devices: int) -> None:
    module = Roads(zoo.make_module("mlp").model)
    plain = run("auto", module, WANDERING)
    emulation = {"poison": True, "delay_seed": devices, "bandwidth": "1GiB"}
    result = run(ours(num_microbatches=1, layers=LAYERS, emulation=emulation), module, WANDERING, devices=devices)
    assert_same(plain, result)


def test_the_last_call_is_not_recomputed_and_weights_come_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    cancelled: list[Any] = []
    prepare, cancel = Worker.prepare, Worker.cancel

    def noting(self: Worker, slot: Slot) -> None:
        prepared.append(slot.phase)
        prepare(self, slot)

    monkeypatch.setattr(Worker, "prepare", noting)
    monkeypatch.setattr(Worker, "cancel", lambda self, slot: (cancelled.append(slot), cancel(self, slot)))
    module = Roads(zoo.make_module("mlp").model)
    result = run(ours(num_microbatches=1, layers=LAYERS), module, _batches(*[(0, 0)] * 3), devices=2)
    first, later = ["forward"] * 6 + ["backward"] * 6, ["forward"] * 5 + ["fused"] + ["backward"] * 5
    assert prepared == first + later + later
    assert not cancelled
    assert result.report is not None
    assert [slot["phase"] for slot in result.report["slots"]] == later
    uploads = [row for row in result.report["events"] if row["kind"] == "upload_weights"]
    assert len(uploads) == len(later)


def test_a_plan_is_kept_to_with_one_microbatch_too() -> None:
    module = Roads(zoo.make_module("mlp").model)
    batches = _batches(*[(0, 0)] * 3)
    plan = "forward 0-2; fused 3-5; backward 1-2 0; round 1"
    result = run(ours(num_microbatches=1, layers=LAYERS, plan=plan), module, batches, devices=2)
    assert result.report is not None
    assert result.report["plan"] == plan
    assert [slot["phase"] for slot in result.report["slots"]] == ["forward", "fused", "backward", "backward"]
    assert_identical(run(ours(num_microbatches=1, layers=LAYERS), module, batches, devices=2), result)
    other = _batches((0, 0), (1, 0), (0, 0))
    result = run(ours(num_microbatches=1, layers=LAYERS, plan=plan), module, other, devices=2)
    assert result.report is not None
    assert result.report["plan"] == plan
    assert_identical(run(ours(num_microbatches=1, layers=LAYERS), module, other, devices=2), result)
