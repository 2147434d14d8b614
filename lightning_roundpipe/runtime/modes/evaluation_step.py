"""Runs one call of a model in parts in evaluation; `evaluation_parts` decides which calls."""

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
"""Sequences of truth values of tensors that user code branched on."""


class _Unsplittable(BaseException):
    """Raised where a part does what only a whole call may do. No ``Exception``, so that user code does not catch it."""


class EvaluationStep(ModelStep):
    """One call of a model in evaluation, in parts.

    It takes the slots and threads of a training step and the device and recorder of an evaluation, hence collaborators
    of both.

    Args:
        engine: the context that outlives the call.
        evaluation: the batch's evaluation.
        trace: the layer calls that each part makes.
        spans: the stages over them.
        sizes_for: see `ModelStep`.
        branches: the branches that parts may take. A frozenset allows only those in it; a set allows any and records
            them.

    Attributes:
        unsplittable: whether a part failed or did what only a whole call may do; the output is then unusable.
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
        self._unclosed = 1  # stands for the slots that are not made yet
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
    """A part of the call. Its layers run unseeded, as examined models do not draw.

    An error in one part marks the whole call `EvaluationStep.unsplittable`, and the other parts leave at their next
    layer call.
    """

    def __init__(self, step: EvaluationStep, *args: Any) -> None:
        super().__init__(step.engine, step, *args)
        self._evaluation_step = step
        self.segments = _EvaluationSections(step.engine, step.spec, self.index, learning=False)
        self.mode = EvaluationUserCode(step.engine, raise_unsplittable, self.segments.paused, self._decided)

    def forward(
        self, function: Callable[..., Any], args: Any, kwargs: Any, context: Any, predecessor: Waiter | None
    ) -> None:
        try:
            with calling(self):  # parts leave nothing behind, so none waits for its predecessor
                try:
                    context.run(self._go, function, args, kwargs)
                finally:
                    self.segments.close()
        except Cancelled:
            pass
        except BaseException:  # an error of the model's own is raised again by the whole call
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
        """Record, or refuse, the branch that user code takes after ``decisions``."""
        branches, branch = self._evaluation_step.branches, tuple(decisions)
        if isinstance(branches, set):
            branches.add(branch)
        elif branch not in branches:
            raise_unsplittable()


class _EvaluationSections(UserCodeSections):
    """Sections of user code under the lock, without a random state or module state of their own."""

    def enter(
        self, slot: int, segment_key: SegmentKey | None, device: Device | None, what: str, *, off_trace: bool
    ) -> None:
        self._slot, self._segment_key = slot, segment_key
        self._take_lock()
        self._activate(device)


def raise_unsplittable(*_: Any, **__: Any) -> None:
    """Raise `_Unsplittable`, whatever the arguments: stands in for ``log`` and other callbacks."""
    raise _Unsplittable
