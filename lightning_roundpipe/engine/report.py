"""The report on a finished step, for ``RoundPipeStrategy.report``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from lightning_roundpipe.devices import host_memory
from lightning_roundpipe.devices.errors import LESS_FRAGMENTED
from lightning_roundpipe.engine.events import DOWNLOADS, UPLOADS, Recorder, bubble_percent, span_of
from lightning_roundpipe.engine.step import Step
from lightning_roundpipe.memory.budget import peak_bytes
from lightning_roundpipe.messages import gib, plural, seconds
from lightning_roundpipe.planning.schedule import Plan

_WIDTH = 80


class Report(dict[str, Any]):
    """A report with the keys that `RoundPipeStrategy.report` documents; ``str()`` gives a summary."""

    def __str__(self) -> str:
        if not self:
            return "No training step has finished yet."
        parts = plural(self["microbatches"], "microbatch")
        plan = "none: each call of a layer was a stage of its own" if self["profiled"] else self["plan"]
        planned = self["planned_device_bytes"]
        up, down = sum(self["bytes_uploaded"]), sum(self["bytes_downloaded"])
        rows = {
            "step": f"{seconds(self['step_time_s'])}, {parts} on {plural(self['workers'], 'worker')}",
            "plan": plan,
            "bubble": f"{self['bubble_pct']:.1f} % of the workers' time without computation, "
            f"{self['stall_pct']:.1f} % waiting for copies",
            "device": f"{gib(max(self['peak_device_bytes']))} at the peak"
            + (f", {gib(planned)} planned" if planned is not None else "")
            + (f", {plural(retries, 'allocation')} tried again" if (retries := sum(self["alloc_retries"])) else ""),
            "advice": f"{LESS_FRAGMENTED}, if allocations are tried again in many steps" if retries else "",
            "host": f"{gib(self['peak_host_bytes'])} at the peak of the process",
            "copies": f"{gib(up)} to the devices, {gib(down)} back",
        }
        width = max(map(len, rows)) + 2
        return "\n".join(
            textwrap.fill(text, _WIDTH, initial_indent=f"{name:{width}}", subsequent_indent=" " * width)
            for name, text in rows.items()
            if text
        )


class Reports:
    """The report of the last finished step, and what all steps have uploaded.

    Attributes:
        weights_uploaded: bytes of weights.
        latest: returns the report; an empty one before a step has finished.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.weights_uploaded = 0
        self.latest: Callable[[], Report] = Report

    def count(self, recorder: Recorder) -> None:
        """Count what was recorded."""
        self.weights_uploaded += sum(recorder.nbytes(("upload_weights",), self._workers))

    def finished(self, step: Step) -> None:
        """Note that ``step`` has ended, of which nothing is in flight any more."""
        self.count(step.spec.recorder)
        self.latest = report_of(step, self.weights_uploaded)


def report_of(step: Step, uploaded: int) -> Callable[[], Report]:
    """Return a function that builds the report of ``step``. Most reports are never asked for.

    ``uploaded``: bytes of weights uploaded in all steps so far.
    """
    options, costs, devices = step.context.options, step.context.learned.costs, step.context.pool.devices
    recorder, plan, workers = step.spec.recorder, step.spec.plan, len(devices)
    started, took = step.started, step.seconds
    peaks = [device.peak_bytes() for device in devices]
    retries = [device.allocation_retries() - n for device, n in zip(devices, step.retries_before, strict=True)]
    planned = peak_bytes(plan, costs, options, devices) if plan is not None and costs is not None else None
    # Keep plain rows: a reference to the step would keep every saved tensor alive.
    slots = [
        {"slot": s.index, "worker": s.worker, "round": s.round, "phase": s.phase, "layers": [x.name for x in s.layers]}
        for s in step.slots.all
    ]
    microbatches, updates = step.spec.loss_weights.count, step.spec.updates
    update = step.spec.version + options.staleness + 1
    calls = len(step.microbatches[0].layer_calls.trace.calls) if step.microbatches else 0
    text = str(plan) if plan is not None else str(Plan.per_call(calls or 1))

    def report() -> Report:
        rows, stalls = recorder.rows(started), recorder.stalls(started)
        applied = updates.stepper.applied.get(update) if updates is not None else None
        span, stalled = workers * span_of(rows), sum(s["end_s"] - s["start_s"] for s in stalls)
        return Report(
            {
                "plan": text,
                "plan_policy": options.plan_policy,
                "profiled": plan is None,
                "workers": workers,
                "microbatches": microbatches,
                "slots": slots,
                "bytes_uploaded": recorder.nbytes(UPLOADS, workers),
                "bytes_downloaded": recorder.nbytes(DOWNLOADS, workers),
                "weights_bytes_uploaded_total": uploaded,
                "peak_device_bytes": peaks,
                "planned_device_bytes": planned,
                "alloc_retries": retries,
                "peak_host_bytes": host_memory.peak_bytes(),
                "bubble_pct": bubble_percent(rows, workers),
                "stall_pct": 100.0 * stalled / span if span > 0 else 0.0,
                "step_time_s": took,
                "optimizer_lag_s": _lag(rows, started, applied),
                "waits_for_optimizer": updates is None,
                "costs": costs.to_dict() if costs is not None else None,
                "events": rows,
                "stalls": stalls,
            }
        )

    return report


def _lag(rows: list[dict[str, Any]], started: float, applied: float | None) -> float | None:
    """Return the seconds from the last gradient's arrival on the host to the end of the update; None if not known."""
    arrived = [row["end_s"] for row in rows if row["kind"] in ("backward", "download_gradients")]
    return None if applied is None or not arrived else max(0.0, applied - started - max(arrived))
