"""One microbatch's sections of user code: each runs under the user-code lock, on its device, with its random state.

enter ── wait for the updates of masters that user code reads ── [1]   before the lock: those updates may depend on
                                                                       a step whose user code needs the lock
      ── take the user-code lock; set the microbatch's module attributes, its device and its random state ── [2]
leave ── undo all of that ── [3]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.core.context import EngineContext, StepSpec
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.param_buckets import ParamBucket
from lightning_roundpipe.runtime.memory.version_waits import Versioned
from lightning_roundpipe.runtime.threads.sync import Priority
from lightning_roundpipe.runtime.user_code.bypassed_gradients import user_of
from lightning_roundpipe.runtime.user_code.module_state import AttributeView, SegmentKey
from lightning_roundpipe.runtime.user_code.rng import Seed

T = TypeVar("T")


class UserCodeSections:
    """Enters and leaves the sections of user code of one microbatch.

    Args:
        engine: the parts of the engine that outlive the step.
        step: the step that the microbatch belongs to.
        index: number of the microbatch.
        learning: whether the step records its calls.
        kind: prefix of the sections' keys, where user code other than that of microbatches runs too.

    Attributes:
        kept: what the microbatch sets on modules; None if there is only one.
        read: buckets whose masters user code has read.
    """

    def __init__(self, engine: EngineContext, step: StepSpec, index: int, *, learning: bool, kind: str = "") -> None:
        self.kept = AttributeView(step.module_state) if step.several and not kind else None
        self._kind = kind
        self.read: set[ParamBucket] = set()
        self._engine, self._step = engine, step
        self._index = index
        self._learning = learning
        self._count = 0
        self._slot = -1
        self._segment_key: SegmentKey | None = None
        self._locked = self._draws = self._returning = False
        self._activated: AbstractContextManager[None] | None = None
        self._segment: AbstractContextManager[None] | None = None
        """Contexts of the section: its device, and its random state."""

    def enter(
        self, slot: int, segment_key: SegmentKey | None, device: Device | None, what: str, *, off_trace: bool
    ) -> None:
        """Enter a section.

        Args:
            slot: index of the slot that the microbatch ran in last; -1 at the start.
            segment_key: the call that the section follows; None in backward.
            device: device on which user code continues, where its newest tensors are.
            what: name of the section for errors.
            off_trace: whether microbatches skip layers, so that the number of a section does not identify it.
        """
        engine, step = self._engine, self._step
        for bucket in engine.learned.read_by_user_code:
            bucket.wait(step.version, step.cancel_scope)  # [1]
        self._slot, self._segment_key, self._returning = slot, segment_key, segment_key is None
        self._take_lock()  # [2]
        if self.kept is not None and (segment_key is not None or not step.overlaps):
            self.kept.enter()
        device = self._activate(device)
        seed = self.seed_of(self._count)
        # If microbatches skip layers, a backward section may have the same number as another one's forward section.
        kind = self._kind + ("user code" if segment_key is not None else "backward")
        key = kind if off_trace else (kind, self._count)
        self._draws = engine.learned.randomness.may_draw(key)
        segment = engine.learned.randomness.segment(key, seed, device, what, backward=segment_key is None)
        segment.__enter__()
        self._segment = segment
        self._count += 1

    def seed_of(self, number: int) -> Seed:
        """Return the seed of the microbatch's section ``number``."""
        return *self._step.seed, self._step.first + self._index, -1 - number

    def needs_seed(self, number: int) -> None:
        """Let section ``number`` of the forward be seeded in all steps, whether it draws or not."""
        self._engine.learned.randomness.needs_seed((f"{self._kind}user code", number))

    def interrupted(self) -> None:
        """Count the section that was left and the next one as one: only the engine has run between them."""
        self._count -= 1

    def go_on(self, before: UserCodeSections) -> None:
        """Continue the numbering of ``before``, the sections of the same microbatch in an earlier call of the model."""
        self._count = before._count

    def leave(self, segment_key: SegmentKey | None) -> None:
        """Leave the section [3].

        Args:
            segment_key: the call that the section followed; None in backward.
        """
        self.close()

    def close(self) -> None:
        """Leave the section, if one is entered."""
        if self.kept is not None:
            self.kept.leave()
        segment, activated = self._segment, self._activated
        self._segment = self._activated = None
        try:
            if segment is not None:
                segment.__exit__(None, None, None)
        finally:
            try:
                if activated is not None:
                    activated.__exit__(None, None, None)
            finally:
                self._give_lock()

    def _activate(self, device: Device | None) -> Device:
        """Run user code on ``device``, by default the first one, until `close`. Return the device."""
        device = device or self._engine.worker_pool.devices[0]
        activated = device.activate()
        activated.__enter__()
        self._activated = activated
        return device

    def read_master(self, master: nn.Parameter) -> Tensor:
        """Return the values that user code sees of ``master``: the version of the weights that the step computes with.

        Raises:
            RoundPipeError: if backward reads it for the first time while the optimizer may be updating it.
        """
        step = self._step
        bucket = self._engine.model.bucket_of[id(master)]
        if self._too_late_for(bucket):
            raise RoundPipeError(
                f"code that runs in backward reads parameter {self._engine.model.name_of(master)!r}, which no earlier "
                "batch read between layers, while the optimizer may be changing it. Let it read it from the first "
                "batch on."
            )
        self.read.add(bucket)
        self.wait_for(bucket, step.version)
        return bucket.read(master)

    def _too_late_for(self, bucket: ParamBucket) -> bool:
        """Return whether the optimizer may update ``bucket`` before this microbatch ends.

        In an overlapping step it may update a bucket while microbatches still run, unless user code is known to read
        that bucket.
        """
        return self._returning and self._step.overlaps and bucket not in self._engine.learned.read_by_user_code

    def refuse_late(self, master: nn.Parameter) -> None:
        """Raise if the update of ``master``, which a layer of another module computes with, is not published yet."""
        if not self._engine.model.bucket_of[id(master)].has(self._step.version):
            raise RoundPipeError(
                f"a layer computes with parameter {self._engine.model.name_of(master)!r} of another module, which it "
                "did not in the first batch, while the optimizer is changing it. Let it do so from the first batch on."
            )

    def used_unseen(self, master: nn.Parameter) -> None:
        """Handle a gradient of ``master`` itself, from an operation that bypassed the user-code mode.

        Raises:
            RoundPipeError: if the operation may have read other values than the step computes with, or if hooks on the
                parameter would be called with a part of its gradient.
        """
        step, engine = self._step, self._engine
        bucket = engine.model.bucket_of.get(id(master))
        why = ""
        if bucket is None:
            pass  # registered in this step: nothing has a copy of it or updates it
        elif bucket.read(master) is not master:
            why = "with staleness=1 or a *-true precision of 16 bits this step computes with a copy of it"
        elif bucket not in engine.learned.read_by_user_code and (not step.undisturbed or self._too_late_for(bucket)):
            why = "it did not in the first batch, so it may have read the parameter while the optimizer changed it"
        if not why and master._backward_hooks:
            why = "a hook on the parameter would be called with a part of its gradient"
        if why:
            raise RoundPipeError(
                f"{user_of(master)} uses parameter {engine.model.name_of(master)!r} itself, by another way than a "
                f"torch function: {why}. Give it parameter.clone() instead."
            )
        if bucket is not None:
            self.read.add(bucket)

    def read_late(self, layer: HostLayer) -> None:
        """Wait until the weights of ``layer`` are those that the step computes with: it is called in backward.

        Raises:
            RoundPipeError: if the optimizer may be changing them already.
        """
        bucket = layer.bucket
        if self._step.overlaps and bucket not in self._engine.learned.read_by_user_code:
            raise RoundPipeError(
                f"layer {layer.name!r} is called in backward (by torch.utils.checkpoint, most likely), which it was "
                "not in the first batch, while the optimizer may be changing its weights. Let it be called so from the "
                "first batch on."
            )
        self.read.add(bucket)
        self.wait_for(bucket, self._step.version)

    def wait_for(self, what: Versioned, version: int) -> None:
        """Wait, within a section, until ``version`` of ``what`` is published."""
        if not what.has(version):
            self.aside(lambda: what.wait(version, self._step.cancel_scope))

    def glance(self, look: Callable[[], T]) -> T:
        """Return ``look()``, which reads attributes of modules between two sections."""
        self._take_lock()
        try:
            if self.kept is not None:
                self.kept.enter()
            return look()
        finally:
            if self.kept is not None:
                self.kept.leave()
            self._give_lock()

    def aside(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` without the user-code lock if it may depend on user code of the step before.

        Only overlapping steps have such a step before them. They keep no attributes on modules (`Engine._may_overlap`),
        so other sections find nothing half changed.
        """
        if not self._step.overlaps:
            return wait()
        if self._draws:  # this section holds the generators' locks: others would take the lock and wait for those
            raise RoundPipeError(
                "code between layers draws random numbers and reads weights that it did not read in the first batch, "
                "while the optimizer is changing them. Let it read them from the first batch on."
            )
        self._give_lock()
        try:
            wait()
        finally:
            self._take_lock()

    def paused(self, wait: Callable[[], T]) -> T:
        """Call ``wait``, which waits for a device, while other microbatches run their user code.

        Microbatches that have come to the same section must not run it: in ``self.total += loss.item()``, the total is
        read before the wait and written after it. A section that draws random numbers keeps the lock, because it holds
        the generators' locks, for which others would wait.
        """
        if self._segment_key is None or self._learning or self._draws or not self._locked:
            return wait()
        if self.kept is not None:
            self.kept.leave()
        lock, self._locked = self._engine.user_lock, False
        lock.pause(self._piece)
        try:
            result = wait()
        finally:
            lock.resume(self._priority, self._step.cancel_scope, self._piece)
            self._locked = True
        if self.kept is not None:
            self.kept.enter()
        return result

    @property
    def _piece(self) -> Hashable:
        """Key of the section's code, equal for all microbatches."""
        return self._kind, self._segment_key

    @property
    def _priority(self) -> Priority:
        return self._step.number, self._slot, self._index

    def _take_lock(self) -> None:
        self._engine.user_lock.acquire(self._priority, self._step.cancel_scope, self._piece)
        self._locked = True

    def _give_lock(self) -> None:
        if self._locked:
            self._locked = False
            self._engine.user_lock.release()
