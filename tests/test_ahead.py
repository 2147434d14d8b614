"""Recomputation ahead: a worker whose turn it is does not wait for the gradient to recompute.

Who runs beside whom is shown by holding a layer up until it has happened; that numbers stay what they are is compared
with plain training here, and with everything else that can go wrong in test_stress, whose plans draw it too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import harness
import pytest
from harness import ours, run
from patience import PATIENCE_S, until
from test_overlap import BATCHES, Gate, Gated, Layer
from torch import Tensor

from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.memory import ahead_within, device_bytes, device_items
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.core.layer_executor import LayerExecutor
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall

PLAN = Plan.parse("forward 0-1 2; fused 3; backward 2 0-1; round 2")
AHEAD = replace(PLAN, recompute_ahead=True)


Recomputed = tuple[int, str, int]
"""A call: its batch, which is the number of updates that it has to see, its layer and its microbatch."""


def fit(module: Gated, plan: Plan = AHEAD, devices: int = 2, **options: Any) -> harness.Result:
    strategy = ours(num_microbatches=2, layers=["Layer"], plan=str(plan), watchdog_timeout=60, **options)
    return run(strategy, module, BATCHES, devices=devices, watch=False)


def held_up_at_the_loss(gate: Gate) -> Gated:
    """The first microbatch's gradient of one batch does not come out of the fused stage before the gate is open."""
    module = Gated(Gate(-1))
    module.layers[0].gate, module.layers[3].gate = None, gate
    return module


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[Recomputed]:
    """Everything that is recomputed ahead, in order."""
    made: list[Recomputed] = []
    real = LayerExecutor.recompute_ahead

    def recompute(executor: LayerExecutor, slot: Any, recorded: RecordedCall, *args: Any) -> None:
        real(executor, slot, recorded, *args)
        made.append((slot.version, recorded.layer.name, recorded.microbatch))

    monkeypatch.setattr(LayerExecutor, "recompute_ahead", recompute)
    return made


class Until(Gate):
    """Opens when the first microbatch of the third batch has been recomputed ahead as far as ``layer``."""

    def __init__(self, ahead: list[Recomputed], layer: str) -> None:
        super().__init__(2, 0)
        self.ahead, self.last = ahead, (2, layer, 0)

    def pass_through(self, batch: int, part: int) -> None:
        if (batch, part) == (2, 0):
            until(lambda: self.last in self.ahead, f"{self.last} is not recomputed ahead")

    def of_stage(self, *layers: str) -> list[str]:
        """Which of ``layers`` were, in order."""
        return [name for batch, name, microbatch in self.ahead if (batch, microbatch) == (2, 0) and name in layers]


def test_a_worker_recomputes_before_the_gradient_is_there(
    ahead: list[Recomputed], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(2, 0)
    made_then: list[Recomputed] = []
    real = LayerExecutor.recompute_ahead

    def recompute(executor: LayerExecutor, slot: Any, *args: Any) -> None:
        real(executor, slot, *args)
        if slot.version == 2 and not gate.opened.is_set():
            gate.reached.wait(PATIENCE_S)
            made_then.append(ahead[-1])
            gate.opened.set()

    monkeypatch.setattr(LayerExecutor, "recompute_ahead", recompute)
    plain = run("auto", held_up_at_the_loss(Gate(-1)), BATCHES, watch=False)
    result = fit(held_up_at_the_loss(gate))
    assert gate.reached.is_set() and not gate.in_vain
    assert made_then == [(2, "layers.2", 0)]
    harness.assert_tensors_same(plain.state, result.state)


def test_a_whole_stage_is_recomputed_deepest_call_first(ahead: list[Recomputed]) -> None:
    """The first worker waits for the first microbatch with the last stage open."""
    gate = Until(ahead, "layers.0")
    fit(held_up_at_the_loss(gate), devices=4)
    assert gate.of_stage("layers.0", "layers.1") == ["layers.1", "layers.0"]


def test_nothing_is_recomputed_before_the_forward_has_left_the_stage(ahead: list[Recomputed]) -> None:
    """The fifth worker has its turn while the first calls of its stage are still being made."""
    plan = replace(Plan.parse("forward 0 1 2; fused 3; backward 1-2 0; round 2"), recompute_ahead=True)
    gate = Until(ahead, "layers.2")
    fit(held_up_at_the_loss(gate), plan, devices=5)
    assert gate.of_stage("layers.1", "layers.2")[0] == "layers.2"


def test_no_plan_changes_a_bit(ahead: list[Recomputed]) -> None:
    results = [fit(Gated(Gate(-1)), plan, devices).state for plan in (PLAN, AHEAD) for devices in (1, 3)]
    assert ahead
    for state in results[1:]:
        harness.assert_tensors_same(results[0], state, rtol=0, atol=0)


def test_only_where_the_plan_says_so(ahead: list[Recomputed]) -> None:
    fit(Gated(Gate(-1)), PLAN)
    assert not ahead


RAN: set[tuple[int, ...]] = set()


class Refusing(Layer):
    """Cannot be run twice."""

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        key = tuple(which.tolist())
        if key[0] == 2 and key in RAN:
            raise ZeroDivisionError("planted")
        RAN.add(key)
        return super().forward(x, which)


def test_what_fails_ahead_is_raised_where_it_is_needed(ahead: list[Recomputed]) -> None:
    module = Gated(Gate(-1))
    RAN.clear()
    module.layers[2] = Refusing()
    strategy = ours(num_microbatches=2, layers=["Layer", "Refusing"], plan=str(AHEAD), watchdog_timeout=60)
    with pytest.raises(ZeroDivisionError, match="planted") as error:
        run(strategy, module, BATCHES, devices=2, watch=False)
    assert any("recomputation" in note and "layers.2" in note for note in error.value.__notes__)


def test_the_plan_says_so_where_there_is_room() -> None:
    costs = Costs(tuple(CallCost(str(i), 1.0, 2.0, 100, 50, 1, 1000, needs_backward=True) for i in range(4)))
    arena = 2 * 100 + 2 * 50
    alone, stage = arena + 1000, arena + 2000
    assert device_bytes(PLAN, costs, 2) == alone
    assert device_bytes(AHEAD, costs, 2) == stage
    assert ahead_within(PLAN, costs, 2, None) == ahead_within(PLAN, costs, 2, stage) == AHEAD
    assert ahead_within(PLAN, costs, 2, stage - 1) == PLAN
    assert sum(item.nbytes for item in device_items(AHEAD, costs, 2, stage)) == stage
    assert ahead_within(Plan.single(4), costs, 2, None) == Plan.single(4)
