"""What the optimizer costs in each of its three ways, on emulated devices with layers that sleep for a model's times.

Each layer's update takes as long as its forward of one microbatch, and so does it here: the optimizer sleeps as well.

    blocking: all updates between the backward and the next forward, while nothing else runs
    late:     as eager, but nothing is recomputed before its gradient is there
    eager:    each layer's update as soon as its gradients are there, and the next forward of a layer behind it
    stale:    staleness 1, the updates while the next step runs

Every way has the best plan that the search finds for it (all but stale the same one: they fill and drain the pipeline
in each step). The simulation is that of `planning.pipeline` for an engine that takes no time itself. Measured is the
time between ends of training batches, the mean of some steps behind some others.

All cases are simulated. To measure one takes minutes, so by default one is measured with 8 workers and one with a
single worker. Times are stretched, because threads of one interpreter keep emulated devices waiting; a GPU, which is
given its work ahead of time, would not notice.

    .venv/bin/python benchmarks/bench_staleness.py [--measure llama3.1-8b:64 qwen3-32b:64] [--quick] [--simulate]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from common import Sleepers, batches, quiet, trainer
from paper_cases import Case, read_cases
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import Costs, Plan
from lightning_roundpipe.planning.pipeline import Rules, SimulatedRun, Staleness, run_steps
from lightning_roundpipe.planning.search import search_partition
from lightning_roundpipe.planning.timing import PERIOD_STEPS
from lightning_roundpipe.planning.updates import UpdateModel

Way = Literal["blocking", "late", "eager", "stale"]
WAYS: tuple[Way, ...] = ("blocking", "late", "eager", "stale")

CASES = {
    case.model: case
    for case in read_cases(Path(__file__).parents[1] / "conf" / "cases" / "paper.json")
    if case.schedule == "roundpipe"
}
GOALS = {
    ("qwen3-1.7b", 64): 1.07,
    ("llama3.1-8b", 64): 1.09,
    ("qwen3-32b", 64): 1.04,
    ("qwen3-1.7b", 128): 1.05,
    ("llama3.1-8b", 128): 1.05,
    ("qwen3-32b", 128): 1.05,
}
"""The most that eager may take, over stale, with 8 workers."""
GOAL_ALONE = 1.02
"""With one worker."""

LEAST_FORWARD_MS = 60.0
"""The engine and its threads' wake-ups take milliseconds for a call of each of 8 workers, on two cores."""
WARM_UP = 2
"""Steps behind the one that learns the trace, which are not counted: steps overlap, and the first ones less."""
FORWARD_S = 1e-9
"""Updates are simulated by bytes of gradients: a byte for so many seconds of a layer's forward."""


@dataclass(frozen=True)
class Question:
    """One model on ``workers`` with ``microbatches`` a step."""

    model: str
    workers: int
    microbatches: int

    @property
    def goal(self) -> float:
        return GOALS[self.model, self.microbatches] if self.workers > 1 else GOAL_ALONE

    @property
    def case(self) -> Case:
        return CASES[self.model]

    def costs(self, scale: float) -> Costs:
        calls = self.case.costs(scale).calls
        return Costs(tuple(replace(call, gradient_bytes=round(call.forward_s / FORWARD_S)) for call in calls))

    def stretched(self, forward_ms: float) -> float:
        """By how much to stretch times for a measurement, so that a forward takes at least so long."""
        return max(1.0, forward_ms / self.case.forward_ms)


class Sleeping(torch.optim.Optimizer):
    """Takes for each parameter the time that the parameter says; nothing is stepped."""

    independent_parameters = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    time.sleep(parameter.update_s())
        return loss


class SleepingTogether(Sleeping):
    """The same, but nobody knows that it treats parameters one by one: the strategy blocks."""

    independent_parameters = False


class UpdatedSleepers(Sleepers):
    """Sleepers whose update takes as long as their forward."""

    def __init__(self, seconds: list[tuple[float, float]], optimizer: type[Sleeping]) -> None:
        super().__init__(seconds)
        self._optimizer = optimizer
        for layer, (forward_s, _) in zip(self.layers, seconds, strict=True):
            assert isinstance(layer.weight, nn.Parameter)
            # Whatever stands in for a parameter has its attributes.
            layer.weight.update_s = lambda seconds=forward_s, pace=self.pace: seconds * pace.factor  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(self.parameters())


class Ends(pl.Callback):
    """When each training batch ended."""

    roundpipe_looks_away = True

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter())


def staleness_of(way: Way) -> Staleness:
    return 1 if way == "stale" else 0


@cache
def best_plan(question: Question, staleness: Staleness, search_seconds: float) -> Plan:
    return search_partition(
        question.costs(1.0),
        question.workers,
        question.microbatches,
        staleness=staleness,
        search_seconds=search_seconds,
    )


def plan_for(question: Question, way: Way, search_seconds: float) -> Plan:
    plan = best_plan(question, staleness_of(way), search_seconds)
    return replace(plan, recompute_ahead=False) if way == "late" else plan


def run(question: Question, way: Way, plan: Plan, scale: float, steps: int) -> SimulatedRun:
    updates = UpdateModel(1 / FORWARD_S, blocking=way == "blocking")
    rules = Rules(staleness_of(way), updates=updates)
    return run_steps(plan, question.costs(scale), question.workers, question.microbatches, rules, steps)


