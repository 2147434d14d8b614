"""The report on a finished step, for ``RoundPipeStrategy.report``."""

from __future__ import annotations

from collections.abc import Callable

from lightning_roundpipe.engine.step import Step
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.memory.budget import peak_bytes
from lightning_roundpipe.runtime.report import Report, _lag, _peak_host_bytes
from lightning_roundpipe.runtime.reporting.events import DOWNLOADS, UPLOADS, bubble_percent, span_of


def report_of(step: Step, retries: list[int], uploaded: int) -> Callable[[], Report]:
    """Return a function that builds the report of ``step``. Most reports are never asked for.

    Args:
        step: a finished step.
        retries: number of allocation retries in the step, by worker.
        uploaded: bytes of weights uploaded in all steps so far.
    """
    options, costs, devices = step.context.options, step.context.learned.costs, step.context.pool.devices
    recorder, plan, workers, started, took = step.spec.recorder, step.plan, len(devices), step.started, step.seconds
    peaks = [device.peak_bytes() for device in devices]
    planned = peak_bytes(plan, costs, options, devices) if plan is not None and costs is not None else None
    # Keep plain rows: a reference to the step would keep every saved tensor alive.
    slots = [
        {"slot": s.index, "worker": s.worker, "round": s.round, "phase": s.phase, "layers": [x.name for x in s.layers]}
        for s in step.slots
    ]
    microbatches, updates, update = step.weights.count, step.spec.updates, step.spec.version + options.staleness + 1
    calls = len(step.runs[0].made.calls) if step.runs else 0
    text = str(plan) if plan is not None else str(Plan.per_call(calls or 1))

    def report() -> Report:
        rows, stalls = recorder.rows(started), recorder.stalls(started)
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
                "peak_host_bytes": _peak_host_bytes(),
                "bubble_pct": bubble_percent(rows, workers),
                "stall_pct": 100.0 * stalled / span if span > 0 else 0.0,
                "step_time_s": took,
                "optimizer_lag_s": _lag(rows, started, updates.applied.get(update) if updates is not None else None),
                "costs": costs.to_dict() if costs is not None else None,
                "events": rows,
                "stalls": stalls,
            }
        )

    return report
