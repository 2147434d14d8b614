"""How near the engine comes to its own simulation: layers that sleep for a real model's times, on emulated devices.

Nothing is computed, so all devices work at once even on two cores, and what the measured step has over the simulated
one is the engine: interception, turns, hand-overs between threads, copies of (tiny) tensors, Lightning's own loop.

    .venv/bin/python benchmarks/bench_schedule.py [--scale 4] [--steps 3]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from common import Sleepers, Steps, batches, parser_of, quiet, show, trainer
from paper_cases import Case, read_cases

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import Plan, greedy_partition
from lightning_roundpipe.planning.pipeline import run_steps

MODELS = ("qwen3-1.7b", "llama3.1-8b")


def measure(case: Case, plan: Plan, scale: float, steps: int) -> float:
    """Median seconds of steps under ``plan``, without the step that finds the trace."""
    watch = Steps()
    strategy = RoundPipeStrategy(num_microbatches=case.microbatches, plan=str(plan), layers=["Sleeper"])
    module = Sleepers([(call.forward_s, call.backward_s) for call in case.costs(scale)])
    data = batches(torch.ones((steps + 1) * case.microbatches, 4), case.microbatches)
    trainer(strategy, case.workers, callbacks=watch).fit(module, data)
    return statistics.median(watch.seconds[1:])


def rows(scale: float, steps: int) -> Iterator[tuple[str, ...]]:
    for model in MODELS:
        case = read_cases()[model]
        costs = case.costs(scale)
        plan = greedy_partition(costs, case.workers, case.microbatches)
        simulated = run_steps(plan, costs, case.workers, case.microbatches)
        bubble = 1 - simulated.busy_s / (case.workers * simulated.makespan_s)
        measured = measure(case, plan, scale, steps)
        times = (simulated.makespan_s, measured, measured / simulated.makespan_s)
        stages = f"{len(plan.forward)} + 1 + {len(plan.backward)}"
        yield model, stages, *(f"{value:.3f}" for value in times), f"{100 * bubble:.1f} %"


def main() -> None:
    options = parser_of(__doc__, scale=4.0, steps=3).parse_args()
    quiet()
    torch.set_num_threads(1)
    title = f"16 microbatches on 8 devices; layers sleep {options.scale:g} times the model's times"
    headings = ("layers of", "stages", "simulated (s)", "measured, median (s)", "ratio", "bubble, simulated")
    show(title, headings, rows(options.scale, options.steps))


if __name__ == "__main__":
    main()