def simulate(question: Question, way: Way, plan: Plan, scale: float) -> float:
    """Seconds of each of many steps."""
    # Without staleness every step is like the one before.
    steps = PERIOD_STEPS if way == "stale" else 1
    return run(question, way, plan, scale, 2 * steps).period_s(steps)


def simulate_measured(question: Question, way: Way, plan: Plan, scale: float, steps: int) -> float:
    """Seconds of each of the ``steps`` that are measured: stale ones differ, because workers begin them elsewhere."""
    if way != "stale":
        return simulate(question, way, plan, scale)
    losses_s = run(question, way, plan, scale, WARM_UP + steps).losses_s
    return (losses_s[-1] - losses_s[-1 - steps]) / steps


def measure(question: Question, way: Way, plan: Plan, scale: float, steps: int) -> float:
    """Seconds of a step, the mean of ``steps``."""
    seconds = [(call.forward_s, call.backward_s) for call in question.costs(scale)]
    module = UpdatedSleepers(seconds, SleepingTogether if way == "blocking" else Sleeping)
    strategy = RoundPipeStrategy(
        num_microbatches=question.microbatches, plan=str(plan), layers=["Sleeper"], staleness=staleness_of(way)
    )
    ends = Ends()
    samples = torch.ones((1 + WARM_UP + steps) * question.microbatches, 4)
    fitter = trainer(strategy, question.workers, callbacks=ends)
    fitter.fit(module, batches(samples, question.microbatches))
    return (ends.seconds[-1] - ends.seconds[-1 - steps]) / steps


@dataclass
class Figures:
    """Seconds of a step in each way."""

    simulated: dict[Way, float]
    same: dict[Way, float]
    """Simulated, of those steps that are measured."""
    measured: dict[Way, float]


def figures_of(question: Question, options: argparse.Namespace, console: Console, to_measure: bool) -> Figures:
    least_ms = options.forward_ms if question.workers > 1 else options.forward_ms / 4  # whose threads are fewer
    scale = question.stretched(least_ms) if to_measure else 1.0
    found = Figures({}, {}, {})
    for way in WAYS:
        with console.status(f"{question.model}: searching a plan"):
            plan = plan_for(question, way, options.search_seconds)
        found.simulated[way] = seconds = simulate(question, way, plan, scale)
        if to_measure:
            with console.status(f"{question.model}, {way}: {WARM_UP + options.steps} steps of {seconds:.1f} s"):
                found.measured[way] = measure(question, way, plan, scale, options.steps)
            found.same[way] = simulate_measured(question, way, plan, scale, options.steps)
    return found


def rows_of(question: Question, found: Figures, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    for way in WAYS:
        plan = plan_for(question, way, options.search_seconds)
        simulated, measured = found.simulated[way], found.measured.get(way)
        yield (
            question.model,
            f"{question.workers}",
            f"{question.microbatches}",
            way,
            f"{len(plan.forward)} + 1 + {len(plan.backward)}, round {plan.round_microbatches}",
            f"{simulated:.3f}",
            f"{simulated / found.simulated['stale']:.4f}",
            "simulated only" if measured is None else f"{measured:.3f}",
            "" if measured is None else f"{found.same[way]:.3f}",
            "" if measured is None else f"{measured / found.same[way]:.3f}",
            "" if measured is None else f"{measured / found.measured['stale']:.4f}",
            f"{question.goal:.2f}" if way == "eager" else "",
        )


def questions_of(options: argparse.Namespace) -> dict[Question, bool]:
    """What to ask, and whether to measure it."""
    measured = {tuple(text.split(":")) for text in options.measure}
    if options.quick:
        return {Question("qwen3-1.7b", 8, 64): not options.simulate}
    asked = {
        Question(model, 8, microbatches): (model, str(microbatches)) in measured and not options.simulate
        for model, microbatches in GOALS
    }
    # One worker has a step for itself: 8 microbatches make it short, and what is not hidden weigh more than 64 would.
    return asked | {Question("qwen3-1.7b", 1, 8): not options.simulate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cases = ", ".join(f"{model}:{microbatches}" for model, microbatches in GOALS)
    parser.add_argument(
        "--measure", nargs="*", default=["qwen3-1.7b:64"], metavar="MODEL:MICROBATCHES", help=f"some of {cases}"
    )
    parser.add_argument(
        "--forward-ms",
        type=float,
        default=LEAST_FORWARD_MS,
        help="a measured forward's milliseconds, at least; alone a quarter",
    )
    parser.add_argument("--steps", type=int, default=2, help="steps that count")
    parser.add_argument("--search-seconds", type=float, default=10.0, help="for each plan")
    parser.add_argument("--quick", action="store_true", help="one model with 64 microbatches")
    parser.add_argument("--simulate", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if unknown := set(options.measure) - {f"{model}:{microbatches}" for model, microbatches in GOALS}:
        parser.error(f"--measure {min(unknown)}: it takes some of {cases}.")
    quiet()
    torch.set_num_threads(1)
    console = Console(width=150)
    table = Table(title="Seconds of a step; each layer's update takes as long as its forward of one microbatch")
    for heading in ("layers of", "workers", "M", "way", "plan", "simulated", "/ stale"):
        table.add_column(heading, justify="left" if heading in ("layers of", "way", "plan") else "right")
    for heading in ("measured", "the same steps, simulated", "ratio", "/ stale", "goal"):
        table.add_column(heading, justify="right")
    for question, to_measure in questions_of(options).items():
        for row in rows_of(question, figures_of(question, options, console, to_measure), options):
            table.add_row(*row)
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
