"""What the optimizer costs in each of its ways, simulated with a model's times.

Each layer's update takes as long as its forward of one microbatch.

    blocking: all updates between the backward and the next forward, while nothing else runs
    eager:    each layer's update as soon as its gradients are there, and the next forward of a layer behind it
    stale:    staleness 1, the updates while the next step runs

Every way has the best plan that the search finds for it (blocking and eager the same one).

    .venv/bin/python benchmarks/bench_staleness.py [--workers 8] [--microbatches 64]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from common import paper_cases, parser_of, show

from lightning_roundpipe.planning import Costs
from lightning_roundpipe.planning.batch import PERIOD_STEPS
from lightning_roundpipe.planning.pipeline import Rules, Staleness, run_steps
from lightning_roundpipe.planning.search import search_partition
from lightning_roundpipe.planning.updates import UpdateModel

MODELS = ("qwen3-1.7b", "llama3.1-8b", "qwen3-32b")
FORWARD_S = 1e-9
"""Updates are simulated by bytes of gradients: a byte for so many seconds of a layer's forward."""


def rows(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    size = options.workers, options.microbatches
    for model in MODELS:
        calls = paper_cases()[model].costs().calls
        costs = Costs(tuple(replace(call, gradient_bytes=round(call.forward_s / FORWARD_S)) for call in calls))
        kinds: tuple[Staleness, ...] = (1, 0)
        plans = {
            kind: search_partition(costs, *size, staleness=kind, search_seconds=options.search_seconds)
            for kind in kinds
        }
        stale = 0.0
        for way in ("stale", "eager", "blocking"):
            staleness: Staleness = 1 if way == "stale" else 0
            plan, steps = plans[staleness], PERIOD_STEPS if staleness else 1
            rules = Rules(staleness, updates=UpdateModel(1 / FORWARD_S, blocking=way == "blocking"))
            found = run_steps(plan, costs, *size, rules, 2 * steps).period_s(steps)
            stale = stale or found
            shown = f"{len(plan.forward)} + 1 + {len(plan.backward)}, round {plan.round_microbatches}"
            yield model, way, shown, f"{found:.3f}", f"{found / stale:.4f}"


def main() -> None:
    options = parser_of(__doc__, workers=8, microbatches=64, search_seconds=10.0).parse_args()
    title = f"Seconds of a step, {options.workers} workers, {options.microbatches} microbatches"
    show(title, ("model", "way", "plan", "simulated", "/ stale"), rows(options))


if __name__ == "__main__":
    main()
