"""Times plans for the search, within a budget of work that is counted, not measured."""

from __future__ import annotations

import numpy as np

from lightning_roundpipe.planning.batch import Floats, Pace, Sizes, step_ends, worker_times
from lightning_roundpipe.planning.shapes import PlanShape

PERIOD_STEPS = 16
"""Number of steps whose mean is the period, after as many that fill the pipeline."""

_BATCH = 1024
"""Most plans timed together, which is many for numpy's overhead."""
_CALL_S, _SLOT_S, _PLAN_S = 400e-6, 8e-6, 50e-9
"""Estimated seconds of a batch, of each of its slots, and of each slot of each plan."""
_SEARCH_SLOTS = 160
"""Slots to simulate for a period while searching: the fewer slots a step has, the more steps it takes to settle."""
_DRAIN = 1e-3
"""Of two plans with nearly the same period, the one with the shorter step is better: as if every 1000 steps drained."""


class Timing:
    """Times all plans of a shape at once.

    Args:
        pace: seconds of calls and turns.
        workers: number of workers (N).
        microbatches: microbatches of a step (M).
        staleness: 0: the time of a plan is that of one step; 1: the mean of many steps.
        work: limit of the search in estimated seconds.
    """

    def __init__(self, pace: Pace, workers: int, microbatches: int, staleness: int, work: float) -> None:
        self.pace = pace
        self.workers, self.microbatches, self.staleness = workers, microbatches, staleness
        self.work_left = work

    def is_over(self) -> bool:
        """Return whether the work is used up."""
        return self.work_left <= 0

    def least_s(self, shape: PlanShape, sizes: Sizes) -> Floats:
        """Return a lower bound of the plans' seconds, (plans,): their work divided by the number of workers."""
        pace, first = self.pace, len(self.pace.fused) - 1 - sizes[:, shape.forward]
        calls = pace.forward[first] + pace.fused[-1] - pace.fused[first] + pace.recompute[first] + pace.backward[first]
        return np.asarray(calls * (self.microbatches / self.workers))

    def times(self, shape: PlanShape, sizes: Sizes) -> Floats:
        """Return the seconds by which the search compares plans, (plans,); infinite when the work is used up."""
        rounds = shape.rounds(self.microbatches)
        slots = sizes.shape[1] * len(rounds)
        steps = 1
        if self.staleness:
            steps = max(6, min(2 * PERIOD_STEPS, 2 * (_SEARCH_SLOTS // slots)))
        times = []
        for begin in range(0, len(sizes), _BATCH):
            part = sizes[begin : begin + _BATCH]
            if self.is_over():
                times.append(np.full(len(part), np.inf))
                continue
            turns = worker_times(self.pace, self.workers, shape.forward, part)
            ends = step_ends(turns, self.pace.hop_s, rounds, steps)
            self.work_left -= _CALL_S + steps * slots * (_SLOT_S + _PLAN_S * len(part))
            if steps == 1:
                times.append(ends[0])
            else:
                half = steps // 2
                times.append((ends[-1] - ends[-1 - half]) / half + _DRAIN * ends[0])
        return np.concatenate(times)
