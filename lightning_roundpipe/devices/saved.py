"""Counts what autograd saves for backward, without changing what it does.

Saved-tensor hooks see each tensor when the graph saves it. The graph owns what the hook returns, so the deletion of
that object means that the graph, or the part of it that backward has consumed, is freed. With such hooks, torch skips
its check that a saved tensor is unmodified, and a model with a wrong in-place operation would train with wrong
gradients. So the hooks make that check, with torch's error message.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_roundpipe.devices.ledger import Ledger
from lightning_roundpipe.devices.process_context import replaced, shared_context

PURPOSE = "saved for backward"
_autograd: Any = torch._C._autograd


class _Saved:
    """A saved tensor that the graph owns. Counted while this object lives."""

    __slots__ = ("__weakref__", "key", "note", "tensor", "version")

    def __init__(self, tensor: Tensor, key: int, note: Callable[[tuple[int, int, str]], None]) -> None:
        self.key, self.note = key, note  # first: `__del__` runs even if a later line fails
        # Detached: an operation's own output refers to its node, and the node would refer to it, a cycle that only the
        # garbage collector frees. A detached tensor still shares the version counter.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def __del__(self) -> None:
        if hasattr(self, "note"):  # torch.compile, if it traces the hooks, creates some without `__init__`
            self.note((self.key, -1, PURPOSE))


class _Uncounted(NamedTuple):
    """A saved tensor in an arena, or without a storage of its own (sparse): checked, but not counted."""

    tensor: Tensor
    version: int


def _unpack(saved: _Saved | _Uncounted) -> Tensor:
    tensor = saved.tensor
    if tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {saved.version} "
            "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )
    return tensor


Pack = Callable[[Tensor], _Saved | _Uncounted]


def packing(ledger: Ledger, arenas: Container[int]) -> Pack:
    """Return the hook with which ``ledger`` counts a saved tensor.

    Args:
        ledger: the device's.
        arenas: keys of storages that are counted already, such as those of weights.
    """

    def pack(tensor: Tensor) -> _Saved | _Uncounted:
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage is None or (key := storage._cdata) in arenas:
            return _Uncounted(tensor.detach(), tensor._version)
        ledger.add(key, storage.nbytes(), PURPOSE)
        return _Saved(tensor, key, ledger.note)

    return pack


def saved_for_backward(pack: Pack) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which ``pack`` counts what autograd saves. Inner hooks (checkpointing) take precedence."""
    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def saved_between_layers(present: Callable[[], Pack | None]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return such a context around user code, which computes on one device after the other.

    ``present`` returns the hook of the one where it computes now; None: on the host.
    """

    def pack(tensor: Tensor) -> _Saved | _Uncounted:
        with torch._C.DisableTorchFunction():  # a Function saves tensors under the modes of user code
            hook = present()
            return _Uncounted(tensor.detach(), tensor._version) if hook is None else hook(tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


@shared_context
def counting_paused_in_transforms() -> Iterator[None]:
    """Let transforms of ``torch.func`` that refuse hooks on saved tensors (``grad``) run, uncounted."""
    real = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def disable(message: str) -> Iterator[None]:
        ours = []
        if not torch.compiler.is_dynamo_compiling():
            while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None and hooks[1] is _unpack:
                _autograd._pop_saved_tensors_default_hooks()
                ours.append(hooks)
        try:
            with real(message):
                yield
        finally:
            for hooks in ours:
                _autograd._push_saved_tensors_default_hooks(*hooks)

    with replaced(torch.autograd.graph, disable_saved_tensors_hooks=disable):
        yield
