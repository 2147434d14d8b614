"""Which plan the engine makes of what it has measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import zoo
from harness import ours, run

from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.nominal import nominal
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.profile import first_batch

judges: list[Callable[[Plan], float]] = []
"""What each of the searches judged plans by."""

seconds: list[float] = []
"""How long each of the searches may take."""

FOUND = harness.per_call(6, 4)


def plan_of(trainer: Mapping[str, Any] | None = None, **options: Any) -> str:
    strategy, batches = ours(num_microbatches=4, **options), zoo.make_batches("mlp")
    result = run(strategy, zoo.PlainClassifier(zoo.MLP()), batches, devices=2, watch=False, **trainer or {})
    assert result.report is not None
    return str(result.report["plan"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Limits]:
    """The limits of every search, which finds `FOUND`."""
    made: list[Limits] = []

    def search(
        costs: Any, workers: int, microbatches: int, limits: Limits, staleness: int, host: HostTime,
        search_seconds: float, *, judge: Callable[[Plan], float], judged: int,
    ) -> Plan:  # fmt: skip
        made.append(limits)
        seconds.append(search_seconds)
        judges.append(judge)
        assert 1 <= judged <= 16
        return Plan.parse(FOUND)

    monkeypatch.setattr(first_batch, "search_partition", search)
    seconds.clear()
    judges.clear()
    return made


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What plans are simulated to take, `FOUND` less than others."""
    seconds = {FOUND: 0.9}

    def step_ends(plan: Plan, *given: Any) -> list[float]:
        steps = given[4] if len(given) > 4 else 1
        return [step * seconds.get(str(plan), 1.0) for step in range(1, steps + 1)]

    monkeypatch.setattr(first_batch, "step_ends", step_ends)
    return seconds


def test_short_trainings_are_cut_by_the_papers_algorithm(asked: list[Limits]) -> None:
    assert plan_of() != FOUND
    assert not asked


def test_long_steps_are_worth_a_search(
    asked: list[Limits], faster: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_batch, "WORTH_S", 0.0)
    assert plan_of(staleness=1) == FOUND
    assert plan_of(staleness=1, memory_budget="1GiB") == FOUND
    usual, roomy = asked
    assert (usual.memory, roomy.memory) == (None, 2**30)
    assert usual.max_fused < roomy.max_fused == 5
    of_two = plan_of(round_microbatches=2)  # whether it says "recompute ahead" depends on measured times
    assert "round 2" in of_two and of_two != FOUND
    assert len(asked) == 2, "who sets the round has decided"


class Until(pl.Callback):
    """Ends a training of many steps after the first ones."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 2


ONCE = {"max_epochs": 1}  # three batches
SOME, MANY = {"max_epochs": 30}, {"max_epochs": -1, "max_steps": 900}
ENDLESS = {"max_epochs": -1, "max_time": {"hours": 1}}
IN_WINDOWS = {"max_epochs": -1, "max_steps": 45, "accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    ("step_s", "trainer", "longest"),
    [
        (0.04, ONCE, None),
        (0.04, SOME, 0.1 * 90 * 0.04),
        (0.04, IN_WINDOWS, 0.1 * 45 * 0.04),
        (0.04, MANY, 2.0),
        (0.0001, ENDLESS, 2.0),
        (0.6, ONCE, 2.0),
        (3.0, ONCE, 6.0),
        (20.0, ONCE, 10.0),
    ],
)
def test_shorter_steps_are_searched_for_less_long(
    step_s: float,
    trainer: Mapping[str, Any],
    longest: float | None,
    asked: list[Limits],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search may take a tenth of the training where a step is short, and two steps' time where it is long."""

    def step_ends(plan: Plan, *given: Any) -> list[float]:
        steps = given[4] if len(given) > 4 else 1
        return [step * (step_s if str(plan) != FOUND else 0.9 * step_s) for step in range(1, steps + 1)]

    monkeypatch.setattr(first_batch, "step_ends", step_ends)
    assert (plan_of({**trainer, "callbacks": [Until()]}) == FOUND) == (longest is not None)
    assert seconds == ([] if longest is None else [pytest.approx(longest)])


@pytest.mark.parametrize("found_s", [0.9, 1.1])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_slower_plan_is_not_taken(
    found_s: float, staleness: int, asked: list[Limits], faster: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_batch, "WORTH_S", 0.0)
    faster[FOUND] = found_s
    assert (plan_of(staleness=staleness) == FOUND) == (found_s < 1.0)
    assert asked


@pytest.mark.parametrize("staleness", [0, 1])
def test_plans_are_judged_with_their_copies(
    staleness: int, asked: list[Limits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link of 1 MB/s takes longer than anything that is computed; one without a stated rate takes no time."""
    monkeypatch.setattr(first_batch, "WORTH_S", 0.0)
    for bandwidth in (None, "1MB"):
        plan_of(staleness=staleness, emulation={"bandwidth": bandwidth})
    free, slow = judges
    plan = Plan.parse(FOUND)
    assert slow(plan) > 0.02 and free(plan) > 0


def test_plans_are_judged_with_the_rules_of_the_plan_command(
    asked: list[Limits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's rate counts: steps that follow each other wait for it if it is slow."""
    monkeypatch.setattr(first_batch, "WORTH_S", 0.0)
    slow = replace(nominal("cpu"), optimizer_bandwidth=1e3)
    plan_of()
    monkeypatch.setattr(first_batch, "rates_of", lambda device: slow)
    plan_of()
    usual, late = judges
    assert late(Plan.parse(FOUND)) > 1.0 > usual(Plan.parse(FOUND))


@pytest.mark.parametrize(("host_memory_bandwidth", "is_worth_it"), [(1e15, False), (1e6, True)])
def test_on_one_worker_recomputing_some_layers_hides_updates(
    host_memory_bandwidth: float, is_worth_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the whole model fits, one stage recomputes nothing, but all its updates wait for the last microbatch."""
    rates = replace(nominal("cpu"), host_memory_bandwidth=host_memory_bandwidth)
    monkeypatch.setattr(first_batch, "nominal", lambda kind: rates)
    module, batches = zoo.PlainClassifier(zoo.MLP()), zoo.make_batches("mlp", 3)
    result = run(ours(num_microbatches=4), module, batches)
    assert result.report is not None
    plan = Plan.parse(result.report["plan"])
    assert bool(plan.forward) == is_worth_it, plan
    harness.assert_same(run("auto", module, batches), result)
