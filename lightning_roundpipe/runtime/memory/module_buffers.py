"""Buffers of a layer's replica: loaded before a call, written back after it, and restored for a recomputation.

A running mean must see each microbatch once, in order. A recomputation must see what its forward saw, and change
nothing. Most buffers never change, so only those that changed in the first batch are tracked from call to call, and no
thread waits for a device:

    load ── the newest values, unless the replica holds them already ── [1]
    call ── changes the replica ── download to the host, where later calls find the values ── [2]
    settle ── the layer's own buffer gets them: at the end of a step, or when user code reads the buffer ── [3]

User code may write to buffers too: hooks of the layer run there, possibly for the next microbatch already. So a call
has changed what differs from the values loaded for it, not from what the layer's buffer holds by now.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.base import stage
from lightning_roundpipe.model.attributes import bits, sparse_parts
from lightning_roundpipe.model.replica import Replica

Place = tuple[int, str]
"""Id of a module and name of one of its buffers."""


class BufferValue:
    """Values of a buffer in host memory. Nothing writes to them once ``ready`` has passed.

    Attributes:
        host: the values; None if the buffer is None.
        ready: end of their download.
        of: the buffer that the values come from or will be settled in, and its version when it held ``base``.
        base: what the buffer holds until the values are settled.
        pending: whether the values are yet to be settled.
    """

    def __init__(
        self, host: Tensor | None, ready: Event | None, of: tuple[Tensor | None, int], base: Tensor | None = None
    ) -> None:
        self.host, self.ready, self.of, self.base = host, ready, of, base
        self.pending = ready is not None

    def is_up_to_date(self, buffer: Tensor | None) -> bool:
        """Return whether ``buffer`` is still the tensor in ``of``, with no write to it since."""
        return self.of[0] is buffer and self.of[1] == _version(buffer)


class HostBuffers:
    """The newest values of all layers' buffers."""

    def __init__(self) -> None:
        self._made: dict[Place, tuple[nn.Module, BufferValue]] = {}
        self._pending: dict[Place, int] = {}
        """Ids of the buffer tensors that are to be settled, by place."""
        self._compared: set[Place] = set()
        """Buffers whose values were compared since the last step: to do so in each call costs more than the call."""
        self._lock = threading.RLock()

    def now(self, module: nn.Module, name: str, device: Device) -> BufferValue:
        """Return the newest values of a buffer, in memory that ``device`` copies from."""
        with self._lock:
            buffer = module._buffers.get(name)
            known = self._made.get((id(module), name))
            if known is not None and known[1].pending and not known[1].is_up_to_date(buffer):
                self._settle((id(module), name))
                known, buffer = self._made.get((id(module), name)), module._buffers.get(name)
            if known is None or not known[1].is_up_to_date(buffer) or self._differs((id(module), name), buffer):
                with torch.inference_mode(False):
                    host = None if buffer is None else buffer.detach()
                    if host is not None:
                        host = stage(host, device) if _is_plain(host) else host.clone()
                known = self._made[id(module), name] = module, BufferValue(host, None, (buffer, _version(buffer)))
            return known[1]

    def _differs(self, place: Place, buffer: Tensor | None) -> bool:
        """Return whether ``buffer`` was written to in a way that increments no version: by its ``data`` or ``numpy()``.

        The first call after a step finds it.
        """
        known = self._made[place][1]
        if place in self._compared or known.pending or buffer is None or known.host is None or not _is_plain(buffer):
            return False  # pending values are those of calls, which the buffer does not hold yet
        self._compared.add(place)
        return not _alike(buffer, known.host)

    def put(self, module: nn.Module, name: str, before: BufferValue, host: Tensor | None, ready: Event) -> BufferValue:
        """Store what a call has made of the values ``before`` [2]."""
        with self._lock:
            base = before.base if before.pending else before.host
            made = BufferValue(host, ready, before.of, base)
            self._made[id(module), name] = module, made
            before.pending, before.base = False, None
            self._pending[id(module), name] = id(before.of[0])
            return made

    def __bool__(self) -> bool:
        return bool(self._pending)

    def awaits(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a buffer with pending values, or a view of one."""
        base = None if tensor.is_inference() else tensor._base
        return any(found in (id(tensor), id(base)) for found in list(self._pending.values()))

    def settle(self) -> None:
        """Wait for all pending values and write them to their buffers [3]."""
        with self._lock:
            for place in list(self._pending):
                self._settle(place)
            self._compared.clear()

    def _settle(self, place: Place) -> None:
        module, made = self._made[place]
        assert made.ready is not None
        made.ready.wait()
        buffer = module._buffers.get(place[1])
        if not _alike(made.host, made.base):
            _assign(module, place[1], made.host)
            buffer = module._buffers.get(place[1])
            made_of = buffer, _version(buffer)
        else:
            made_of = made.of
        self._pending.pop(place, None)
        made.of, made.pending, made.base = made_of, False, None

    def drop(self) -> None:
        """Forget all values after a failed step: pending ones may never arrive."""
        with self._lock:
            self._made.clear()
            self._pending.clear()
            self._compared.clear()


class _Loaded(NamedTuple):
    """The values that a replica's buffer was loaded with, and the tensor that holds them."""

    made: BufferValue
    here: Tensor | None
    here_version: int


class ReplicaBuffers:
    """The buffers of one layer's replica on one worker.

    Args:
        layer: name of the layer.
        host: values that the calls of all layers have left.
        mutable: module and name of the buffers that the forward changes, by position. Updated.
        replica: the replica.
        device: the worker's device.
    """

    def __init__(
        self, layer: str, host: HostBuffers, mutable: dict[int, tuple[nn.Module, str]], replica: Replica, device: Device
    ) -> None:
        self._layer, self._host, self._mutable = layer, host, mutable
        self._replica = replica
        self._device = device
        self.places = [
            (original, copy, name)
            for original, copy in zip(replica.originals, replica.modules, strict=True)
            for name in original._buffers
        ]
        self._loaded: list[_Loaded | None] = [None] * len(self.places)

    def load(self, saved: dict[int, BufferValue] | None = None) -> None:
        """Load the newest values into the replica, or those in ``saved`` where given [1]."""
        for index, (original, copy, name) in enumerate(self.places):
            made = None if saved is None else saved.get(index)
            if made is None:
                made = self._host.now(original, name, self._device)
            known = self._loaded[index]
            if known is None or known.made is not made:
                here = copy._buffers[name] = self._uploaded(made)
                self._loaded[index] = _Loaded(made, here, _version(here))

    def _uploaded(self, made: BufferValue) -> Tensor | None:
        if made.host is None:
            return None
        with torch.inference_mode(False):
            if made.ready is not None:
                self._device.compute.wait(made.ready)
            if not _is_plain(made.host):
                return made.host.to(self._replica.device, copy=True)
            here = torch.empty_like(made.host, device=self._replica.device)
            self._device.compute.copy(here, made.host)
            return here

    def snapshot(self) -> dict[int, BufferValue]:
        """Return the values for the recomputation: the forward and user code may change the buffers meanwhile."""
        found = {}
        for index, (original, _, name) in enumerate(self.places):
            made = self._host.now(original, name, self._device)
            if made.host is not None:
                found[index] = made
        return found

    def changed(self, thorough: bool) -> list[int]:
        """Return the positions of the buffers that the call has changed.

        Versions do not suffice: batch norm updates its running statistics without incrementing their versions. If
        ``thorough``, values are compared, and the host waits for the device. Otherwise buffers that are known to be
        mutable count as changed.
        """
        found = []
        for index, (_, copy, name) in enumerate(self.places):
            loaded = self._loaded[index]
            now = copy._buffers.get(name)
            if loaded is None or now is not loaded.here or _version(now) != loaded.here_version:
                found.append(index)
            elif now is not None and thorough:
                if not _alike(now.cpu(), loaded.made.host):  # ``cpu`` comes after `load` on the compute stream
                    found.append(index)
            elif now is not None and index in self._mutable:
                found.append(index)
        return found

    def written(self) -> list[tuple[int, int]]:
        """Return a value that changes when code writes to the replica's buffers or replaces them."""
        now = [copy._buffers.get(name) for _, copy, name in self.places]
        return [(id(buffer), _version(buffer)) for buffer in now]

    def refuse_written(self, before: list[tuple[int, int]]) -> None:
        """Refuse writes to buffers during a backward, because they would be lost.

        Args:
            before: result of `written` before the backward.

        Raises:
            RoundPipeError: if a buffer was written to or replaced.
        """
        for (original, _, name), then, now in zip(self.places, before, self.written(), strict=True):
            if then != now:
                raise RoundPipeError(
                    f"buffer {name!r} of {type(original).__name__} in layer {self._layer!r} was written to in "
                    "backward, by a hook or an autograd.Function, on a worker's copy, where it would be lost. Write to "
                    "it in the layer's forward, or between steps in a hook of the LightningModule."
                )

    def write_back(self, saved: dict[int, BufferValue] | None, thorough: bool) -> None:
        """Store what a forward changed [2]. ``saved`` is its snapshot, None if the call is not recomputed."""
        found: list[tuple[int, Tensor | None, Tensor | None]] = []
        for index in self.changed(thorough):
            original, copy, name = self.places[index]
            known = thorough or index in self._mutable
            if saved is not None and not (known and index in saved):
                raise RoundPipeError(
                    f"buffer {name!r} of {type(original).__name__} in layer {self._layer!r} changed during a "
                    "forward pass, which it did not do in the first batch, so its recomputation cannot be exact."
                )
            self._mutable[index] = (original, name)
            here = copy._buffers.get(name)
            found.append((index, here, None if here is None else self._downloaded(here)))
        if not found:
            return
        ready = self._device.compute.record()
        for index, here, host in found:
            original, _, name = self.places[index]
            loaded = self._loaded[index]
            assert loaded is not None
            made = self._host.put(original, name, loaded.made, host, ready)
            self._loaded[index] = _Loaded(made, here, _version(here))

    def _downloaded(self, here: Tensor) -> Tensor:
        here = here.detach()
        with torch.inference_mode(False):
            if here.device != self._replica.device or not _is_plain(here):
                return here.cpu().clone()
            host = self._device.host_like(here)
            self._device.compute.copy(host, here)
            return host

    def discard(self, *, thorough: bool = False) -> None:
        """Reload, at the next `load`, what a recomputation or a trial forward changed."""
        for index in {*self.changed(thorough), *self._mutable}:
            self._loaded[index] = None


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether both are equal to the bit."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is other.layout and (parts := sparse_parts(one)):
        return all(map(torch.equal, parts, sparse_parts(other)))
    return _is_plain(one) and torch.equal(bits(one), bits(other))


def _assign(module: nn.Module, name: str, value: Tensor | None) -> None:
    host = module._buffers.get(name)
    if host is not None and value is not None and host.shape == value.shape and host.dtype == value.dtype:
        with torch.no_grad():
            host.copy_(value)
    else:
        module._buffers[name] = None if value is None else value.detach().clone()
