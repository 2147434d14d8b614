"""The paper's partitioner: cut the trace into stages of nearly equal time, within a worker's memory.

A round-robin pipeline of equal stages takes ``M S + N (N - 1)`` stage times of all N workers together (M
microbatches, S stages): the work, and the bubble that is left while workers fill and drain. That holds for at least
as many stages and microbatches as workers. With fewer, some workers have nothing to do or wait for a microbatch to
come round, which the formula does not see (it would put a whole model into one stage on one worker), so there the
slots are counted (`pipeline_length`). With unequal stages the longest one sets the pace, so
the objective is that count times ``t_max``. It falls with fewer stages and with a shorter longest stage, which pull
against each other, and no closed form settles it. But ``t_max`` is always the time of some span of calls, of which
there are only about L squared, and for each the fewest stages come from filling them greedily: so all are tried
(arXiv 2604.27085, its partitioning algorithm; L cubed in all there, less here by bisection over prefix sums).

Stages are filled from the last call down, first the fused one: that leaves the small remainders in the first forward
and the last backward stage, where they shorten the fill and the drain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import get_args

from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.costs import Costs, Phase, StageBytes
from lightning_roundpipe.planning.memory import WorkerNeeds, device_bytes, fits, least
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.schedule import Plan, Span

_TICKS_PER_S = 10**12
"""Times are compared as whole picoseconds, so that equal sums are equal whatever order they were added in."""

_PARTS = tuple(2**power for power in range(1, 9))
"""Numbers of parts of a microbatch to try where no plan fits."""


def greedy_partition(
    costs: Costs, workers: int, microbatches: int, round_microbatches: int | None = None,
    stage_bytes: int | None = None, stage_s: float | None = None,
) -> Plan:  # fmt: skip
    """Return the plan that minimises `pipeline_length` times ``t_max``; of equals, the one with fewer stages.

    Args:
        costs: what each call costs for one microbatch.
        workers: number of workers (N).
        microbatches: microbatches of a step (M).
        round_microbatches: microbatches that pass all stages before the next ones start; by default all of them.
        stage_bytes: what one stage may hold on its worker: the weights of its layers, their gradients (unless it is a
            forward stage), and the activations of its worst call, or of all its calls in the fused stage, whose graph
            is kept. ``None``: no limit.
        stage_s: ``t_max`` itself, instead of the best one: seconds that a stage may take for one microbatch.

    Raises:
        ValueError: a call does not fit into ``stage_bytes`` on its own, or takes longer than ``stage_s``, or a number
            makes no sense.
    """
    for name, value in (("workers", workers), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1 to make a plan.")
    if stage_bytes is not None:
        _check_calls_fit(costs, stage_bytes)
    phases = {phase: _PhaseLimits.of(costs, phase, stage_bytes) for phase in get_args(Phase)}
    if stage_s is not None:
        check_calls_are_short(costs, stage_s)
    best: tuple[int, int] | None = None
    cuts: _Cuts = ([], Span(0, len(costs) - 1), [])
    for t_max in _candidates(phases) if stage_s is None else [round(stage_s * _TICKS_PER_S)]:
        if best is not None and microbatches * workers * t_max > best[0]:
            break  # candidates ascend: even a single stage would now take longer
        packed = _pack(phases, t_max)
        if packed is None:
            continue
        stages = len(packed[0]) + 1 + len(packed[2])
        score = pipeline_length(stages, workers, microbatches) * t_max
        if best is None or (score, stages) < best:
            best, cuts = (score, stages), packed
    assert best is not None, "the largest candidate holds every call"
    return Plan(tuple(cuts[0]), cuts[1], tuple(cuts[2]), round_microbatches or microbatches)


def check_calls_are_short(costs: Costs, stage_s: float) -> None:
    """Check that no call takes longer than ``stage_s`` seconds for a microbatch, because no cut is finer than a call.

    Raises:
        ValueError: a call takes longer.
    """
    # The last call is always fused, and the others need not be.
    apart: tuple[Phase, ...] = ("forward", "backward")
    calls = [(call.time_s(phase), phase, call.layer) for call in costs.calls[:-1] for phase in apart]
    longest, phase, layer = max([*calls, (costs.calls[-1].time_s("fused"), "fused", costs.layers[-1])])
    if round(longest * _TICKS_PER_S) > round(stage_s * _TICKS_PER_S):
        raise ValueError(
            f"stage_seconds={stage_s:g} is shorter than one layer takes for a microbatch: {layer!r} {longest:.3g} s "
            f"({phase}). Raise stage_seconds above that, lower microbatch_size, or name smaller modules in "
            "layers= so that the layer is split."
        )


def pipeline_length(stages: int, workers: int, microbatches: int) -> int:
    """Return the length of a step of equal stages: N times the number of stage times from its start to its end.

    Slot i starts when its worker has finished slot i - N, which takes a stage time for each microbatch, and when slot
    i - 1 has finished a microbatch: N stage times after slot i - N if there are fewer microbatches than workers.
    """
    if stages >= workers and microbatches >= workers:
        return microbatches * stages + workers * (workers - 1)
    turns, place = divmod(stages - 1, workers)
    return workers * (turns * max(microbatches, workers) + place + microbatches)


_Cuts = tuple[list[Span], Span, list[Span]]


@dataclass(frozen=True)
class _PhaseLimits:
    """Limits of the stages of a phase: by time, for each candidate of ``t_max``, and by memory."""

    elapsed: Sequence[int]
    """Cumulative ticks of the calls before each call, and of all calls."""
    lowest: Sequence[int]
    """For each call, the lowest first call of a stage that ends with it and fits into memory."""

    @classmethod
    def of(cls, costs: Costs, phase: Phase, stage_bytes: int | None) -> _PhaseLimits:
        ticks = (round(call.time_s(phase) * _TICKS_PER_S) for call in costs)
        return cls(tuple(accumulate(ticks, initial=0)), _lowest_that_fit(costs, phase, stage_bytes))

    def ticks(self, first: int, last: int) -> int:
        return self.elapsed[last + 1] - self.elapsed[first]

    def first_call(self, last: int, t_max: int) -> int | None:
        """Return the lowest first call of a stage that ends with ``last``; None if ``last`` alone exceeds ``t_max``."""
        first = bisect_left(self.elapsed, self.elapsed[last + 1] - t_max, hi=last + 1)
        return max(first, self.lowest[last]) if first <= last else None


def _lowest_that_fit(costs: Costs, phase: Phase, stage_bytes: int | None) -> list[int]:
    if stage_bytes is None:
        return [0] * len(costs)
    lowest = list(range(1, len(costs) + 1))
    for first in reversed(range(len(costs))):
        need = StageBytes(phase)
        for last in range(first, len(costs)):
            need.add(costs.calls[last])
            if need.total > stage_bytes:
                break
            lowest[last] = first
    return lowest


def _check_calls_fit(costs: Costs, stage_bytes: int) -> None:
    """Check that every call fits into a stage of its own, in every phase: no cut makes a smaller stage."""
    for call in range(len(costs)):
        need = max((costs.stage_bytes(call, call, p) for p in get_args(Phase)), key=lambda load: load.total)
        if need.total > stage_bytes:
            raise ValueError(
                f"Layer {costs.calls[call].layer!r} (call {call}) needs {need.total:,} bytes on a worker "
                f"({need.weights:,} of weights, {need.gradients:,} of gradients, {need.activations:,} of activations), "
                f"but a stage may hold {stage_bytes:,}. Raise memory_budget, lower microbatch_size, or name smaller "
                "modules in layers= so that the layer is split."
            )


def _candidates(phases: dict[Phase, _PhaseLimits]) -> list[int]:
    """Return all possible times of a longest stage, ascending. A fused stage always ends with the last call."""
    end = len(phases["fused"].elapsed) - 1
    sums = {phases["fused"].ticks(first, end - 1) for first in range(end)}
    for phase in ("forward", "backward"):
        elapsed = phases[phase].elapsed
        sums.update(elapsed[last] - elapsed[first] for last in range(1, end + 1) for first in range(last))
    return sorted(sums)


def _pack(phases: dict[Phase, _PhaseLimits], t_max: int) -> _Cuts | None:
    """Return the fewest stages that take at most ``t_max`` each; None if a call alone takes longer."""
    last = len(phases["fused"].lowest) - 1
    first = phases["fused"].first_call(last, t_max)
    if first is None:
        return None
    backward = _fill(phases["backward"], first - 1, t_max)
    forward = _fill(phases["forward"], first - 1, t_max)
    if backward is None or forward is None:
        return None
    return forward[::-1], Span(first, last), backward


def _fill(limits: _PhaseLimits, last: int, t_max: int) -> list[Span] | None:
    """Return stages over calls 0 to ``last``, each as large as it may be, from the last call down."""
    spans = []
    while last >= 0:
        first = limits.first_call(last, t_max)
        if first is None:
            return None
        spans.append(Span(first, last))
        last = first - 1
    return spans


# -- within memory -----------------------------------------------------------------------------------------------------


def smallest_within(problem: Problem) -> Plan:
    """Return the plan with a stage for each call, and as many microbatches a round as memory has room for.

    It has room for the largest arena if some round does with it. With fewer microbatches a round, fewer wait on the
    workers, and weights travel more often. A round has all microbatches of a step or an equal part of them, within the
    limits. With the smallest round the plan may not fit.
    """
    microbatches = problem.microbatches
    lowest = min(problem.min_round, microbatches)
    parts = {-(-microbatches // rounds) for rounds in range(1, microbatches + 1)}
    sizes = sorted({size for size in parts if lowest < size <= (problem.max_round or microbatches)}, reverse=True)
    plans = [Plan.per_call(len(problem.costs), size) for size in (*sizes, lowest)]
    return next((plan for most in (True, False) for plan in plans if problem.fits(plan, most=most)), plans[-1])


def partition_within(problem: Problem, round_microbatches: int | None = None, stage_s: float | None = None) -> Plan:
    """Return the partitioner's plan within memory. If workers are unequal, the smallest memory counts for all.

    `greedy_partition` limits the bytes of single stages, but the largest weights, gradients and activations may belong
    to different stages. So this function lowers the limit until the whole plan fits, with the largest arena unless a
    cut at every call has no room for that.

    Args:
        round_microbatches: microbatches of a round; None: see `smallest_within`.
        stage_s: most seconds of a stage for one microbatch; None: no limit.

    Raises:
        TooSmall: a cut at every call does not fit.
        ValueError: a call takes longer than ``stage_s``.
    """
    costs, budget = problem.costs, least(problem.memory)
    problem = replace(problem, memory=budget)
    if stage_s is not None:
        check_calls_are_short(costs, stage_s)
    size = round_microbatches or smallest_within(problem).round_microbatches
    if budget is None:
        return greedy_partition(costs, problem.workers, problem.microbatches, size, stage_s=stage_s)
    smallest = Plan.per_call(len(costs), size)
    if not problem.fits(smallest):
        raise TooSmall(costs, smallest, problem.workers, budget)
    most = problem.fits(smallest, most=True)
    stage_bytes = budget
    while True:
        try:
            plan = greedy_partition(costs, problem.workers, problem.microbatches, size, stage_bytes, stage_s)
        except ValueError:  # some call does not fit into a stage of that size, though the arenas have room for it
            return smallest
        need = device_bytes(plan, costs, problem.workers, most=most)
        if need <= budget:
            return plan
        stage_bytes = min(stage_bytes - 1, stage_bytes * budget // need)


class TooSmall(ValueError):
    """No plan fits. The message says what takes how much.

    Attributes:
        enough: bytes of a worker for a cut at every layer.
        round_microbatches: microbatches of a smaller round that fits; None: there is none.
        parts: number of parts into which to cut each microbatch so that it fits; None: no number of `_PARTS` is enough.
    """

    def __init__(self, costs: Costs, smallest: Plan, workers: int, budget: int) -> None:
        self.enough, count, size = device_bytes(smallest, costs, workers), len(costs), smallest.round_microbatches
        rounds = (Plan.per_call(count, smaller) for smaller in range(size - 1, 0, -1))
        fitting = next((plan for plan in rounds if fits(plan, costs, workers, budget)), None)
        self.round_microbatches = None if fitting is None else fitting.round_microbatches
        self.parts = next((n for n in _PARTS if fits(smallest, costs.of_part(n), workers, budget)), None)
        call = max(costs, key=lambda c: c.weight_bytes + c.gradient_bytes + c.activation_bytes)
        waiting = max(WorkerNeeds(smallest, costs, workers).waiting)
        held = f"; {plural(size - 1, 'waiting microbatch')} with up to {waiting:,}" if waiting else ""
        code = f" ({call.behind_bytes:,} by the code behind it)" if call.behind_bytes else ""
        super().__init__(
            f"memory_budget: workers may use {budget:,} bytes, and a cut at every layer needs {self.enough:,}. The "
            f"largest layer is {call.layer!r}: {call.weight_bytes:,} of weights, {call.gradient_bytes:,} of gradients, "
            f"{call.activation_bytes:,} of activations{code}{held}."
        )
