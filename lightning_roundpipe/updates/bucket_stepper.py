"""The optimizer thread's work: from the gradients of a window, as they become complete, to published weights.

    bucket by bucket as they become ready, of several the first in forward order:
        take the gradients from host memory ── add what earlier windows have accumulated ── [1]
        with clipping by norm or loss scaling: wait for all buckets, as all norms, or whether all gradients are finite,
        must be known before any bucket is stepped; then step all or none, in forward order ── [2]
        step ── give the gradients' memory back ── publish the version ── [3]

Gradients that came narrowed stay so (`NarrowGradient`), but for those that hooks or other machines get.

With staleness 1 a step computes with working copies of the masters. An update is published once the next step has made
its last upload of the bucket. That is long before that step's gradients of the bucket are ready; published only then,
the update would make the step behind wait for its end.

With several machines, `GradientExchange` sums the gradients behind [1]: the thread takes buckets in the same order on
each machine, and steps one when its sum has arrived, while the next ones are computed and on their way.

No deadlock: the thread waits only for the backward of a window, which needs only updates submitted before that window.
"""

from __future__ import annotations

import functools
import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_roundpipe.memory.grad_buffers import GradientPool
from lightning_roundpipe.memory.loss_scale import Scales
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.optim.clipping import Clip, clamp, coefficient, norms, scale
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.narrow_gradient import AnyGradient, all_widened
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer
from lightning_roundpipe.optim.scaling import unscale
from lightning_roundpipe.updates.current_optimizer import CurrentOptimizer
from lightning_roundpipe.updates.gradient_exchange import GradientExchange
from lightning_roundpipe.updates.loss_handle import StepGradients
from lightning_roundpipe.updates.window_gradients import WindowGradients

Gathered: TypeAlias = dict[ParamBucket, Mapping[int, AnyGradient]]
Value = TypeVar("Value")

PIECE = 16_000_000
"""Parameters to step in one call at most, if several buckets are ready. A call costs 0.1 ms of Python with Adam, and
0.5 ms with other optimizers. A full piece takes about 10 ms, and the next forward of all its layers waits for that."""
_REMEMBERED = 4
"""Number of updates whose end is remembered: a report, read while steps overlap, is about an earlier step."""


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step.

    Attributes:
        number: the version of the weights that it makes.
        window: the gradients of its last window; None if that gave none.
        hyperparameters: a snapshot of when the step was submitted.
        clip: how to clip gradients; None leaves them.
        scale: the loss scale, which the gradients of all its windows were multiplied by.
        outside: ids of the masters that the optimizer does not hold, whose gradients its ``zero_grad`` does not drop.
        keeps: see `WindowGradients`.
    """

    number: int
    window: StepGradients | None
    hyperparameters: Hyperparameters
    clip: Clip | None
    partial_optimizer: PartialOptimizer
    scale: float
    outside: AbstractSet[int]
    keeps: bool

    def held(self, gradients: Mapping[int, Value]) -> dict[int, Value]:
        """Return the ``gradients`` of the optimizer's parameters, in its order: only they are clipped."""
        return {key: gradients[key] for key in self.hyperparameters.group_of if key in gradients}


