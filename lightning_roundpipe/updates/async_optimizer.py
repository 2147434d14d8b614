"""The optimizer on a thread of its own: steps each bucket as its gradients arrive, and the next forward follows it.

    main thread: begin ── losses ── submit ── [1]             the batch ends in an optimizer step; backward goes on
    optimizer thread, bucket by bucket as they become ready, of several the first in forward order:
        take the gradients from host memory ── add what earlier batches have accumulated ── [2]
        with clipping by norm or loss scaling: wait for all buckets, as all norms, or whether all gradients are finite,
        must be known before any bucket is stepped; then step all or none, in forward order ── [3]
        step ── give the gradients' memory back ── publish the version ── [4]
        a large bucket, without clipping by norm or loss scaling: part by part, each as soon as it has arrived ── [5]
    worker: uploads of the next step wait for the version of their own layer only

A batch is followed by an optimizer step, or its gradients are accumulated; `submit`, or the `begin` of the next batch,
decides which. `submit` takes a snapshot of the hyperparameters, as schedulers change them afterwards.

With staleness 1 a step computes with working copies of the masters. An update is published once the next step has made
its last upload of the bucket. That is long before that step's gradients of the bucket are ready; published only then,
the update would make the step behind wait for its end.

With several machines, `GradientExchange` sums the gradients between [1] and [2]: the thread takes buckets in the same
order on each machine, and steps one when its sum has arrived, while the next ones are computed and on their way.

No deadlock: the thread waits only for the backward of a batch, which needs only updates submitted before that batch.
"""

from __future__ import annotations

import functools
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.errors import StreamAborted
from lightning_roundpipe.faults.interrupts import interrupts_deferred
from lightning_roundpipe.memory import grad_buffers
from lightning_roundpipe.memory.grad_buffers import GradientPool
from lightning_roundpipe.memory.loss_scale import Scales
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.optim.clipping import Clip, clamp, coefficient, norms, scale
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.packed_moments import FP32
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer
from lightning_roundpipe.optim.scaling import unscale
from lightning_roundpipe.optim.split_masters import SplitTensor
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.threads.task_thread import TaskThread
from lightning_roundpipe.updates.grad_readiness import Dropped
from lightning_roundpipe.updates.gradient_exchange import GradientExchange
from lightning_roundpipe.updates.loss_handle import StepGradients
from lightning_roundpipe.updates.window_gradients import WindowGradients

PIECE = 16_000_000
"""Parameters to step in one call at most, if several buckets are ready. A call costs 0.1 ms of Python with Adam, and
0.5 ms with other optimizers. A full piece takes about 10 ms, and the next forward of all its layers waits for that."""
TORN = "which has changed some layers and not others; go on from a checkpoint."
_REMEMBERED = 4
"""Number of updates whose end is remembered: a report, read while steps overlap, is about an earlier step."""
LOOK = 0.25
"""Seconds between two checks that the thread is alive."""


