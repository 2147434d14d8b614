"""Vectorised simulation of many plans at once, for the search.

The rules are those of `pipeline`, without copies and updates. A batch holds plans with equally many stages, and the
simulation computes only the first and the last turn of each slot. With ``d`` a turn's length, ``left[m]`` when its
microbatch left the stage before, and ``lead`` how much of the turn may come before that (the recomputation),

    end[m] = max(end[m - 1], left[m] - lead) + d    so, over all turns,
    end[m] = max(free + (m + 1) d, left[j] - lead + (m - j + 1) d for each j up to m)

If the ends of a slot are convex in m, as those of a first stage are, ``left[j] - j d`` is largest at j = 0 or j = m. A
maximum of convex rows is convex. So the last end of a slot follows from the first and the last end of the stage before,
for any number of microbatches. The first stage of a step follows the last stage of the step before in the same way.

Two simplifications can make a plan look slower, never faster. A recomputation begins only after all forward stages,
which matters if a stage recomputes for longer than all stages before it compute. With unequal workers, these stages
count as run by the fastest worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_roundpipe.planning.costs import Costs, for_each
from lightning_roundpipe.planning.host_time import HostTime

Floats = NDArray[np.float64]
Sizes = NDArray[np.int64]
"""Plans of one shape, a row each: calls per forward stage, of the fused stage, per backward stage (deepest first)."""


@dataclass(frozen=True)
class Pace:
    """Cumulative seconds of the calls of a microbatch, and the overhead of a turn.

    Attributes:
        forward, fused, recompute, backward: sums over the calls before each call and over all calls, (calls + 1,).
        hop_s: seconds from one worker to another.
        ahead: whether recomputation may run before the gradient is there.
        of_workers: the pace of each worker if workers are unequal, else empty.
    """

    forward: Floats
    fused: Floats
    recompute: Floats
    backward: Floats
    hop_s: float
    ahead: bool
    of_workers: tuple[Pace, ...] = ()

    @classmethod
    def of(cls, costs: Costs, host: HostTime, ahead: bool = True, *, carried: bool = False) -> Pace:
        """Return the pace of calls that take ``costs``, and of each worker if workers are unequal.

        ``carried``: whether all calls' products are carried, and not computed again.
        """
        if not costs.unequal:
            return cls._of_one(costs, host, ahead, carried)
        mean, each = cls._of_one(Costs(costs.calls), host, ahead, carried), map(costs.on, range(len(costs.times)))
        return replace(mean, of_workers=tuple(for_each(list(each), lambda one: cls._of_one(one, host, ahead, carried))))

    @classmethod
    def _of_one(cls, costs: Costs, host: HostTime, ahead: bool, carried: bool) -> Pace:
        calls = costs.calls  # the interpreter runs ahead of the workers; if it limits them, it limits all plans alike
        recompute = [c.recompute_s(carried=carried) if c.needs_backward else 0.0 for c in calls]
        backward = [c.backward_s if c.needs_backward else 0.0 for c in calls]
        forward = [c.forward_s for c in calls]
        fused = [f + b for f, b in zip(forward, backward, strict=True)]
        return cls(_sums(forward), _sums(fused), _sums(recompute), _sums(backward), host.hop_s, ahead)

    def each(self, workers: int) -> tuple[Pace, ...]:
        """Return the pace of every worker."""
        return self.of_workers or (self,) * workers

    def speeds(self) -> list[float]:
        """Return the speed of each worker relative to the mean; empty if workers are equal."""
        return [self.fused[-1] / one.fused[-1] if one.fused[-1] else 1.0 for one in self.of_workers]


def _sums(times: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(times)])


class Turns(NamedTuple):
    """What turns take under plans of one shape, in seconds.

    Attributes:
        forward: number of forward stages, which is also the fused stage's position.
        length: length of a turn, (stages, plans).
        lead: the part of a turn that may run before the microbatch arrives, (stages, plans).
        behind_loss: the part of a fused turn after its loss is known, (plans,).
    """

    forward: int
    length: Floats
    lead: Floats
    behind_loss: Floats


def period_of(workers: Sequence[object]) -> int:
    """Return the period of a sequence of workers: 2 for fast, slow, fast, slow."""
    whole = len(workers)
    repeats = (n for n in range(1, whole) if whole % n == 0 and list(workers) == list(workers[:n]) * (whole // n))
    return next(repeats, max(1, whole))


def worker_times(pace: Pace, workers: int, forward: int, sizes: Sizes) -> list[Turns]:
    """Return the turns of plans on each worker.

    Args:
        pace: seconds of calls and turns.
        workers: number of workers.
        forward: number of forward stages.
        sizes: the plans, (plans, stages).
    """
    cuts = _Cuts.of(forward, sizes)
    each = pace.each(workers)
    since = None
    if pace.ahead:
        since = np.minimum.reduce([_since(one, cuts) for one in {id(one): one for one in each}.values()])
    return for_each(each, lambda one: _turns(one, cuts, since))


class _Cuts(NamedTuple):
    """The calls between which the stages of plans are cut, (plans, edges) each. NumPy sums fastest along rows.

    Attributes:
        ahead: cuts of the forward stages, ascending. The last is the first call of the fused stage.
        behind: cuts of the backward stages, descending from there.
    """

    ahead: Sizes
    behind: Sizes

    @classmethod
    def of(cls, forward: int, sizes: Sizes) -> _Cuts:
        ahead = np.zeros((len(sizes), forward + 1), dtype=np.int64)
        np.cumsum(sizes[:, :forward], axis=1, out=ahead[:, 1:])
        behind = np.zeros((len(sizes), sizes.shape[1] - forward), dtype=np.int64)
        np.cumsum(sizes[:, forward + 1 :], axis=1, out=behind[:, 1:])
        np.subtract(ahead[:, -1:], behind, out=behind)
        return cls(ahead, behind)


def _since(pace: Pace, cuts: _Cuts) -> Floats:
    """Return the time since a microbatch left the forward stages, (plans, backward stages)."""
    backward = pace.backward.take(cuts.behind)
    elapsed = np.empty(backward.shape)
    elapsed[:, 0] = pace.fused[-1] - pace.fused[cuts.behind[:, 0]]
    np.subtract(backward[:, :-1], backward[:, 1:], out=elapsed[:, 1:])
    elapsed += pace.hop_s
    return np.cumsum(elapsed[:, :-1], axis=1)


def _turns(pace: Pace, cuts: _Cuts, since: Floats | None) -> Turns:
    ahead, behind, fused = cuts.ahead.T, cuts.behind.T, cuts.behind[:, 0]
    forward = len(ahead) - 1
    elapsed, recomputed, backward = pace.forward.take(ahead), pace.recompute.take(behind), pace.backward.take(behind)
    length = np.empty((forward + len(behind), len(fused)))
    np.subtract(elapsed[1:], elapsed[:-1], out=length[:forward])
    length[forward] = pace.fused[-1] - pace.fused[fused]
    recompute = recomputed[:-1] - recomputed[1:]
    np.add(recompute, backward[:-1] - backward[1:], out=length[forward + 1 :])
    lead = np.zeros_like(length)
    if since is not None:
        np.minimum(recompute, since.T, out=lead[forward + 1 :])
    return Turns(forward, length, lead, pace.backward[-1] - backward[0])


def step_ends(each: Sequence[Turns], hop_s: float, rounds: Sequence[int], steps: int) -> Floats:
    """Return the end of each step in seconds, (steps, plans).

    Several steps run under staleness 1: a step starts when all losses of the one before are known.

    Args:
        each: turns on each worker, as `worker_times` returns them.
        hop_s: seconds from one worker to another.
        rounds: number of microbatches of each round of a step.
        steps: number of steps.
    """
    workers, position = len(each), each[0].forward
    stages, plans = each[0].length.shape
    hop = hop_s if workers > 1 else 0.0

    def times(turns: Turns) -> tuple[Floats, Floats, dict[int, Floats]]:
        length = turns.length
        comes = length - turns.lead + hop  # from a microbatch's end in the stage before to its own, without waiting
        return length, comes, {members: length * (members - 1) for members in set(rounds)}  # to the last turn's end

    of_workers = for_each(each, times)
    free = [np.zeros(plans) for _ in range(workers)]
    ends = np.empty((steps, plans))
    begin = np.zeros(plans)
    through = [(begin, begin)] * len(rounds)  # ends of each round's first and last microbatch in the step before
    slot = 0
    for step in range(steps):
        if any(turns is not each[0] for turns in each):  # as in `pipeline`
            slot += -slot % workers
        closed: list[Floats] = []
        fused = 0
        for round_, members in enumerate(rounds):
            before, closed = closed, []
            first = last = free[slot % workers]
            for s in range(stages):
                worker = slot % workers
                length, comes, behind = of_workers[worker]
                ready = free[worker]
                if before:
                    ready = np.maximum(ready, before[s])
                if s:
                    first = np.maximum(ready + length[s], first + comes[s])
                    last = np.maximum(first + behind[members][s], last + comes[s])
                else:
                    first = np.maximum(np.maximum(ready, begin), through[round_][0]) + length[0]
                    last = np.maximum(first + behind[members][0], through[round_][1] + length[0])
                if s == position:
                    fused = worker
                free[worker] = last
                closed.append(last)
                slot += 1
            through[round_] = first, last
        ends[step] = np.maximum.reduce(closed)
        begin = closed[position] - each[fused].behind_loss
    return ends