class BucketStepper:
    """Steps and publishes buckets, on the optimizer's thread.

    Args:
        pool: the memory of gradients, in which downloads wait for updates.
        optimizer: the one that the next step will use.
        staleness: 0: a step computes with all updates before it. 1: with all but the last, which is applied meanwhile.
        exchange: sums gradients over several machines; None if there is only one.

    Attributes:
        gradients: what windows have accumulated, and what ``.grad`` shows between steps.
        applying: whether the step has stepped some buckets and not all.
        applied: the last steps that are applied, by number, each with when it was, on the clock of
            ``time.perf_counter()``.
    """

    def __init__(
        self, buckets: Sequence[ParamBucket], pool: GradientPool, optimizer: CurrentOptimizer, staleness: int = 0,
        scales: Scales | None = None, exchange: GradientExchange | None = None,
    ) -> None:  # fmt: skip
        self.buckets, self._pool, self.optimizer, self.staleness = list(buckets), pool, optimizer, staleness
        self.scales, self._exchange = scales or Scales(), exchange
        self.gradients = WindowGradients(self.buckets, self.outside)
        self._sizes = {bucket: sum(master.numel() for master in bucket.masters) for bucket in buckets}
        self.applying = False
        self.applied: dict[int, float] = {}

    def outside(self) -> AbstractSet[int]:
        """Return the ids of the masters that gradients are accumulated for outside of the optimizer. Any thread may.

        Several machines accumulate none there, as they sum the gradients of each step anew.
        """
        return self.optimizer.outside() if self._exchange is None else frozenset()

    def add(self, window: StepGradients) -> None:
        """Accumulate the gradients of a window that no step follows."""
        if self._exchange is not None:
            window.weigh()
        for buckets in self._as_they_come(window, lambda bucket: None):
            for bucket in buckets:
                self.gradients.accumulated[bucket].add(all_widened(window.take(bucket, widen=True)))
                window.release(bucket)
        window.release()

    def run(self, step: OptimizerStep) -> None:
        """Make a step."""
        self.gradients.begin_step(step.window.sums if step.window is not None and step.keeps else ())
        if self._exchange is not None:
            self._exchange.begin()
            if step.window is not None:
                step.window.weigh()
            else:
                self._exchange.share(None)
        for bucket in self.buckets:
            bucket.split()  # a hook may have looked at weights since the step's last upload
        with step.partial_optimizer.prepared(step.hyperparameters):  # while the gradients are still on their way
            self._step(step)
        step.partial_optimizer.copy_rest()
        self.applying = False
        recent = {number: when for number, when in self.applied.items() if number > step.number - _REMEMBERED}
        self.applied = recent | {step.number: time.perf_counter()}

    def _as_they_come(
        self, window: StepGradients | None, uploaded: Callable[[ParamBucket], None]
    ) -> Iterator[list[ParamBucket]]:
        """Yield all buckets as they become ready, small ones together; of several, the first in forward order first.

        Args:
            window: the gradients to wait for; None if there are none, so that all buckets are ready.
            uploaded: called with each bucket when its weights are uploaded, and again when it is ready.
        """
        readiness = window.readiness if window is not None else None
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

    def _in_order(self, exchange: GradientExchange, step: OptimizerStep) -> Iterator[ParamBucket]:
        """Yield all buckets as they become ready, in the order in which machines exchange them; see `_as_they_come`."""
        readiness = step.window.readiness if step.window is not None else None
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

    def _uploaded(self, step: OptimizerStep, bucket: ParamBucket) -> None:
        """With staleness 1, publish the update before this one: the step's last upload of the bucket is over.

        Until then the step's own version had to stay in the working copies.
        """
        if self.staleness and not bucket.has(step.number - 1):
            bucket.refresh(trained_only=True)
            bucket.publish(step.number - 1)

    def _gathered(self, step: OptimizerStep) -> Iterator[Gathered]:
        """Yield the gradients of buckets as they become ready; with several machines, their sums as they arrive."""
        if self._exchange is None:
            for buckets in self._as_they_come(step.window, functools.partial(self._uploaded, step)):
                yield {bucket: self._gather(bucket, step) for bucket in buckets}
            return
        for bucket, gradients in self._summed(self._exchange, step):
            if step.keeps:
                self.gradients.use(bucket, gradients)
            yield {bucket: gradients}

    def _summed(
        self, exchange: GradientExchange, step: OptimizerStep
    ) -> Iterator[tuple[ParamBucket, dict[int, Tensor]]]:
        for bucket in self._in_order(exchange, step):
            yield from exchange.add(bucket, all_widened(self._gather(bucket, step)))
        yield from exchange.rest()

    def _gather(self, bucket: ParamBucket, step: OptimizerStep) -> Mapping[int, AnyGradient]:
        """Return the bucket's gradients, summed over all windows since the last step [1]."""
        accumulated, keeps = self.gradients.accumulated[bucket], step.keeps
        widen = keeps or self._exchange is not None or bool(accumulated.present())
        last = step.window.take(bucket, widen=widen) if step.window is not None else {}
        gathered = accumulated.with_last(last, step.outside)
        if keeps:
            self.gradients.use(bucket, all_widened(gathered))
        return gathered

    def _step(self, step: OptimizerStep) -> None:
        self.applying = False
        clips_by_norm = step.clip is not None and step.clip.kind == "norm"
        if clips_by_norm or self.scales.scale is not None:
            self._step_at_once(step, step.clip if clips_by_norm else None)
        elif self._exchange is not None:
            for gathered in self._gathered(step):
                self._apply(step, gathered)
        else:
            with self._draining(step):
                for buckets in self._as_they_come(step.window, functools.partial(self._uploaded, step)):
                    self._apply(step, {bucket: self._gather(bucket, step) for bucket in buckets})
        self._publish_weights(step, wait=True)

    def _step_at_once(self, step: OptimizerStep, clip: Clip | None) -> None:
        """Step all buckets, or none if gradients are not finite, once all gradients are there [2]."""
        scaled = self.scales.scale is not None
        gathered: Gathered = {}
        measured: dict[int, Tensor] = {}
        finite = True
        for mine in self._gathered(step):
            gathered |= mine
            for gradients in mine.values():
                held = step.held(gradients)
                if scaled:
                    finite &= unscale(held.values(), step.scale)
                lengths = norms(list(held.values())) if clip is not None else [torch.zeros(())] * len(held)
                measured.update(zip(held, lengths, strict=True))
        lengths = list(step.held(measured).values())
        if self._exchange is not None and self._exchange.owner:
            lengths, finite = self._exchange.combined_norms(measured, list(step.hyperparameters.group_of), finite)
        some = bool(lengths)
        if scaled:
            self.scales.decided(step.number, finite=finite if some else None)
        factor = coefficient(lengths, clip) if clip is not None and some and finite else None

        def of(bucket: ParamBucket) -> Mapping[int, AnyGradient]:
            gradients = gathered.pop(bucket) if finite else {}
            if factor is not None:
                scale(list(step.held(gradients).values()), factor)
            return gradients

        there = [(bucket.index, bucket) for bucket in self.buckets]
        while there:
            self._apply(step, {bucket: of(bucket) for bucket in self._piece(there)})

    @contextmanager
    def _draining(self, step: OptimizerStep) -> Iterator[None]:
        """Let downloads wait for memory while the optimizer has complete gradients to use, layer by layer."""
        if step.window is None or step.keeps:
            yield
            return
        self._pool.draining = step.window.readiness
        try:
            yield
        finally:
            self._pool.draining = None
            self._pool.look_again()

    def _apply(self, step: OptimizerStep, gathered: Gathered) -> None:
        """Step the parameters of some buckets that have gradients, and publish the buckets [3]."""
        self.applying = True
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
            self._finish(step, bucket)

    def _publish_weights(self, step: OptimizerStep, *, wait: bool) -> None:
        """Publish buckets whose weights have come from the machines that update them."""
        for bucket in self._exchange.weights(wait=wait) if self._exchange is not None else ():
            self._finish(step, bucket)

    def _finish(self, step: OptimizerStep, bucket: ParamBucket) -> None:
        """Release the gradients of a stepped bucket, and publish it; with staleness 1, `_uploaded` does that later."""
        if not self.staleness:
            bucket.refresh(trained_only=True)
        self.gradients.accumulated[bucket].forget(step.outside)
        if step.window is not None:
            if step.window.readiness is not None:
                step.window.readiness.used()
            if not step.keeps:
                step.window.release(bucket)
            self._pool.look_again()  # the bucket may have had no memory, and be the last one that was complete
        if not self.staleness:
            bucket.publish(step.number)
