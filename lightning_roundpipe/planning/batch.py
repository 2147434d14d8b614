"""How long many plans take, all at once: what the search asks, thousands of times a second.

The rules are those of `pipeline`, where they stand one turn after another with everything that happens. Here is the
same clock without a record, for a whole batch of plans with equally many stages: a turn's start is a maximum of sums,
and the turns of a slot come out of one running maximum. With ``d`` a turn's length, ``gradient`` when its input arrives
and ``lead`` how much of the turn may come before (the recomputation),

    end[m] = max(end[m - 1], gradient[m] - lead) + d    so, with x[m] = end[m] - m d,
    x[m] = max(x[m - 1], gradient[m] - lead + d - m d)

which numpy does for all microbatches and all plans in four operations a slot. Two simplifications, both of which can
only make a plan look slower, never faster: a recomputation is not assumed to begin before all forward stages are done
(it matters when a stage recomputes for longer than all before it compute), and with staleness 1 a step waits for the
whole step before the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_roundpipe.planning.costs import Costs

Floats = NDArray[np.float64]
Sizes = NDArray[np.int64]
"""Plans of one shape, a row each: calls per forward stage, of the fused stage, per backward stage (deepest first)."""


@dataclass(frozen=True)
class Pace:
    """Sums over the calls before each call, in seconds, and what a turn takes besides."""

    forward: Floats
    fused: Floats
    recompute: Floats
    backward: Floats
    turn_s: float
    hop_s: float
    ahead: bool

    @classmethod
    def of(cls, costs: Costs, call_s: float = 0.0, turn_s: float = 0.0, hop_s: float = 0.0, ahead: bool = True) -> Pace:
        calls = costs.calls
        recompute = [c.forward_s if c.needs_backward else 0.0 for c in calls]
        backward = [c.backward_s + call_s if c.needs_backward else 0.0 for c in calls]
        forward = [c.forward_s + call_s for c in calls]
        fused = [f + b for f, b in zip(forward, backward, strict=True)]
        return cls(_sums(forward), _sums(fused), _sums(recompute), _sums(backward), turn_s, hop_s, ahead)


def _sums(times: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(times)])


def stage_times(pace: Pace, forward: int, sizes: Sizes) -> tuple[Floats, Floats]:
    """Length and lead of each stage's turns, (stages, plans) each. ``forward``: the number of forward stages."""
    starts, ends = stage_ends(forward, sizes)

    def sums(elapsed: Floats, stages: slice) -> Floats:
        return elapsed[ends[:, stages]] - elapsed[starts[:, stages]]

    before, middle, after = slice(0, forward), slice(forward, forward + 1), slice(forward + 1, None)
    recompute, backward = sums(pace.recompute, after), sums(pace.backward, after)
    fused = sums(pace.fused, middle)
    length = np.concatenate([sums(pace.forward, before), fused, recompute + backward], axis=1) + pace.turn_s
    lead = np.zeros_like(length)
    if pace.ahead:
        # What has passed since the microbatch left the forward stages; see the module's head.
        since = np.cumsum(np.concatenate([fused, backward], axis=1) + pace.hop_s, axis=1)
        lead[:, forward + 1 :] = np.minimum(recompute, since[:, :-1])
    return np.ascontiguousarray(length.T), np.ascontiguousarray(lead.T)


def stage_ends(forward: int, sizes: Sizes) -> tuple[Sizes, Sizes]:
    """First call and the call after the last one of every stage, (plans, stages) each."""
    upwards = np.cumsum(sizes[:, : forward + 1], axis=1)
    downwards = upwards[:, forward : forward + 1] - np.cumsum(sizes[:, forward:], axis=1)
    starts = np.concatenate([upwards - sizes[:, : forward + 1], downwards[:, 1:]], axis=1)
    ends = np.concatenate([upwards, downwards[:, :-1]], axis=1)
    return starts, ends


def step_ends(length: Floats, lead: Floats, hop_s: float, workers: int, rounds: Sequence[int], steps: int) -> Floats:
    """When each of ``steps`` steps ends, (steps, plans). ``rounds``: the microbatches of each round of a step.

    With several steps these are steps under staleness 1: the next one starts as soon as workers are free, the one after
    it when this one has ended.
    """
    stages, plans = length.shape
    most = max(rounds)
    turns = np.arange(most)[:, None]
    hop = hop_s if workers > 1 else 0.0
    later = np.zeros((stages, plans))  # x of a stage's turns against x of the same turns one stage before is so much,
    slower = np.zeros((stages, plans))  # and for each turn so much less
    later[1:] = length[:-1] + (hop - lead[1:])
    slower[1:] = length[1:] - length[:-1]
    offsets: list[Floats] = []
    spans = {members: length * members for members in set(rounds)}
    free = [np.zeros(plans) for _ in range(workers)]
    ends = np.empty((steps, plans))
    slot = 0
    for step in range(steps):
        closed: list[Floats] = []
        for members in rounds:
            span, before, closed = spans[members], closed, []
            x = np.empty((0, plans))
            for s in range(stages):
                ready = free[slot % workers]
                if before:
                    ready = np.maximum(ready, before[s])
                if len(offsets) == s:
                    offsets.append(later[s] - turns * slower[s])
                if s:
                    x += offsets[s][:members]
                    np.maximum(x[0], ready, out=x[0])
                    np.maximum.accumulate(x, axis=0, out=x)
                else:
                    if step >= 2:
                        ready = np.maximum(ready, ends[step - 2])
                    x = np.repeat(ready[None], members, axis=0)
                free[slot % workers] = ready = x[-1] + span[s]
                closed.append(ready)
                slot += 1
        ends[step] = np.maximum.reduce(closed)
    return ends
