"""One microbatch's sections of user code: each in its turn, on its device, with its own random state.

enter ── what it reads of the masters is there ── [1]   before the lock, for it is made by who may need the lock
      ── the user-code lock, what the microbatch keeps on modules, the device, the random state ── [2]
leave ── given back ── [3]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.core.context import EngineContext, StepSpec
from lightning_roundpipe.runtime.memory.param_buckets import ParamBucket
from lightning_roundpipe.runtime.memory.version_waits import Versioned
from lightning_roundpipe.runtime.threads.sync import Priority
from lightning_roundpipe.runtime.user_code.bypassed_gradients import user_of
from lightning_roundpipe.runtime.user_code.module_state import MicrobatchModuleState, SegmentKey
from lightning_roundpipe.runtime.user_code.rng import derive

T = TypeVar("T")


class UserCodeSections:
    """Of one microbatch.

    Args:
        engine: what outlives its step.
        step: that it belongs to.
        index: its number.
        learning: whether this is the first batch.
        kind: of pieces, where there are others beside those of microbatches.

    Attributes:
        kept: what the microbatch keeps on modules; None where nobody else could find it.
        read: buckets that were read.
    """

    def __init__(self, engine: EngineContext, step: StepSpec, index: int, *, learning: bool, kind: str = "") -> None:
        self.kept = MicrobatchModuleState(step.module_state) if step.module_state is not None and not kind else None
        self._kind = kind
        self.read: set[ParamBucket] = set()
        self._engine, self._step = engine, step
        self._index = index
        self._learning = learning
        self._count = 0
        self._slot = -1
        self._segment_key: SegmentKey | None = None
        self._locked = self._draws = self._returning = False
        self._around = contextlib.ExitStack()

    def enter(
        self, slot: int, segment_key: SegmentKey | None, device: Device | None, what: str, *, off_trace: bool
    ) -> None:
        """Begin a piece.

        Args:
            slot: that the microbatch ran in last; -1 at the start.
            segment_key: the call that it follows; None in backward.
            device: that the newest tensors are on.
            what: for errors.
            off_trace: whether pieces cannot be told by their number.
        """
        engine, step = self._engine, self._step
        for bucket in engine.learned.read_by_user_code:
            bucket.wait(step.version, step.cancel_scope)  # [1]
        self._slot, self._segment_key, self._returning = slot, segment_key, segment_key is None
        self._take_lock()  # [2]
        self._around.callback(self._give_lock)
        if self.kept is not None:
            self.kept.enter(segment_key, learning=self._learning)
        device = device or engine.worker_pool.devices[0]
        self._around.enter_context(device.activate())
        seed = derive(*step.seed, self._index, -1 - self._count)
        # Where layers are left out, a section of the backward pass may have the number of one of the forward pass.
        kind = self._kind + ("user code" if segment_key is not None else "backward")
        key = kind if off_trace else (kind, self._count)
        self._draws = engine.learned.randomness.may_draw(key)
        self._around.enter_context(
            engine.learned.randomness.segment(key, seed, device, what, backward=segment_key is None)
        )
        self._count += 1

    def go_on(self, before: UserCodeSections) -> None:
        """Pieces follow those of ``before``, of the same microbatch."""
        self._count = before._count

    def leave(self, segment_key: SegmentKey | None) -> None:
        """End it [3]."""
        if self.kept is not None and segment_key is not None:
            self.kept.leave(segment_key, learning=self._learning)
        self.close()

    def close(self) -> None:
        """End it, however it went."""
        self._around.close()

    def read_master(self, master: nn.Parameter) -> Tensor:
        """What user code reads, where it reads a master itself: the weights that the step computes with."""
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
        """Whether ``bucket`` may be updated before the microbatch has ended, because no code was known to read it."""
        return self._returning and self._step.overlaps and bucket not in self._engine.learned.read_by_user_code

    def refuse_late(self, master: nn.Parameter) -> None:
        """A layer computes with ``master``, which is not its own, and whose update nobody has waited for."""
        if not self._engine.model.bucket_of[id(master)].has(self._step.version):
            raise RoundPipeError(
                f"a layer computes with parameter {self._engine.model.name_of(master)!r} of another module, which it "
                "did not in the first batch, while the optimizer is changing it. Let it do so from the first batch on."
            )

    def used_unseen(self, master: nn.Parameter) -> None:
        """An operation that no mode saw has computed with ``master`` itself, and its gradient is there.

        Raises:
            RoundPipeError: if that may have had other values than the step computes with, or if hooks of the user's
                would be called more than once.
        """
        step, engine = self._step, self._engine
        bucket = engine.model.bucket_of[id(master)]
        why = ""
        if bucket.read(master) is not master:
            why = "with staleness=1 or a *-true precision of 16 bits this step computes with a copy of it"
        elif bucket not in engine.learned.read_by_user_code and (not step.undisturbed or self._too_late_for(bucket)):
            why = "it did not in the first batch, so it may have read the parameter while the optimizer changed it"
        elif master._backward_hooks:
            why = "a hook on the parameter would be called with a part of its gradient"
        if why:
            raise RoundPipeError(
                f"{user_of(master)} uses parameter {engine.model.name_of(master)!r} itself, by another way than a "
                f"torch function: {why}. Give it parameter.clone() instead."
            )
        self.read.add(bucket)

    def wait_for(self, what: Versioned, version: int) -> None:
        """Within a piece: wait until ``version`` is there."""
        if not what.has(version):
            self.aside(lambda: what.wait(version, self._step.cancel_scope))

    def aside(self, wait: Callable[[], None]) -> None:
        """Within a piece: ``wait`` for what may need other user code, such as the backward pass of the step before.

        Where there may be such a step, pieces keep nothing on modules that others would find changed.
        """
        if not self._step.overlaps:
            return wait()
        if self._draws:  # others that draw would wait for this one, with the lock
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
        """Within a piece: ``wait`` for a device, while other microbatches run user code as they do during a call.

        Those that have come to the same piece stay behind: in ``self.total += loss.item()``, the total is read before
        the wait and written after it. A piece that draws keeps the lock, as the others that draw would wait for it.
        """
        if self._segment_key is None or self._learning or self._draws or not self._locked:
            return wait()
        if self.kept is not None:
            self.kept.leave(self._segment_key, learning=False)
        lock, self._locked = self._engine.user_lock, False
        lock.pause(self._piece)
        try:
            result = wait()
        finally:
            lock.resume(self._priority, self._step.cancel_scope, self._piece)
            self._locked = True
        if self.kept is not None:
            self.kept.enter(self._segment_key, learning=False)
        return result

    @property
    def _piece(self) -> Hashable:
        """What stands for the code of the piece."""
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
