"""Boundary tensors that leave a worker while their microbatch waits for another one.

Outputs of a stage are in the hands of user code, and the next stage runs on another worker, from their host copies:

    next call: inputs are copied to the host ── `OffloadedTensors` makes the tensor one of the host ── [1]
    no one holds the memory on the worker any more ── [2]
    user code touches the tensor after all ── it is restored on its worker first ── [3]

It is done only where the plan needs the memory, and after the copy is complete: whoever else reads the tensor, such as
a thread of the user's own, finds the same values at any time.

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

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.planning.memory import LEAVING
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.threads.sync import CancelScope
from lightning_roundpipe.runtime.user_code.graph_cuts import source_of

_ON_HOST = torch.empty(0)
_HELD_BY_PYTHON = _ON_HOST._use_count()  # type: ignore[attr-defined]
"""References to a tensor that only Python holds: one or two, by the version of torch."""


def mark_output(tensor: Tensor, owner: int) -> None:
    """Mark ``tensor`` as the output of a call of ``owner``, a microbatch of one step (`ActivationStore.number`)."""
    tensor.roundpipe_output = owner  # type: ignore[attr-defined]


def may_leave(tensor: Tensor, owner: int) -> bool:
    """Return whether ``tensor`` is an output of ``owner`` whose memory user code sees through this object alone.

    What an earlier step or another microbatch has left (a cache) may be in the hands of several microbatches, of which
    each restores only what it has offloaded itself. Autograd keeps a tensor itself as what a function of user code
    saved, and would read it on the host.
    """
    return (
        getattr(tensor, "roundpipe_output", None) == owner
        and (not tensor.requires_grad or source_of(tensor) is not None)
        and type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and not (tensor.is_conj() or tensor.is_neg())  # which the memory alone does not tell
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
        witness: shares its version.
        version: the version when it left.
    """

    tensor: weakref.ref[Tensor]
    copy: HostTensor
    device: Device
    storage: weakref.ref[torch.UntypedStorage]
    place: tuple[int, torch.Size, tuple[int, ...]]
    witness: Tensor
    version: int

    def is_written(self) -> bool:
        """Return whether the tensor, or one that shares its memory, was written to since it left."""
        return self.witness._version != self.version

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
        self._dropped: list[_Offloaded] = []
        """Those that user code has dropped; layers are recomputed from their copies."""

    def __bool__(self) -> bool:
        if self._known:
            self._forget_dead()
        return bool(self._known)

    def add(self, tensor: Tensor, copy: HostTensor, device: Device) -> None:
        """Let ``tensor`` have the memory of its complete host ``copy`` instead of that on ``device`` [1].

        Its object, its graph and its version stay the same.
        """
        self._forget_dead()
        place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        storage, version = weakref.ref(tensor.untyped_storage()), tensor._version
        tensor.data = copy.tensor
        witness = tensor.detach()
        self._known[id(tensor)] = _Offloaded(weakref.ref(tensor), copy, device, storage, place, witness, version)

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
        for key, known in list(self._known.items()):
            if known.tensor() is None:
                self._dropped.append(self._known.pop(key))

    def alive(self) -> list[Tensor]:
        """Return the tensors that user code still holds."""
        return [tensor for known in self._known.values() if (tensor := known.tensor()) is not None]

    def end(self) -> None:
        """Forget all tensors at the end of the microbatch's forward.

        Raises:
            RoundPipeError: one that user code has dropped was written to without being restored.
        """
        self._forget_dead()
        dropped, self._dropped = self._dropped, []
        if any(known.is_written() and known.storage() is None for known in dropped):
            raise written_unseen()


def written_unseen() -> RoundPipeError:
    """Return the error for a write that only the tensor's version shows."""
    return RoundPipeError(
        "code between layers wrote to what a layer returned in a way that cannot be followed: by another tensor of the "
        "same memory (detach(), a view), or in TorchScript or an extension. Write to the output itself, in a function "
        "of torch. Outputs stay where they are, and such code works, if memory_budget or the devices' memory is larger."
    )


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
