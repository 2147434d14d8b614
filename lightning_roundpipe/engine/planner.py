"""Makes a plan from what the first window has shown, and the arenas that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.errors import DoesNotFit
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.trace import Trace, TracedCall
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.memory import (
    BESIDE,
    Memory,
    Reserved,
    ahead_within,
    boundary_bytes,
    partition_within,
    reserved_within,
)
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.runtime.memory.budget import (
    check_plan_fits,
    libraries_note,
    memory_of_workers,
    worker_bytes,
)
from lightning_roundpipe.runtime.memory.grad_buffers import GradientLayout
from lightning_roundpipe.runtime.memory.host_layer import begin_to_train


class Planner:
    """It is where `planning` meets the engine.

    Args:
        context: the engine's parts.
        windows_left: returns how many windows will be trained on.
    """

    def __init__(self, context: Context, windows_left: Callable[[], float]) -> None:
        self._context, self._options, self._windows_left = context, context.options, windows_left
        self._workers, self._devices = context.pool.workers, context.pool.devices

    def plan_from(self, traces: Sequence[Trace]) -> None:
        """Make a plan from the calls of a window's microbatches.

        Raises:
            RoundPipeError: ``training_step`` called no layer.
            DoesNotFit: no plan fits the memory budget.
            ValueError: the plan in the options does not fit the calls or the budget.
        """
        learned, options = self._context.learned, self._options
        trace = Trace.of(traces)
        if not trace.calls:
            names = ", ".join(layer.name for layer in self._context.model.layers)
            raise RoundPipeError(
                f"training_step called none of the layers that were found ({names}): name the modules it calls with "
                "layers=[...]."
            )
        costs = Costs(tuple(map(self._cost, trace.calls)))
        limit = memory_of_workers(options, self._devices)
        if (text := options.plan_text) is not None:
            plan = Plan.parse(text)
            plan.validate(trace.names)
            check_plan_fits(plan, costs, options, self._devices)
        else:
            plan = self._cut(costs, len(traces), limit)
        for worker in self._workers:
            own = worker.index if isinstance(limit, tuple) else None
            budget = limit[worker.index] if isinstance(limit, tuple) else limit
            worker.reserve(reserved_within(plan, costs, len(self._workers), budget, worker.device.lead_bytes, own))
        self._devices[0].reserve_host(boundary_bytes(plan, costs))
        learned.trace, learned.costs, learned.plan = trace, costs, plan

    def _cut(self, costs: Costs, microbatches: int, limit: Memory | None) -> Plan:
        options, workers = self._options, len(self._workers)
        size, stage_s = options.round_microbatches, options.stage_seconds
        try:
            plan = partition_within(costs, workers, microbatches, size, limit, stage_s=stage_s)
            return ahead_within(plan, costs, workers, limit)
        except ValueError as error:
            raise DoesNotFit(f"{error}{libraries_note(options, self._devices)}") from None

    def _cost(self, call: TracedCall) -> CallCost:
        dtype = self._context.gradients.reduction.dtype
        gradients = GradientLayout(call.layer, dtype=dtype) if call.taped else None
        return CallCost(
            layer=call.layer.name,
            forward_s=call.forward_s,
            backward_s=call.backward_s,
            weight_bytes=call.layer.nbytes,
            gradient_bytes=gradients.nbytes if gradients is not None else 0,
            boundary_bytes=call.boundary_bytes,
            activation_bytes=max(call.activation_bytes, call.kept_bytes),
            needs_backward=call.taped,
            kept_bytes=call.kept_bytes,
            reduced_bytes=gradients.travel_nbytes if gradients is not None and gradients.narrowed else None,
        )

    def reserve_for_layers(self) -> None:
        """Make the arenas large enough for a layer and the next one: without a plan, each call has a slot."""
        layers = self._context.model.layers
        weights = max((layer.nbytes for layer in layers), default=0)
        arena = weights + max((GradientLayout(layer).nbytes for layer in layers), default=0)
        limit = worker_bytes(self._options, self._devices)
        if limit is None or 2 * BESIDE * arena <= limit:
            arena *= BESIDE
        for worker in self._workers:
            worker.reserve(Reserved(arena), at_least=limit is None)

    def forget(self) -> None:
        """Drop the plan, to learn it again: other parameters are trained, or weights are used otherwise."""
        context = self._context
        context.gradients.drop()
        learned = context.learned
        learned.plan = learned.costs = learned.trace = None
        context.randomness.learning = True
        model = context.model
        begin_to_train(model.layers, model.buckets[0].masters, model.formats, apart=bool(self._options.staleness))
        for worker in self._workers:
            worker.forget()
        self.reserve_for_layers()
