"""What a call of a model leaves behind beside its output, and how to take that back.

Evaluation cuts only calls that leave nothing behind: what one call would do once, its parts would do several times.

    before the call ── attributes, helper objects, buffers, versions of parameters, random states ── [1]
    after it ── one of them differs: the call has an effect ── [2]
    it ran in parts ── everything is put back, and the call is repeated whole ── [3]
"""

from __future__ import annotations

from typing import Any

from lightning_roundpipe.model.attributes import differing
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.user_code.left_behind import LeftBehind, version
from lightning_roundpipe.runtime.user_code.module_state import StateWatch
from lightning_roundpipe.runtime.user_code.rng import GlobalRandomState


class CallEffects:
    """A snapshot of what a call may change [1]. Make it outside of torch function modes.

    Args:
        engine: the context of the engine, whose module is watched.
    """

    def __init__(self, engine: EngineContext) -> None:
        module: Any = engine.model.module
        self._buffers = engine.model.buffers
        self._parameters = list(module.parameters())
        self._left = LeftBehind(module)
        self._watch = StateWatch(list(module.modules()), self._parameters)
        self._versions = [*map(version, self._parameters)]
        self._random = GlobalRandomState(engine.worker_pool.devices)
        self._trainable = [p.requires_grad for p in self._parameters]

    @property
    def undoable(self) -> bool:
        """Whether `undo` can put back whatever a call changes, parameters aside."""
        return not self._left.stuck

    def found(self) -> bool:
        """Return whether anything differs from before [2]."""
        self._buffers.settle()
        return (
            self._random.has_moved()
            or self._versions != [*map(version, self._parameters)]
            or any(self._left.changes().values())
            or any(differing(old, new) for _, old, new in self._watch.changes())
        )

    def undo(self) -> None:
        """Put everything back [3]."""
        self._buffers.settle()
        self._left.put_back()
        self._random.restore()
        for parameter, trainable in zip(self._parameters, self._trainable, strict=True):
            if parameter.requires_grad != trainable:
                parameter.requires_grad_(trainable)
