"""What a simulated run holds in memory, and when: on each worker, and on the host for recomputation.

A worker holds a stage's weights from the start of their upload to the end of the slot, its gradients from the first
turn to the end of their download, and its activations while a microbatch is in the stage. The host holds the inputs of
the calls that will be recomputed, from the forward to the backward turn. Where links take no time, nothing is held for
them.

`memory.device_bytes` is what the engine sets aside for a plan, which is enough for the worst of all this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.pipeline import COMPUTE, SimulatedEvent, SimulatedRun


@dataclass(frozen=True)
class Occupancy:
    """Bytes that are held from a time on, ascending in time."""

    times_s: tuple[float, ...]
    held: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.held, default=0)


def find_occupancy(run: SimulatedRun, costs: Costs) -> tuple[list[Occupancy], Occupancy]:
    """Of each worker, and of the host's inputs for recomputation."""
    stages = run.plan.stages()
    needs = [costs.stage_bytes(stage.first, stage.last, stage.phase) for stage in stages]
    slots: dict[int, list[SimulatedEvent]] = defaultdict(list)
    for event in run.events:
        if event.worker >= 0:
            slots[event.slot].append(event)
    changes: list[list[tuple[float, int]]] = [[] for _ in range(run.workers)]
    on_host: list[tuple[float, int]] = []
    for events in slots.values():
        turns = [event for event in events if event.kind in COMPUTE]
        if not turns:
            continue
        worker, need, stage = turns[0].worker, needs[turns[0].position], stages[turns[0].position]
        closed = max(turn.end_s for turn in turns)
        loaded = min(event.start_s for event in events if event.kind in (*COMPUTE, "upload_weights"))
        begun = min(turn.start_s for turn in turns)
        gone = max([closed, *(event.end_s for event in events if event.kind == "download_gradients")])
        changes[worker] += _held(loaded, closed, need.weights) + _held(begun, gone, need.gradients)
        for first, end in _stays(turns):
            changes[worker] += _held(first, end, need.activations)
        saved = sum(c.boundary_bytes for c in costs.calls[stage.first : stage.last + 1] if c.needs_backward)
        for turn in turns:
            if turn.kind == "forward":
                on_host.append((turn.end_s, saved))
            elif turn.kind == "backward":
                on_host.append((turn.end_s, -saved))
    return [_summed(change) for change in changes], _summed(on_host)


def _stays(turns: Iterable[SimulatedEvent]) -> list[tuple[float, float]]:
    """From and until when each microbatch is in the stage; a recomputation belongs to its backward."""
    stays: dict[int, tuple[float, float]] = {}
    for turn in turns:
        start, end = stays.get(turn.microbatch, (turn.start_s, turn.end_s))
        stays[turn.microbatch] = min(start, turn.start_s), max(end, turn.end_s)
    return list(stays.values())


def _held(start: float, end: float, size: int) -> list[tuple[float, int]]:
    return [(start, size), (end, -size)] if size else []


def _summed(changes: list[tuple[float, int]]) -> Occupancy:
    """At the same time, what ends goes before what begins: a buffer is handed on."""
    times: list[float] = []
    held: list[int] = []
    now = 0
    for time, change in sorted(changes):
        now += change
        if times and times[-1] == time:
            held[-1] = now
        else:
            times.append(time)
            held.append(now)
    return Occupancy(tuple(times), tuple(held))
