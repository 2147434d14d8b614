"""How near the engine comes to its own simulation: layers that sleep for a real model's times, on emulated devices.

Nothing is computed, so all devices work at once even on two cores, and what the measured step has over the simulated
one is the engine: interception, turns, hand-overs between threads, copies of (tiny) tensors, Lightning's own loop.

    .venv/bin/python benchmarks/bench_schedule.py [--scale 4] [--steps 3] [--timed [--link 25e9]] [--unequal]

Emulated devices work while a thread sleeps, so what the host does between two layers adds to their time. With
``--timed``, devices have clocks of their own (`timed_cuda`), and the host runs ahead of them, as it does on GPUs. With
``--link``, layers have as many weights as the model's, which links carry at so many bytes a second, and gradients:
both in fp32. Weights, rate, and the parts in which gradients travel are a two-hundredth of what they are. With
``--side-by-side``, each device computes whole microbatches.

``--unequal`` takes devices of different speeds instead of 8 equal ones, the plan that the engine itself makes from its
first batch, and what all devices reach together if each of them trains alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import Sleepers, Stopwatch, batches, quiet, trainer, unequal_devices
from paper_cases import Case, read_cases
from rich.console import Console
from rich.table import Table
from timed_cuda import TimedCuda

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.memory import grad_buffers
from lightning_roundpipe.planning import Costs, Plan, greedy_partition
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.pipeline import Rules, run_steps
from lightning_roundpipe.planning.search import search_partition
from lightning_roundpipe.planning.updates import PIECE_BYTES, UpdateModel

CASES = Path(__file__).parents[1] / "conf" / "cases" / "paper.json"
MODELS = ("qwen3-1.7b", "llama3.1-8b")
MIXED = ((1.0, 0.5), (1.0, 0.5) * 2, (1.0, 1.0, 0.5, 0.5), (1.0, 1.0, 1.0, 0.4))
BANDWIDTH = 25e9
"""Bytes a second of a link of devices with clocks of their own, where layers have next to no weights."""
SCALE = 200
"""By which weights and links are smaller, as the CPU copies them."""
WEIGHTS = {"qwen3-1.7b": (50.3e6, 311e6), "llama3.1-8b": (218e6, 525e6)}
"""Weights of a layer, and of the embedding and of the output layer."""
PART = PIECE_BYTES // SCALE // 4 * 4
"""Bytes of a part of a large layer's gradients."""
STEPS = 6
"""Steps that are simulated. With links, those of later steps count, which find their weights on the way."""
LEARNING = 0.1
"""How long layers take in the first batch, which the engine makes its plan from, as a part of what they take later."""


def measure(
    case: Case, plan: str, scale: float, steps: int, devices: int, microbatches: int, learning: float = 0.0
) -> tuple[list[float], dict[str, Any]]:
    """Seconds of steps under ``plan``, without the step that finds the trace, and the report on the last one."""
    seconds = [(call.forward_s, call.backward_s) for call in case.costs(scale)]
    watch = Stopwatch()
    strategy = RoundPipeStrategy(num_microbatches=microbatches, plan=plan, layers=["Sleeper"])
    fitter = trainer(strategy, devices, callbacks=watch)
    module = Sleepers(seconds)
    module.pace.factor = learning
    fitter.fit(module, batches(torch.ones((steps + 1) * microbatches, 4), microbatches))
    return watch.seconds[1:], strategy.report()


