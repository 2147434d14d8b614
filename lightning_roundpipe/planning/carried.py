"""Plans that carry products: which calls, in rounds of how many microbatches.

A carried call's products go to the host behind its forward and come back before its backward, so no product is computed
again. They take the link in both directions, and host memory for every microbatch of a round. So rounds are short: the
search tries a few sizes, cuts stages for calls whose recomputation is short, and carries as many calls as pay. These
are spread evenly, because a worker computes the others while products are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

from lightning_roundpipe.planning.batch import Timing
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.memory import PRODUCTS, Memory, fits, unpacked_within
from lightning_roundpipe.planning.pipeline import Staleness
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import WORK_PER_SECOND, PlanSearch, baseline_within, descent

_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
"""Shares of the calls to carry, tried until fewer are slower."""

_WORTH = 0.01
"""A plan that takes more host memory must be faster by this share."""

_CUTS = 4
"""Most ways to cut stages that are judged, for each size of rounds."""

_WORK = 0.1
"""Share of a search's work for cutting the stages of each size of rounds."""


def spread(plan: Plan, costs: Costs, share: float) -> Plan:
    """Return the plan with a share of the calls of its backward stages carried, evenly spread."""
    able = [call for call in range(plan.fused.first) if costs.calls[call].product_bytes]
    count = round(share * len(able))
    kept = (call for at, call in enumerate(able) if at * count // len(able) < (at + 1) * count // len(able))
    return replace(plan, carry=tuple(kept), recompute_ahead=plan.recompute_ahead and not count)


def carrying_within(
    plan: Plan,
    costs: Costs,
    workers: int,
    microbatches: int,
    limits: Limits,
    judge: Callable[[Plan], float],
    *,
    staleness: Staleness = 0,
    host: HostTime | None = None,
    search_seconds: float = 0.0,
    judged: int = 16,
    cuts: bool = True,
) -> Plan:
    """Return the best plan by ``judge`` that carries products, or ``plan`` if none is faster by `_WORTH`.

    Args:
        plan: the best plan that carries nothing.
        costs: what each call costs for one microbatch.
        workers: N.
        microbatches: M of one step.
        limits: what the plan has to keep to.
        judge: seconds of a step with copies; infinite for a plan that does not fit on the workers or the host.
        staleness: 0 or 1.
        host: what the engine itself takes; by default nothing.
        search_seconds: as of `search_partition`; 0: stages are cut by the paper's algorithm.
        judged: how many plans near the best one ``judge`` is asked about.
        cuts: whether stages may be cut otherwise than in ``plan``.
    """
    if not any(call.product_bytes for call in costs.calls[:-1]):
        return plan
    judge, best, hop_s = cache(judge), plan, host.hop_s if host else 0.0
    memory = _less(limits.memory, (PRODUCTS + 1) * max(call.product_bytes for call in costs.calls[:-1]))

    def finished(cut: Plan, share: float) -> Plan:
        """Return the plan that carries, or the one that carries nothing if products do not fit ahead of their turns."""
        carrying = spread(cut, costs, share)
        if not fits(carrying, costs, workers, limits.memory, ahead=True):
            return plan
        return unpacked_within(carrying, costs, workers, microbatches, limits.memory)

    def search(size: int, work: float) -> PlanSearch:
        timing = Timing(costs, workers, microbatches, staleness, hop_s, work, ahead=False, carried=True)
        return PlanSearch(timing, costs, replace(limits, min_round=size, max_round=size, memory=memory))

    work = _WORK * search_seconds * WORK_PER_SECOND
    for size in _rounds(workers, microbatches, limits) if cuts else ():
        inner = replace(limits, min_round=size, max_round=size, memory=memory)
        with suppress(ValueError):  # a layer does not fit beside its products
            found = [baseline_within(costs, workers, microbatches, inner)]
            if work:
                found = search(size, work).run(found[0], _CUTS)
            best = min(
                [best, *(_better(best, (finished(cut, share) for share in _SHARES), judge) for cut in found)], key=judge
            )
    best = _better(best, (finished(plan, share) for share in _SHARES), judge)
    if not (best.carry and work):
        return best
    share = len(best.carry) / sum(bool(call.product_bytes) for call in costs.calls[: best.fused.first])
    near = search(best.round_microbatches, work).near
    return descent(best, judge, lambda found: (finished(other, share) for other in near(found)), judged)


def _better(best: Plan, others: Iterator[Plan], judge: Callable[[Plan], float]) -> Plan:
    """Return the best of plans that carry less and less if it is worth it; stop where they become slower."""
    found = None
    for other in others:
        if found is not None and judge(other) >= judge(found):
            break
        if other.carry and judge(other) < float("inf"):
            found = other
    return best if found is None or judge(found) >= judge(best) * (1 - _WORTH) else found


def _rounds(workers: int, microbatches: int, limits: Limits) -> list[int]:
    """Return sizes of rounds to try, ascending: those of larger ones take more host memory."""
    least, most = limits.min_round, min(limits.max_round or microbatches, microbatches)
    sizes = {least, least + 1, 2 * least, 4 * least}
    return sorted(size for size in sizes if size <= most and (size > 1 or workers == 1))


def _less(memory: Memory | None, nbytes: int) -> Memory | None:
    """Return the bytes of each worker beside ``nbytes``; 1 if there are none."""
    if isinstance(memory, tuple):
        return tuple(max(1, size - nbytes) for size in memory)
    return None if memory is None else max(1, memory - nbytes)
