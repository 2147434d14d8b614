"""Which plan the engine makes of what it has measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import harness
import pytest
import zoo
from harness import ours, run

from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.profile import first_batch

clocks: list[bool] = []
"""Whether each of the searches could be ended by the clock."""

FOUND = harness.per_call(6, 4)


def plan_of(**options: Any) -> str:
    strategy = ours(num_microbatches=4, **options)
    result = run(strategy, zoo.PlainClassifier(zoo.MLP()), zoo.make_batches("mlp"), devices=2, watch=False)
    assert result.report is not None
    return str(result.report["plan"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Limits]:
    """The limits of every search, which finds `FOUND`."""
    made: list[Limits] = []

    def search(
        costs: Any, workers: int, microbatches: int, limits: Limits, staleness: int, *, by_clock: bool = True
    ) -> Plan:
        made.append(limits)
        clocks.append(by_clock)
        return Plan.parse(FOUND)

    monkeypatch.setattr(first_batch, "search_partition", search)
    clocks.clear()
    return made


def test_short_steps_are_cut_by_the_papers_algorithm(asked: list[Limits]) -> None:
    assert plan_of() != FOUND
    assert not asked


def test_long_steps_are_worth_a_search(asked: list[Limits], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_batch, "WORTH_S", 0.0)
    assert plan_of(staleness=1) == FOUND
    assert plan_of(staleness=1, memory_budget="1GiB") == FOUND
    usual, roomy = asked
    assert (usual.memory, roomy.memory) == (None, 2**30)
    assert usual.max_fused < roomy.max_fused == 5
    of_two = plan_of(round_microbatches=2)  # whether it says "recompute ahead" depends on measured times
    assert "round 2" in of_two and of_two != FOUND
    assert len(asked) == 2, "who sets the round has decided"
    assert clocks == [True, True]


def test_the_clock_does_not_end_the_search_for_a_static_plan(
    asked: list[Limits], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_batch, "WORTH_S", 0.0)
    assert plan_of(staleness=1, plan="static") == FOUND
    assert clocks == [False]


@pytest.mark.parametrize("found_s", [0.9, 1.1])
def test_a_slower_plan_is_not_taken(found_s: float, asked: list[Limits], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_batch, "WORTH_S", 0.0)
    seconds = {FOUND: found_s}
    monkeypatch.setattr(
        first_batch, "run_steps", lambda plan, *_: SimpleNamespace(makespan_s=seconds.get(str(plan), 1.0))
    )
    assert (plan_of() == FOUND) == (found_s < 1.0)
    assert asked
