"""Counts what autograd saves for backward, without changing what it does.

`saved_for_backward` counts each tensor, as it is saved and freed:

Saved-tensor hooks see each tensor when the graph saves it. The graph owns what the hook returns, so the deletion of
that object means that the graph, or the part of it that backward has consumed, is freed. With such hooks, torch skips
its check that a saved tensor is unmodified, and a model with a wrong in-place operation would train with wrong
gradients. So the hooks make that check, with torch's error message.

Hooks are Python, and autograd runs backward without it. On several devices, each unpacked tensor makes a thread wait
for the interpreter. `LedgerSavedCounter` therefore counts calls that are alike as a whole, once two of them have saved
the same amount. It uses hooks for the others, and on a device with a limit, where any tensor may be the one that does
not fit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from lightning_roundpipe.devices.base import SavedAmount, SavedAmounts, SavedCounter
from lightning_roundpipe.devices.ledger import Ledger, LedgerTrackedTensors

PURPOSE = "saved for backward"


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


class _Uncounted:
    """A saved tensor in an arena, or without a storage of its own (sparse): checked, but not counted."""

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


def saved_for_backward(
    ledger: Ledger, arenas: Container[int], seen: Callable[[_Saved], object] = lambda saved: None
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which ``ledger`` counts what autograd saves. Inner hooks (checkpointing) take precedence.

    Args:
        ledger: the device's.
        arenas: keys of storages that are counted already, such as those of weights.
        seen: is given each object that stands for a counted tensor.

    ``torch.func`` transforms refuse to run inside any saved-tensor hooks, including these.
    """

    def pack(tensor: Tensor) -> _Saved | _Uncounted:
        if tensor.layout is not torch.strided:
            return _Uncounted(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in arenas:
            return _Uncounted(tensor)
        ledger.add(key, storage.nbytes(), PURPOSE)
        saved = _Saved(tensor, key, ledger.note)
        seen(saved)
        return saved

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


class LedgerSavedCounter(SavedCounter):
    """Counts on an emulated device.

    Args:
        ledger: the device's.
        arenas: keys of storages that are counted already.
        amounts: what the layer is known to save.
        key: equal for calls that are alike: they run the same code on arguments of the same shapes.
    """

    def __init__(self, ledger: Ledger, arenas: Container[int], amounts: SavedAmounts, key: Hashable) -> None:
        self._ledger, self._amounts, self._key = ledger, amounts, key
        self._amount = amounts.known(key) if ledger.limit is None else None
        self._saved: list[weakref.ref[_Saved]] = []
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        if self._amount is None:
            self._hooks = saved_for_backward(ledger, arenas, lambda saved: self._saved.append(weakref.ref(saved)))

    def __enter__(self) -> Self:
        if self._hooks is not None:
            self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(*error)

    def held(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> object:
        if self._amount is not None:
            return _HeldTensors(self._ledger, self._amount, inputs, outputs)
        self._amounts.learn(self._key, self._found(inputs, outputs))
        return None  # the hooks have counted

    def _found(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> SavedAmount:
        alive = [saved for reference in self._saved if (saved := reference()) is not None]
        others = {saved.key: saved.tensor.untyped_storage().nbytes() for saved in alive}
        given: list[int] = []
        returned: list[int] = []
        for tensors, positions in ((inputs, given), (outputs, returned)):
            for i, tensor in enumerate(tensors):
                if tensor.layout is torch.strided and others.pop(tensor.untyped_storage()._cdata, None) is not None:
                    positions.append(i)
        return SavedAmount(tuple(given), tuple(returned), sum(others.values()))


class _HeldTensors:
    """Counts the tensors that one call has saved, while it lives."""

    __slots__ = ("_ledger", "_others", "_tensors")

    def __init__(
        self, ledger: Ledger, amount: SavedAmount, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        tensors = [*(inputs[i] for i in amount.inputs), *(outputs[i] for i in amount.outputs)]
        self._ledger, self._others = ledger, amount.nbytes
        self._tensors = LedgerTrackedTensors(ledger, tensors, PURPOSE)
        if amount.nbytes:
            ledger.add(id(self), amount.nbytes, PURPOSE)

    def __del__(self) -> None:
        if self._others:
            self._ledger.end(id(self), PURPOSE)
