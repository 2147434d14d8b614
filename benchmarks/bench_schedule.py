"""How near the engine comes to its own simulation: layers that sleep for a real model's times, on emulated devices.

Nothing is computed, so all devices work at once even on two cores, and what the measured step has over the simulated
one is the engine: interception, turns, hand-overs between threads, copies of (tiny) tensors, Lightning's own loop.

    .venv/bin/python benchmarks/bench_schedule.py [--scale 4] [--steps 3] [--unequal]

``--unequal`` takes devices of different speeds instead of 8 equal ones, the plan that the engine itself makes from its
first batch, and what all devices reach together if each of them trains alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from common import Sleepers, Stopwatch, batches, paper_cases, parser_of, quiet, show, trainer, unequal_devices
from paper_cases import Case

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import Plan, greedy_partition
from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.planning.search import search_partition

MODELS = ("qwen3-1.7b", "llama3.1-8b")
MIXED = ((1.0, 0.5), (1.0, 0.5) * 2, (1.0, 1.0, 0.5, 0.5), (1.0, 1.0, 1.0, 0.4))
LEARNING = 0.1
"""How long layers take in the first batch, which the engine makes its plan from, as a part of what they take later."""


def measure(
    case: Case, plan: str, scale: float, steps: int, devices: int, microbatches: int, learning: float = 0.0
) -> tuple[list[float], dict[str, Any]]:
    """Seconds of steps under ``plan``, without the step that finds the trace, and the report on the last one."""
    watch = Stopwatch()
    strategy = RoundPipeStrategy(num_microbatches=microbatches, plan=plan, layers=["Sleeper"])
    module = Sleepers([(call.forward_s, call.backward_s) for call in case.costs(scale)])
    module.pace.factor = learning
    data = batches(torch.ones((steps + 1) * microbatches, 4), microbatches)
    trainer(strategy, devices, callbacks=watch).fit(module, data)
    return watch.seconds[1:], strategy.report()


def stages(plan: Plan) -> str:
    return f"{len(plan.forward)} + 1 + {len(plan.backward)}"


def equal_rows(scale: float, steps: int) -> Iterator[tuple[str, ...]]:
    for model in MODELS:
        case = paper_cases()[model]
        costs = case.costs(scale)
        plan = greedy_partition(costs, case.workers, case.microbatches)
        simulated = run_steps(plan, costs, case.workers, case.microbatches)
        bubble = 1 - simulated.busy_s / (case.workers * simulated.makespan_s)
        measured = statistics.median(measure(case, str(plan), scale, steps, case.workers, case.microbatches)[0])
        times = (simulated.makespan_s, measured, measured / simulated.makespan_s)
        yield model, stages(plan), *(f"{value:.3f}" for value in times), f"{100 * bubble:.1f} %"


def unequal_rows(scale: float, steps: int) -> Iterator[tuple[str, ...]]:
    case = paper_cases()[MODELS[0]]
    costs = case.costs(scale)
    for speeds in MIXED:
        workers, microbatches = len(speeds), 8 * len(speeds)
        alone = run_steps(search_partition(costs, 1, microbatches), costs, 1, microbatches).makespan_s / sum(speeds)
        with unequal_devices(speeds):
            _, report = measure(case, "measured", scale, steps, workers, microbatches, LEARNING)
        plan, measured = Plan.parse(report["plan"]), report["step_time_s"]
        simulated = run_steps(plan, costs.at_speeds(speeds), workers, microbatches).makespan_s
        times = (alone, simulated, measured, measured / simulated, alone / measured)
        yield ", ".join(f"{speed:g}" for speed in speeds), stages(plan), *(f"{value:.3f}" for value in times)


def main() -> None:
    parser = parser_of(__doc__, scale=4.0, steps=3)
    parser.add_argument("--unequal", action="store_true", help="devices of different speeds")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    title = f"16 microbatches on 8 devices, or 8 on each; layers sleep {options.scale:g} times the model's times"
    if options.unequal:
        headings = ("speeds", "stages", "alone (s)", "simulated (s)", "measured (s)", "/ simulated", "alone / measured")
        show(title, headings, unequal_rows(options.scale, options.steps))
    else:
        headings = ("layers of", "stages", "simulated (s)", "measured, median (s)", "ratio", "bubble, simulated")
        show(title, headings, equal_rows(options.scale, options.steps))


if __name__ == "__main__":
    main()
