"""The tensors that cross a layer call, saved once on the host and brought to whichever worker needs them.

A microbatch hands the same mask and rotary tables to every layer, so what is saved is remembered by tensor and version.
Going over the host is also the way from one worker to the next: no peer access is assumed. What the next stage finds on
its own worker does not travel.

    save, send ── on the way down as soon as it is known what is needed ── [1]
    bring ── on the way up, before its turn (see `activation_prefetch`); nobody waits ── [2]
    on, transfer ── the call itself: compute waits for what is not there yet ── [3]
    drop ── given back when no call here needs it any more ── [4]
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device, Event, TrackedTensors
from lightning_roundpipe.devices.base import stage
from lightning_roundpipe.planning.crossing import tensor_bytes
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.user_code.inference_writes import version_of


class PrefetchBudget:
    """Bytes that may lie on a worker before they are needed; ``limit`` None: as many as there are."""

    def __init__(self, limit: int | None = 0) -> None:
        self.limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Whether there is room for them. If so, they are to be given back."""
        with self._lock:
            if self.limit is not None and self._taken + nbytes > self.limit:
                return False
            self._taken += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._taken -= nbytes


class _Here(NamedTuple):
    """A copy that is on the worker, or on its way there until ``end``. ``ahead``: the room that it takes until used."""

    copy: HostTensor
    tensor: Tensor
    end: Event
    tracked: TrackedTensors
    ahead: list[tuple[PrefetchBudget, int]]

    def needed(self) -> None:
        """It is not ahead any more. Any thread may say so."""
        with contextlib.suppress(IndexError):
            room, nbytes = self.ahead.pop()
            room.give_back(nbytes)


