"""From what the first batch has called to a plan, and the arenas that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.errors import DoesNotFit
from lightning_roundpipe.planning.limits import Limits
from lightning_roundpipe.planning.memory import (
    ahead_within,
    boundary_bytes,
    device_bytes,
    lead_within,
    partition_within,
)
from lightning_roundpipe.planning.meter import Counter
from lightning_roundpipe.planning.nominal import nominal, with_times_of_bytes
from lightning_roundpipe.planning.pipeline import run_steps
from lightning_roundpipe.planning.profile import Hardware
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.search import SEARCH_SECONDS, search_partition
from lightning_roundpipe.runtime.core.trace import Trace, TracedCall, distinct_layers
from lightning_roundpipe.runtime.faults.interrupts import allowed
from lightning_roundpipe.runtime.memory.autocast_weights import send_rounded
from lightning_roundpipe.runtime.memory.budget import check_plan_fits, libraries_note, worker_bytes
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import begin_to_train
from lightning_roundpipe.runtime.user_code.module_state import ModuleStateIsolation
from lightning_roundpipe.runtime.user_code.rng import Randomness

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.core.step import Step
    from lightning_roundpipe.runtime.engine import Engine

WORTH_S = 5.0
"""Seconds of a step from which on some seconds are spent on a better plan."""


def plan_from(engine: Engine, step: Step) -> None:
    """Make a plan of what all microbatches called, unless they are to run in order; and room for it on the workers."""
    engine.trace = trace = engine.trace or Trace()
    recorder, static = step.recorder, engine.options.plan == "static"
    seconds = recorder.nominal_seconds() if static else recorder.call_seconds()
    if not trace.learn(step.traces, seconds, len(engine.layers)):
        return
    if not trace.calls:
        raise RoundPipeError(
            "training_step called none of the layers that were found "
            f"({', '.join(layer.name for layer in engine.layers)}): name the modules it calls with layers=[...]."
        )
    if send_rounded(engine):
        reserve_for_layers(engine)
    engine.devices[0].settle_libraries(engine.devices, len(step.sizes))
    for worker in engine.workers:
        worker.warm_up()
    costs = trace.costs(engine.reduction.dtype if engine.reduction is not None else None)
    engine.costs = with_times_of_bytes(costs, rates_of(engine)) if static else costs
    limit = worker_bytes(engine.options, engine.devices)
    if (text := engine.options.plan_text) is not None:
        plan = Plan.parse(text)
        plan.validate(trace.names)
        check_plan_fits(plan, engine.costs, engine.options, engine.devices)
    else:
        try:
            with allowed():  # it may take its time, and nothing has been changed yet
                plan = _cut(engine, trace, len(step.sizes), limit)
        except ValueError as error:
            raise DoesNotFit(f"{error}{libraries_note(engine.options, engine.devices)}") from None
    if buffer := trace.torn_buffer(plan):
        why = f"{buffer} is changed by several calls of each microbatch, and what is in it depends on their order"
        run_in_order(engine, why, "plan must have these calls in one forward stage, or be left out.")
        return
    lead = lead_within(plan, engine.costs, len(engine.workers), limit, engine.devices[0].lead_bytes)
    _reserve_for(engine, plan, trace, _room(engine, plan, limit, lead), lead)
    engine.plan = plan


def _cut(engine: Engine, trace: Trace, microbatches: int, limit: int | None) -> Plan:
    """The plan of the paper's algorithm, or a better one where a step takes so long that looking for it pays."""
    costs, workers, size = engine.costs, len(engine.workers), engine.options.round_microbatches
    assert costs is not None
    stage_s = engine.options.stage_seconds
    plan = partition_within(costs, workers, microbatches, size, limit, stage_s=stage_s)
    if not engine.scope.cuts_calls:  # else gradients come when all have their outputs
        plan = ahead_within(plan, costs, workers, limit)
    seconds = run_steps(plan, costs, workers, microbatches).makespan_s
    if workers == 1 or size is not None or stage_s is not None or seconds < WORTH_S:
        return plan
    static = engine.options.plan == "static"
    if static:
        engine.hints.say("plan", "searching for a faster plan by the shapes of the calls, which takes some seconds.")
    else:
        engine.hints.say(
            "plan",
            f"a step takes {seconds:.0f} s: searching for a faster plan, which takes up to {SEARCH_SECONDS:.0f} s.",
        )
    limits = Limits.usual(costs, workers, microbatches)
    if limit is not None:  # how much is fused is a question of memory then
        limits = Limits(limits.min_round, len(costs) - 1, limit)
    stale = bool(engine.options.staleness)
    found = search_partition(costs, workers, microbatches, limits, 1 if stale else 0, by_clock=not static)
    better = stale or run_steps(found, costs, workers, microbatches).makespan_s < seconds
    return found if better and not trace.torn_buffer(found) else plan


