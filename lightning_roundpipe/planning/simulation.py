"""When everything of a step happens under a plan: the engine's own rules, walked with a clock instead of a model.

    slot i runs on worker i mod N, its microbatches in order                                          [1]
    a worker takes its next slot when the last microbatch has left the one before                     [2]
    a slot of a later round waits until the same stage of the round before is closed (same sums)      [3]
    a microbatch enters a stage when it has left the one before, wherever that ran                    [4]
    the fused slot is held from a microbatch's first call until its backward through the stage ends   [5]
    rounds of one microbatch run side by side: a slot waits for [3] when it closes, and a microbatch  [6]
    stays a call behind the one before

Every turn depends only on turns of a lower slot, or of a lower microbatch in its own slot, so one pass in that order is
the whole simulation. Copies are taken to be hidden, and the optimizer not to run meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_roundpipe.planning.costs import Costs, Phase
from lightning_roundpipe.planning.schedule import Plan, Stage


@dataclass(frozen=True)
class Turn:
    """One microbatch's stay in one slot; times are seconds from the start of the step."""

    slot: int
    worker: int
    round: int
    phase: Phase
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class HostTime:
    """What the engine itself takes, in seconds, while the worker has nothing to compute.

    Args:
        call_s: for every call that a turn makes; a recomputed call and its backward are one.
        turn_s: for every turn.
        hop_s: from one worker to another, for a microbatch that changes workers between two stages.
        shared: whether calls and turns take the host's interpreter, ahead of the workers, and not the workers' time.
    """

    call_s: float = 0.0
    turn_s: float = 0.0
    hop_s: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        for name in ("call_s", "turn_s", "hop_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 or more seconds.")


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found.

    Attributes:
        turns: in the order (slot, microbatch).
        workers: N.
        busy_s: seconds of layer code, all workers together; host time is not in it.
    """

    turns: tuple[Turn, ...]
    workers: int
    busy_s: float

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first turn to the end of the last."""
        return max(turn.end_s for turn in self.turns)

    @property
    def bubble_pct(self) -> float:
        """100 (1 - compute time / (workers x makespan))."""
        span = self.workers * self.makespan_s
        return 100.0 * (1.0 - self.busy_s / span) if span else 0.0


def simulate(plan: Plan, costs: Costs, workers: int, microbatches: int, host: HostTime | None = None) -> Simulation:
    """One step of ``microbatches`` (M) under ``plan`` on ``workers`` (N) that are idle when it begins.

    Raises:
        ValueError: the plan does not fit the costs' calls, or a number makes no sense.
    """
    for name, value in (("workers", workers), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1 to simulate a step.")
    plan.validate(costs.layers)
    host = host or HostTime()
    costs.check_workers(workers)
    stages = plan.stages()
    each = [[costs_in(stage, plan, costs.on(worker), microbatches) for stage in stages] for worker in range(workers)]
    computing = [
        [one.stage_time_s(s.first, s.last, s.phase) for one, s in zip(own, stages, strict=True)] for own in each
    ]
    hosting = [host.turn_s + calls_made(costs, s) * host.call_s for s in stages]
    side_by_side = plan.side_by_side(workers, microbatches)
    lags = [[lag_s(one, stage, host) for one, stage in zip(own, stages, strict=True)] for own in each]
    behind = [(0.0, 0.0)] * len(stages)  # when the next microbatch may begin beside the last one, and end
    free = [0.0] * workers
    left = [0.0] * microbatches
    closed = [0.0] * len(stages)
    turns: list[Turn] = []
    slot, busy = 0, 0.0
    for round_, begin in enumerate(range(0, microbatches, plan.round_microbatches)):
        members = range(begin, min(begin + plan.round_microbatches, microbatches))
        for stage in stages:
            worker = slot % workers  # [1]
            if not side_by_side:
                free[worker] = max(free[worker], closed[stage.position])  # [2] [3]
            hop = host.hop_s if stage.position and workers > 1 else 0.0
            for m in members:
                start = max(free[worker], left[m] + hop, behind[stage.position][0])  # [4] [6]
                end = start + hosting[stage.position] + computing[worker][stage.position]  # [5]
                end = max(end, behind[stage.position][1])
                if side_by_side:
                    behind[stage.position] = start + lags[worker][stage.position], end
                busy += computing[worker][stage.position]
                free[worker] = left[m] = end
                turns.append(Turn(slot, worker, round_, stage.phase, m, start, end))
            if side_by_side:
                free[worker] = max(free[worker], closed[stage.position])  # [6]
            closed[stage.position] = free[worker]
            slot += 1
    return Simulation(tuple(turns), workers, busy)


def costs_in(stage: Stage, plan: Plan, costs: Costs, microbatches: int) -> Costs:
    """What calls cost in ``stage``: a microbatch of a round bears its share of what is unpacked once for all of it."""
    return costs.unpacked_once(min(plan.round_microbatches, microbatches)) if stage.unpacks_once else costs


def lag_s(costs: Costs, stage: Stage, host: HostTime) -> float:
    """How far a microbatch that runs beside another stays behind it, to begin no call before the other is through."""
    calls = costs.calls[stage.first : stage.last + 1]
    again = 1.0 if stage.phase == "backward" else 0.0
    backward = [again * call.forward_s + call.backward_s for call in calls if call.needs_backward]
    forward = [call.forward_s for call in calls] if stage.phase != "backward" else []
    longest = max([*forward, *(backward if stage.phase != "forward" else [])], default=0.0)
    return longest + (0.0 if host.shared else host.call_s)


def calls_made(costs: Costs, stage: Stage) -> int:
    """Calls that a turn makes: in a fused stage a call and its backward are two trips to the worker."""
    calls = costs.calls[stage.first : stage.last + 1]
    backward = sum(call.needs_backward for call in calls)
    if stage.phase == "forward":
        return len(calls)
    return backward + (len(calls) if stage.phase == "fused" else 0)
