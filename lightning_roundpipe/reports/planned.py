"""Simulated steps in the form of a report: the first steps of a plan, and a step replayed with its own times.

Emulated devices share the cores of one machine: while one computes, others wait for its cores. So a picture of the step
as it ran is mostly idle, and its bubble shows how many devices share the cores, not how good the plan is. `replay` runs
the planner's simulator on the step's plan with the measured times, as if each device computed on its own. It assumes:

* **Computing.** A call takes the same time on any device: the shortest that was measured, in the first batch or in the
  step itself. Each time is taken while the call has its cores, so it excludes waiting for them.
* **Copies** take what ``emulation.bandwidth`` and ``emulation.latency`` say, on a link per device and direction;
  without these settings, no time.
* **The step** stands alone: all devices are idle when it begins, and it ends with the last backward. The times of the
  optimizer, of code between layers, and of the engine do not count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.engine.events import bubble_percent
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.links import HostTime, Links
from lightning_roundpipe.planning.pipeline import Rules, SimulatedRun, run_steps
from lightning_roundpipe.planning.schedule import Plan

_KINDS = {
    **{kind: kind for kind in ("forward", "recompute", "backward", "upload_weights", "download_gradients")},
    "upload_boundary": "upload_activations",
    "download_boundary": "download_activations",
}
"""The report's names of the simulator's events. A fused turn becomes two events; host time becomes none."""


def planned_seconds(plan: Plan, costs: Costs, workers: int, microbatches: int, cores: int | None = None) -> float:
    """Return the seconds that computing alone takes in a step. ``cores``: how many emulated devices compute at once."""
    run = run_steps(plan, costs, workers, microbatches)
    return max(run.makespan_s, run.busy_s / cores) if cores else run.makespan_s


def plan_and_costs(report: Mapping[str, Any]) -> tuple[Plan, Costs] | None:
    """Return the plan of the step and the costs that it was made from; None if the step did not follow its stages."""
    if not report or report["profiled"] or not report["costs"]:
        return None
    plan = Plan.parse(report["plan"])
    if [slot["phase"] for slot in report["slots"] if slot["round"] <= 0] != [stage.phase for stage in plan.stages()]:
        return None  # microbatches have left the plan
    return plan, Costs.from_dict(report["costs"])


def replay_of(strategy: Any) -> dict[str, Any] | None:
    """Return the replay of the strategy's last step; None unless several emulated devices ran it under a plan."""
    if not hasattr(strategy, "report") or strategy.root_device.type != "cpu":
        return None
    return replay(strategy.report(), strategy.options.emulation)


def replay(report: Mapping[str, Any], emulation: Emulation | None = None) -> dict[str, Any] | None:
    """Return the step of ``report`` on devices that do not share cores, in the form of a report.

    The result is None if the step did not follow the plan's stages in order, or had one worker, which shares no cores.
    """
    if (followed := plan_and_costs(report)) is None or report["workers"] == 1:
        return None
    plan, costs = followed
    if not costs.unequal:
        costs = _with_shortest_times(costs, report)
    emulation = emulation or Emulation()
    rate = emulation.bandwidth
    rules = Rules(
        links=None if rate is None else Links(float(rate), float(rate)),
        host=HostTime(hop_s=2 * emulation.latency),  # from the device to the host, and to the next device
    )
    run = run_steps(plan, costs, report["workers"], report["microbatches"], rules)
    found = report_of(run, costs, report["microbatches"], run.makespan_s)
    first = min(report["slots"], key=lambda slot: int(slot["slot"]))
    for event in found["events"]:
        event["worker"] = (event["worker"] + first["worker"]) % run.workers
        event["slot"] += first["slot"]
    return found | {"slots": report["slots"], "bubble_pct": bubble_percent(found["events"], run.workers)}


def report_of(run: SimulatedRun, costs: Costs, microbatches: int, step_s: float, steps: int = 1) -> dict[str, Any]:
    """Return the first ``steps`` of a simulation in the form of a report. ``step_s``: the step time that it names."""
    stages, rounds = run.plan.stages(), -(-microbatches // run.plan.round_microbatches)
    events: list[dict[str, Any]] = []
    slots: dict[int, dict[str, Any]] = {}
    for event in run.events:
        if event.step >= steps or event.kind not in ("fused", *_KINDS):
            continue
        stage = stages[event.position]
        layers = costs.layers[stage.first : stage.last + 1]
        parts = [(_KINDS.get(event.kind, ""), event.start_s, event.end_s)]
        if event.kind == "fused":
            forward_s = sum(call.forward_s for call in costs.on(event.worker).calls[stage.first :])
            middle_s = min(event.start_s + forward_s, event.end_s)
            parts = [("forward", event.start_s, middle_s), ("backward", middle_s, event.end_s)]
        about = {"worker": event.worker, "slot": event.slot, "phase": stage.phase}
        if event.microbatch >= 0:
            round_ = event.step * rounds + event.microbatch // run.plan.round_microbatches
            slots.setdefault(event.slot, {**about, "round": round_, "layers": list(layers)})
        layer = " … ".join(dict.fromkeys((layers[0], layers[-1])))
        events += [
            {**about, "kind": kind, "layer": layer, "microbatch": event.microbatch, "start_s": start_s, "end_s": end_s}
            for kind, start_s, end_s in parts
            if end_s > start_s
        ]
    return {
        "plan": str(run.plan),
        "workers": run.workers,
        "microbatches": microbatches,
        "slots": list(slots.values()),
        "events": events,
        "step_time_s": step_s,
        "bubble_pct": 100 * (1 - run.busy_s / len(run.ends_s) / (run.workers * step_s)),
    }


def _with_shortest_times(costs: Costs, report: Mapping[str, Any]) -> Costs:
    took: dict[tuple[str, int], float] = defaultdict(lambda: math.inf)
    for event in report["events"]:
        kind = "forward" if event["kind"] == "recompute" else event["kind"]
        took[kind, event["call"]] = min(took[kind, event["call"]], event["end_s"] - event["start_s"])
    return Costs(
        tuple(
            replace(
                call,
                forward_s=min(call.forward_s, took["forward", number]),
                backward_s=min(call.backward_s, took["backward", number]),
                unpack_s=0.0,  # the shortest of a stage that unpacks once has found its weights unpacked
                backward_unpack_s=0.0,
            )
            for number, call in enumerate(costs)
        )
    )
