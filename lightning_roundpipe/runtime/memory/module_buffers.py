"""Buffers of a layer's copy: loaded before a call, written back after it, and as they were for a recomputation.

A running mean must see each microbatch once, in order, and a recomputation must see what its forward saw, yet change
nothing. Most buffers never change, so what the first batch saw changing is followed from call to call, and no thread
waits for a device:

    load ── the newest values, unless the worker's copy holds them already ── [1]
    call ── changes the worker's copy ── on its way to the host, where later calls find it ── [2]
    settle ── the layer's own buffer gets them: at a step's end, or when user code looks at the buffer ── [3]

User code may write to buffers, too: hooks of the layer itself run there, for the next microbatch already. So what a
call has changed is what differs from what was loaded for it, not from what the layer holds by now.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.base import stage
from lightning_roundpipe.model.attributes import bits
from lightning_roundpipe.model.replica import Replica

Place = tuple[int, str]
"""Id of a module, and the name of a buffer of it."""


class BufferValue:
    """Values of a buffer, in host memory to which nothing is written once ``ready`` has passed.

    Attributes:
        host: they; None where the buffer is None.
        ready: the end of their way to the host.
        of: the buffer that holds them, or is to get them, and its version when it held what ``base`` says.
        base: what the buffer holds until they are settled there.
        pending: whether they are still to be settled.
    """

    def __init__(
        self, host: Tensor | None, ready: Event | None, of: tuple[Tensor | None, int], base: Tensor | None = None
    ) -> None:
        self.host, self.ready, self.of, self.base = host, ready, of, base
        self.pending = ready is not None

    def is_up_to_date(self, buffer: Tensor | None) -> bool:
        """Whether no one else has put values into ``buffer``, which is now in the place of the one that it was for."""
        return self.of[0] is buffer and self.of[1] == _version(buffer)


class HostBuffers:
    """The buffers of all layers, as calls leave them."""

    def __init__(self) -> None:
        self._made: dict[Place, tuple[nn.Module, BufferValue]] = {}
        self._pending: dict[Place, int] = {}
        """With the ids of the buffers."""
        self._lock = threading.RLock()

    def now(self, module: nn.Module, name: str, device: Device) -> BufferValue:
        """The newest values; ``device`` is the one that asks."""
        with self._lock:
            buffer = module._buffers.get(name)
            known = self._made.get((id(module), name))
            if known is not None and known[1].pending and not known[1].is_up_to_date(buffer):
                self._settle((id(module), name))
                known, buffer = self._made.get((id(module), name)), module._buffers.get(name)
            if known is None or not known[1].is_up_to_date(buffer):
                with torch.inference_mode(False):
                    host = None if buffer is None else _staged(buffer.detach(), device)
                known = self._made[id(module), name] = module, BufferValue(host, None, (buffer, _version(buffer)))
            return known[1]

    def put(self, module: nn.Module, name: str, before: BufferValue, host: Tensor | None, ready: Event) -> BufferValue:
        """What a call has made of the values ``before`` [2]."""
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
        """Whether ``tensor`` is a buffer, or a view of one, that is to get values."""
        base = None if tensor.is_inference() else tensor._base
        return any(found in (id(tensor), id(base)) for found in list(self._pending.values()))

    def settle(self) -> None:
        """Let all buffers hold what the calls have made of them [3]; waits for what is on its way."""
        with self._lock:
            for place in list(self._pending):
                self._settle(place)

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
        """A step has failed: what it was about to leave in buffers will not arrive."""
        with self._lock:
            self._made.clear()
            self._pending.clear()


class _Loaded(NamedTuple):
    """What the copy was given, and where it is."""

    made: BufferValue
    here: Tensor | None
    here_version: int


class ReplicaBuffers:
    """The buffers of one layer's copy on one worker.

    Args:
        layer: its name.
        host: what calls of all layers have left.
        mutable: module and name of the layer's buffers that its forward changes, by position; updated.
        replica: the copy.
        device: the worker's.
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
        """Bring the copy's buffers to what the layer's are now, or to ``saved`` where given [1]."""
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
        """The values of the buffers, for the recomputation: the forward may change them, and so may user code."""
        found = {}
        for index, (original, _, name) in enumerate(self.places):
            made = self._host.now(original, name, self._device)
            if made.host is not None:
                found[index] = made
        return found

    def changed(self, thorough: bool) -> list[int]:
        """Which buffers the call has changed.

        Versions do not tell all: batch norm moves its running statistics without moving their versions. So buffers that
        are known to change are taken to, and if ``thorough``, values are compared, for which the host waits.
        """
        found = []
        for index, (_, copy, name) in enumerate(self.places):
            loaded = self._loaded[index]
            now = copy._buffers.get(name)
            if loaded is None or now is not loaded.here or _version(now) != loaded.here_version:
                found.append(index)
            elif now is not None and thorough:
                if not _alike(now.cpu(), loaded.made.host):  # behind `load`, in the order of compute
                    found.append(index)
            elif now is not None and index in self._mutable:
                found.append(index)
        return found

    def written(self) -> list[tuple[int, int]]:
        """What changes when code of the layer writes to the copy's buffers, or puts others in their place."""
        now = [copy._buffers.get(name) for _, copy, name in self.places]
        return [(id(buffer), _version(buffer)) for buffer in now]

    def refuse_written(self, before: list[tuple[int, int]]) -> None:
        """After a backward: what it has written to buffers would be lost.

        Args:
            before: `written`, before it.

        Raises:
            RoundPipeError: if there is any.
        """
        for (original, _, name), then, now in zip(self.places, before, self.written(), strict=True):
            if then != now:
                raise RoundPipeError(
                    f"buffer {name!r} of {type(original).__name__} in layer {self._layer!r} was written to in "
                    "backward, by a hook or an autograd.Function, on a worker's copy, where it would be lost. Write to "
                    "it in the layer's forward, or between steps in a hook of the LightningModule."
                )

    def write_back(self, saved: dict[int, BufferValue] | None, thorough: bool) -> None:
        """Give the layer what a forward changed [2]. ``saved`` is its snapshot, None where nothing is recomputed."""
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
        """Forget what a recomputation changed, or a forward that does not count."""
        for index in {*self.changed(thorough), *self._mutable}:
            self._loaded[index] = None


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def _staged(tensor: Tensor, device: Device) -> Tensor:
    """A copy, from which ``device`` copies without the host waiting."""
    try:
        return stage(tensor, device) if _is_plain(tensor) else tensor.clone()
    except RuntimeError:  # elements that share memory, in a way that torch writes to none of them
        return tensor.clone()


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether they are the same to the bit."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype or not _is_plain(one):
        return False
    return torch.equal(bits(one), bits(other))


def _assign(module: nn.Module, name: str, value: Tensor | None) -> None:
    host = module._buffers.get(name)
    if host is not None and value is not None and host.shape == value.shape and host.dtype == value.dtype:
        with torch.no_grad():
            host.copy_(value)
    else:
        module._buffers[name] = None if value is None else value.detach().clone()
