"""Buffers of a layer's replica: loaded before a call, written back after it, and restored for a recomputation.

A running mean must see each microbatch once, in order. A recomputation must see what its forward saw, and change
nothing. Most buffers never change, so only those that changed in the first batch are tracked from call to call, and no
thread waits for a device:

    load ── the newest values, unless the replica holds them already ── [1]
    call ── changes the replica ── download to the host, where later calls find the values ── [2]
    settle ── the layer's own buffer gets them: at the end of a step, or when user code reads the buffer ── [3]

A layer may also register buffers in its forward, and delete them, as code that fills a cache on first use does. So the
places of its buffers are found as calls go on, on all workers together, and a buffer may be absent.

User code may write to buffers too: hooks of the layer run there, possibly for the next microbatch already. So a call
has changed what differs from the values loaded for it, not from what the layer's buffer holds by now.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Iterator
from itertools import chain
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


class Absent(enum.Enum):
    """What a module holds under a name that is not registered."""

    ABSENT = enum.auto()


ABSENT = Absent.ABSENT
BufferOrAbsent = Tensor | Absent | None
"""What a module holds as one of its buffers."""


class BufferValue:
    """Values of a buffer in host memory. Nothing writes to them once ``ready`` has passed.

    Attributes:
        host: the values; None if the buffer is None, `ABSENT` if there is none.
        of: the buffer that the values come from or will be settled in, and its version when it held ``base``.
        base: what the buffer holds until the values are settled.
        pending: whether the values are yet to be settled.
        overwritten: whether user code has written to the buffer since.
    """

    def __init__(
        self, host: BufferOrAbsent, ready: Event | None, of: tuple[BufferOrAbsent, int], base: BufferOrAbsent = None
    ) -> None:
        self.host, self.ready, self.of, self.base = host, ready, of, base
        self.pending, self.overwritten = ready is not None, False

    def is_up_to_date(self, buffer: BufferOrAbsent) -> bool:
        """Return whether ``buffer`` is still the tensor in ``of``, with no write to it since."""
        return self.of[0] is buffer and self.of[1] == _version(buffer)


class HostBuffers:
    """The newest values of all layers' buffers."""

    def __init__(self) -> None:
        self._current: dict[Place, tuple[nn.Module, BufferValue]] = {}
        self._pending: dict[Place, int] = {}
        """Ids of the buffer tensors that are to be settled, by place."""
        self._compared: set[Place] = set()
        """Buffers whose values were compared since the last step: to do so in each call costs more than the call."""
        self._history: dict[int, dict[Place, tuple[nn.Module, BufferValue]]] = {}
        """What the calls of each microbatch have left in this step; before the first, under -1."""
        self._lock = threading.RLock()
        self.replaced = False
        """Whether pending values need another tensor than the module holds, so that no use of that tensor shows who
        `awaits` them."""

    def now(self, module: nn.Module, name: str, device: Device) -> BufferValue:
        """Return the newest values of a buffer, in memory that ``device`` copies from."""
        with self._lock:
            buffer = _buffer_of(module, name)
            known = self._current.get((id(module), name))
            if known is not None and known[1].pending and not known[1].is_up_to_date(buffer):
                self._settle((id(module), name))
                known, buffer = self._current.get((id(module), name)), _buffer_of(module, name)
            if known is None or not known[1].is_up_to_date(buffer) or self._differs((id(module), name), buffer):
                with torch.inference_mode(False):
                    host = buffer
                    if isinstance(buffer, Tensor):
                        host = buffer.detach()
                        host = stage(host, device) if _is_plain(host) else host.clone()
                known = self._current[id(module), name] = module, BufferValue(host, None, (buffer, _version(buffer)))
            return known[1]

    def _differs(self, place: Place, buffer: BufferOrAbsent) -> bool:
        """Return whether ``buffer`` was written to by its ``data`` or ``numpy()``, once for each step."""
        known = self._current[place][1]
        if place in self._compared or known.pending or not isinstance(buffer, Tensor) or not _is_plain(buffer):
            return False  # pending values are those of calls, which the buffer does not hold yet
        self._compared.add(place)
        return not _alike(buffer, known.host)

    def put(
        self, module: nn.Module, name: str, before: BufferValue, host: BufferOrAbsent, ready: Event, microbatch: int
    ) -> BufferValue:
        """Store what a call of ``microbatch`` has made of the values ``before`` [2]."""
        with self._lock:
            place = id(module), name
            if place not in (first := self._history.setdefault(-1, {})):
                held = before.host.clone() if isinstance(before.host, Tensor) else before.host
                first[place] = module, BufferValue(held, None, before.of)
            base = before.base if before.pending else before.host
            value = BufferValue(host, ready, before.of, base)
            self._current[place] = self._history.setdefault(microbatch, {})[place] = module, value
            before.pending, before.base = False, None
            self._pending[place] = id(before.of[0])
            self.replaced = self.replaced or not _fits(before.of[0], host)
            return value

    def __bool__(self) -> bool:
        return bool(self._pending)

    def awaits(self, tensor: Tensor) -> str:
        """Return the name of the buffer with pending values that ``tensor`` is, or a view of; empty if it is none."""
        base = None if tensor.is_inference() else tensor._base
        found = (place for place, of in list(self._pending.items()) if of in (id(tensor), id(base)))
        return next(
            (f"buffer {name!r} of {type(self._current[module, name][0]).__name__}" for module, name in found), ""
        )

    def settle(self) -> None:
        """Wait for all pending values and write them to their buffers [3].

        Others may load buffers meanwhile: one that waited for the lock would have the baton.
        """
        with self._lock:
            ready = [self._current[place][1].ready for place in self._pending]
        for event in filter(None, ready):
            event.wait()
        with self._lock:
            for place in list(self._pending):
                self._settle(place)
            self._compared.clear()
            self.replaced = False

    def _settle(self, place: Place) -> None:
        module, value = self._current[place]
        assert value.ready is not None
        value.ready.wait()
        if not _alike(value.host, value.base):
            _assign(module, place[1], value.host)
            buffer = _buffer_of(module, place[1])
            of: tuple[BufferOrAbsent, int] = buffer, _version(buffer)
        else:
            of = value.of
        self._pending.pop(place, None)
        value.of, value.pending, value.base = of, False, None

    def overwrite(self, buffer: Tensor) -> None:
        """Note that user code writes to ``buffer``, so that it leaves other values than the calls before."""
        with self._lock:
            for _, value in self._current.values():
                value.overwritten = value.overwritten or value.of[0] is buffer

    def take_history(self) -> BufferHistory:
        """Return what each microbatch has left since the last call. Call `settle` first."""
        with self._lock:
            history, self._history = self._history, {}
        return BufferHistory(history)

    def drop(self) -> None:
        """Forget all values after a failed step: pending ones may never arrive."""
        with self._lock:
            self._current.clear()
            self._history.clear()
            self._pending.clear()
            self._compared.clear()
            self.replaced = False


