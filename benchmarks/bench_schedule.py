"""How near the engine comes to its own simulation: layers that sleep for a real model's times, on 8 emulated devices.

Nothing is computed, so all 8 devices work at once even on two cores, and what the measured step has over the simulated
one is the engine: interception, turns, hand-overs between threads, copies of (tiny) tensors, Lightning's own loop.

    .venv/bin/python benchmarks/bench_schedule.py [--scale 4] [--steps 3]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from common import Sleepers, Stopwatch, batches, quiet, trainer
from rich.console import Console
from rich.table import Table

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import greedy_partition
from lightning_roundpipe.planning.cases import Case, read_cases
from lightning_roundpipe.planning.pipeline import run_steps

CASES = Path(__file__).parents[1] / "conf" / "cases" / "paper.json"
MODELS = ("qwen3-1.7b", "llama3.1-8b")


def measure(case: Case, plan: str, scale: float, steps: int) -> list[float]:
    """Seconds of steps under ``plan``, without the step that finds the trace."""
    seconds = [(call.forward_s, call.backward_s) for call in case.costs(scale)]
    watch = Stopwatch()
    strategy = RoundPipeStrategy(num_microbatches=case.microbatches, plan=plan, layers=["Sleeper"])
    fitter = trainer(strategy, case.workers, callbacks=watch)
    fitter.fit(Sleepers(seconds), batches(torch.ones((steps + 1) * case.microbatches, 4), case.microbatches))
    return watch.seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=4.0, help="stretches the layers' times")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    console = Console()
    cases = {case.model: case for case in read_cases(CASES) if case.schedule == "roundpipe"}
    table = Table(title=f"8 devices, 16 microbatches, layers that sleep {options.scale:g} times the model's times")
    for heading in ("layers of", "stages", "simulated (s)", "measured, median (s)", "ratio", "bubble, simulated"):
        table.add_column(heading, justify="left" if heading == "layers of" else "right")
    for model in MODELS:
        case = cases[model]
        costs = case.costs(options.scale)
        plan = greedy_partition(costs, case.workers, case.microbatches)
        simulation = run_steps(plan, costs, case.workers, case.microbatches)
        bubble = 1 - simulation.busy_s / (case.workers * simulation.makespan_s)
        with console.status(f"{model}: {options.steps} steps of {simulation.makespan_s:.1f} s"):
            measured = statistics.median(measure(case, str(plan), options.scale, options.steps))
        table.add_row(
            model,
            f"{len(plan.forward)} + 1 + {len(plan.backward)}",
            f"{simulation.makespan_s:.3f}",
            f"{measured:.3f}",
            f"{measured / simulation.makespan_s:.3f}",
            f"{100 * bubble:.1f} %",
        )
    console.print(table)


if __name__ == "__main__":
    main()
