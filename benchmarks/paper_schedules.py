"""The five schedules of the paper's table, run against a clock: RoundPipe as the paper models it, and its rivals.

The rules are those of the paper's simulator (arXiv 2604.27085), so that its figures come out to the last digit; our
engine has stricter ones (`planning.pipeline`). An operation is one stage for one microbatch in one direction. It
starts

    max(its worker is free, each dependency's end, plus a hop if that ran on another worker)                        [1]

**Baselines.** Stage s stands on worker s mod N for good. F(s) needs F(s-1). B(s) needs F(s) and B(s+1), recomputes
all its layers once the gradient is there, and goes back through them.                                             [2]
Each worker has a list of operations that it does in order, and waits when one is not ready (`_ORDERS`).

**RoundPipe.** Blocks of up to N microbatches pass S slots one after another; slot i of a block runs on worker g + i,
and g moves on by S for the next block. Backward has its own, shorter stages, and the first of them also has the LM
head. A backward operation begins with what needs no gradient: recomputation, or the forward of the fused stage and
the head. The model lets that happen before anything that it depends on, so that it ends just when backward can start:
    max(its worker is free + that work, F(last) + a hop, B(j-1) + a hop if on another worker)                       [3]
(The hop from the last forward stage counts even where there is only one worker.)

Times are whole numbers of a tick that divides all times of the case. Sums are exact: what is equal compares as equal,
an operation of no length has exactly none, and percentages add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import Literal, NamedTuple

from paper_cases import Case

Direction = Literal["F", "B"]
Part = Literal["forward", "head forward", "recompute", "backward", "head backward"]
Task = tuple[Direction, int, int]
"""Direction, stage and microbatch."""


class StageOperation(NamedTuple):
    """One stage for one microbatch in one direction, in ticks from the start of the step.

    Stages count from 0 in the direction of the forward pass for a baseline, and in the order in which they run, for
    each direction by itself, for RoundPipe.
    """

    worker: int
    direction: Direction
    stage: int
    microbatch: int
    start: int
    end: int


@dataclass(frozen=True)
class PaperRun:
    """A case, run.

    Attributes:
        case: what was run.
        operations: all of them, each worker's in the order in which it ran them.
        parts: per direction and stage, what an operation consists of, in order, in ticks; parts of no length are left
            out. The layers of a baseline's backward take turns in truth, recomputation and backward of one after
            another; here each kind is added up.
        ticks_per_ms: how many ticks a millisecond has.
    """

    case: Case
    operations: tuple[StageOperation, ...]
    parts: Mapping[tuple[Direction, int], tuple[tuple[Part, int], ...]]
    ticks_per_ms: int

    @property
    def makespan(self) -> int:
        """Ticks to the end of the last operation that has a length."""
        return max((op.end for op in self.operations if op.end > op.start), default=0)


def run_case(case: Case) -> PaperRun:
    """Runs the case under its schedule."""
    ticks = _TickTimes.of(case)
    parts = _parts_of_roundpipe(case, ticks) if case.schedule == "roundpipe" else _parts_of_a_baseline(case, ticks)
    if case.schedule == "roundpipe":
        operations = tuple(_run_roundpipe(case, parts, ticks.hop))
    else:
        operations = tuple(_run_lists(case, _ORDERS[case.schedule](case), parts, ticks.hop))
    kept = {key: tuple((kind, length) for kind, length in found if length) for key, found in parts.items()}
    return PaperRun(case, operations, kept, ticks.per_ms)


@dataclass(frozen=True)
class _TickTimes:
    """A case's times in ticks."""

    per_ms: int
    forward: int
    backward: int
    head_forward: int
    head_backward: int
    hop: int

    @classmethod
    def of(cls, case: Case) -> _TickTimes:
        """Times are taken as they are written: 7.429 is 7429/1000, not the nearest binary fraction."""
        written = (case.forward_ms, case.backward_ms, case.head_forward_ms, case.head_backward_ms, case.hop_ms)
        times = [Fraction(Decimal(repr(time))) for time in written]
        per_ms = lcm(*(time.denominator for time in times))
        return cls(per_ms, *(int(time * per_ms) for time in times))


