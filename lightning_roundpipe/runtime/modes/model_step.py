"""A step that runs training_step once, on the whole batch, and cuts its calls of the model.

For losses that need all samples at once. The whole batch has a thread, and so has each microbatch number; the latter
are idle between two calls of the model. A call shows into how many microbatches it is cut, so its forward slots are
made when it comes. The slots of the backward are made at the last call of the trace, or when the loss is there if
training_step leaves that call out.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.span import Span
from lightning_roundpipe.runtime.batch.logs import gathered, issue
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.microbatch import MicrobatchTask
from lightning_roundpipe.runtime.core.slots_on_arrival import SlotsOnArrival
from lightning_roundpipe.runtime.core.step import Step
from lightning_roundpipe.runtime.core.trace import Trace
from lightning_roundpipe.runtime.core.turns import PlannedSlots, Slot, Slots
from lightning_roundpipe.runtime.modes.model_call_stages import CallSlots, DirectionStages, ModelCallStages, portions_of
from lightning_roundpipe.runtime.modes.model_calls import ModelCall
from lightning_roundpipe.runtime.modes.model_tasks import PartRun, WholeRun
from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.threads.task_thread import Task

MANY = 2**20
"""More microbatches than a step has."""


class ModelStep(Step):
    """The step of one batch whose model calls are cut.

    It has many collaborators because it runs two kinds of tasks (the whole batch and the parts), with slots made
    call by call beside those of `Step`.

    Args:
        engine: the context that outlives the step.
        seed: numbers that identify the batch.
        sizes_for: returns the sizes of the microbatches for a call's number of samples.
        updates, before, overlaps, isolated, recorder: see `Step`.
    """

    def __init__(
        self, engine: EngineContext, seed: tuple[int, ...], sizes_for: Callable[[int], list[int]],
        updates: AsyncOptimizer | None = None, before: Step | None = None, *, overlaps: bool = False,
        isolated: bool = True, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            engine, seed, [1], None, updates, before, overlaps=overlaps, cut=True, isolated=isolated, recorder=recorder
        )
        self.sizes_for = sizes_for
        self.calls: list[ModelCall[PartRun]] = []
        self._parts: list[PartRun] = []
        self._last: dict[int, PartRun] = {}
        """By microbatch number, the last part that ran under it."""
        self._trace: Trace | None = None
        self._portions: list[ModelCallStages] = []
        self._next_portion = 0
        self._forward_of: list[tuple[ModelCallStages, CallSlots, int]] = []
        """Calls so far whose backward has no slots yet: their stages, slots and number of microbatches."""
        self._arriving: Slots | None = None
        """The slots of all calls, made one by one, if there is no plan."""

    @staticmethod
    def _count_of(sizes: Sequence[int]) -> int:
        return MANY  # a call shows only when it comes into how many it is cut

    @property
    def everybody(self) -> Sequence[MicrobatchTask]:
        return [*self.runs, *self._parts]

    @property
    def traces(self) -> list[Trace]:
        traces = [self._last[index].trace for index in sorted(self._last)] or [Trace()]
        if self._trace is None:
            for trace in traces:
                trace.portions = [call.name for call in self.calls]
        return traces

    # -- running ------------------------------------------------------------------------------------------------------

    def run_planned(self, plan: Plan, trace: Trace, function: Callable[..., Any], args: list[tuple[Any, ...]]) -> None:
        self.plan, self._trace = plan, trace
        self._portions = portions_of(plan, trace)
        self._unclosed = self._running = 1  # the one unclosed slot stands for those that are not made yet
        self.runs = [WholeRun(self.engine, self, CallSlots(None))]
        self._join(function, args, together=True)

    def run_one_by_one(self, function: Callable[..., Any], args: list[tuple[Any, ...]]) -> None:
        slots = SlotsOnArrival(self._make_slot, self._prepare, self._cancel, self._open, self._close)
        self._arriving, self._running = slots, 1
        self.runs = [WholeRun(self.engine, self, slots)]
        self._join(function, args, together=True)

    def ended(self) -> None:
        super().ended()
        if self.plan is not None:
            self._closed()

    def is_fused(self, call: int) -> bool:
        return False

    # -- calls of the model, in the whole batch's thread --------------------------------------------------------------

    def forward(
        self,
        call: ModelCall[PartRun],
        function: Callable[..., Any],
        parts: list[tuple[Any, Any]],
        device: Device | None,
    ) -> None:
        """Run the forward of ``call`` in parts.

        Args:
            call: the call, already split.
            function: the model's forward.
            parts: the arguments of each part.
            device: the device that the arguments are on.
        """
        portion, slots = self._slots_for(call, len(parts))
        if self.spec.module_state is not None:
            self.spec.module_state.begin()
        call.runs = [self._part(m, slots, call, portion, device) for m in range(len(parts))]
        self.calls.append(call)
        self._parts += call.runs
        self._last.update(enumerate(call.runs))
        if len(parts) > len(self.sizes) or len(self.calls) == 1:
            self.sizes = call.sizes
        before = [None, *(run.started for run in call.runs)]
        contexts = [contextvars.copy_context() for _ in parts]
        self._run_all(
            [
                lambda run=run, part=part, context=context, b=b: run.forward(function, *part, context, b)  # type: ignore[misc]
                for run, part, context, b in zip(call.runs, parts, contexts, before, strict=False)
            ]
        )
        if self.spec.module_state is not None and (last := call.runs[-1].kept) is not None:
            self.spec.module_state.end([last], call.sizes[-1:])

    def _part(
        self, index: int, slots: Slots, call: ModelCall[PartRun], portion: ModelCallStages | None, device: Device | None
    ) -> PartRun:
        return PartRun(self.engine, self, index, self._trace, slots, call, portion, self._last.get(index), device)

    def back(self, call: ModelCall[PartRun], grads: list[list[Tensor | None]], factor: float) -> None:
        """Run the backward of ``call`` from the gradients of each part's outputs.

        Args:
            call: the call.
            grads: per part, the gradients of its outputs.
            factor: what the gradients of weights still have to be multiplied by.
        """
        self._run_all(
            [
                lambda run=run, grads=mine: run.back(grads, call.home, factor)  # type: ignore[misc]
                for run, mine in zip(call.runs, grads, strict=True)
            ]
        )

    def _run_all(self, work: list[Callable[[], None]]) -> None:
        """Run each on its microbatch's thread; without a plan, one after another."""
        tasks: list[Task[None]] = []
        for index, function in enumerate(work):
            tasks.append(self.engine.worker_pool.thread(1 + index).submit(function))
            if self.plan is None:
                tasks[-1].waiter.wait()
        for task in tasks:  # a failure of the step cancels them, so they always end
            task.waiter.wait()
        self.cancel_scope.check()

    # -- slots --------------------------------------------------------------------------------------------------------

    def _slots_for(self, call: ModelCall[PartRun], microbatches: int) -> tuple[ModelCallStages | None, Slots]:
        if self._arriving is not None:
            return None, self._arriving
        portion = self._find(call)
        slots = CallSlots(self._make_group("forward", portion.forward, microbatches))
        self._forward_of.append((portion, slots, microbatches))
        if self._next_portion == len(self._portions):
            self.expect_backward()
        return portion, slots

    def _find(self, call: ModelCall[PartRun]) -> ModelCallStages:
        """Return the stages of ``call``: those of the next call of that model in the trace."""
        for number in range(self._next_portion, len(self._portions)):
            if self._portions[number].name == call.name:
                self._next_portion = number + 1
                return self._portions[number]
        known = ", ".join(repr(portion.name) for portion in self._portions)
        raise RoundPipeError(
            f"training_step called {call.name!r} where the first batches did not: they called {known}, in this order. "
            "With microbatch_scope='model' each batch must do so (it may leave some out). Set num_microbatches=1, "
            "without a plan, which allows any control flow."
        )

    def expect_backward(self) -> None:
        """Make the backward slots of all calls that have none yet, those of the last call first."""
        waiting, self._forward_of = self._forward_of, []
        if self.plan is not None:
            for portion, slots, microbatches in reversed(waiting):
                slots.back = self._make_group("backward", portion.backward, microbatches)

    def _make_group(self, phase: Phase, spans: tuple[Span, ...], microbatches: int) -> PlannedSlots | None:
        """Append the slots of one direction of a call to the global sequence."""
        if not spans:
            return None
        assert self.plan is not None and self._trace is not None
        way = DirectionStages(phase, spans)
        rounds = self._rounds_of(way, self._trace, microbatches)
        slots = sorted({slot for row in rounds for slot in row}, key=lambda slot: slot.index)
        with self._counting:
            self._unclosed += len(slots)
        self.slots += slots
        self.readiness.expect(slots, uploads=bool(self.engine.options.staleness))
        group = PlannedSlots(rounds, way, self.cancel_scope, self._close)
        for index, queue in enumerate(self.engine.worker_pool.queues):
            queue.append((slot for slot in slots if slot.worker == index), self._close)
        return group

    def _rounds_of(self, way: DirectionStages, trace: Trace, microbatches: int) -> list[list[Slot]]:
        assert self.plan is not None
        return self._make_rounds(way.stages, trace, microbatches, self.plan.round_microbatches)

    # -- the outcome --------------------------------------------------------------------------------------------------

    def finish(self) -> Any:
        for call in self.calls:  # issue what the model's own forward has logged
            sizes = [float(size) for size in call.sizes]
            issue(self.engine.model.module, gathered([run.logs for run in call.runs]), call.sizes, sizes)
        return super().finish()

    def release(self) -> None:
        super().release()
        for call in self.calls:  # break the cycle of calls and parts
            call.runs, call.arguments = [], []
        self.calls, self._parts, self._last, self._forward_of = [], [], {}, []
