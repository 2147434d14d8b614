"""Thread-local state that affects how torch computes, captured at a layer's call and restored where the layer runs.

Grad mode, inference mode, autocast, context variables and the user's ``threading.local`` belong to a thread. A layer
runs on a worker's thread, and again much later for its recomputation, so all of this travels with the call. Autocast's
cache of cast weights is always off: all threads share it, and it would return casts of weights that have left the
arena.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_roundpipe.model.attributes import same

_UNSET = object()
_LIBRARIES = re.compile(r"(torch|torchmetrics|lightning|pytorch_lightning|lightning_fabric|builtins|typing|abc)\b")


class TorchThreadState(NamedTuple):
    """Modes of a thread at a call."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    locals: tuple[_Local, ...] = ()

    @classmethod
    def capture(cls, device_types: tuple[str, ...], thread_locals: Sequence[threading.local] = ()) -> TorchThreadState:
        """Capture the calling thread's modes, for devices of these types, and the contents of ``thread_locals``."""
        autocast = tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types])
        local = tuple([_Local(value, dict(vars(value))) for value in thread_locals])
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, local)

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with these modes."""
        return _Entered(self)


class _Entered:
    """Context with the modes of ``state``. Changes only what differs, usually nothing."""

    __slots__ = ("_around", "_before", "_state")

    def __init__(self, state: TorchThreadState) -> None:
        self._state = state
        self._around: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        state = self._state
        if state.inference or torch.is_inference_mode_enabled():
            self._entering().enter_context(torch.inference_mode(state.inference))
        for device, enabled, dtype in state.autocast:
            if enabled or torch.is_autocast_enabled(device):
                autocast = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
                self._entering().enter_context(autocast)
        self._before = torch.is_grad_enabled()
        if self._before != state.grad:
            torch.set_grad_enabled(state.grad)
        for local in state.locals:
            local.enter()

    def _entering(self) -> contextlib.ExitStack:
        if self._around is None:
            self._around = contextlib.ExitStack()
        return self._around

    def __exit__(self, *error: Any) -> None:
        torch.set_grad_enabled(self._before)
        if self._around is not None:
            self._around.__exit__(*error)


@dataclass(frozen=True)
class _Local:
    """The contents of a ``threading.local`` in one thread."""

    value: threading.local
    held: dict[str, Any]

    def enter(self) -> None:
        """Give it the same contents in this thread."""
        there = vars(self.value)
        if not same(there, self.held):  # ``==`` would fail on tensors
            there.clear()
            there.update(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Local) and self.value is other.value and same(self.held, other.held)

    def __hash__(self) -> int:
        return id(self.value)


def thread_locals_of(root: nn.Module) -> tuple[threading.local, ...]:
    """Return the ``threading.local`` objects beside the classes of the user's code, and among its attributes."""
    files = {kind.__module__ for module in root.modules() for kind in type(module).__mro__}
    places = [vars(sys.modules[name]) for name in files if name in sys.modules and not _LIBRARIES.match(name)]
    held = [value for place in (*places, *map(vars, root.modules())) for value in list(place.values())]
    return tuple({id(value): value for value in held if isinstance(value, threading.local)}.values())


def apply_context(context: contextvars.Context) -> None:
    """Set the context variables of the calling thread to their values in ``context``.

    ``training_step`` runs in a copy of the context on a microbatch's thread, but what it sets must remain set, as in
    plain training.
    """
    own = contextvars.copy_context()
    for variable, value in context.items():
        if own.get(variable, _UNSET) is not value:
            variable.set(value)