def measure_timed(case: Case, costs: Costs, plan: str, steps: int, link: float | None) -> list[float]:
    """Seconds from one step's end to the next one's, on devices with clocks of their own."""
    bandwidth = BANDWIDTH if link is None else link / SCALE
    with (
        TimedCuda(bandwidth).played() as gpus,
        mock.patch("common.take", gpus.launch),
        mock.patch.multiple(grad_buffers, PART=PART, STREAMED=2 * PART),
    ):
        watch = Stopwatch(gaps=True)
        strategy = RoundPipeStrategy(num_microbatches=case.microbatches, plan=plan, layers=["Sleeper"])
        data = batches(torch.ones((steps + 2) * case.microbatches, 4), case.microbatches)
        seconds = [(call.forward_s, call.backward_s) for call in costs]
        module = Sleepers(seconds, [max(1, call.weight_bytes // 4) for call in costs])
        trainer(strategy, case.workers, callbacks=watch).fit(module, data)
    return watch.seconds[2:]


def with_weights(costs: Costs, model: str) -> Costs:
    """Return ``costs`` with the bytes that `SCALE` leaves of the model's weights and gradients, in fp32."""
    inner, outer = (4 * int(count / SCALE) for count in WEIGHTS[model])
    sizes = [outer, *[inner] * (len(costs) - 2), outer]
    calls = [replace(call, weight_bytes=n, gradient_bytes=n) for call, n in zip(costs, sizes, strict=True)]
    return Costs(tuple(calls))


def equal_table(
    scale: float, steps: int, timed: bool, link: float | None, side_by_side: bool, console: Console
) -> Table:
    cases = {case.model: case for case in read_cases(CASES) if case.schedule == "roundpipe"}
    layers = (
        "layers that take {} times the model's times, and the host runs ahead"
        if timed
        else "layers that sleep {} times"
    )
    table = Table(title=f"8 devices, 16 microbatches, {layers.format(f'{scale:g}')}")
    for heading in ("layers of", "stages", "simulated (s)", "measured, median (s)", "ratio", "bubble, simulated"):
        table.add_column(heading, justify="left" if heading == "layers of" else "right")
    links = None if link is None else Links(link / SCALE, link / SCALE)
    updates = None if link is None else UpdateModel(math.inf, piece_bytes=PART)
    rules = Rules(host=HostTime(shared=timed), links=links, updates=updates)
    for model in MODELS:
        case = cases[model]
        costs = case.costs(scale) if link is None else with_weights(case.costs(scale), model)
        plan = Plan.single(len(costs)) if side_by_side else greedy_partition(costs, case.workers, case.microbatches)
        simulation = run_steps(plan, costs, case.workers, case.microbatches, rules, STEPS)
        period = simulation.period_s(STEPS - 2) if timed else simulation.ends_s[0]
        bubble = 1 - simulation.busy_s / STEPS / (case.workers * period)
        with console.status(f"{model}: {steps} steps of {period:.1f} s"):
            if timed:
                seconds = measure_timed(case, costs, str(plan), steps, link)
            else:
                seconds, _ = measure(case, str(plan), scale, steps, case.workers, case.microbatches)
        measured = statistics.median(seconds)
        table.add_row(
            model,
            f"{len(plan.forward)} + 1 + {len(plan.backward)}",
            f"{period:.3f}",
            f"{measured:.3f}",
            f"{measured / period:.3f}",
            f"{100 * bubble:.1f} %",
        )
    return table


def unequal_table(scale: float, steps: int, console: Console) -> Table:
    case = next(case for case in read_cases(CASES) if case.model == MODELS[0] and case.schedule == "roundpipe")
    costs = case.costs(scale)
    table = Table(title=f"layers that sleep {scale:g} times those of {case.model}, by the speed of their device")
    headings = ("speeds", "microbatches", "stages", "alone, together (s)", "simulated (s)", "measured, last (s)")
    for heading in (*headings, "measured / simulated", "alone / measured"):
        table.add_column(heading, justify="left" if heading == "speeds" else "right")
    for speeds in MIXED:
        workers, microbatches = len(speeds), 8 * len(speeds)
        one = search_partition(costs, 1, microbatches)
        alone = run_steps(one, costs, 1, microbatches).makespan_s / sum(speeds)
        with console.status(f"{speeds}: {steps} steps of more than {alone:.1f} s"), unequal_devices(speeds):
            _, report = measure(case, "measured", scale, steps, workers, microbatches, LEARNING)
        plan, measured = Plan.parse(report["plan"]), report["step_time_s"]
        simulated = run_steps(plan, costs.at_speeds(speeds), workers, microbatches).makespan_s
        table.add_row(
            ", ".join(f"{speed:g}" for speed in speeds),
            str(microbatches),
            f"{len(plan.forward)} + 1 + {len(plan.backward)}",
            f"{alone:.3f}",
            f"{simulated:.3f}",
            f"{measured:.3f}",
            f"{measured / simulated:.3f}",
            f"{alone / measured:.3f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=4.0, help="stretches the layers' times")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timed", action="store_true", help="devices with clocks of their own, as GPUs")
    parser.add_argument("--link", type=float, help="bytes a second of the devices' links, with --timed")
    parser.add_argument("--side-by-side", action="store_true", help="rounds of one microbatch and one stage")
    parser.add_argument("--unequal", action="store_true", help="devices of different speeds")
    options = parser.parse_args()
    if options.link and not options.timed:
        parser.error("--link needs --timed: layers that sleep have no weights")
    quiet()
    torch.set_num_threads(1)
    console = Console(width=150)
    if options.unequal:
        console.print(unequal_table(options.scale, options.steps, console))
    else:
        console.print(
            equal_table(options.scale, options.steps, options.timed, options.link, options.side_by_side, console)
        )


if __name__ == "__main__":
    main()
