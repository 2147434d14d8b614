"""What the optimizer costs in each of its ways, on emulated devices with layers that sleep for a model's times.

Each layer's update takes as long as its forward of one microbatch, and so does it here: the optimizer sleeps as well.

    blocking: all updates between the backward and the next forward, while nothing else runs
    late:     as eager, but nothing is recomputed before its gradient is there
    eager:    each layer's update as soon as its gradients are there, and the next forward of a layer behind it
    stale:    staleness 1, the updates while the next step runs

Every way has the best plan that the search finds for it (all but stale the same one: they fill and drain the pipeline
in each step). Measured is the time between ends of training batches, the mean of some steps behind some others. Times
are then stretched, because threads of one interpreter keep emulated devices waiting.

    .venv/bin/python benchmarks/bench_staleness.py [--measure llama3.1-8b:8:64] [--steps 2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from common import BatchEnds, Sleepers, batches, paper_cases, parser_of, quiet, show, trainer
from torch import nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import Costs, Plan
from lightning_roundpipe.planning.pipeline import Rules, SimulatedRun, Staleness, run_steps
from lightning_roundpipe.planning.search import search_partition
from lightning_roundpipe.planning.timing import PERIOD_STEPS
from lightning_roundpipe.planning.updates import UpdateModel

Way = Literal["blocking", "late", "eager", "stale"]
WAYS: tuple[Way, ...] = ("blocking", "late", "eager", "stale")
Question = tuple[str, int, int]
"""Model, workers, microbatches."""
GOALS: dict[Question, float] = {
    ("qwen3-1.7b", 8, 64): 1.07,
    ("llama3.1-8b", 8, 64): 1.09,
    ("qwen3-32b", 8, 64): 1.04,
    ("qwen3-1.7b", 8, 128): 1.05,
    ("llama3.1-8b", 8, 128): 1.05,
    ("qwen3-32b", 8, 128): 1.05,
    ("qwen3-1.7b", 1, 8): 1.02,
}
"""The most that eager may take, over stale."""
WARM_UP = 2
"""Steps behind the one that learns the trace, which are not counted: steps overlap, and the first ones less."""
FORWARD_S = 1e-9
"""Updates are simulated by bytes of gradients: a byte for so many seconds of a layer's forward."""


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
    """The same, without the statement that it treats parameters one by one: the strategy blocks."""

    independent_parameters = False


class UpdatedSleepers(Sleepers):
    """Sleepers whose update takes as long as their forward."""

    def __init__(self, seconds: list[tuple[float, float]], optimizer: type[Sleeping]) -> None:
        super().__init__(seconds)
        self._optimizer = optimizer
        for layer, (forward_s, _) in zip(self.layers, seconds, strict=True):
            assert isinstance(layer.weight, nn.Parameter)
            # Masters and copies of a parameter have its attributes.
            layer.weight.update_s = lambda seconds=forward_s, pace=self.pace: seconds * pace.factor  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(self.parameters())


def costs_of(question: Question, scale: float) -> Costs:
    calls = paper_cases()[question[0]].costs(scale).calls
    return Costs(tuple(replace(call, gradient_bytes=round(call.forward_s / FORWARD_S)) for call in calls))


def staleness_of(way: Way) -> Staleness:
    return 1 if way == "stale" else 0


def plans_of(question: Question, search_seconds: float) -> dict[Way, Plan]:
    _, workers, microbatches = question
    found = {
        staleness: search_partition(
            costs_of(question, 1.0), workers, microbatches, staleness=staleness, search_seconds=search_seconds
        )
        for staleness in (staleness_of("eager"), staleness_of("stale"))
    }
    late = replace(found[0], recompute_ahead=False)
    return {"blocking": found[0], "late": late, "eager": found[0], "stale": found[1]}


def run(question: Question, way: Way, plan: Plan, scale: float, steps: int) -> SimulatedRun:
    _, workers, microbatches = question
    rules = Rules(staleness_of(way), updates=UpdateModel(1 / FORWARD_S, blocking=way == "blocking"))
    return run_steps(plan, costs_of(question, scale), workers, microbatches, rules, steps)


def simulate(question: Question, way: Way, plan: Plan, scale: float) -> float:
    """Seconds of each of many steps. Without staleness every step is like the one before."""
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
    _, workers, microbatches = question
    seconds = [(call.forward_s, call.backward_s) for call in costs_of(question, scale)]
    module = UpdatedSleepers(seconds, SleepingTogether if way == "blocking" else Sleeping)
    strategy = RoundPipeStrategy(
        num_microbatches=microbatches, plan=str(plan), layers=["Sleeper"], staleness=staleness_of(way)
    )
    ends = BatchEnds()
    samples = torch.ones((1 + WARM_UP + steps) * microbatches, 4)
    trainer(strategy, workers, callbacks=ends).fit(module, batches(samples, microbatches))
    return (ends.seconds[-1] - ends.seconds[-1 - steps]) / steps


def rows(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    for question, goal in GOALS.items():
        name = ":".join(map(str, question))
        measured = name in options.measure
        stretched = max(1.0, options.forward_ms / paper_cases()[question[0]].forward_ms)
        scale, plans, stale = stretched if measured else 1.0, plans_of(question, options.search_seconds), 0.0
        for way in reversed(WAYS):  # the others are held against stale
            plan = plans[way]
            simulated = simulate(question, way, plan, scale)
            stale = stale or simulated
            cells = ["simulated only", "", ""]
            if measured:
                same = simulate_measured(question, way, plan, scale, options.steps)
                found = measure(question, way, plan, scale, options.steps)
                cells = [f"{found:.3f}", f"{same:.3f}", f"{found / same:.3f}"]
            shown = f"{len(plan.forward)} + 1 + {len(plan.backward)}, round {plan.round_microbatches}"
            wanted = f"{goal:.2f}" if way == "eager" else ""
            yield name, way, shown, f"{simulated:.3f}", f"{simulated / stale:.4f}", wanted, *cells


def main() -> None:
    parser = parser_of(__doc__, steps=2, search_seconds=10.0, forward_ms=60.0)
    known = [":".join(map(str, question)) for question in GOALS]
    parser.add_argument("--measure", nargs="*", default=known[:1], choices=known, help="cases to measure, too")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    headings = ("model:workers:M", "way", "plan", "simulated", "/ stale", "goal", "measured", "simulated too", "ratio")
    show("Seconds of a step; an update takes as long as a layer's forward of one microbatch", headings, rows(options))


if __name__ == "__main__":
    main()
