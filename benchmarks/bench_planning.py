"""How long planning takes, and how good the plans are: the paper's algorithm, and the search that starts from it.

The paper's algorithm is timed on traces of equal and of unequal layers, with the power of their number by which its
time grows. The search is judged on the paper's five models: eight workers, 16 microbatches, at most an eighth of the
layers fused, no limit of memory. Its plans are compared with the paper's: one step (staleness 0) with the makespan that
the paper's simulator gives RoundPipe, and each of many steps (staleness 1) with the same without fill and drain.

    .venv/bin/python benchmarks/bench_planning.py [--search-seconds 10] [--unequal]

``--unequal`` prints instead how near unequal workers come to the sum of what each of them reaches alone, as
`docs/planning.md` has it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
from common import paper_cases, parser_of, show
from paper_bubble import find_bubble
from paper_cases import Case
from paper_schedules import run_case

from lightning_roundpipe.planning import CallCost, Costs, greedy_partition
from lightning_roundpipe.planning.batch import PERIOD_STEPS
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.pipeline import Rules, Staleness, run_steps
from lightning_roundpipe.planning.search import SEARCH_SECONDS, search_partition

SIZES = (32, 48, 64, 94, 128, 192)
STEADY = 2


def trace(layers: int, equal: bool) -> Costs:
    random = Random(layers)

    def call(number: int) -> CallCost:
        scale = 1.0 if equal else random.uniform(0.5, 2)
        return CallCost(f"layers.{number}", 0.02 * scale, 0.04 * scale, 0, 0, 0, 0, needs_backward=True)

    return Costs(tuple(call(number) for number in range(layers + 1)))


def seconds_of_greedy(costs: Costs) -> float:
    """The fastest of some repetitions, of processor time."""
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        greedy_partition(costs, 8, 16)
        best = min(best, time.process_time() - start)
    return best


def greedy_rows() -> Iterator[tuple[str, ...]]:
    for equal in (True, False):
        seconds = [seconds_of_greedy(trace(layers, equal)) for layers in SIZES]
        power = np.polyfit(np.log(SIZES), np.log(seconds), 1)[0]
        yield "equal" if equal else "unequal", *(f"{s:.4f}" for s in seconds), f"{power:.1f}"


def papers_seconds(case: Case) -> dict[Staleness, float]:
    """What the paper's RoundPipe takes for a step alone, and for each of many without a flush between them."""
    bubble = find_bubble(run_case(case))
    work = case.layers * (2 * case.forward_ms + case.backward_ms) + case.head_forward_ms + case.head_backward_ms
    steady = case.microbatches * work / (case.workers * (1 - bubble.asynchronous_pct / 100))
    return {0: bubble.makespan_ms / 1e3, 1: steady / 1e3}


def row_of(case: Case, staleness: Staleness, search_seconds: float) -> tuple[float, float, tuple[str, ...]]:
    """Plans and judges. Returns our time and that of the least work, both over the paper's, and a row of the table."""
    costs, host = case.costs(), HostTime(hop_s=case.hop_ms / 1e3)
    limits = Limits.usual(costs, case.workers, case.microbatches)
    start, processor = time.perf_counter(), time.process_time()
    plan = search_partition(costs, case.workers, case.microbatches, limits, staleness, host, search_seconds)
    took, used = time.perf_counter() - start, time.process_time() - processor
    rules = Rules(staleness, host=host)
    steps = STEADY * PERIOD_STEPS if staleness else 1
    run = run_steps(plan, costs, case.workers, case.microbatches, rules, steps)
    ours = run.period_s(PERIOD_STEPS) if staleness else run.makespan_s
    saved = sum(call.forward_s for call in costs.calls[-1 - limits.max_fused : -1])
    unfused = sum(2 * call.forward_s + call.backward_s for call in costs) - costs.calls[-1].forward_s
    least = case.microbatches * (unfused - saved) / case.workers
    paper = papers_seconds(case)[staleness]
    row = (
        case.model,
        str(staleness),
        f"{1e3 * paper:,.1f}",
        f"{1e3 * ours:,.1f}",
        f"{ours / paper:.4f}",
        f"{100 * (ours / (run.busy_s / steps / case.workers) - 1):.2f} %",
        f"{100 * (ours / least - 1):.2f} %",
        f"{len(plan.forward)} + 1 + {len(plan.backward)}",
        str(len(plan.fused) - 1),
        f"{took:.1f} ({used:.1f})",
    )
    return ours / paper, least / paper, row


def mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


MIXED = (
    (1.0, 0.5),
    (1.0, 1.0, 0.5, 0.5),
    (1.0, 0.5) * 2,
    (1.0, 1.0, 1.0, 0.4),
    (1.0, 0.5) * 4,
    (1.0,) * 4 + (0.5,) * 4,
)
MICROBATCHES = 64


def rate(case: Case, speeds: tuple[float, ...], staleness: Staleness, search_seconds: float) -> float:
    """Microbatches a second on workers of these speeds. The clock does not end the search."""
    costs, workers = case.costs().at_speeds(speeds), len(speeds)
    host, limits = HostTime(hop_s=case.hop_ms / 1e3), Limits.usual(costs, workers, MICROBATCHES)
    plan = search_partition(costs, workers, MICROBATCHES, limits, staleness, host, search_seconds)
    steps = STEADY * PERIOD_STEPS if staleness else 1
    run = run_steps(plan, costs, workers, MICROBATCHES, Rules(staleness, host=host), steps)
    return MICROBATCHES / (run.period_s(PERIOD_STEPS) if staleness else run.makespan_s)


def unequal_table(search_seconds: float) -> str:
    """In Markdown: percent of the sum of what each worker reaches alone, with staleness 0 and with 1."""
    cases = list(paper_cases().values())
    lines = ["| speeds | " + " | ".join(case.model for case in cases) + " |", "| --- |" + " ---: |" * len(cases)]
    for speeds in MIXED:
        cells = []
        for case in cases:
            shares = []
            for staleness in (0, 1):
                kind: Staleness = 1 if staleness else 0
                alone = sum(speeds) * rate(case, (1.0,), kind, search_seconds)
                shares.append(f"{100 * rate(case, speeds, kind, search_seconds) / alone:.1f}")
            cells.append(" / ".join(shares))
        lines.append(f"| {', '.join(f'{speed:g}' for speed in speeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, search_seconds=SEARCH_SECONDS)
    parser.add_argument("--unequal", action="store_true")
    options = parser.parse_args()
    if options.unequal:
        print(unequal_table(options.search_seconds))
        return
    title = "The paper's algorithm: seconds of one core, for 8 workers and 16 microbatches"
    show(title, ("layers", *map(str, SIZES), "grows as L to the"), greedy_rows())
    kinds: tuple[Staleness, ...] = (0, 1)
    headings = (
        "model", "staleness", "paper (ms)", "ours (ms)", "ratio", "above its work / 8", "above the least work / 8",
        "stages", "fused", "planned in s (processor)",
    )  # fmt: skip
    found = {kind: [row_of(case, kind, options.search_seconds) for case in paper_cases().values()] for kind in kinds}
    show("Plans found for the paper's models", headings, [row for rows in found.values() for *_, row in rows])
    for kind, rows in found.items():
        ratios, least, _ = zip(*rows, strict=True)
        print(
            f"staleness {kind}: ratio {mean(ratios):.4f} in geometric mean, {max(ratios):.4f} at most; "
            f"{mean(least):.4f} with the least work and no idle worker"
        )


if __name__ == "__main__":
    main()
