"""Idle time of a schedule, split as in the paper's table.

=======  =============================================================================================================
fill     until a worker's first operation
drain    after its last backward
switch   between its (N - g)-th forward, g being its number, and its first backward: what a pipeline needs to turn
         round. The last forward if it has fewer; in RoundPipe, whose workers are all alike, the last one before its
         first backward
intra    all other idle time, between operations
=======  =============================================================================================================

Operations of zero length (a stage of 0 layers) are ignored. A worker without operations fills for the whole makespan. A
worker without a backward drains after its last forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paper_schedules import PaperRun, StageOperation


@dataclass(frozen=True)
class Bubble:
    """Percent of makespan x workers; ``bubble_pct`` is the sum of the other four."""

    makespan_ms: float
    bubble_pct: float
    fill_pct: float
    switch_pct: float
    drain_pct: float
    intra_pct: float

    @property
    def asynchronous_pct(self) -> float:
        """Percentage of idle time of RoundPipe if steps follow each other without a flush."""
        return self.switch_pct + self.intra_pct


def find_bubble(run: PaperRun) -> Bubble:
    """Return the idle time of ``run``. All percentages are 0 if the makespan is 0."""
    makespan, workers = run.makespan, run.case.workers
    of_worker: list[list[StageOperation]] = [[] for _ in range(workers)]
    for operation in run.operations:
        if operation.end > operation.start:
            of_worker[operation.worker].append(operation)
    fill = switch = drain = idle = 0
    for worker, operations in enumerate(of_worker):
        idle += makespan - _busy(operations, 0, makespan)
        if not operations:
            fill += makespan
            continue
        fill += operations[0].start
        backwards = [op for op in operations if op.direction == "B"]
        last = backwards[-1].end if backwards else operations[-1].end
        drain += makespan - last - _busy(operations, last, makespan)
        begin, end = _turn(operations, None if run.case.schedule == "roundpipe" else workers - worker)
        switch += max(end - begin, 0) - _busy(operations, begin, end)

    def percent(ticks: int) -> float:
        return 100 * ticks / (makespan * workers) if makespan else 0.0

    return Bubble(
        makespan / run.ticks_per_ms,
        percent(idle),
        percent(fill),
        percent(switch),
        percent(drain),
        percent(idle - fill - switch - drain),
    )


def _turn(operations: Sequence[StageOperation], warm_up: int | None) -> tuple[int, int]:
    """Return the end of a forward and the start of the first backward.

    The forward is the ``warm_up``-th, or the last one before the first backward if ``warm_up`` is None.
    """
    first = next((op for op in operations if op.direction == "B"), None)
    if first is None:
        return 0, 0
    forwards = [op for op in operations if op.direction == "F"]
    if warm_up is None:
        forwards = [op for op in forwards if op.start < first.start]
    else:
        forwards = forwards[:warm_up]
    return (forwards[-1].end, first.start) if forwards else (0, 0)


def _busy(operations: Sequence[StageOperation], begin: int, end: int) -> int:
    """Return the ticks of work between ``begin`` and ``end``. No operation may cross either."""
    return sum(op.end - op.start for op in operations if begin <= op.start and op.end <= end)
