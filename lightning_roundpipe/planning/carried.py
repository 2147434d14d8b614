"""Plans that carry products: of which calls, which of their products, in rounds of how many microbatches.

Products of a carried call go to the host behind its forward and come back before its backward, so they are not computed
again. They take the link in both directions, and host memory for every microbatch of a round. So rounds are short, and
where the link or the host limits what is carried, products with many FLOPs for each byte come first: the output of a
product of inner size K takes K FLOPs a byte in 16 bits, and attention's as many as there are tokens, twice. Carried
calls are spread evenly, because a worker computes the others while products are on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise

from lightning_roundpipe.planning.batch import Timing
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.memory import PRODUCTS, Memory
from lightning_roundpipe.planning.problem import Problem
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import WORK_PER_SECOND, PlanSearch, baseline_within, descent

_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
"""Shares of the calls to carry, tried until fewer are slower."""

_ROUNDS = (1.5, 2, 3, 4)
"""Sizes of rounds to try: so many microbatches for each worker, in equal rounds."""

_APART = 1.5
"""Kinds of products differ by at least this factor in their FLOPs a byte."""

_WORTH = 0.01
"""A plan that takes more host memory must be faster by this share."""

_NEAR_BOUND = 0.98
"""Several workers do not come nearer to the least seconds of a step: fill, drain and copies take more."""

_CUTS = 2
"""Most ways to cut stages that are judged, for each size of rounds."""

_WORK = 0.1
"""Share of a search's work for cutting the stages of each size of rounds."""


def spread(plan: Plan, costs: Costs, share: float, least: int = 0) -> Plan:
    """Return the plan with a share of the calls of its backward stages carried, evenly spread.

    ``least``: least FLOPs a byte of the products that are carried.
    """
    able = [call for call in range(plan.fused.first) if costs.calls[call].product_bytes(least)]
    count = round(share * len(able))
    kept = tuple(call for at, call in enumerate(able) if at * count // len(able) < (at + 1) * count // len(able))
    ahead = plan.recompute_ahead and not count
    return replace(plan, carry=kept, carry_least=least if kept else 0, recompute_ahead=ahead)


def kinds(costs: Costs) -> list[int]:
    """Return least FLOPs a byte for all products, for all but the cheapest kind, and so on; empty if there are none."""
    found = sorted({flops for call in costs.calls[:-1] for flops, *_ in call.products})
    between = [round(math.sqrt(one * other)) for one, other in pairwise(found) if other >= _APART * max(1, one)]
    return [0, *between] if found else []


def least_s(plan: Plan, problem: Problem) -> float:
    """Return the least seconds of a step: all workers always compute."""
    costs, found = problem.costs, 0.0
    for number, call in enumerate(costs.carrying(plan.carry, plan.carry_least)):
        again = call.forward_s if number < plan.fused.first and call.needs_backward else 0.0
        found += costs.calls[number].time_s("fused") + again
    return found * problem.microbatches / problem.workers


def carrying_within(
    plan: Plan, problem: Problem, judge: Callable[[Plan], float], *, search_seconds: float = 0.0, judged: int = 16,
    cuts: bool = True,
) -> Plan:  # fmt: skip
    """Return the best plan by ``judge`` that carries products, or ``plan`` if none is faster by `_WORTH`.

    Args:
        plan: the best plan that carries nothing.
        judge: seconds of a step with copies; infinite for a plan that does not fit on the workers or the host.
        search_seconds: as of `search_partition`; 0: stages are cut by the paper's algorithm.
        judged: how many plans near the best one ``judge`` is asked about.
        cuts: whether stages may be cut otherwise than in ``plan``.
    """
    judge, work, calls = cache(judge), _WORK * search_seconds * WORK_PER_SECOND, problem.costs.calls
    found, found_s = plan, judge(plan) * (1 - _WORTH)

    def finished(cut: Plan, share: float, least: int) -> Plan:
        """Return the plan that carries, or the one that carries nothing if products do not fit ahead of their turns."""
        carrying = spread(cut, problem.costs, share, least)
        return problem.unpacking_once(carrying) if problem.fits(carrying, ahead=True) else plan

    def within(size: int, least: int) -> Problem:
        most = (PRODUCTS + 1) * max(call.product_bytes(least) for call in calls[:-1])
        return replace(problem, min_round=size, max_round=size, memory=_less(problem.memory, most))

    def search(size: int, least: int) -> PlanSearch:
        return PlanSearch(Timing(within(size, least), work, ahead=False, carried=least))

    def hopeful(other: Plan) -> bool:
        return least_s(other, problem) < found_s * (_NEAR_BOUND if problem.workers > 1 else 1.0)

    def fastest(cut: Plan, least: int) -> bool:
        """Judge plans that carry less and less until they become slower. Returns whether one fits."""
        nonlocal found, found_s
        last = math.inf
        for share in _SHARES:
            other = finished(cut, share, least)
            if not other.carry or (seconds := judge(other)) == math.inf:
                continue
            if seconds < found_s:
                found, found_s = other, seconds
            if seconds >= last or not hopeful(other):
                return True
            last = seconds
        return last < math.inf

    for least in kinds(problem.costs):
        fastest(plan, least)
        for size in _rounds(problem) if cuts else ():
            with suppress(ValueError):  # a layer does not fit beside its products
                cut = baseline_within(within(size, least))
                if hopeful(spread(cut, problem.costs, 1.0, least)) and fastest(cut, least) and work:
                    for other in search(size, least).run(cut, _CUTS):
                        fastest(other, least)
    if not (found.carry and work):
        return found
    able = sum(bool(call.product_bytes(found.carry_least)) for call in calls[: found.fused.first])
    share, least = len(found.carry) / able, found.carry_least
    near = search(found.round_microbatches, least).near
    return descent(found, judge, lambda best: (finished(other, share, least) for other in near(best)), judged)


def _rounds(problem: Problem) -> list[int]:
    """Return sizes of rounds to try, ascending: those of larger ones take more host memory."""
    workers, microbatches = problem.workers, problem.microbatches
    least, most = problem.min_round, min(problem.max_round or microbatches, microbatches)
    counts = (max(1, round(microbatches / (times * workers))) for times in _ROUNDS)
    sizes = {least, least + 1, *(-(-microbatches // count) for count in counts)}
    return sorted(size for size in sizes if least <= size <= most and (size > 1 or workers == 1))


def _less(memory: Memory | None, nbytes: int) -> Memory | None:
    """Return the bytes of each worker beside ``nbytes``; 1 if there are none."""
    if isinstance(memory, tuple):
        return tuple(max(1, size - nbytes) for size in memory)
    return None if memory is None else max(1, memory - nbytes)