class BufferHistory:
    """The buffers as each microbatch of a step has left them, for hooks that run between its batches."""

    def __init__(self, history: dict[int, dict[Place, tuple[nn.Module, BufferValue]]]) -> None:
        self._history = history

    def show(self, microbatch: int) -> None:
        """Let modules hold what ``microbatch`` has left; -1: what was there before the step."""
        for (_, name), (module, value) in self._history.get(microbatch, {}).items():
            if not value.overwritten:
                _assign(module, name, value.host)


class _Loaded(NamedTuple):
    """The values that a replica's buffer was loaded with, and the tensor that holds them."""

    value: BufferValue
    here: BufferOrAbsent
    here_version: int


_NEVER_LOADED = _Loaded(BufferValue(ABSENT, None, (ABSENT, 0)), ABSENT, 0)
"""Of a buffer that a replica was not loaded with yet: neither the replica nor the layer's module had it."""


class LayerBuffers:
    """The buffers of one layer, which its replicas share.

    Attributes:
        host: values that the calls of all layers have left.
        mutable: module and name of the buffers that the forward was seen to change, by position.
        places: index of the module and name of each buffer, by position.
    """

    def __init__(self, layer: str, host: HostBuffers) -> None:
        self.layer, self.host = layer, host
        self.mutable: dict[int, tuple[nn.Module, str]] = {}
        self.places: list[tuple[int, str]] = []
        self._lock = threading.Lock()

    def find(self, found: Iterable[tuple[int, str]]) -> None:
        """Add those ``found`` that are new."""
        with self._lock:
            known = set(self.places)
            self.places += [place for place in dict.fromkeys(found) if place not in known]


