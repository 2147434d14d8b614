"""A call of the model in evaluation, in parts; see `evaluation_parts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_roundpipe.devices import Device
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.span import Span
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.sections import UserCodeSections
from lightning_roundpipe.runtime.core.trace import Trace
from lightning_roundpipe.runtime.core.turns import Slots
from lightning_roundpipe.runtime.core.worker_pool import GRACE
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.modes.evaluation import Evaluation
from lightning_roundpipe.runtime.modes.evaluation_user_code import EvaluationUserCode
from lightning_roundpipe.runtime.modes.model_call_stages import CallSlots, ModelCallStages
from lightning_roundpipe.runtime.modes.model_calls import ModelCall
from lightning_roundpipe.runtime.modes.model_step import ModelStep
from lightning_roundpipe.runtime.modes.model_tasks import PartRun
from lightning_roundpipe.runtime.threads.sync import Cancelled, Waiter
from lightning_roundpipe.runtime.threads.task_thread import Task
from lightning_roundpipe.runtime.user_code.interception import calling
from lightning_roundpipe.runtime.user_code.module_state import SegmentKey

Branches = set[tuple[bool, ...]] | frozenset[tuple[bool, ...]]
"""Truth values of tensors, one after another, that code went by."""


class _Unsplittable(BaseException):
    """A part does what it may not do in parts. Not an ``Exception``, so that user code does not catch it."""


class EvaluationStep(ModelStep):
    """One call of the model, in parts.

    Args:
        engine: what outlives it.
        evaluation: that it belongs to.
        trace: the layers that parts call.
        spans: of its stages.
        sizes_for: see `ModelStep`.
        branches: that the code of parts may take; a set is added to, and they may take any.

    Attributes:
        unsplittable: whether a part did what it may not do.
    """

    def __init__(
        self, engine: EngineContext, evaluation: Evaluation, trace: Trace, spans: tuple[Span, ...],
        sizes_for: Callable[[int], list[int]], branches: Branches,
    ) -> None:  # fmt: skip
        super().__init__(engine, (0,), sizes_for, isolated=False, recorder=evaluation.recorder)
        self.unsplittable = False
        self.branches = branches
        self._trace, self._spans = trace, spans
        self._device = evaluation.device
        self._unclosed = 1  # that stands for those that are not made yet
        self._portion = ModelCallStages("", range(len(trace.calls)), spans, ())

    def run_parts(self, call: ModelCall[PartRun], function: Callable[..., Any], parts: list[tuple[Any, Any]]) -> None:
        self.plan = Plan((), Span(0, len(self._portion.calls) - 1), (), len(parts))
        try:
            self.forward(call, function, parts, self._device)
            self._closed()
            self.engine.worker_pool.wait(self._all_closed, self.cancel_scope, unless_failed=True)
        except BaseException as error:  # Ctrl-C, or the watchdog
            self.cancel_scope.fail(error)
        if self.cancel_scope.failed:
            for queue in self.engine.worker_pool.queues:
                queue.clear()
        self.cancel_scope.raise_error()

    def _slots_for(self, call: ModelCall[PartRun], microbatches: int) -> tuple[ModelCallStages | None, Slots]:
        return self._portion, CallSlots(self._make_group("forward", self._spans, microbatches))

    def _part(
        self, index: int, slots: Slots, call: ModelCall[PartRun], portion: ModelCallStages | None, device: Device | None
    ) -> PartRun:
        return _EvaluationPart(self, index, self._trace, slots, call, portion, None, device)

    def _run_all(self, work: list[Callable[[], None]]) -> None:
        tasks: list[Task[None]] = []
        try:
            tasks += [self.engine.worker_pool.thread(1 + i).submit(function) for i, function in enumerate(work)]
            for task in tasks:
                self.engine.worker_pool.wait(task.waiter, self.cancel_scope)
        except BaseException as error:
            self.cancel_scope.fail(error)
            for task in tasks:
                task.waiter.wait_for(GRACE)
            raise


class _EvaluationPart(PartRun):
    """Draws from nobody's generator, as the model does not; what it may not do ends it, and all others."""

    def __init__(self, step: EvaluationStep, *args: Any) -> None:
        super().__init__(step.engine, step, *args)
        self._evaluation_step = step
        self.segments = _EvaluationSections(step.engine, step.spec, self.index, learning=False)
        self.mode = EvaluationUserCode(step.engine, raise_unsplittable, self.segments.paused, self._decided)

    def forward(
        self, function: Callable[..., Any], args: Any, kwargs: Any, context: Any, predecessor: Waiter | None
    ) -> None:
        try:
            with calling(self):  # in any order, as they leave nothing behind
                try:
                    context.run(self._go, function, args, kwargs)
                finally:
                    self.segments.close()
        except Cancelled:
            pass
        except BaseException:  # if it is the model's own, it comes again when the call is made whole
            self._evaluation_step.unsplittable = True
        finally:
            self._announce()
            self._slots.finish(self.index)

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._evaluation_step.unsplittable:
            raise _Unsplittable
        return super().call(layer, args, kwargs)

    def _seed_of(self, layer: HostLayer) -> None:
        return None

    def _decided(self, decisions: list[bool]) -> None:
        """Its code goes by a tensor's truth value, the last of these."""
        branches, branch = self._evaluation_step.branches, tuple(decisions)
        if isinstance(branches, set):
            branches.add(branch)
        elif branch not in branches:
            raise_unsplittable()


class _EvaluationSections(UserCodeSections):
    """User code without a random state of its own."""

    def enter(
        self, slot: int, segment_key: SegmentKey | None, device: Device | None, what: str, *, off_trace: bool
    ) -> None:
        self._slot, self._segment_key = slot, segment_key
        self._take_lock()
        self._around.callback(self._give_lock)
        self._around.enter_context((device or self._engine.worker_pool.devices[0]).activate())


def raise_unsplittable(*_: Any, **__: Any) -> None:
    """What may not be done in parts."""
    raise _Unsplittable
