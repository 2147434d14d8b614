"""Counting what autograd saves for backward, without changing what it does.

Saved-tensor hooks see each tensor when the graph saves it, and the graph owns what the hook returns: when that dies,
the graph (or the part of it that backward has used up) is gone. The price of hooks is that torch then leaves out its
check that a saved tensor is still what it was, and a model with a wrong in-place operation would train on, silently
wrong. So the check is done here, with torch's words.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from lightning_roundpipe.devices.ledger import Ledger

PURPOSE = "saved for backward"


class _Saved:
    """One saved tensor in the graph's hands, counted while it lives."""

    __slots__ = ("end", "key", "tensor", "version")

    def __init__(self, tensor: Tensor, key: int, end: Callable[[int, str], None]) -> None:
        self.key, self.end = key, end  # first, as `__del__` comes even if something fails here
        # Detached, because an operation's own output holds its node, and the node would hold it: a cycle that only the
        # garbage collector ends. A detached tensor still shares the version counter.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def __del__(self) -> None:
        if hasattr(self, "end"):  # torch.compile, if it gets to see the hooks, makes some without `__init__`
            self.end(self.key, PURPOSE)


class _Uncounted:
    """The same for a tensor in an arena, or without storage of its own (sparse): checked, but not counted."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version


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


def saved_for_backward(ledger: Ledger, arenas: Container[int]) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which ``ledger`` counts what autograd saves; hooks of an inner one (checkpointing) go before it.

    Args:
        ledger: of the device.
        arenas: keys of storages that are counted anyway, as weights are.

    ``torch.func`` transforms refuse to run inside any saved-tensor hooks, so they do inside this.
    """

    def pack(tensor: Tensor) -> _Saved | _Uncounted:
        if tensor.layout is not torch.strided:
            return _Uncounted(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in arenas:
            return _Uncounted(tensor)
        ledger.add(key, storage.nbytes(), PURPOSE)
        return _Saved(tensor, key, ledger.end)

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)
