"""The optimizer on a thread of its own: each bucket is stepped as its gradients arrive, and the next forward follows
it.

    main thread: begin ── losses ── submit ── [1]             a batch's fate is known; backward goes on
    optimizer thread, bucket by bucket as they arrive, of several the first in forward order:
        gradients taken from the host buffers ── accumulated with earlier batches' ── [2]
        norms, if they are clipped, and whether all are finite, if they are scaled: nothing is stepped before all are
        known, and all buckets or none ── [3]   then the first layer goes first
        stepped ── buffers free ── version published ── [4]
        a large one without clipping by norm: part by part, each as soon as it has arrived ── [6]
    worker: uploads of the next step wait for the version of their own layer ── [5]

A batch is either followed by an optimizer step or accumulated; which one is known when the step is submitted or the
next batch begins. Hyperparameters are those of the moment when the step was submitted: schedulers go on.

With staleness 1 a step computes with working copies, and what its gradients change is published after the next step's
last upload of the bucket, long before that step's gradients of it arrive: or the step behind it would wait for its end.

Nothing here waits in a circle: what the thread waits for, the backward of a batch, needs only updates that were
submitted before that batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices.errors import StreamAborted
from lightning_roundpipe.optim.clipping import Clip, clamp, coefficient, norms, scale
from lightning_roundpipe.optim.partial_optimizer import Hyperparameters, PartialOptimizer
from lightning_roundpipe.optim.scaling import unscale
from lightning_roundpipe.runtime.faults.interrupts import interrupts_deferred
from lightning_roundpipe.runtime.memory import grad_buffers
from lightning_roundpipe.runtime.memory.flat_params import ALONE, holders
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.loss_scale import Scales
from lightning_roundpipe.runtime.memory.param_buckets import ParamBucket
from lightning_roundpipe.runtime.optimizer.grad_readiness import Dropped
from lightning_roundpipe.runtime.optimizer.loss_handle import StepGradients
from lightning_roundpipe.runtime.threads.sync import CancelScope
from lightning_roundpipe.runtime.threads.task_thread import TaskThread

PIECE = 16_000_000
"""Parameters that are stepped together, if so many are there: one call of the optimizer takes a tenth of a millisecond
of Python with Adam, half a one with others; their layers' next forward waits for all of them, which takes some ten."""
TORN = "which has changed some layers and not others; go on from a checkpoint."
LOOK = 0.25
"""Seconds between two looks whether the thread is alive."""