class ActivationStore:
    """One microbatch's saved tensors, and their copies on the worker where it is now.

    Args:
        microbatch: its number.
        recorder: takes down copies.
        staging: the device whose host memory tensors of the host are saved in, so that uploads of them are asynchronous
            too; None where any host memory serves.
    """

    def __init__(self, microbatch: int, recorder: Recorder, staging: Device | None = None) -> None:
        self._microbatch = microbatch
        self._staging = staging
        self._recorder = recorder
        self._saved: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], HostTensor]] = {}
        self._sent: dict[int, tuple[Tensor, HostTensor]] = {}
        self._here: dict[Device, dict[int, _Here]] = {}
        self._device: Device | None = None
        self._ahead: set[Device] = set()
        """Where the microbatch has not been since something was recomputed there for it."""
        self._bringing = threading.Lock()
        self._pending: list[tuple[Device, Event]] = []

    # -- to the host

    def save(self, tensor: Tensor, device: Device | None) -> HostTensor:
        """The host copy of ``tensor`` as it is now [1]. ``device`` is where it lives, None for the host."""
        known = self._saved.get(id(tensor))
        version = version_of(tensor)
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        copy = self._download(tensor.detach(), device)
        if device is not None and copy.ready is not None:
            self._pending.append((device, copy.ready))
        self._saved[id(tensor)] = (weakref.ref(tensor), version, copy)
        return copy

    def send(self, tensor: Tensor, device: Device | None) -> HostTensor:
        """Begin what `transfer` of a tensor to which nobody writes will ask for [1]; it is kept until then."""
        known = self._sent.get(id(tensor))
        if known is None:
            known = self._sent[id(tensor)] = (tensor, self._download(tensor.detach(), device))
        return known[1]

    def _download(self, tensor: Tensor, device: Device | None) -> HostTensor:
        if device is None:
            return HostTensor(self._staged(tensor), None)
        host = device.host_like(tensor)
        stream = device.activations_down
        stream.wait(device.compute.record())
        start = stream.record(timed=True)
        stream.copy(host, tensor)
        ready = stream.record(timed=True)
        copy = HostTensor(host, ready)
        self._recorder.add("download_activations", device.index, start, ready, self._microbatch, copy.nbytes)
        return copy

    def _staged(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the host, in memory that a GPU copies from without the host waiting."""
        if self._staging is None or tensor.layout is not torch.strided:
            return tensor.clone()
        try:
            return stage(tensor, self._staging)
        except RuntimeError:  # elements that share memory, in a way that torch writes to none of them
            return tensor.clone()

    def settle(self) -> None:
        """Order everything that follows on the compute streams after the downloads of what was saved so far.

        User code may overwrite a tensor as soon as the layer has returned; without this the download could read what
        came after.
        """
        for device, ready in self._pending:
            could = None if ready.done() else device.compute.record(timed=True)
            device.compute.wait(ready)
            if could is not None:
                self._recorder.waited(device.index, could, device.compute.record(timed=True))
        self._pending.clear()

    def end_forward(self) -> None:
        """Nothing is saved any more: from here on a copy lives as long as its call is on the tape."""
        self._saved.clear()

    # -- to a worker

    def transfer(self, tensor: Tensor, source: Device | None, target: Device | None) -> Tensor:
        """``tensor`` as it is on ``target``; over the host if that is another device [3]. None is the host."""
        if source is target:
            return tensor
        sent = self._sent.pop(id(tensor), None)
        copy = sent[1] if sent is not None else self._download(tensor.detach(), source)
        if target is None:
            if copy.ready is not None:
                copy.ready.wait()
            return copy.tensor
        if target is self._device and id(copy) in self._here.get(target, ()):
            return self.on(target, copy)
        return self.fresh(target, copy)

    def bring(self, device: Device, copy: HostTensor, room: PrefetchBudget) -> None:
        """Begin to bring ``copy`` to ``device``, unless it is there or there is no ``room`` for it [2]."""
        self.move_to(device)
        self._brought(device, copy, room)

    def on(self, device: Device, copy: HostTensor) -> Tensor:
        """``copy`` on ``device``, brought there once while the microbatch stays [3]."""
        self.move_to(device)
        return self._used(device, copy)

    def ahead_on(self, device: Device, copy: HostTensor) -> Tensor:
        """``copy`` on ``device``, where the microbatch will come later: what it has elsewhere stays there."""
        self._ahead.add(device)
        return self._used(device, copy)

    def _brought(self, device: Device, copy: HostTensor, room: PrefetchBudget | None = None) -> _Here | None:
        """``room`` None: it is needed now."""
        with self._bringing:  # the worker may recompute ahead while the microbatch arrives
            copies = self._here.setdefault(device, {})
            here = copies.get(id(copy))
            if here is None:
                size = tensor_bytes(copy.tensor)
                if room is not None and not room.take(size):
                    return None
                ahead = [] if room is None else [(room, size)]
                try:
                    tensor, end = self._upload(device, copy, lent=True)
                    here = _Here(copy, tensor, end, device.track([tensor], "inputs of the next call"), ahead)
                except BaseException:
                    for taken, nbytes in ahead:
                        taken.give_back(nbytes)
                    raise
                copies[id(copy)] = here
            return here

    def _used(self, device: Device, copy: HostTensor) -> Tensor:
        here = self._brought(device, copy)
        assert here is not None, "what is needed asks for no room"
        here.needed()
        device.compute.wait(here.end)
        return here.tensor

    def fresh(self, device: Device, copy: HostTensor) -> Tensor:
        """``copy`` on ``device``, brought there once more, to be kept for as long as anybody likes [3]."""
        tensor, end = self._upload(device, copy, lent=False)
        device.compute.wait(end)
        return tensor

    def _upload(self, device: Device, copy: HostTensor, *, lent: bool) -> tuple[Tensor, Event]:
        stream = device.activations_up
        tensor = device.device_like(copy.tensor, stream, lent=lent)
        if copy.ready is not None:
            stream.wait(copy.ready)
        start = stream.record(timed=True)
        stream.copy(tensor, copy.tensor)
        end = stream.record(timed=True)
        self._recorder.add("upload_activations", device.index, start, end, self._microbatch, copy.nbytes)
        return tensor, end

    def move_to(self, device: Device | None) -> None:
        """The microbatch goes on elsewhere: what it had on the last worker is dropped. None: it has ended."""
        if device is None:
            self._ahead.clear()
        elif device is not self._device:
            self._ahead.discard(device)
        else:
            return
        for other in list(self._here):  # workers add to it meanwhile
            if other is not device and other not in self._ahead:
                self._drop(other, list(self._here[other]))
        self._device = device

    def leave(self, device: Device | None = None) -> None:
        """No call on ``device``, by default here, will be followed by another one: all that is there is dropped."""
        device = device or self._device
        if device is not None:
            self._ahead.discard(device)
            self._drop(device, list(self._here.get(device, ())))

    def drop(self, copies: Iterable[HostTensor]) -> None:
        """Nobody here needs ``copies`` any more [4]. Behind the compute that used them."""
        if self._device is not None:
            self._drop(self._device, [id(copy) for copy in copies])

    def forget_dead(self) -> None:
        """Drop the copies of tensors that nobody holds any more. Where there is no tape, nobody needs them."""
        self._saved = {key: known for key, known in self._saved.items() if known[0]() is not None}
        alive = {id(copy) for _, _, copy in self._saved.values()}
        for device, copies in self._here.items():
            self._drop(device, [key for key in copies if key not in alive])

    def _drop(self, device: Device, keys: Iterable[int]) -> None:
        copies = self._here.get(device, {})
        gone = [copies.pop(key) for key in keys if key in copies]
        if gone:
            device.free_after_compute([here.tensor for here in gone])
        for here in gone:
            here.needed()
            here.tracked.release()
