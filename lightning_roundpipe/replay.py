"""Replays a step that emulated devices ran as if each of them computed on its own.

Emulated devices share the cores of one machine: while one computes, others wait for its cores. So a picture of the step
as it ran is mostly white, and its bubble shows how many devices share the cores, not how good the plan is. What a plan
is worth shows where devices compute at the same time. The planner's simulator models that: the replay runs it on the
step's plan with the measured times.

A replay assumes:

* **Computing.** A call takes the same time on any device: the shortest that was measured, in the first batch (whose
  times the plan was made from) or in the step itself. Each time is taken while the call has the cores that it computes
  on, so it excludes waiting for them. Other load on the machine can only make it longer. Each device is as fast as
  those cores.
* **Copies** take what ``emulation.bandwidth`` and ``emulation.latency`` say, on a link per device and direction;
  without these settings, no time.
* **The step** stands alone: all devices are idle when it begins, and it ends with the last backward. The times of the
  optimizer, of code between layers, and of the engine do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.diagnosis import plan_and_costs, with_shortest_times
from lightning_roundpipe.engine.events import bubble_percent
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.pipeline import Rules, SimulatedEvent, SimulatedRun, run_steps

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


def replay_of(strategy: Strategy) -> dict[str, Any] | None:
    """Return the replay of the last step; None unless several emulated devices ran it under a plan."""
    if not hasattr(strategy, "report") or strategy.root_device.type != "cpu":
        return None
    ours: Any = strategy
    return replay(ours.report(), ours.options.emulation)


def replay(report: Mapping[str, Any], emulation: Emulation | None = None) -> dict[str, Any] | None:
    """Return the step of ``report`` on devices that do not share cores, in the form of a report.

    Args:
        report: what ``RoundPipeStrategy.report()`` returns.
        emulation: the speed of copies.

    Returns:
        ``plan``, ``workers``, ``microbatches``, ``slots``, ``events``, ``step_time_s`` and ``bubble_pct``, which
        ``timeline.draw_timeline`` needs. None if the step did not follow the plan's stages in order, or had one worker,
        which shares no cores anyway.
    """
    if (followed := plan_and_costs(report)) is None or report["workers"] == 1:
        return None
    plan, costs = followed
    if not costs.unequal:
        costs = with_shortest_times(costs, report["events"])
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
            "layer": _name(costs.layers[stage.first : stage.last + 1]),
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
        "plan": report["plan"],
        "workers": run.workers,
        "microbatches": report["microbatches"],
        "slots": report["slots"],
        "events": events,
        "step_time_s": run.makespan_s,
        "bubble_pct": bubble_percent(events, run.workers),
    }


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


def _name(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]}"