@dataclass(frozen=True)
class _OptimizerStep:
    """One optimizer step.

    Attributes:
        number: of the version that it makes.
        batch: the last batch's gradients; None if it has none.
        scale: that the gradients of all its batches were multiplied by.
    """

    number: int
    batch: StepGradients | None
    hyperparameters: Hyperparameters
    clip: Clip | None
    partial_optimizer: PartialOptimizer
    scale: float

    def held(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Of ``gradients``, those of the optimizer's parameters, in its order: they alone are clipped."""
        return {key: gradients[key] for key in self.hyperparameters.group_of if key in gradients}


class _Accumulated:
    """What earlier batches gave to the next optimizer step, for one bucket. Its memory is used again by every step."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self._present: set[int] = set()
        self.shown = False
        """Whether user code has seen it."""

    def add(self, gradients: dict[int, Tensor]) -> None:
        for key, gradient in gradients.items():
            if key in self._present:
                self._memory[key].add_(gradient)
            elif key in self._memory:
                self._memory[key].copy_(gradient)
            else:
                self._memory[key] = gradient.clone()
        self._present |= gradients.keys()

    def with_last(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """The sum with the last batch's ``gradients``, in their memory where nothing was accumulated."""
        if not self._present:
            return gradients
        self.add(gradients)
        return self.present()

    def part_with_last(self, key: int, gradient: Tensor | None, start: int, end: int) -> Tensor:
        """`with_last` for the numbers ``start`` to ``end`` of one gradient, of which there is one."""
        if key not in self._present:
            assert gradient is not None
            return gradient
        total = self._memory[key].view(-1)[start:end]
        return total if gradient is None else total.add_(gradient)

    def present(self) -> dict[int, Tensor]:
        return {key: self._memory[key] for key in self._present}

    def multiply(self, factor: float) -> None:
        """By a power of two, which changes nothing else."""
        for gradient in self.present().values() if factor != 1.0 else ():
            gradient.mul_(factor)

    def forget(self) -> None:
        self._present = set()
        if self.shown:  # what user code keeps of it is not used again
            self._memory = {key: memory for key, memory in self._memory.items() if holders(memory) == ALONE}
            self.shown = False

    def drop(self, key: int) -> None:
        """User code has put another gradient in the place of this one, which it may keep."""
        self._present.discard(key)
        self._memory.pop(key, None)


class AsyncOptimizer:
    """Applies gradients to masters, in the order in which batches come.

    Args:
        buckets: all of them, in forward order.
        staleness: 0: a step sees all updates before it. 1: all but the last one, which is applied meanwhile.
        scales: what losses are multiplied by.
        around: entered by the thread for as long as it lives.

    Attributes:
        submitted: how many optimizer steps there were.
        torn: whether a step's gradients stopped coming when some layers had been stepped.
        whole: whether all that was submitted has been applied, or is still to be: no update failed or was left out.
    """

    def __init__(
        self,
        buckets: Sequence[ParamBucket],
        staleness: int = 0,
        scales: Scales | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.buckets = list(buckets)
        self.staleness = staleness
        self._first = self.submitted = max(bucket.version for bucket in self.buckets)  # there may have been another one
        self.torn = self._applying = False
        self.whole = True
        self._cancel_scopes: list[CancelScope] = []
        self._thread = TaskThread("roundpipe-optimizer", around)
        self._error: BaseException | None = None
        self._batch: StepGradients | None = None
        self._accumulated: dict[ParamBucket, _Accumulated] = {bucket: _Accumulated() for bucket in buckets}
        self._sizes = {bucket: sum(master.numel() for master in bucket.masters) for bucket in buckets}
        self._nbytes = {bucket: sum(master.nbytes for master in bucket.masters) for bucket in buckets}
        self._partial_optimizer: tuple[Optimizer, PartialOptimizer] | None = None
        self._scales = scales or Scales()
        self._scales.fix(self.wanted, self.submitted)
        self._window_is_open = False
        """Whether a batch was accumulated that no step has used."""
        self._left: dict[int, Tensor] = {}
        """What the last step was made of, by the ids of masters, until the next batch begins."""
        self._left_in: Sequence[HostGradSums] = ()
        """Whose memory that is."""
        self._shown: dict[int, Tensor] | None = None
        """What `show` has put into ``.grad`` since the last batch; None: it has not been called."""

    # -- the main thread ----------------------------------------------------------------------------------------------

    def begin(self, *, zero_grad: bool) -> None:
        """Before a batch: the one before it was accumulated, if it was not followed by a step.

        Args:
            zero_grad: whether what was accumulated is dropped, as ``zero_grad`` would.
        """
        self.raise_error()
        self._hide()
        self._accumulate()
        if zero_grad:
            self._window_is_open = False
            self._post(self._forget)

    def accompany(self, cancel_scope: CancelScope) -> None:
        """A step runs, which fails when an update does, for it would wait for something that never comes."""
        self._cancel_scopes = [*self._cancel_scopes, cancel_scope]
        # It may have failed since `begin` looked. Whoever of the two threads writes last sees what the other one wrote.
        if (error := self._error) is not None:
            cancel_scope.fail(error)

    def leave(self, cancel_scope: CancelScope) -> None:
        """The step is over."""
        self._cancel_scopes = [other for other in self._cancel_scopes if other is not cancel_scope]

    def offer(self, gradients: StepGradients) -> None:
        """What the batch gave. Its loss may be differentiated later, or not at all."""
        self._batch = gradients

    @interrupts_deferred()
    def submit(self, optimizer: Optimizer, clip: Clip | None) -> None:
        """The optimizer step that follows the batch [1]."""
        batch, self._batch = self._batch, None
        if batch is not None and batch.scale is None:  # its loss was not differentiated
            batch.release()
            batch = None
        self.submitted += 1
        self._window_is_open = False
        scale, partial_optimizer = self._scales.last, self._partial_optimizer_of(optimizer)
        step = _OptimizerStep(self.submitted, batch, Hyperparameters.of(optimizer), clip, partial_optimizer, scale)
        self._post(lambda: self._run(step))

    def accumulated(self) -> dict[int, Tensor]:
        """What batches gave to the optimizer step that is still to come, by the ids of masters. Settle first."""
        if self._shown is not None:
            self.show(after_step=True)  # user code may have put other gradients in their place
        return self._present()

    def _present(self) -> dict[int, Tensor]:
        return {
            key: gradient for bucket in self.buckets for key, gradient in self._accumulated[bucket].present().items()
        }

    def go_on(self, gradients: dict[int, Tensor]) -> None:
        """Begin with ``gradients``, as ``accumulated`` gave them to a run before this one."""
        self._window_is_open = True
        for bucket in self.buckets:
            mine = {id(master): gradients[id(master)] for master in bucket.masters if id(master) in gradients}
            self._accumulated[bucket].add(mine)

    def show(self, *, after_step: bool) -> None:
        """Put into ``.grad`` what plain training leaves there, until the next batch begins. Settle first.

        What user code makes of it counts, as in plain training: what it writes to it, puts in its place, or drops.

        Args:
            after_step: whether gradients that a step has used are still there.
        """
        if not after_step and self._shown is None:
            self._left, self._left_in = {}, ()
        self._hide()
        self._shown = {}
        gradients = self._present() if self._window_is_open else self._left
        if not self._window_is_open:
            for total in self._left_in:
                total.handed_out = True  # so that the next batch looks whether user code has kept it
        for bucket in self.buckets:
            self._accumulated[bucket].shown = True
            for master in bucket.masters:
                if (gradient := gradients.get(id(master))) is not None:
                    self._shown[id(master)] = master.grad = gradient.detach()

    def _hide(self) -> None:
        """Take back what `show` has shown, with what user code has made of it."""
        shown, self._shown = self._shown, None
        if shown is None:
            return
        for bucket in self.buckets:
            for master in bucket.masters:
                key, now = id(master), master.grad
                master.grad = None
                if now is shown.get(key):
                    continue
                self._accumulated[bucket].drop(key)
                self._left.pop(key, None)
                if now is not None and self._window_is_open:
                    self._accumulated[bucket].add({key: now.detach()})
                elif now is not None:
                    self._left[key] = now.detach()

    @property
    def begun(self) -> bool:
        """Whether there was an optimizer step."""
        return self.submitted > self._first

    @property
    def wanted(self) -> int:
        """The version that the next step is to compute with."""
        return max(0, self.submitted - self.staleness)

    def publish_all(self) -> None:
        """Settled: let the next step see every update, whatever the staleness, and what else was written to masters."""
        moved = self._scales.fix(self.wanted, self.submitted)
        for accumulated in self._accumulated.values():
            accumulated.multiply(moved)
        for bucket in self.buckets:
            bucket.refresh()
            bucket.publish(self.submitted)

    def settle(self) -> None:
        """Wait until everything submitted has been applied.

        Raises:
            what an update raised; once.
        """
        self._accumulate()
        self._rest()
        self.raise_error()

    def release_masters(self) -> None:
        """Settled: nothing here holds their memory."""
        if self._partial_optimizer is not None:
            self._partial_optimizer[1].release()

    def drop(self, error: BaseException) -> None:
        """After a failure: finish what was submitted; the batch that failed gives nothing.

        Args:
            error: that is raised because of it, and says so if some layers had been stepped already.
        """
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.release()
        self._rest()
        if self.torn:
            error.add_note(f"roundpipe: the backward pass was running and its optimizer step had begun, {TORN}")

    def raise_error(self) -> None:
        """Raise what an update raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                error.add_note(f"roundpipe: this happened in an optimizer step, {TORN}")
                raise error
        finally:
            del error

    def retire(self) -> None:
        """Everything is settled and seen, and the thread has stopped: others step from here on."""
        self.settle()
        self.publish_all()
        self.close()

    def close(self) -> None:
        """Finish what was submitted, and stop the thread."""
        self._thread.stop()
        self._thread.join()

    def _accumulate(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if batch.scale is None:
            batch.release()
            return
        self._window_is_open = True
        self._post(lambda: self._add(batch))

    def _rest(self) -> None:
        waiter = self._thread.submit(lambda: None).waiter
        while not waiter.wait_for(LOOK):
            if not self._thread.alive:
                raise RoundPipeError(f"the optimizer's thread has died ({self._thread.died!r})") from self._thread.died

    def _partial_optimizer_of(self, optimizer: Optimizer) -> PartialOptimizer:
        if self._partial_optimizer is None or self._partial_optimizer[0] is not optimizer:
            self._partial_optimizer = (
                optimizer,
                PartialOptimizer(optimizer, [master for bucket in self.buckets for master in bucket.masters]),
            )
        return self._partial_optimizer[1]

    # -- the optimizer's thread ---------------------------------------------------------------------------------------

    def _post(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._error is not None:
                return
            try:
                work()
            except (Dropped, StreamAborted):  # of gradients that it waited for, or that were on their way down
                self.torn, self.whole = self._applying, False  # the step says why
            except BaseException as error:
                self._error, self.whole = error, False
                for cancel_scope in self._cancel_scopes:
                    cancel_scope.fail(error)

        self._thread.submit(guarded)

    def _forget(self) -> None:
        self._left, self._left_in = {}, ()
        for accumulated in self._accumulated.values():
            accumulated.forget()

    def _as_they_come(
        self, batch: StepGradients | None, came: Callable[[ParamBucket], None]
    ) -> Iterator[list[ParamBucket]]:
        """All buckets, when their gradients are there, the first in forward order first; small ones together.

        Args:
            batch: whose gradients; None: nobody has to be waited for.
            came: called with each as soon as the batch needs its weights no more, and when it is there.
        """
        readiness = batch.readiness if batch is not None else None
        there: list[tuple[int, ParamBucket]] = []
        coming = len(self.buckets)
        while coming or there:
            if coming:
                buckets = self.buckets if readiness is None else readiness.take(wait=not there, sent=came)
                for bucket in buckets:
                    came(bucket)
                    heapq.heappush(there, (bucket.index, bucket))
                coming -= len(buckets)
            yield self._piece(there)

    def _piece(self, there: list[tuple[int, ParamBucket]]) -> list[ParamBucket]:
        buckets = [heapq.heappop(there)[1]]
        size = self._sizes[buckets[0]]
        while there and (size := size + self._sizes[there[0][1]]) <= PIECE:
            buckets.append(heapq.heappop(there)[1])
        return buckets

    def _add(self, batch: StepGradients) -> None:
        for buckets in self._as_they_come(batch, lambda bucket: None):
            for bucket in buckets:
                self._accumulated[bucket].add(batch.take(bucket))
                batch.release(bucket)
        batch.release()

    def _uploaded(self, bucket: ParamBucket, step: _OptimizerStep) -> None:
        """The step's last upload of the bucket is over: its successor sees the update before this one."""
        if self.staleness and not bucket.has(step.number - 1):
            bucket.refresh(trained_only=True)
            bucket.publish(step.number - 1)

    def _gather(self, bucket: ParamBucket, step: _OptimizerStep) -> dict[int, Tensor]:
        """The bucket's gradients, of all batches since the last step [2]."""
        gathered = self._accumulated[bucket].with_last(step.batch.take(bucket) if step.batch is not None else {})
        self._left.update(gathered)
        return gathered

    def _run(self, step: _OptimizerStep) -> None:
        self._left, self._left_in = {}, step.batch.sums if step.batch is not None else ()
        with step.partial_optimizer.prepared(step.hyperparameters):  # before gradients come
            self._step(step)
        self._applying = False

    def _step(self, step: _OptimizerStep) -> None:
        self._applying = False
        arriving = self._as_they_come(step.batch, lambda bucket: self._uploaded(bucket, step))
        clip = step.clip if step.clip is not None and step.clip.kind == "norm" else None
        scaled = self._scales.scale is not None
        if not (clip or scaled):
            for buckets in arriving:
                if not (len(buckets) == 1 and self._apply_parts(step, buckets[0])):
                    self._apply(step, {bucket: self._gather(bucket, step) for bucket in buckets})
            return
        gathered: dict[ParamBucket, dict[int, Tensor]] = {}
        measured: dict[int, Tensor] = {}
        finite = True
        for bucket in (bucket for buckets in arriving for bucket in buckets):
            gathered[bucket] = self._gather(bucket, step)
            held = {key: grad for key, grad in gathered[bucket].items() if key in step.hyperparameters.group_of}
            if scaled:
                finite &= unscale(held.values(), step.scale)
            if clip:
                measured.update(zip(held, norms(list(held.values())), strict=True))
        whole = step.held({key: gradient for gradients in gathered.values() for key, gradient in gradients.items()})
        if scaled:
            self._scales.decided(step.number, finite=finite if whole else None)
        if clip and whole and finite:
            scale(list(whole.values()), coefficient([measured[key] for key in whole], clip))  # [3]
        there = [(bucket.index, bucket) for bucket in self.buckets]
        while there:
            self._apply(step, {bucket: gathered[bucket] if finite else {} for bucket in self._piece(there)})

    def _apply(self, step: _OptimizerStep, gathered: dict[ParamBucket, dict[int, Tensor]]) -> None:
        """Step buckets, those that have gradients, and let everybody know [4]."""
        self._applying = True
        gradients = {key: gradient for mine in gathered.values() for key, gradient in mine.items()}
        if step.clip is not None and step.clip.kind == "value":
            clamp(list(step.held(gradients).values()), step.clip)
        step.partial_optimizer.step(step.hyperparameters, gradients)
        for bucket in gathered:
            if not self.staleness:
                bucket.refresh(trained_only=True)
            self._finish(step, bucket)

    def _apply_parts(self, step: _OptimizerStep, bucket: ParamBucket) -> bool:
        """Step a large bucket part by part, while the next ones arrive and those before are uploaded [6].

        Returns:
            False if it has to be stepped as a whole: it is small, nothing is on its way, user code has added to its
            gradients, or the optimizer's kernel cannot be given parts. Then nothing has been done.
        """
        batch, values, accumulated = step.batch, step.hyperparameters, self._accumulated[bucket]
        if (
            batch is None
            or self._nbytes[bucket] < grad_buffers.STREAMED
            or (found := batch.sums_by_master(bucket)) is None
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
            for start in range(0, master.numel(), length):
                end = min(start + length, master.numel())
                last = batch.take_part(found[key], key, start, end) if key in found else None
                gradient = accumulated.part_with_last(key, last, start, end)
                if step.clip is not None:
                    clamp([gradient], step.clip)
                step.partial_optimizer.step_part(values, key, gradient, start, end)
                if not self.staleness:
                    bucket.refresh_part(master, start, end)
                    bucket.publish_part(step.number, master, start, end)
        self._left.update({key: found[key][0].view_of(key) for key in found} | accumulated.present())
        self._finish(step, bucket)
        return True

    def _finish(self, step: _OptimizerStep, bucket: ParamBucket) -> None:
        """It has been stepped, and its working copies are up to date."""
        self._accumulated[bucket].forget()
        if step.batch is not None:
            step.batch.release(bucket)
        if not self.staleness:
            bucket.publish(step.number)