class ReplicaBuffers:
    """The ``buffers`` of one layer, in its replica on one worker."""

    def __init__(self, buffers: LayerBuffers, replica: Replica, device: Device) -> None:
        self._of = buffers
        self._host, self._replica, self._device = buffers.host, replica, device
        sides = (replica.originals, replica.modules)
        self._registered = [(i, m._buffers) for modules in sides for i, m in enumerate(modules)]
        self._dicts = [held for _, held in self._registered]
        self._names: list[str] = []
        """All names that were registered when this last looked for new places."""
        self._loaded: dict[int, _Loaded | None] = {}
        """By position: None if the replica's buffer is to be loaded in any case. It does not have the others yet."""
        self._loaded.update({index: None for index, *_ in self._buffers()})

    def __bool__(self) -> bool:
        """Whether the layer has buffers, or its copy has."""
        return bool(self._of.places) or any(self._dicts)

    def _buffers(self) -> Iterator[tuple[int, nn.Module, nn.Module, str]]:
        """Yield position, module, its copy and name of all buffers that either has, or had."""
        if (names := list(chain.from_iterable(self._dicts))) != self._names:
            self._of.find(((index, name) for index, held in self._registered for name in held))
            self._names = names
        for position, (index, name) in enumerate(self._of.places):
            yield position, self._replica.originals[index], self._replica.modules[index], name

    def load(self, saved: dict[int, BufferValue] | None = None) -> None:
        """Load the newest values into the replica, or those of a `snapshot` [1]."""
        for index, original, copy, name in self._buffers():
            if saved is None:
                value = self._host.now(original, name, self._device)
            else:
                value = saved.get(index, _NEVER_LOADED.value)  # found by a later call
            known = self._loaded.get(index, _NEVER_LOADED)
            if known is None or known.value is not value:
                here = self._uploaded(value)
                _set_buffer(copy, name, here)
                self._loaded[index] = _Loaded(value, here, _version(here))

    def _uploaded(self, value: BufferValue) -> BufferOrAbsent:
        if not isinstance(value.host, Tensor):
            return value.host
        with torch.inference_mode(False):
            if value.ready is not None:
                self._device.compute.wait(value.ready)
            if not _is_plain(value.host):
                return value.host.to(self._replica.device, copy=True)
            here = torch.empty_like(value.host, device=self._replica.device)
            self._device.compute.copy(here, value.host)
            return here

    def snapshot(self) -> dict[int, BufferValue]:
        """Return the values for the recomputation: the forward and user code may change the buffers meanwhile."""
        return {index: self._host.now(original, name, self._device) for index, original, _, name in self._buffers()}

    def changed(self, thorough: bool) -> list[int]:
        """Return the positions of the buffers that the call has changed.

        Versions do not suffice: batch norm updates its running statistics without incrementing them. If ``thorough``,
        values are compared, and the host waits for the device. Else buffers that are known to be mutable count as
        changed.
        """
        found = []
        for index, _, copy, name in self._buffers():
            loaded = self._loaded.get(index, _NEVER_LOADED)
            now = _buffer_of(copy, name)
            differs = loaded is None or now is not loaded.here or _version(now) != loaded.here_version
            if isinstance(now, Tensor) and loaded is not None and not differs:
                # ``cpu`` comes after `load` on the compute stream
                differs = not _alike(now.cpu(), loaded.value.host) if thorough else index in self._of.mutable
            if differs:
                found.append(index)
        return found

    def written(self) -> dict[int, tuple[int, int]]:
        """Return a value that changes when code writes to the replica's buffers or replaces them, by position."""
        now = {index: _buffer_of(copy, name) for index, _, copy, name in self._buffers()}
        return {index: (id(buffer), _version(buffer)) for index, buffer in now.items()}

    def refuse_written(self, before: dict[int, tuple[int, int]]) -> None:
        """Raise if a buffer was written to since `written` returned ``before``: a backward's writes are lost."""
        now = self.written()
        for index, original, _, name in self._buffers():
            if before.get(index, (id(ABSENT), 0)) != now[index]:
                raise RoundPipeError(
                    f"buffer {name!r} of {type(original).__name__} in layer {self._of.layer!r} was written to in "
                    "backward, by a hook or an autograd.Function, on a worker's copy, where it would be lost. Write to "
                    "it in the layer's forward, or between steps in a hook of the LightningModule."
                )

    def write_back(self, saved: dict[int, BufferValue] | None, thorough: bool, microbatch: int) -> None:
        """Store what a forward of ``microbatch`` changed [2]. ``saved``: its snapshot, None if it is not recomputed."""
        found: list[tuple[int, BufferOrAbsent, BufferOrAbsent]] = []
        for index in self.changed(thorough):
            original, copy, name = self._place(index)
            loaded = self._loaded.get(index, _NEVER_LOADED)
            registered = loaded is not None and loaded.here is ABSENT
            if saved is not None and not (thorough or registered or index in self._of.mutable):
                raise RoundPipeError(
                    f"buffer {name!r} of {type(original).__name__} in layer {self._of.layer!r} changed during a "
                    "forward pass, which it did not do in the first batch, so its recomputation cannot be exact."
                )
            if not registered:  # once there, it may never change again
                self._of.mutable[index] = (original, name)
            here = _buffer_of(copy, name)
            found.append((index, here, self._downloaded(here) if isinstance(here, Tensor) else here))
        if not found:
            return
        ready = self._device.compute.record()
        for index, here, host in found:
            original, _, name = self._place(index)
            loaded = self._loaded.get(index)
            before = loaded.value if loaded is not None else self._host.now(original, name, self._device)
            value = self._host.put(original, name, before, host, ready, microbatch)
            self._loaded[index] = _Loaded(value, here, _version(here))

    def _place(self, position: int) -> tuple[nn.Module, nn.Module, str]:
        index, name = self._of.places[position]
        return self._replica.originals[index], self._replica.modules[index], name

    def _downloaded(self, here: Tensor) -> Tensor:
        here = here.detach()
        with torch.inference_mode(False):
            if here.device != self._replica.device or not _is_plain(here):
                return here.cpu().clone()
            host = self._device.host_like(here)
            self._device.compute.copy(host, here)
            return host

    def discard(self) -> None:
        """Reload, at the next `load`, what a recomputation changed."""
        for index in {*self.changed(thorough=False), *self._of.mutable}:
            self._loaded[index] = None