_Parts = dict[tuple[Direction, int], list[tuple[Part, int]]]


def _parts_of_a_baseline(case: Case, ticks: _TickTimes) -> _Parts:
    parts: _Parts = {}
    last = len(case.forward_stages) - 1
    for stage, layers in enumerate(case.forward_stages):
        parts["F", stage] = [("forward", layers * ticks.forward)]
        parts["B", stage] = [("recompute", layers * ticks.forward), ("backward", layers * ticks.backward)]
        if stage == last:
            parts["F", stage].append(("head forward", ticks.head_forward))
            parts["B", stage].insert(0, ("head backward", ticks.head_backward))
    return parts


def _parts_of_roundpipe(case: Case, ticks: _TickTimes) -> _Parts:
    parts: _Parts = {("F", s): [("forward", n * ticks.forward)] for s, n in enumerate(case.forward_stages)}
    for stage, layers in enumerate(case.backward_stages):
        ahead: Part = "recompute" if stage else "forward"
        parts["B", stage] = [(ahead, layers * ticks.forward), ("backward", layers * ticks.backward)]
    parts["B", 0][1:1] = [("head forward", ticks.head_forward), ("head backward", ticks.head_backward)]
    return parts


# -- baselines -------------------------------------------------------------------------------------------------------


def _run_lists(case: Case, lists: Sequence[Sequence[Task]], parts: _Parts, hop: int) -> Iterator[StageOperation]:
    """Runs what can run until all is done; in which order workers are looked at does not matter."""
    workers, last = case.workers, len(case.forward_stages) - 1
    lengths = {key: sum(length for _, length in found) for key, found in parts.items()}
    ended: dict[Task, int] = {}
    free, place = [0] * workers, [0] * workers
    awake = list(range(workers))[::-1]
    while awake:
        worker = awake.pop()
        while place[worker] < len(lists[worker]):
            task = direction, stage, microbatch = lists[worker][place[worker]]
            needs: list[Task] = []  # [2]
            if direction == "F" and stage:
                needs = [("F", stage - 1, microbatch)]
            elif direction == "B":
                needs = [("F", stage, microbatch)]
                needs += [("B", stage + 1, microbatch)] if stage < last else []
            if any(need not in ended for need in needs):
                break  # whoever does the last of them wakes this worker
            arrived = (ended[need] + (hop if need[1] % workers != worker else 0) for need in needs)
            start = max(free[worker], *arrived, 0)  # [1]
            end = ended[task] = free[worker] = start + lengths[direction, stage]
            yield StageOperation(worker, direction, stage, microbatch, start, end)
            place[worker] += 1
            awake += [(stage + 1) % workers if direction == "F" else (stage - 1) % workers]
    assert all(at == len(tasks) for at, tasks in zip(place, lists, strict=True)), "workers wait for each other forever"


def _order_1f1b(case: Case) -> list[list[Task]]:
    """N - g forwards on worker g, then a backward and a forward in turn, then the remaining backwards."""
    stages, microbatches = len(case.forward_stages), case.microbatches
    lists: list[list[Task]] = [[] for _ in range(case.workers)]
    for stage in range(stages):
        ahead = min(case.workers - stage, microbatches)
        lists[stage] += [("F", stage, m) for m in range(ahead)]
        for m in range(microbatches):
            lists[stage].append(("B", stage, m))
            if ahead + m < microbatches:
                lists[stage].append(("F", stage, ahead + m))
    return lists


def _order_gpipe(case: Case) -> list[list[Task]]:
    """All forwards, then all backwards."""
    stages, microbatches = len(case.forward_stages), range(case.microbatches)
    lists: list[list[Task]] = [[] for _ in range(case.workers)]
    for stage in range(stages):
        lists[stage] = [("F", stage, m) for m in microbatches] + [("B", stage, m) for m in microbatches]
    return lists


