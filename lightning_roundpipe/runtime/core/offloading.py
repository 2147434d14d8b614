"""Boundary tensors that leave a worker while their microbatch waits for another one.

Outputs of a stage are in the hands of user code, and the next stage runs on another worker, from their host copies:

    next call: inputs are on their way to the host ── `OffloadedTensors` makes the tensor one of the host ── [1]
    the copy is done ── no one holds the memory on the worker any more ── [2]
    user code touches the tensor after all ── it is restored on its worker first ── [3]

Gradients leave in the same way, but are in no one's hands. `Departures` bounds how many microbatches are between the
end of their stage and [2], which is what the plan counts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.planning.memory import LEAVING
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.threads.sync import CancelScope
from lightning_roundpipe.runtime.user_code.graph_cuts import source_of

_ON_HOST = torch.empty(0)
_HELD_BY_PYTHON = _ON_HOST._use_count()  # type: ignore[attr-defined]
"""References to a tensor that only Python holds: one or two, by the version of torch."""


def mark_output(tensor: Tensor) -> None:
    """Mark ``tensor`` as the output of a call. Outputs that require grad are known by their graph."""
    tensor.roundpipe_output = True  # type: ignore[attr-defined]


def may_leave(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a call's output whose memory user code sees through this object alone.

    Autograd keeps a tensor itself as what a function of user code saved, and would read it on the host.
    """
    is_output = source_of(tensor) is not None if tensor.requires_grad else hasattr(tensor, "roundpipe_output")
    return (
        is_output
        and type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and tensor._use_count() == _HELD_BY_PYTHON  # type: ignore[attr-defined]
        and torch._has_compatible_shallow_copy_type(tensor, _ON_HOST)
    )


@dataclass(eq=False)
class _Offloaded:
    """A tensor that was made one of the host.

    Attributes:
        tensor: the tensor, by a weak reference.
        copy: its values.
        device: the worker that held it.
        storage: its memory there, by a weak reference: other tensors may share it.
        place: its storage offset, shape and strides there.
    """

    tensor: weakref.ref[Tensor]
    copy: HostTensor
    device: Device
    storage: weakref.ref[torch.UntypedStorage]
    place: tuple[int, torch.Size, tuple[int, ...]]

    def there(self) -> Tensor | None:
        """Return the tensor's old memory; None if it is freed."""
        storage = self.storage()
        like = self.copy.tensor
        return None if storage is None else torch.empty(0, dtype=like.dtype, device=storage.device).set_(
            storage, *self.place
        )  # fmt: skip


class OffloadedTensors:
    """The tensors of one microbatch that user code holds and that are on the host only. Used by one thread."""

    def __init__(self) -> None:
        self._known: dict[int, _Offloaded] = {}

    def __bool__(self) -> bool:
        if self._known:
            self._forget_dead()
        return bool(self._known)

    def add(self, tensor: Tensor, copy: HostTensor, device: Device) -> None:
        """Let ``tensor`` have the memory of its host ``copy`` instead of that on ``device`` [1].

        Its object, its graph and its version stay the same.
        """
        self._forget_dead()
        place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        storage = weakref.ref(tensor.untyped_storage())
        self._known[id(tensor)] = _Offloaded(weakref.ref(tensor), copy, device, storage, place)
        tensor.data = copy.tensor

    def get(self, tensor: Tensor) -> _Offloaded | None:
        """Return where the values of ``tensor`` are; None if it was not offloaded."""
        known = self._known.get(id(tensor)) if self._known else None
        return known if known is not None and known.tensor() is tensor else None

    def pop(self, tensor: Tensor) -> _Offloaded | None:
        """Do what `get` does, and forget ``tensor``."""
        known = self.get(tensor)
        if known is not None:
            del self._known[id(tensor)]
        return known

    def _forget_dead(self) -> None:
        self._known = {key: known for key, known in self._known.items() if known.tensor() is not None}

    def alive(self) -> list[Tensor]:
        """Return the tensors that user code still holds."""
        return [tensor for known in self._known.values() if (tensor := known.tensor()) is not None]


class Departure:
    """A microbatch that has left a stage on a worker, until its boundary tensors have left the worker, too."""

    def __init__(self) -> None:
        self._known = Waiter()
        self._copies: list[Event] | None = None
        """The ends of their downloads; None: user code has not reached the call that they go to."""

    def leave(self, copies: Iterable[Event] = ()) -> None:
        """Say that the tensors leave as soon as ``copies`` are done."""
        self._copies = list(copies)
        self._known.wake()

    def is_over(self) -> bool:
        return self._copies is not None and all(copy.done() for copy in self._copies)

    def wait(self, cancel_scope: CancelScope) -> None:
        cancel_scope.wait(self._known)
        for copy in self._copies or ():
            copy.wait()


class Departures:
    """The departures from one worker. A microbatch's call there waits until at most `LEAVING` are not over.

    A microbatch departs once its user code has reached the next call, and needs no turn for that. So the wait, for
    microbatches whose turns were before, cannot be part of a cycle.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Departure] = []

    def begin(self) -> Departure:
        """Return the departure of a microbatch that is about to pass its turn on."""
        departure = Departure()
        with self._lock:
            self._pending.append(departure)
        return departure

    def wait(self, cancel_scope: CancelScope) -> None:
        """Wait until at most `LEAVING` departures are not over. The microbatch whose turn it is calls this."""
        while self._pending:
            with self._lock:
                self._pending = [departure for departure in self._pending if not departure.is_over()]
                if len(self._pending) <= LEAVING:
                    return
                oldest = self._pending[0]
            oldest.wait(cancel_scope)

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()
