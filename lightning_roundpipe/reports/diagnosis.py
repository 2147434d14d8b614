"""What steps wait for: the shares that `RoundPipeMonitor` logs, and the longest wait with the setting that shortens it.

Everything here works on plain reports, so it needs no engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.engine.events import DOWNLOADS, UPLOADS
from lightning_roundpipe.messages import seconds

if TYPE_CHECKING:
    from lightning_roundpipe.reports.step_times import StepTimes  # imports Lightning, which has two names

REMEDIES = {
    "the data loader": "set num_workers= of the DataLoader, or more of them, with persistent_workers=True",
    "the optimizer": "a message at the start of training says why training waits for it, and what to change",
    "weights": "a larger accumulate_grad_batches= uses each upload for more microbatches, precision='bf16-mixed' makes "
    "uploads smaller, and staleness=1 lets steps run while the optimizer updates",
    "activations": "precision='bf16-mixed' makes them smaller, and a larger stage_seconds= sends them less often",
    "gradients": "reduce_dtype='bfloat16' halves them, and adapters (LoRA) have few",
}
"""What a step can wait for, and the settings that shorten the wait."""

_AT_ONCE = 1e-5
"""Seconds by which the end of a stall may precede the recorded end of the copy that it waited for."""


@dataclass(frozen=True)
class Diagnosis:
    """Mean seconds of a step, and those of waiting in it, by the keys of `REMEDIES`; for copies, the mean of all
    workers.
    """

    step_s: float
    waits_s: Mapping[str, float]

    def __str__(self) -> str:
        longest = max(self.waits_s, key=lambda what: self.waits_s[what])
        return (
            f"a step takes {seconds(self.step_s)}. It waits longest for {longest}, "
            f"{seconds(self.waits_s[longest])}: {REMEDIES[longest]}."
        )


def diagnose(report: Mapping[str, Any], times: StepTimes, waited_s: float) -> Diagnosis | None:
    """Return what the steps of ``times`` wait for; None if the step of ``report`` had no plan.

    ``waited_s``: seconds in which the main thread waited for the data loader meanwhile.
    """
    if report["profiled"] or not times.steps:
        return None
    step_s = times.seconds / times.steps
    between_s = max(0.0, step_s - report["step_time_s"])  # before that, workers compute while the main thread waits
    waits = {
        "the data loader": min(between_s, waited_s / times.steps),
        "the optimizer": min(between_s, times.updating_s / times.steps) if report["waits_for_optimizer"] else 0.0,
        **{kind: stalled / report["workers"] for kind, stalled in stall_seconds(report).items()},
    }
    return Diagnosis(step_s, waits) if any(waits.values()) else None


def figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one step that `RoundPipeMonitor` logs, by name, as far as the report has them."""
    workers, step = report["workers"], report["step_time_s"]
    values: dict[str, float] = {"bubble_pct": report["bubble_pct"]}
    for kind, stalled in stall_seconds(report).items():
        values[f"stall_{kind}_pct"] = 100 * stalled / (workers * step) if step > 0 else 0.0
    values["device_peak_gib"] = max(report["peak_device_bytes"]) / 2**30
    for name, key in (("device_planned_gib", "planned_device_bytes"), ("host_planned_gib", "planned_host_bytes")):
        if report.get(key) is not None:
            values[name] = report[key] / 2**30
    if report.get("optimizer_lag_s") is not None:
        values["optimizer_lag_s"] = report["optimizer_lag_s"]
    return values


def stall_seconds(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that workers waited for copies, all workers together, by what was copied.

    A stall ends with the copy that it waited for: ``"weights"``, ``"activations"`` or ``"gradients"``.
    """
    copies: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for event in report["events"]:
        if event["kind"] in UPLOADS + DOWNLOADS:
            copies[event["worker"]].append((event["end_s"], event["kind"].rpartition("_")[2]))
    found = dict.fromkeys(("weights", "activations", "gradients"), 0.0)
    for ends in copies.values():
        ends.sort()
    for stall in report["stalls"]:
        ends = copies[stall["worker"]]
        at = bisect_right(ends, (stall["end_s"] + _AT_ONCE, "~"))
        came = at and ends[at - 1][0] > stall["start_s"]
        found[ends[at - 1][1] if came else "weights"] += stall["end_s"] - stall["start_s"]
    return found
