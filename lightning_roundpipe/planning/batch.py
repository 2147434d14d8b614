"""How long many plans take, all at once: what the search asks, thousands of times a second.

The rules are those of `pipeline`, where they stand one turn after another with everything that happens. Here is the
same clock without a record, for a whole batch of plans with equally many stages, and of each slot only its first turn
and its last. With ``d`` a turn's length, ``left[m]`` when its microbatch left the stage before, and ``lead`` how much
of the turn may come before that (the recomputation),

    end[m] = max(end[m - 1], left[m] - lead) + d    so, over all turns,
    end[m] = max(free + (m + 1) d, left[j] - lead + (m - j + 1) d for each j up to m)

Where a slot's ends grow by ever larger steps, which those of a first stage do, ``left[j] - j d`` is largest at one of
the two ends of its range, so that only j = 0 and j = m count; and a maximum of such rows is such a row again. So the
last end follows from the first one and the last one of the stage before, whatever the number of microbatches. A step's
first stage comes behind the last one of the step before in the same way: each microbatch has to be through there.

One simplification, which can only make a plan look slower, never faster: a recomputation is not assumed to begin before
all forward stages are done (it matters when a stage recomputes for longer than all before it compute).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.simulation import HostTime

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
    def of(cls, costs: Costs, host: HostTime, ahead: bool = True) -> Pace:
        calls, call_s, turn_s = costs.calls, host.call_s, host.turn_s
        if host.shared:  # the interpreter is ahead of the workers unless it is what limits them, whatever the plan
            call_s = turn_s = 0.0
        recompute = [c.forward_s if c.needs_backward else 0.0 for c in calls]
        backward = [c.backward_s + call_s if c.needs_backward else 0.0 for c in calls]
        forward = [c.forward_s + call_s for c in calls]
        fused = [f + b for f, b in zip(forward, backward, strict=True)]
        return cls(_sums(forward), _sums(fused), _sums(recompute), _sums(backward), turn_s, host.hop_s, ahead)


def _sums(times: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(times)])


class Turns(NamedTuple):
    """What turns take under plans of one shape, in seconds.

    Attributes:
        forward: the number of forward stages, and so the fused stage's position.
        length: of each stage's turns, (stages, plans).
        lead: how much of them may come before the microbatch does, (stages, plans).
        behind_loss: what a fused turn still does when its loss is known, (plans,).
    """

    forward: int
    length: Floats
    lead: Floats
    behind_loss: Floats


def stage_times(pace: Pace, forward: int, sizes: Sizes) -> Turns:
    """What turns take under the plans, rows of ``sizes`` with ``forward`` forward stages."""
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
    behind_loss = sums(pace.backward, middle)[:, 0]
    return Turns(forward, np.ascontiguousarray(length.T), np.ascontiguousarray(lead.T), behind_loss)


def stage_ends(forward: int, sizes: Sizes) -> tuple[Sizes, Sizes]:
    """First call and the call after the last one of every stage, (plans, stages) each."""
    upwards = np.cumsum(sizes[:, : forward + 1], axis=1)
    downwards = upwards[:, forward : forward + 1] - np.cumsum(sizes[:, forward:], axis=1)
    starts = np.concatenate([upwards - sizes[:, : forward + 1], downwards[:, 1:]], axis=1)
    ends = np.concatenate([upwards, downwards[:, :-1]], axis=1)
    return starts, ends


def step_ends(turns: Turns, hop_s: float, workers: int, rounds: Sequence[int], steps: int) -> Floats:
    """When each of ``steps`` steps ends, (steps, plans). ``rounds``: the microbatches of each round of a step.

    With several steps these are steps under staleness 1: the next one starts when this one's losses are known.
    """
    length = turns.length
    stages, plans = length.shape
    hop = hop_s if workers > 1 else 0.0
    comes = length - turns.lead + hop  # from a microbatch's end in the stage before to its own, if nobody is waited for
    behind = {members: length * (members - 1) for members in set(rounds)}  # from the first turn's end to the last one's
    free = [np.zeros(plans) for _ in range(workers)]
    ends = np.empty((steps, plans))
    begin = np.zeros(plans)
    through = [(begin, begin)] * len(rounds)  # when each round's first microbatch ended the last step, and its last one
    slot = 0
    for step in range(steps):
        closed: list[Floats] = []
        for round_, members in enumerate(rounds):
            rest, before, closed = behind[members], closed, []
            first = last = free[slot % workers]
            for s in range(stages):
                ready = free[slot % workers]
                if before:
                    ready = np.maximum(ready, before[s])
                if s:
                    first = np.maximum(ready + length[s], first + comes[s])
                    last = np.maximum(first + rest[s], last + comes[s])
                else:
                    first = np.maximum(np.maximum(ready, begin), through[round_][0]) + length[0]
                    last = np.maximum(first + rest[0], through[round_][1] + length[0])
                free[slot % workers] = last
                closed.append(last)
                slot += 1
            through[round_] = first, last
        ends[step] = np.maximum.reduce(closed)
        begin = closed[turns.forward] - turns.behind_loss
    return ends
