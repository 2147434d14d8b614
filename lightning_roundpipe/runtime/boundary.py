"""The tensors that cross a layer call, saved once on the host and brought to whichever worker needs them.

A microbatch hands the same mask and rotary tables to every layer, so what is saved is remembered by tensor and version.
Going over the host is also the way from one worker to the next: no peer access is assumed.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.runtime.events import Recorder


class HostCopy:
    """A tensor on the host; ``ready`` (if any) is the end of its download."""

    __slots__ = ("nbytes", "ready", "tensor")

    def __init__(self, tensor: Tensor, ready: Event | None) -> None:
        self.tensor = tensor
        self.ready = ready
        self.nbytes = tensor.numel() * tensor.element_size()


class Boundaries:
    """One microbatch's saved tensors, and their copies on the worker where it is now."""

    def __init__(self, microbatch: int, recorder: Recorder) -> None:
        self._microbatch = microbatch
        self._recorder = recorder
        self._saved: dict[int, tuple[weakref.ref[Tensor], int, HostCopy]] = {}
        self._copies: dict[Device, dict[int, tuple[HostCopy, Tensor]]] = {}
        self._ahead: set[Device] = set()
        """Where the microbatch has not been since something was recomputed there for it."""
        self._pending: list[tuple[Device, Event]] = []

    def save(self, tensor: Tensor, device: Device | None) -> HostCopy:
        """The host copy of ``tensor`` as it is now. ``device`` is where it lives, None for the host."""
        known = self._saved.get(id(tensor))
        version = 0 if tensor.is_inference() else tensor._version
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        copy = self._download(tensor.detach(), device)
        self._saved[id(tensor)] = (weakref.ref(tensor), version, copy)
        return copy

    def _download(self, tensor: Tensor, device: Device | None) -> HostCopy:
        if device is None:
            return HostCopy(tensor.clone(), None)
        host = device.host_like(tensor)
        stream = device.activations_down
        stream.wait(device.compute.record())
        start = stream.record(timed=True)
        stream.copy(host, tensor)
        ready = stream.record(timed=True)
        copy = HostCopy(host, ready)
        self._recorder.add("download_activations", device.index, start, ready, self._microbatch, copy.nbytes)
        self._pending.append((device, ready))
        return copy

    def transfer(self, tensor: Tensor, source: Device | None, target: Device | None) -> Tensor:
        """``tensor`` as it is on ``target``; over the host if that is another device. None is the host."""
        if source is target:
            return tensor
        copy = self._download(tensor.detach(), source)
        if target is not None:
            return upload(target, copy, self._recorder, self._microbatch)
        if copy.ready is not None:
            copy.ready.wait()
        return copy.tensor

    def settle(self) -> None:
        """Order everything that follows on the compute streams after the downloads so far.

        Glue may overwrite or free a tensor as soon as the layer has returned; without this the download could read
        what came after.
        """
        for device, ready in self._pending:
            device.compute.wait(ready)
        self._pending.clear()

    def end_forward(self) -> None:
        """Nothing is saved any more: from here on a copy lives as long as its call is on the tape."""
        self._saved.clear()

    def forget_dead(self) -> None:
        """Drop the copies of tensors that nobody holds any more. Where there is no tape, nobody needs them."""
        self._saved = {key: known for key, known in self._saved.items() if known[0]() is not None}
        alive = {id(copy) for _, _, copy in self._saved.values()}
        for device, here in self._copies.items():
            self._copies[device] = {key: known for key, known in here.items() if key in alive}

    def on(self, device: Device, copy: HostCopy) -> Tensor:
        """``copy`` on ``device``, brought there once while the microbatch stays."""
        self.move_to(device)
        return self._known(device, copy)

    def ahead_on(self, device: Device, copy: HostCopy) -> Tensor:
        """``copy`` on ``device``, where the microbatch will come later: what it has elsewhere stays there."""
        self._ahead.add(device)
        return self._known(device, copy)

    def _known(self, device: Device, copy: HostCopy) -> Tensor:
        here = self._copies.setdefault(device, {})
        known = here.get(id(copy))
        if known is None:
            known = here[id(copy)] = (copy, self.fresh(device, copy))
        return known[1]

    def fresh(self, device: Device, copy: HostCopy) -> Tensor:
        """``copy`` on ``device``, brought there once more."""
        return upload(device, copy, self._recorder, self._microbatch)

    def move_to(self, device: Device | None) -> None:
        """The microbatch goes on elsewhere: what it had on the last worker is dropped. None: it has ended."""
        if device is None:
            self._ahead.clear()
        else:
            self._ahead.discard(device)
        for other in list(self._copies):  # workers add to it meanwhile
            if other is not device and other not in self._ahead:
                self._copies.pop(other, None)


def upload(device: Device, copy: HostCopy, recorder: Recorder, microbatch: int) -> Tensor:
    """``copy`` as a new tensor on ``device``; work enqueued on its compute stream from here on sees it."""
    stream = device.activations_up
    tensor = device.device_like(copy.tensor, stream)
    if copy.ready is not None:
        stream.wait(copy.ready)
    start = stream.record(timed=True)
    stream.copy(tensor, copy.tensor)
    end = stream.record(timed=True)
    device.compute.wait(end)
    recorder.add("upload_activations", device.index, start, end, microbatch, copy.nbytes)
    return tensor
