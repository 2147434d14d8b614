"""What the search asks of plans: their time, within a budget of work that is counted and not measured."""

from __future__ import annotations

import time

import numpy as np

from lightning_roundpipe.planning.batch import Floats, Pace, Sizes, stage_times, step_ends, worker_times
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.shapes import PlanShape, sizes_of

PERIOD_STEPS = 16
"""The period is the mean over so many steps, after as many that fill the pipeline."""

_BATCH = 1024
"""Plans that are timed together: enough to make numpy's own time small, few enough to look at the clock in time."""
_CALL_S, _SLOT_S, _PLAN_S = 400e-6, 8e-6, 50e-9
"""Estimated seconds of a batch, of each slot of it, and of each slot of each plan in it."""
_SEARCH_SLOTS = 160
"""Slots to simulate for a period while searching: the fewer slots a step has, the more steps it takes to settle."""
_DRAIN = 1e-3
"""Of two plans with nearly the same period, the one with the shorter step is better: as if every 1000 steps drained."""


class Timing:
    """Times plans, all those of a shape at once.

    Args:
        pace: how long calls take.
        workers: N.
        microbatches: M.
        staleness: 0: a plan's time is that of one step; 1: that of each of many.
        seconds: what may be spent, by the clock.
        work: what may be spent in estimated seconds.
    """

    def __init__(
        self, pace: Pace, workers: int, microbatches: int, staleness: int, seconds: float, work: float
    ) -> None:
        self.pace = pace
        self.workers, self.microbatches, self.staleness = workers, microbatches, staleness
        self.work_left = work
        self._deadline = time.monotonic() + seconds

    def is_over(self) -> bool:
        """Whether the search has to end."""
        return self.work_left <= 0 or time.monotonic() > self._deadline

    def least_s(self, shape: PlanShape, sizes: Sizes) -> Floats:
        """What the plans take at least: their work, shared by all workers."""
        turns = stage_times(self.pace, shape.forward, sizes)
        return np.asarray(turns.length.sum(axis=0) * (self.microbatches / self.workers))

    def settled(self, plan: Plan) -> Floats:
        """How long steps take in the end: one step, or means of `PERIOD_STEPS` steps, from each of as many on.

        Where the pattern of steps does not repeat after `PERIOD_STEPS`, one mean alone may be too low or too high.
        """
        shape, sizes = sizes_of(plan)
        pace = self.pace.going_ahead(self.pace.ahead and plan.recompute_ahead)
        turns = worker_times(pace, self.workers, shape.forward, np.array([sizes]))
        steps = 2 * PERIOD_STEPS if self.staleness else 1
        rounds = shape.rounds(self.microbatches)
        ends = step_ends(turns, self.pace.hop_s, rounds, steps)[:, 0]
        return (ends[PERIOD_STEPS:] - ends[:-PERIOD_STEPS]) / PERIOD_STEPS if self.staleness else ends

    def times(self, shape: PlanShape, sizes: Sizes) -> Floats:
        """Seconds that each plan is judged by while searching; infinitely many when time is up."""
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
