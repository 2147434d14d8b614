"""Where the idle time of a simulated run lies, and what it waits for.

=========  ===========================================================================================================
fill       until a worker's first turn
drain      after its last backward
switch     between its last forward before its first backward, and that backward
intra      between other turns
transfer   of these, waiting for weights on their way, or for the buffer of gradients that are
optimizer  of these, waiting for weights that are not updated yet
=========  ===========================================================================================================

Each second counts once: what is lost to a transfer or to the optimizer is not in the other four. Host time is no
compute time, so it is idle time of its own kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from lightning_roundpipe.planning.pipeline import COMPUTE, SimulatedEvent, SimulatedRun

_FORWARD = ("forward",)


@dataclass(frozen=True)
class IdleShares:
    """Percent of makespan x workers; ``bubble_pct`` is the sum of all."""

    fill_pct: float
    switch_pct: float
    drain_pct: float
    intra_pct: float
    transfer_pct: float
    optimizer_pct: float
    host_pct: float

    @property
    def bubble_pct(self) -> float:
        return float(sum(getattr(self, item.name) for item in fields(self)))


def find_idle(run: SimulatedRun) -> IdleShares:
    """The figures of a whole run, from the first turn to the end of the last step."""
    span = run.makespan_s
    seconds = {item.name.removesuffix("_pct"): 0.0 for item in fields(IdleShares)}
    for worker in range(run.workers):
        events = [event for event in run.events if event.worker == worker]
        turns = sorted((e for e in events if e.kind in COMPUTE), key=lambda event: event.start_s)
        waits = [wait for wait in run.waits if wait.worker == worker]
        for begin, end, kind in _gaps(turns, span):
            transfer = _within(begin, end, [(wait.update_s, wait.transfer_s) for wait in waits])
            optimizer = _within(begin, end, [(wait.input_s, wait.update_s) for wait in waits])
            host = _within(begin, end, [(e.start_s, e.end_s) for e in events if e.kind == "host"])
            seconds["transfer"] += transfer
            seconds["optimizer"] += optimizer
            seconds["host"] += host
            seconds[kind] += end - begin - transfer - optimizer - host
    whole = run.workers * span
    return IdleShares(**{f"{name}_pct": 100 * value / whole if whole else 0.0 for name, value in seconds.items()})


def _gaps(turns: Sequence[SimulatedEvent], span: float) -> list[tuple[float, float, str]]:
    """The pauses of one worker, with what they would be if nothing but inputs were waited for."""
    if not turns:
        return [(0.0, span, "fill")]
    backward = next((at for at, turn in enumerate(turns) if turn.kind not in _FORWARD), None)
    gaps = [(0.0, turns[0].start_s, "fill"), (turns[-1].end_s, span, "drain")]
    for at in range(1, len(turns)):
        begin, end = turns[at - 1].end_s, turns[at].start_s
        gaps.append((begin, end, "switch" if at == backward else "intra"))
    return [gap for gap in gaps if gap[1] > gap[0]]


def _within(begin: float, end: float, parts: Sequence[tuple[float, float]]) -> float:
    return sum(max(min(end, stop) - max(begin, start), 0.0) for start, stop in parts)