def _order_looped_bfs(case: Case) -> list[list[Task]]:
    """Local stages ascending, all forwards of each; then local stages and microbatches descending, all backwards."""
    microbatches = range(case.microbatches)
    lists: list[list[Task]] = []
    for worker in range(case.workers):
        local = range(worker, len(case.forward_stages), case.workers)
        lists.append([("F", stage, m) for stage in local for m in microbatches])
        lists[-1] += [("B", stage, m) for stage in reversed(local) for m in reversed(microbatches)]
    return lists


def _order_interleaved(case: Case) -> list[list[Task]]:
    """Local stages take turns, r microbatches each; after w forwards a backward follows each forward."""
    workers, microbatches, stages = case.workers, case.microbatches, len(case.forward_stages)
    assert stages % workers == 0, "as many stages on each worker; stages of 0 layers may fill up"
    local = stages // workers
    rounds = max(microbatches // workers, 1)
    assert local == 1 or microbatches % rounds == 0, "equal rounds"
    turn, total = microbatches // rounds, microbatches * local
    lists = []
    for worker in range(workers):
        warm_up = min((local - 1) * turn + 2 * (workers - 1 - worker), total)
        forward, backward = ([iter(range(microbatches)) for _ in range(local)] for _ in "FB")
        tasks: list[Task] = []
        for i in range(warm_up + total):
            if i < total:
                number = i // turn % local
                tasks.append(("F", number * workers + worker, next(forward[number])))
            if i >= warm_up:
                number = local - 1 - (i - warm_up) // turn % local
                tasks.append(("B", number * workers + worker, next(backward[number])))
        lists.append(tasks)
    return lists


_ORDERS: Mapping[str, Callable[[Case], list[list[Task]]]] = {
    "1f1b": _order_1f1b,
    "gpipe": _order_gpipe,
    "looped-bfs": _order_looped_bfs,
    "interleaved-1f1b": _order_interleaved,
}
"""Per baseline the list of what each worker does."""


# -- RoundPipe -------------------------------------------------------------------------------------------------------


def _run_roundpipe(case: Case, parts: _Parts, hop: int) -> Iterator[StageOperation]:
    workers, slots = case.workers, len(case.forward_stages) + len(case.backward_stages)
    free = [0] * workers
    for number, begin in enumerate(range(0, case.microbatches, workers)):
        block = range(begin, min(begin + workers, case.microbatches))
        first = number * slots % workers  # g
        ended = dict.fromkeys(block, 0)  # of the stage before, per microbatch
        forward_ended = dict.fromkeys(block, 0)
        for stage in range(len(case.forward_stages)):
            worker = (first + stage) % workers
            length = sum(length for _, length in parts["F", stage])
            for m in block:
                arrived = ended[m] + hop if stage and workers > 1 else ended[m]
                start = max(free[worker], arrived)  # [1]
                free[worker] = ended[m] = start + length
                yield StageOperation(worker, "F", stage, m, start, ended[m])
            forward_ended = {m: ended[m] + hop for m in block}
        for stage in range(len(case.backward_stages)):
            worker = (first + len(case.forward_stages) + stage) % workers
            ahead, after = _split_at_backward(parts["B", stage])
            for m in block:
                arrived = ended[m] + hop if stage and workers > 1 else 0
                start = max(free[worker] + ahead, forward_ended[m], arrived)  # [3]
                free[worker] = ended[m] = start + after
                yield StageOperation(worker, "B", stage, m, start - ahead, ended[m])


def _split_at_backward(parts: Sequence[tuple[Part, int]]) -> tuple[int, int]:
    """What an operation does before it needs a gradient, and after."""
    after = sum(length for kind, length in parts if "backward" in kind)
    return sum(length for _, length in parts) - after, after
