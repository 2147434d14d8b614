"""Runs one call of a model in parts in evaluation; `evaluation_parts` decides which calls.

Beside tensors with a row for each sample, outputs may be losses, which are combined by their numbers of targets, and
key-value caches, which stay with the parts until somebody looks at them.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.planning.forward_plan import ForwardPlan
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.planning.span import Span
from lightning_roundpipe.runtime.batch import microbatches
from lightning_roundpipe.runtime.batch.known_losses import Weight, combined_losses
from lightning_roundpipe.runtime.batch.samples import listed_samples
from lightning_roundpipe.runtime.core.call import Call, Forward
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.sections import UserCodeSections
from lightning_roundpipe.runtime.core.trace import Trace, TracedCall
from lightning_roundpipe.runtime.core.turns import Slot, Slots
from lightning_roundpipe.runtime.core.worker_pool import GRACE
from lightning_roundpipe.runtime.layer_calls.arguments import flatten, is_cache, unflatten
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.modes.evaluation import Evaluation, wants_gradients
from lightning_roundpipe.runtime.modes.evaluation_user_code import EvaluationUserCode
from lightning_roundpipe.runtime.modes.model_call_stages import CallSlots, DirectionStages, ModelCallStages
from lightning_roundpipe.runtime.modes.model_calls import ModelCall
from lightning_roundpipe.runtime.modes.model_step import ModelStep
from lightning_roundpipe.runtime.modes.model_tasks import PartRun
from lightning_roundpipe.runtime.modes.parted_caches import join_later, parts_of, take_place
from lightning_roundpipe.runtime.threads.sync import Cancelled
from lightning_roundpipe.runtime.threads.task_thread import Task
from lightning_roundpipe.runtime.user_code.interception import calling
from lightning_roundpipe.runtime.user_code.module_state import SegmentKey

Branches = frozenset[tuple[Any, ...]]
"""Sequences of truth values and numbers of tensors that user code asked for."""


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
        plan: the stages over them.
        sizes: number of samples of each part.
        branches: the branches that parts may take.
        compared: the parts whose outputs are compared afterwards: these may take any branch, and the others any that
            one of these takes. If there are some, one more part comes last, with the samples of all of these.

    Attributes:
        unsplittable: whether a part failed or did what only a whole call may do; the output is then unusable.
    """

    def __init__(
        self, engine: EngineContext, evaluation: Evaluation, trace: Trace, plan: ForwardPlan,
        sizes: list[int], branches: Branches, compared: tuple[int, ...],
    ) -> None:  # fmt: skip
        super().__init__(engine, (0,), lambda _: sizes, isolated=False, recorder=evaluation.recorder)
        self.unsplittable = False
        self._part_sizes = sizes
        self._first_slot: int | None = None
        self.branches, self.compared = branches, compared
        self._trace, self._forward_plan = trace, plan
        self._device = evaluation.device
        self._unclosed = 1  # stands for the slots that are not made yet
        self._evaluated: list[_EvaluationPart] = []
        self._portion = ModelCallStages("", range(len(trace.calls)), plan.stages, ())

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
        self.branches |= self._taken(self.compared)
        self.unsplittable |= not self._taken(range(len(call.sizes))) <= self.branches

    def give_up(self, *_: Any, **__: Any) -> NoReturn:
        """Mark the call `unsplittable` and leave the part. It stands in for ``log`` and other callbacks."""
        self.unsplittable = True  # the model's code may catch any exception
        raise _Unsplittable

    def samples_of(self, part: int) -> int:
        return self._part_sizes[part]

    def _taken(self, parts: Sequence[int]) -> Branches:
        """Return the branches that ``parts`` took, with every prefix."""
        decisions = [run.mode.decisions for run in self._evaluated if run.index in parts]
        return frozenset(tuple(taken[: i + 1]) for taken in decisions for i in range(len(taken)))

    def made(self) -> list[int]:
        """Return which of the trace's calls a part has made, in order."""
        return sorted({index for run in self._evaluated for index in run.made})

    def _slots_for(self, call: ModelCall[PartRun], microbatches: int) -> tuple[ModelCallStages | None, Slots]:
        return self._portion, CallSlots(self._make_group("forward", self._forward_plan.stages, microbatches))

    def _part(
        self, index: int, slots: Slots, call: ModelCall[PartRun], portion: ModelCallStages | None, device: Device | None
    ) -> PartRun:
        part = _EvaluationPart(self, index, self._trace, slots, call, portion, None, device)
        self._evaluated.append(part)
        return part

    def _worker_of(self, index: int, layers: Sequence[HostLayer]) -> int:
        """Return the same worker for the same stage of every call, so that caches stay where they are."""
        if self._first_slot is None:
            self._first_slot = index
        return super()._worker_of(index - self._first_slot, layers)

    def _rounds_of(self, way: DirectionStages, trace: Trace, microbatches: int) -> list[list[Slot]]:
        """Return the slots of each share of the microbatches, which have those before the spread stages in common."""
        plan, stages = self._forward_plan, way.stages
        shares = plan.shares(self._part_sizes)
        shared = [self._slot_of(stage, trace, range(microbatches), 0, None) for stage in stages[: plan.first_spread]]
        spread = [
            [self._slot_of(stage, trace, share, 0, None) for share in shares] for stage in stages[plan.first_spread :]
        ]
        return [[*shared, *mine] for mine in zip(*spread, strict=True)]

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

    It has the collaborators of a microbatch, because that is what it is, without backward.

    An error in one part marks the whole call `EvaluationStep.unsplittable`, and the other parts leave at their next
    layer call.
    """

    def __init__(self, step: EvaluationStep, *args: Any) -> None:
        super().__init__(step.engine, step, *args)
        self._prefetcher.departs = self._prefetcher.offloads = False
        self._evaluation_step = step
        self.segments = _EvaluationSections(step.engine, step.spec, self.index, learning=False)
        self.made: list[int] = []
        """Which calls of the trace it has made."""
        self.weights: list[Weight | None] = []
        """Of each leaf of the output, how it counts beside those of other parts if it is a loss."""
        self.firsts: list[int] = []
        """Of each leaf of the output, the place of the first one that is the same object."""
        self.mode: EvaluationUserCode = EvaluationUserCode(
            step.engine, step.give_up, self.segments.paused, self._decided, step.samples_of(self.index)
        )

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
        if self._evaluation_step.unsplittable or wants_gradients():
            self._evaluation_step.give_up()
        return super().call(layer, args, kwargs)

    def _seed_of(self, layer: HostLayer) -> None:
        return None

    def _next(self, layer: HostLayer, *, can_tape: bool) -> tuple[int, TracedCall]:
        index, traced = super()._next(layer, can_tape=can_tape)
        self.made.append(index)
        return index, traced

    def _run_forward(self, call: Call, recorded: RecordedCall | None, traced: TracedCall) -> tuple[Forward, Slot]:
        forward, slot = super()._run_forward(call, recorded, traced)
        if forward.side_outputs or forward.mutated:
            self._evaluation_step.give_up()  # what is written is the whole batch's; user code has not seen it yet
        return forward, slot

    def _give(self, output: Any) -> None:
        first: dict[int, int] = {}
        self.firsts = [first.setdefault(id(leaf), place) for place, leaf in enumerate(flatten(output)[0])]
        super()._give(output)
        losses = self.mode.losses
        self.weights = [losses.weight_of(leaf) if is_number(leaf) else None for leaf in self.outputs[0]]
        losses.clear()

    def _decided(self, decisions: list[Any]) -> None:
        """Refuse what user code does after ``decisions``, if no compared part can vouch for it."""
        if not self._evaluation_step.compared and tuple(decisions) not in self._evaluation_step.branches:
            self._evaluation_step.give_up()


class EvaluatedCall(ModelCall[PartRun]):
    """A call of a model in evaluation: it also cuts and merges key-value caches, and merges losses.

    Attributes:
        cache: the key-value cache that the call is given; None if there is none.
        caches: that of each part.
        alike: whether an output has no row for each sample and is no known loss, but is the same for all parts.
        settle: waits until the devices have filled the caches.
    """

    cache: Any = None
    caches: list[Any]
    alike: bool = False
    settle: Callable[[], None]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._merged: dict[int, tuple[Tensor, bool]] = {}
        """By place, the output's tensors for the whole batch, and whether they have a row for each sample."""

    def split_with_cache(
        self, args: Any, kwargs: Any, sizes_of: Callable[[int], list[int]], masters: Collection[int],
        locate: Callable[[Tensor], Device | None],
    ) -> list[tuple[Any, Any]]:  # fmt: skip
        """Return the arguments of each part, as `split`, if a key-value cache may be among them.

        Raises:
            RoundPipeError: if the cache cannot be cut, or there are several.
        """
        leaves, spec = flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if is_cache(leaf)]
        if not places:
            return self.split(args, kwargs, sizes_of, masters, locate)
        self.cache, whole = leaves[places[0]], without_caches(leaves, spec)
        parts = self.split(*whole, sizes_of, masters, locate)
        caches = parts_of(self.cache, self.sizes) if len(places) == 1 else None
        if caches is None:
            raise RoundPipeError(f"{self.what} is given a {type(self.cache).__name__} that cannot be cut.")
        self.caches = caches
        return [_with_leaf(part, places[0], cache) for part, cache in zip(parts, caches, strict=True)]

    def keep_cache(self) -> None:
        """Let the cache that user code gave stand for those of the parts."""
        if self.cache is not None:
            take_place(self.cache, self.caches, self.sizes, self.settle)

    def part_of_parts(self, args: Any, kwargs: Any, parts: Sequence[int], masters: Collection[int]) -> tuple[Any, Any]:
        """Return the arguments of the samples of ``parts`` together; see `split`."""
        ranges = [microbatches.rows_of(self.sizes)[part] for part in parts]
        samples, listed = sum(self.sizes), listed_samples((args, kwargs)) is not None
        taken: dict[int, Any] = {}

        def take(value: Any, rows: microbatches.Rows | None) -> Any:
            if rows is None or id(value) in masters:
                return value
            if id(value) not in taken:
                taken[id(value)] = torch.cat([value[part] for part in ranges])
            return taken[id(value)]

        rows = [row for part in ranges for row in range(part.start, part.stop)]
        found: tuple[Any, Any] = microbatches.part_of((args, kwargs), rows, samples, listed, take)
        return found

    def only(self, parts: Sequence[int]) -> EvaluatedCall:
        """Return the call of ``parts`` alone."""
        runs = [copy.copy(self.runs[part]) for part in parts]  # `merge` takes outputs
        return self._of(runs, [self.sizes[part] for part in parts])

    def pop_last(self, size: int) -> EvaluatedCall:
        """Take the last part, of ``size`` samples, out of this call, and return it as a call by itself."""
        return self._of([self.runs.pop()], [size])

    def _of(self, runs: list[PartRun], sizes: list[int]) -> EvaluatedCall:
        fresh = EvaluatedCall(self.name, self.number, self.thread_state)
        fresh.settle, fresh.sizes, fresh.runs = self.settle, sizes, runs
        return fresh

    def _merge(self, parts: list[Tensor], place: int) -> Tensor:
        firsts = {run.firsts[place] for run in self.runs if isinstance(run, _EvaluationPart)}
        if len(firsts) == 1 and (known := self._merged.get(firsts.pop())) is not None:
            self.rows.append(known[1])  # one object, to which the caller may write by either name
            return known[0]
        whole = self._merge_apart(parts, place)
        self._merged[place] = whole, self.rows[-1]
        return whole

    def _merge_apart(self, parts: list[Tensor], place: int) -> Tensor:
        weights = [run.weights[place] for run in self.runs if isinstance(run, _EvaluationPart)]
        if not is_number(parts[0]) or any(weight is None for weight in weights):
            merged = super()._merge(parts, place)
            self.alike |= not self.rows[-1]
            return merged
        self.rows.append(False)
        with torch.no_grad():
            total = combined_losses(parts, weights)
        if total is None:
            raise RoundPipeError(f"{self.what} returns losses of which some are sums and others are means.")
        return total

    def _unmerged(self, error: RoundPipeError) -> Tensor:
        raise error  # the call is then made whole

    def _merge_others(self, parts: list[Any]) -> Any:
        if self.cache is not None and all(map(operator.is_, parts, self.caches)):
            return self.cache
        if is_cache(parts[0]):
            return join_later(parts, self.sizes, self.settle)
        return super()._merge_others(parts)


def without_caches(leaves: list[Any], spec: TreeSpec) -> tuple[Any, Any]:
    """Return a call's arguments with None in place of key-value caches."""
    args, kwargs = unflatten([None if is_cache(leaf) else leaf for leaf in leaves], spec)
    return args, kwargs


def _with_leaf(value: Any, place: int, leaf: Any) -> Any:
    leaves, spec = flatten(value)
    leaves[place] = leaf
    return unflatten(leaves, spec)


def is_number(leaf: Any) -> bool:
    """Return whether an output is a single number, as losses are."""
    return isinstance(leaf, Tensor) and not leaf.dim() and leaf.is_floating_point()


class _EvaluationSections(UserCodeSections):
    """Sections of user code under the lock, without a random state or module state of their own."""

    def enter(
        self, slot: int, segment_key: SegmentKey | None, device: Device | None, what: str, *, off_trace: bool
    ) -> None:
        self._slot, self._segment_key = slot, segment_key
        self._take_lock()
        self._activate(device)
