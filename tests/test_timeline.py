from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.planning import Plan
from lightning_roundpipe.timeline import Event, draw_timeline, read_events, stage_names, write_trace

PLAN = "forward 0-9 10-19; fused 20-29; backward 16-19 12-15 8-11 4-7 0-3; round 4"
FORWARD_S, BACKWARD_S = 0.010, 0.020


def synthetic(workers: int = 4, microbatches: int = 4, text: str = PLAN) -> dict[str, Any]:
    """A report as an engine with free turns and slow copies would write it: each call takes 10 ms forward, 20 ms back."""
    plan = Plan.parse(text)
    events: list[dict[str, Any]] = []
    slots: list[dict[str, Any]] = []
    free = [0.0] * workers  # per worker
    ready = [0.0] * microbatches  # per microbatch, on the host

    def add(kind: str, phase: str, slot: int, call: int, microbatch: int, start: float, length: float) -> float:
        events.append(
            {"worker": slot % workers, "kind": kind, "phase": phase, "slot": slot, "call": call}
            | {"layer": f"layers.{call}", "microbatch": microbatch, "start_s": start, "end_s": start + length}
        )
        return start + length

    for stage in plan.stages():
        slot, worker, phase = stage.position, stage.position % workers, stage.phase
        calls = range(stage.first, stage.last + 1)
        slots.append(
            {"slot": slot, "worker": worker, "round": 0, "phase": phase, "layers": [f"layers.{c}" for c in calls]}
        )
        upload = max(0.0, free[worker] - 0.12)
        for call in calls:
            upload = add("upload_weights", phase, slot, call, -1, upload, 0.008)
        free[worker] = max(free[worker], upload)
        for microbatch in range(microbatches):
            kind = "upload_gradients" if phase == "backward" else "upload_activations"
            arrived = add(kind, phase, slot, calls[0], microbatch, ready[microbatch], 0.004)
            now = max(free[worker], arrived)
            if phase != "backward":
                for call in calls:
                    now = add("forward", phase, slot, call, microbatch, now, FORWARD_S)
            for call in reversed(calls) if phase != "forward" else ():
                if phase == "backward":
                    now = add("recompute", phase, slot, call, microbatch, now, FORWARD_S)
                now = add("backward", phase, slot, call, microbatch, now, BACKWARD_S)
            free[worker] = now
            ready[microbatch] = add("download_activations", phase, slot, calls[-1], microbatch, now, 0.004)
        if phase != "forward":
            add("download_gradients", phase, slot, calls[0], -1, free[worker], 0.02)
    step = max(event["end_s"] for event in events)
    busy = sum(e["end_s"] - e["start_s"] for e in events if e["kind"] in ("forward", "recompute", "backward"))
    return {
        "plan": text,
        "workers": workers,
        "microbatches": microbatches,
        "bubble_pct": 100 * (1 - busy / (workers * step)),
        "step_time_s": step,
        "slots": slots,
        "events": events,
    }


TINY = {"workers": 1, "microbatches": 1, "text": "forward none; fused 0; backward none; round 1"}