def _version(buffer: BufferOrAbsent) -> int:
    return 0 if not isinstance(buffer, Tensor) or buffer.is_inference() else buffer._version


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def _alike(one: BufferOrAbsent, other: BufferOrAbsent) -> bool:
    """Return whether both are equal to the bit."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is other.layout and (parts := sparse_parts(one)):
        return all(map(torch.equal, parts, sparse_parts(other)))
    return _is_plain(one) and torch.equal(bits(one), bits(other))


def _fits(buffer: BufferOrAbsent, value: BufferOrAbsent) -> bool:
    """Return whether ``buffer`` can hold ``value``."""
    if not isinstance(buffer, Tensor) or not isinstance(value, Tensor):
        return buffer is value
    return buffer.shape == value.shape and buffer.dtype == value.dtype


def _buffer_of(module: nn.Module, name: str) -> BufferOrAbsent:
    return module._buffers.get(name, ABSENT)


def _set_buffer(module: nn.Module, name: str, value: BufferOrAbsent) -> None:
    if value is ABSENT:
        module._buffers.pop(name, None)
    else:
        module._buffers[name] = value


def _assign(module: nn.Module, name: str, value: BufferOrAbsent) -> None:
    host = _buffer_of(module, name)
    if isinstance(host, Tensor) and isinstance(value, Tensor) and _fits(host, value):
        with torch.no_grad():
            host.copy_(value)
    else:
        _set_buffer(module, name, value.detach().clone() if isinstance(value, Tensor) else value)
