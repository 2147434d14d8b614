"""What a step takes by its plan: simulated with the costs that the plan was made from, or replayed with its own times.

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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.engine.events import bubble_percent
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.pipeline import Rules, SimulatedEvent, SimulatedRun, run_steps
from lightning_roundpipe.planning.schedule import Plan

_KINDS = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "upload_weights": "upload_weights",
    "upload_boundary": "upload_activations",
    "download_boundary": "download_activations",
    "download_gradients": "download_gradients",
}
"""The report's names of the simulator's events. A fused turn becomes two events; host time becomes none."""


def planned_seconds(plan: Plan, costs: Costs, workers: int, microbatches: int, cores: int | None = None) -> float:
    """Return how long computing alone takes in a step, in seconds.

    Args:
        plan: the plan of the step.
        costs: of its calls.
        workers: number of devices.
        microbatches: of a step.
        cores: how many emulated devices compute at once; None for devices that share no cores.
    """
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

    Args:
        report: what ``RoundPipeStrategy.report()`` returns.
        emulation: the speed of copies.

    Returns:
        ``plan``, ``workers``, ``microbatches``, ``slots``, ``events``, ``step_time_s`` and ``bubble_pct``, which
        `timeline.draw_timeline` needs. None if the step did not follow the plan's stages in order, or had one worker,
        which shares no cores anyway.
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
    first = min(report["slots"], key=lambda slot: int(slot["slot"]))
    events = [
        {
            "kind": kind,
            "phase": stage.phase,
            "worker": (event.worker + first["worker"]) % run.workers,
            "slot": event.slot + first["slot"],
            "layer": " … ".join(dict.fromkeys((costs.layers[stage.first], costs.layers[stage.last]))),
            "microbatch": event.microbatch,
            "start_s": start_s,
            "end_s": end_s,
        }
        for event in run.events
        if event.kind in ("fused", *_KINDS)
        for stage in (plan.stages()[event.position],)
        for kind, start_s, end_s in _parts(event, run, costs.on(event.worker))
    ]
    return {
        **{key: report[key] for key in ("plan", "microbatches", "slots")},
        "workers": run.workers,
        "events": events,
        "step_time_s": run.makespan_s,
        "bubble_pct": bubble_percent(events, run.workers),
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


def _parts(event: SimulatedEvent, run: SimulatedRun, costs: Costs) -> Iterator[tuple[str, float, float]]:
    """Yield the event under its names in a report. A fused turn yields its forward and its backward."""
    if event.kind != "fused":
        yield _KINDS[event.kind], event.start_s, event.end_s
        return
    forward_s = sum(call.forward_s for call in costs.calls[run.plan.fused.first :])
    for kind, (start_s, end_s) in zip(
        ("forward", "backward"), pairwise((event.start_s, event.start_s + forward_s, event.end_s)), strict=True
    ):
        if end_s > start_s:
            yield kind, start_s, end_s
