"""How long planning takes, and how good its plans are, for the paper's five models.

Eight workers, 16 microbatches, at most an eighth of the layers fused, no limit of memory. One step (staleness 0) is
compared with the makespan that the paper's simulator gives RoundPipe, and each of many steps (staleness 1) with the
same without fill and drain.

    .venv/bin/python benchmarks/bench_planning.py [--search-seconds 10]
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from common import parser_of, show
from paper_cases import Case, read_cases

from lightning_roundpipe.planning.batch import PERIOD_STEPS
from lightning_roundpipe.planning.links import HostTime
from lightning_roundpipe.planning.pipeline import Rules, Staleness, run_steps
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.search import SEARCH_SECONDS, search_partition

STEADY = 2


def row_of(case: Case, staleness: Staleness, search_seconds: float) -> tuple[float, float, tuple[str, ...]]:
    """Plans and judges. Returns our time and that of the least work, both over the paper's, and a row of the table."""
    costs, rules = case.costs(), Rules(staleness, HostTime(hop_s=case.hop_ms / 1e3))
    problem = Problem.usual(costs, case.workers, case.microbatches, rules=rules)
    start, processor = time.perf_counter(), time.process_time()
    plan = search_partition(problem, search_seconds)
    took, used = time.perf_counter() - start, time.process_time() - processor
    steps = STEADY * PERIOD_STEPS if staleness else 1
    run = run_steps(plan, costs, case.workers, case.microbatches, rules, steps)
    ours = run.period_s(PERIOD_STEPS) if staleness else run.makespan_s
    saved = sum(call.forward_s for call in costs.calls[-1 - problem.max_fused : -1])
    unfused = sum(2 * call.forward_s + call.backward_s for call in costs) - costs.calls[-1].forward_s
    least = case.microbatches * (unfused - saved) / case.workers
    paper = case.papers_seconds(staleness)
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


def main() -> None:
    options = parser_of(__doc__, search_seconds=SEARCH_SECONDS).parse_args()
    kinds: tuple[Staleness, ...] = (0, 1)
    headings = (
        "model", "staleness", "paper (ms)", "ours (ms)", "ratio", "above its work / 8", "above the least work / 8",
        "stages", "fused", "planned in s (processor)",
    )  # fmt: skip
    found = {kind: [row_of(case, kind, options.search_seconds) for case in read_cases().values()] for kind in kinds}
    show("Plans found for the paper's models", headings, [row for rows in found.values() for *_, row in rows])
    for kind, rows in found.items():
        ratios, least, _ = zip(*rows, strict=True)
        print(
            f"staleness {kind}: ratio {mean(ratios):.4f} in geometric mean, {max(ratios):.4f} at most; "
            f"{mean(least):.4f} with the least work and no idle worker"
        )


if __name__ == "__main__":
    main()