def rates_of(engine: Engine) -> Hardware:
    """What a static plan's times are computed by."""
    return nominal(engine.devices[0].torch_device.type)


def counter_of(engine: Engine) -> Counter | None:
    """Something to count a call's operations with, where a static plan is going to be made from them."""
    return Counter(rates_of(engine)) if engine.plans and engine.options.plan == "static" else None


def _room(engine: Engine, plan: Plan, limit: int | None, lead: int) -> int | None:
    """What is left for tensors that are brought to a worker before their turn."""
    assert engine.costs is not None
    return None if limit is None else max(0, limit - device_bytes(plan, engine.costs, len(engine.workers)) - lead)


def run_in_order(engine: Engine, why: str, remedy: str) -> None:
    """Microbatches run one after another from now on.

    Raises:
        ValueError: if a plan was asked for, with the ``remedy``.
    """
    if engine.options.plan_text is not None:
        raise ValueError(f"{why}: {remedy}")
    engine.in_order = True
    engine.hints.say("order", f"{why}, so microbatches run one after another, without a plan.")


def _reserve_for(engine: Engine, plan: Plan, trace: Trace, room: int | None, lead: int) -> None:
    weights = gradients = 0
    for stage in plan.stages():
        calls = trace.calls[stage.first : stage.last + 1]
        loaded = [c for c in calls if stage.phase != "backward" or c.taped]
        weights = max(weights, sum(layer.nbytes for layer in distinct_layers(loaded)))
        if stage.phase != "forward":
            gradients = max(gradients, sum(HostGradSums.bytes_of(c.layer) for c in calls if c.taped))
    for worker in engine.workers:
        worker.reserve(weights, gradients, room, lead)
    assert engine.costs is not None
    engine.devices[0].reserve_host(boundary_bytes(plan, engine.costs))


def reserve_for_layers(engine: Engine) -> None:
    """Arenas for one layer at a time, which is what runs without a plan needs."""
    weights = max((layer.nbytes for layer in engine.layers), default=0)
    gradients = max((HostGradSums.bytes_of(layer) for layer in engine.layers), default=0)
    for worker in engine.workers:
        worker.reserve(weights, gradients)


def forget_plan(engine: Engine) -> None:
    """Other parameters are trained now, so that gradients flow elsewhere; or a weight that travels cast was used
    otherwise. Everything is learned again."""
    engine.trace, engine.recent, engine.plan, engine.costs = None, None, None, None
    engine.in_order = engine.scope.in_order
    engine.probed.clear()
    engine.walked.clear()
    for layer in engine.layers:
        layer.borrows = layer.reaches_out = None
    engine.module_state = ModuleStateIsolation(engine.module, engine.layers)
    engine.randomness = Randomness()
    begin_to_train(engine.layers, engine.buckets[0].masters, engine.formats, apart=bool(engine.options.staleness))
    for worker in engine.workers:
        worker.forget()
    reserve_for_layers(engine)


def is_to_be_probed(engine: Engine, call: TracedCall) -> bool:
    """Whether a plan will be made from this step, and its first call of this kind is this one."""
    key, known = (call.layer.index, call.use), engine.probed
    if not engine.plans or key in known:
        return False
    known.add(key)
    return True


def is_to_be_walked(engine: Engine, call: TracedCall) -> bool:
    """Whether the call's graph is looked at: in all of what a plan is made from, else once."""
    key, known = (call.layer.index, call.use), engine.walked
    if key in known:
        return engine.plans
    known.add(key)
    return True