@dataclass(frozen=True)
class _OptimizerStep:
    """One optimizer step.

    Attributes:
        number: the version of the weights that it makes.
        batch: the gradients of its last batch; None if that gave none.
        hyperparameters: a snapshot of when the step was submitted.
        clip: how to clip gradients; None leaves them.
        partial_optimizer: steps some of the optimizer's parameters.
        scale: the loss scale, which the gradients of all its batches were multiplied by.
        outside: ids of the masters that the optimizer does not hold, whose gradients its ``zero_grad`` does not drop.
        keeps: see ``AsyncOptimizer.keeps_gradients``.
    """

    number: int
    batch: StepGradients | None
    hyperparameters: Hyperparameters
    clip: Clip | None
    partial_optimizer: PartialOptimizer
    scale: float
    outside: AbstractSet[int]
    keeps: bool

    def held(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the ``gradients`` of the optimizer's parameters, in its order: only they are clipped."""
        return {key: gradients[key] for key in self.hyperparameters.group_of if key in gradients}


class AsyncOptimizer:
    """Applies gradients to masters, in the order of the batches.

    Args:
        buckets: all buckets of the model, in forward order.
        pool: the memory of gradients, in which downloads wait for updates.
        optimizer: returns the one that the next step will use, which user code may replace; None if there is none.
        staleness: 0: a step computes with all updates before it. 1: with all but the last, which is applied meanwhile.
        scales: the loss scales.
        around: returns a context that the thread enters for as long as it lives.
        exchange: sums gradients over several machines; None if there is only one.
        form: how moments are kept, one of `config.OPTIMIZER_STATES`.

    Attributes:
        gradients: what batches have accumulated, and what ``.grad`` shows between steps. Call `settle` before its
            methods for the main thread.
        keeps_gradients: whether the gradients that a step has used stay until the next batch, for ``gradients.show``.
            Otherwise the gradients of other layers take their memory.
        submitted: the number of optimizer steps submitted, which is the version of the newest weights.
        torn: whether the last update was cut short, by a failing backward, after some buckets had been stepped.
        whole: whether no submitted update has failed or was left out.
        applied: the last updates that are applied, by number, each with when it was, on the clock of
            ``time.perf_counter()``.
    """

    def __init__(
        self,
        buckets: Sequence[ParamBucket],
        pool: GradientPool,
        optimizer: Callable[[], Optimizer | None] = lambda: None,
        staleness: int = 0,
        scales: Scales | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        exchange: GradientExchange | None = None,
        form: str = FP32,
    ) -> None:
        self._form = form
        self.mapped: set[int] = set()
        """Ids of the masters whose state lies in the file of a checkpoint, until their first update."""
        self._exchange, self._pool = exchange, pool
        self.keeps_gradients = True
        self.buckets = list(buckets)
        self.staleness = staleness
        self._first = self.submitted = max(bucket.version for bucket in self.buckets)  # an earlier instance's, or 0
        self.torn = self._applying = False
        self.whole = True
        self._optimizer = optimizer
        self.applied: dict[int, float] = {}
        self._cancel_scopes: list[CancelScope] = []
        self._thread = TaskThread("roundpipe-optimizer", around)
        self._error: BaseException | None = None
        self._batch: StepGradients | None = None
        self.gradients = WindowGradients(self.buckets, self._outside)
        self._masters = {id(master): master for bucket in self.buckets for master in bucket.masters}
        self._bucket_of = {id(master): bucket for bucket in self.buckets for master in bucket.masters}
        self._sizes = {bucket: sum(master.numel() for master in bucket.masters) for bucket in buckets}
        self._nbytes = {bucket: sum(master.nbytes for master in bucket.masters) for bucket in buckets}
        self._partial_optimizer: tuple[Optimizer, PartialOptimizer] | None = None
        self._scales = scales or Scales()
        self._scales.fix(self.wanted, self.submitted)

    # -- the main thread ----------------------------------------------------------------------------------------------

    def begin(self, *, zero_grad: bool) -> None:
        """Prepare for a batch. If no step has followed the one before it, that one is accumulated.

        Args:
            zero_grad: whether to drop what was accumulated, as ``Optimizer.zero_grad`` does.

        Raises:
            Exception: what an update has raised.
        """
        self.raise_error()
        self.gradients.hide()
        self._accumulate()
        if zero_grad:
            self.gradients.is_open = False
            outside = self._outside()
            self._post(lambda: self.gradients.forget(outside))

    def accompany(self, cancel_scope: CancelScope) -> None:
        """Fail a running step when an update fails: it would wait for a version that is never published."""
        self._cancel_scopes = [*self._cancel_scopes, cancel_scope]
        # An update may have failed since `begin` looked. Each thread writes its own field (this list, or the error)
        # before it reads the other's, so at least one of them sees both.
        if (error := self._error) is not None:
            cancel_scope.fail(error)

    def part_from(self, cancel_scope: CancelScope) -> None:
        """End what `accompany` began: the step is over."""
        self._cancel_scopes = [other for other in self._cancel_scopes if other is not cancel_scope]

    def offer(self, gradients: StepGradients) -> None:
        """Take the gradients of a batch, whose loss may be differentiated later or not at all."""
        self._batch = gradients

    @interrupts_deferred()
    def submit(self, clip: Clip | None) -> None:
        """Submit the optimizer step that follows the batch [1]."""
        batch = self._take_batch()
        self.submitted += 1
        optimizer = self._optimizer()
        assert optimizer is not None, "a step has an optimizer"
        self.gradients.is_open = False
        scale, partial_optimizer = self._scales.last, self._partial_optimizer_of(optimizer)
        values, outside = Hyperparameters.of(optimizer), self._outside()
        keeps = self.keeps_gradients
        step = _OptimizerStep(self.submitted, batch, values, clip, partial_optimizer, scale, outside, keeps)
        self._post(lambda: self._run(step))

    @property
    def begun(self) -> bool:
        """Whether an optimizer step was submitted."""
        return self.submitted > self._first

    @property
    def wanted(self) -> int:
        """The version of the weights that the next step computes with."""
        return max(0, self.submitted - self.staleness)

    def publish_all(self) -> None:
        """Let the next step see all updates, whatever the staleness, and user code's writes. Call `settle` first."""
        self.gradients.multiply(self._scales.fix(self.wanted, self.submitted))
        for bucket in self.buckets:
            bucket.refresh()
            bucket.publish(self.submitted)

    def settle(self, *, within_batch: bool = False) -> None:
        """Wait until everything submitted has been applied.

        Args:
            within_batch: whether the last batch goes on, and its loss may still be differentiated: its gradients stay
                apart from those of earlier batches.

        Raises:
            Exception: what an update has raised; once.
        """
        if not within_batch:
            self._accumulate()
        self._rest()
        self.raise_error()

    def release_masters(self) -> None:
        """Drop all references to the memory of masters. Call `settle` first."""
        if self._partial_optimizer is not None:
            self._partial_optimizer[1].release()

    def drop(self, error: BaseException) -> None:
        """After a failed step, finish what was submitted and drop the gradients of its batch.

        Args:
            error: the error of the step. It gets a note if some layers had been stepped already.
        """
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.release()
        self._rest()
        if self._error is error:  # an update has failed the step, which raises it
            self._error = None
        if self.torn:
            error.add_note(f"roundpipe: the backward pass was running and its optimizer step had begun, {TORN}")

    def raise_error(self) -> None:
        """Raise what an update has raised, once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def retire(self) -> None:
        """Settle, publish all updates and stop the thread. From here on the caller steps."""
        self.settle()
        self.publish_all()
        self.close()

    def close(self) -> None:
        """Finish what was submitted, and join the thread."""
        self._thread.stop()
        self._thread.join()

    def _accumulate(self) -> None:
        if (batch := self._take_batch()) is not None:
            self.gradients.is_open = True
            self._post(lambda: self._add(batch))

    def _take_batch(self) -> StepGradients | None:
        """Return the last batch's gradients, once; None if there are none, as when its loss was not differentiated."""
        batch, self._batch = self._batch, None
        if batch is not None and batch.scale is None:
            batch.release()
            return None
        return batch

    def _rest(self) -> None:
        waiter = self._thread.submit(lambda: None).waiter
        while not waiter.wait_for(LOOK):
            if not self._thread.alive:
                raise RoundPipeError(f"the optimizer's thread has died ({self._thread.died!r})") from self._thread.died

    def _partial_optimizer_of(self, optimizer: Optimizer) -> PartialOptimizer:
        if self._partial_optimizer is None or self._partial_optimizer[0] is not optimizer:
            self._partial_optimizer = (
                optimizer,
                PartialOptimizer(optimizer, list(self._masters.values()), self._memory, self._form, self.mapped),
            )
        return self._partial_optimizer[1]

    def _memory(self, master: nn.Parameter) -> Tensor | SplitTensor:
        return self._bucket_of[id(master)].memory(master)

    def _outside(self) -> AbstractSet[int]:
        """Return the ids of the masters that the optimizer does not hold now, which a parameter group may change.

        Several machines have none, as they sum the gradients of each step anew.
        """
        optimizer = self._optimizer()
        if self._exchange is not None or optimizer is None:
            return frozenset()
        return self._masters.keys() - {id(master) for group in optimizer.param_groups for master in group["params"]}

    # -- the optimizer's thread ---------------------------------------------------------------------------------------

    def _post(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._error is not None:
                return
            try:
                work()
            except (Dropped, StreamAborted):  # the step has failed, before or during the download of its gradients
                self.torn, self.whole = self._applying, False  # the step raises the error
            except BaseException as error:
                error.add_note(f"roundpipe: this happened in an optimizer step, {TORN}")
                self._error, self.whole = error, False
                for cancel_scope in self._cancel_scopes:
                    cancel_scope.fail(error)

        self._thread.submit(guarded)

    def _as_they_come(
        self, batch: StepGradients | None, uploaded: Callable[[ParamBucket], None]
    ) -> Iterator[list[ParamBucket]]:
        """Yield all buckets as they become ready, small ones together; of several, the first in forward order first.

        Args:
            batch: the gradients to wait for; None if there are none, so that all buckets are ready.
            uploaded: called with each bucket when its weights are uploaded, and again when it is ready.
        """
        readiness = batch.readiness if batch is not None else None
        there: list[tuple[int, ParamBucket]] = []
        coming = len(self.buckets)
        while coming or there:
            if coming:
                buckets = self.buckets if readiness is None else readiness.take(wait=not there, uploaded=uploaded)
                for bucket in buckets:
                    uploaded(bucket)
                    heapq.heappush(there, (bucket.index, bucket))
                coming -= len(buckets)
            yield self._piece(there)

    def _in_order(self, exchange: GradientExchange, step: _OptimizerStep) -> Iterator[ParamBucket]:
        """Yield all buckets as they become ready, in the order in which machines exchange them; see `_as_they_come`."""
        readiness = step.batch.readiness if step.batch is not None else None
        there: set[ParamBucket] = set(self.buckets) if readiness is None else set()
        for bucket in exchange.order:
            while bucket not in there:
                assert readiness is not None
                there.update(readiness.take(wait=True, uploaded=functools.partial(self._uploaded, step)))
            self._uploaded(step, bucket)
            yield bucket

    def _piece(self, there: list[tuple[int, ParamBucket]]) -> list[ParamBucket]:
        buckets = [heapq.heappop(there)[1]]
        size = self._sizes[buckets[0]]
        while there and (size := size + self._sizes[there[0][1]]) <= PIECE:
            buckets.append(heapq.heappop(there)[1])
        return buckets

    def _add(self, batch: StepGradients) -> None:
        if self._exchange is not None:
            batch.weigh()
        for buckets in self._as_they_come(batch, lambda bucket: None):
            for bucket in buckets:
                self.gradients.accumulated[bucket].add(batch.take(bucket))
                batch.release(bucket)
        batch.release()

    def _uploaded(self, step: _OptimizerStep, bucket: ParamBucket) -> None:
        """With staleness 1, publish the update before this one: the step's last upload of the bucket is over.

        Until then the step's own version had to stay in the working copies.
        """
        if self.staleness and not bucket.has(step.number - 1):
            bucket.refresh(trained_only=True)
            bucket.publish(step.number - 1)

    def _gathered(self, step: _OptimizerStep) -> Iterator[dict[ParamBucket, dict[int, Tensor]]]:
        """Yield the gradients of buckets as they become ready; with several machines, their sums as they arrive."""
        if self._exchange is None:
            for buckets in self._as_they_come(step.batch, functools.partial(self._uploaded, step)):
                yield {bucket: self._gather(bucket, step) for bucket in buckets}
            return
        for bucket, gradients in self._summed(self._exchange, step):
            self._use(step, bucket, gradients)
            yield {bucket: gradients}

    def _summed(
        self, exchange: GradientExchange, step: _OptimizerStep
    ) -> Iterator[tuple[ParamBucket, dict[int, Tensor]]]:
        for bucket in self._in_order(exchange, step):
            yield from exchange.add(bucket, self._gather(bucket, step))
        yield from exchange.rest()

    def _gather(self, bucket: ParamBucket, step: _OptimizerStep) -> dict[int, Tensor]:
        """Return the bucket's gradients, summed over all batches since the last step [2]."""
        last = step.batch.take(bucket) if step.batch is not None else {}
        gathered = self.gradients.accumulated[bucket].with_last(last, step.outside)
        self._use(step, bucket, gathered)
        return gathered

    def _use(self, step: _OptimizerStep, bucket: ParamBucket, gradients: dict[int, Tensor]) -> None:
        if step.keeps:
            self.gradients.use(bucket, gradients)

    def _run(self, step: _OptimizerStep) -> None:
        self.gradients.begin_step(step.batch.sums if step.batch is not None and step.keeps else ())
        if self._exchange is not None:
            self._exchange.begin()
            if step.batch is not None:
                step.batch.weigh()
            else:
                self._exchange.share(None)
        for bucket in self.buckets:
            bucket.split()  # a hook may have looked at weights since the step's last upload
        with step.partial_optimizer.prepared(step.hyperparameters):  # while the gradients are still on their way
            self._step(step)
        step.partial_optimizer.copy_rest()
        self._applying = False
        recent = {number: when for number, when in self.applied.items() if number > step.number - _REMEMBERED}
        self.applied = recent | {step.number: time.perf_counter()}

    def _step(self, step: _OptimizerStep) -> None:
        self._applying = False
        clips_by_norm = step.clip is not None and step.clip.kind == "norm"
        if clips_by_norm or self._scales.scale is not None:
            self._step_at_once(step, step.clip if clips_by_norm else None)
        elif self._exchange is not None:
            for gathered in self._gathered(step):
                self._apply(step, gathered)
        else:
            with self._draining(step):
                for buckets in self._as_they_come(step.batch, functools.partial(self._uploaded, step)):
                    if not (len(buckets) == 1 and self._apply_parts(step, buckets[0])):
                        self._apply(step, {bucket: self._gather(bucket, step) for bucket in buckets})
        self._publish_weights(step, wait=True)

    def _step_at_once(self, step: _OptimizerStep, clip: Clip | None) -> None:
        """Step all buckets, or none if gradients are not finite, once all gradients are there [3]."""
        scaled = self._scales.scale is not None
        gathered: dict[ParamBucket, dict[int, Tensor]] = {}
        measured: dict[int, Tensor] = {}
        finite = True
        for bucket, gradients in (pair for mine in self._gathered(step) for pair in mine.items()):
            gathered[bucket] = gradients
            held = {key: grad for key, grad in gradients.items() if key in step.hyperparameters.group_of}
            if scaled:
                finite &= unscale(held.values(), step.scale)
            if clip is not None:
                measured.update(zip(held, norms(list(held.values())), strict=True))
        whole = step.held({key: gradient for gradients in gathered.values() for key, gradient in gradients.items()})
        lengths, some = [measured[key] for key in whole] if clip is not None else [], bool(whole)
        if self._exchange is not None and self._exchange.owner:
            norms_of = measured if clip is not None else {key: torch.zeros(()) for key in whole}
            lengths, finite = self._exchange.combined_norms(norms_of, list(step.hyperparameters.group_of), finite)
            some = bool(lengths)
        if scaled:
            self._scales.decided(step.number, finite=finite if some else None)
        if clip is not None and some and finite:
            scale(list(whole.values()), coefficient(lengths, clip))
        there = [(bucket.index, bucket) for bucket in self.buckets]
        while there:
            self._apply(step, {bucket: gathered[bucket] if finite else {} for bucket in self._piece(there)})

    @contextmanager
    def _draining(self, step: _OptimizerStep) -> Iterator[None]:
        """Let downloads wait for memory while the optimizer has complete gradients to use, layer by layer."""
        if step.batch is None or step.keeps:
            yield
            return
        self._pool.draining = step.batch.readiness
        try:
            yield
        finally:
            self._pool.draining = None
            self._pool.look_again()

    def _apply(self, step: _OptimizerStep, gathered: dict[ParamBucket, dict[int, Tensor]]) -> None:
        """Step the parameters of some buckets that have gradients, and publish the buckets [4]."""
        self._applying = True
        gradients = {key: gradient for mine in gathered.values() for key, gradient in mine.items()}
        if step.clip is not None and step.clip.kind == "value":
            clamp(list(step.held(gradients).values()), step.clip)
        step.partial_optimizer.step(step.hyperparameters, gradients)
        if self._exchange is not None and self._exchange.owner:
            for bucket in gathered:
                self._exchange.send_weights(bucket)
            self._publish_weights(step, wait=False)
            return
        for bucket in gathered:
            self._refresh_and_finish(step, bucket)

    def _publish_weights(self, step: _OptimizerStep, *, wait: bool) -> None:
        """Publish buckets whose weights have come from the machines that update them."""
        for bucket in self._exchange.weights(wait=wait) if self._exchange is not None else ():
            self._refresh_and_finish(step, bucket)

    def _refresh_and_finish(self, step: _OptimizerStep, bucket: ParamBucket) -> None:
        if not self.staleness:
            bucket.refresh(trained_only=True)
        self._finish(step, bucket)

    def _apply_parts(self, step: _OptimizerStep, bucket: ParamBucket) -> bool:
        """Step a large bucket part by part, while later parts are downloaded [5].

        Returns:
            False if nothing was done, as the bucket has to be stepped as a whole: it is small, its batch gave no
            gradients, user code has added to them, the optimizer does not hold all, or its kernel takes no parts.
        """
        batch, values, accumulated = step.batch, step.hyperparameters, self.gradients.accumulated[bucket]
        if (
            batch is None
            or self._nbytes[bucket] < grad_buffers.STREAMED
            or (found := batch.sums_by_master(bucket)) is None
            or not step.outside.isdisjoint(found)
        ):
            return False
        keys = [key for key in dict.fromkeys((*found, *accumulated.present())) if key in values.group_of]
        if not step.partial_optimizer.steps_parts(values, keys):
            return False
        self._applying = True
        masters = {id(master): master for master in bucket.masters}
        for key in keys:
            master = masters[key]
            length = grad_buffers.PART // master.itemsize
            for start in range(0, max(master.numel(), 1), length):  # of an empty one, the kernel counts the step
                end = min(start + length, master.numel())
                last = batch.take_part(found[key], key, start, end) if key in found else None
                gradient = accumulated.part_with_last(key, last, start, end)
                if step.clip is not None:
                    clamp([gradient], step.clip)
                step.partial_optimizer.step_part(values, key, gradient, start, end)
                if not self.staleness:
                    bucket.refresh_part(master, start, end)
        self._use(step, bucket, {key: found[key][0].view_of(key) for key in found} | accumulated.present())
        self._finish(step, bucket)
        return True

    def _finish(self, step: _OptimizerStep, bucket: ParamBucket) -> None:
        """Release the gradients of a stepped bucket, and publish it; with staleness 1, `_uploaded` does that later."""
        self.gradients.accumulated[bucket].forget(step.outside)
        if step.batch is not None:
            if step.batch.readiness is not None:
                step.batch.readiness.used()
            if not step.keeps:
                step.batch.release(bucket)
            self._pool.look_again()  # the bucket may have had no memory, and be the last one that was complete
        if not self.staleness:
            bucket.publish(step.number)
