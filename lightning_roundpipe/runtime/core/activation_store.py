"""Storage of the tensors that cross layer calls: each is saved once on the host and uploaded where it is needed.

A microbatch passes the same mask and rotary tables to every layer, so saved tensors are looked up by identity and
version. Tensors also travel from one worker to another over the host, as no peer access is assumed. A tensor that is
already on the worker of the next stage is not copied.

    save, send ── start the download as soon as it is known that the tensor is needed ── [1]
    bring ── start the upload before the call's turn (see `activation_prefetch`), blocking no thread ── [2]
    on, transfer ── the call itself: the compute stream waits for copies that are not finished ── [3]
    drop ── free the copy when no call on this worker needs it any more ── [4]
    offload ── leave a saved tensor to the host, for a microbatch that goes on to another worker ── [5]
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event, TrackedTensors
from lightning_roundpipe.devices.base import stage
from lightning_roundpipe.planning.crossing import tensor_bytes
from lightning_roundpipe.runtime.core.offloading import OffloadedTensors, may_leave, written_unseen
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.reporting.events import Recorder
from lightning_roundpipe.runtime.user_code.inference_writes import version_of

_NUMBERS = itertools.count(1)

RESTORED = "tensors between layers"
"""Purpose under which a device counts them."""


class PrefetchBudget:
    """The bytes of a worker's memory that prefetched tensors may take. A ``limit`` of None means no limit."""

    def __init__(self) -> None:
        self.limit: int | None = 0
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` and return True, or return False if they exceed the limit."""
        with self._lock:
            if self.limit is not None and self._taken + nbytes > self.limit:
                return False
            self._taken += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._taken -= nbytes


class _Here(NamedTuple):
    """A host tensor's copy on a worker.

    Attributes:
        copy: the host tensor.
        tensor: its copy on the worker.
        end: the end of the upload.
        tracked: counts ``tensor`` as resident on the device.
        ahead: the budget that ``tensor`` takes, and its bytes, as its only element; empty once it has been used.
    """

    copy: HostTensor
    tensor: Tensor
    end: Event
    tracked: TrackedTensors
    ahead: list[tuple[PrefetchBudget, int]]

    def needed(self) -> None:
        """Return the bytes to the prefetch budget; thread-safe, and a no-op when repeated."""
        while self.ahead:
            try:
                room, nbytes = self.ahead.pop()  # atomic: of several threads, one gets the element
            except IndexError:
                return
            room.give_back(nbytes)


class ActivationStore:
    """One microbatch's saved tensors, and their copies on the worker that it runs on.

    Args:
        microbatch: number of the microbatch, for the report.
        recorder: records all copies.
        staging: device whose page-locked host memory host tensors are saved in, so that their uploads are asynchronous
            too. None: ordinary host memory is good enough.
    """

    def __init__(self, microbatch: int, recorder: Recorder, staging: Device | None = None) -> None:
        self._microbatch = microbatch
        self.number = next(_NUMBERS)
        """Tells it from the stores of all other microbatches of all steps."""
        self._staging = staging
        self._recorder = recorder
        self._saved: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], HostTensor]] = {}
        self._sent: dict[int, HostTensor] = {}
        """By the id of the host copy's tensor."""
        self.offloaded = OffloadedTensors()
        """Tensors that user code holds and that are on the host only."""
        self._here: dict[Device, dict[int, _Here]] = {}
        self._device: Device | None = None
        self._ahead: set[Device] = set()
        """Devices that hold tensors for a recomputation ahead, and that the microbatch has not moved to since."""
        self._bringing = threading.Lock()
        self._pending: list[tuple[Device, Event]] = []

    # -- to the host

    def save(self, tensor: Tensor, device: Device | None) -> HostTensor:
        """Return the host copy of ``tensor`` with its present values, and start the download if it is new [1].

        Args:
            tensor: the tensor to save.
            device: the device that holds it; None for the host.
        """
        if (there := self.unwritten(tensor)) is not None:
            return there
        known = self._saved.get(id(tensor))
        version = version_of(tensor)
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        copy = self._download(tensor.detach(), device)
        if device is not None and copy.ready is not None:
            self._pending.append((device, copy.ready))
        self._saved[id(tensor)] = (weakref.ref(tensor), version, copy)
        return copy

    def offload(self, tensor: Tensor, copy: HostTensor, device: Device) -> None:
        """Leave ``tensor``, which `save` copies from ``device``, to the host if user code cannot tell [5].

        The calling thread waits for the copy.
        """
        if self.offloaded.get(tensor) is None and may_leave(tensor, self.number):  # it may be passed twice
            if copy.ready is not None:
                copy.ready.wait()
            self.offloaded.add(tensor, copy, device)

    def unwritten(self, tensor: Tensor) -> HostTensor | None:
        """Return the copy of an offloaded ``tensor``; None for others. One that was written to is restored first."""
        known = self.offloaded.get(tensor)
        if known is not None and known.is_written():
            self.restore(tensor)
            return None
        return known.copy if known is not None else None

    def restore(self, tensor: Tensor) -> None:
        """Undo `offload` of ``tensor``, if it was offloaded, because user code touches it."""
        known = self.offloaded.pop(tensor)
        if known is None:
            return
        there, written = known.there(), known.is_written()
        if there is None and written:
            raise written_unseen()
        if there is None:
            there = self.fresh(known.device, known.copy)
            known.device.track_until_freed([there], RESTORED)
        tensor.data = there
        if not written:
            self._saved[id(tensor)] = (weakref.ref(tensor), version_of(tensor), known.copy)

    def restore_all(self) -> None:
        """Undo `offload` of all tensors that user code still holds."""
        for tensor in self.offloaded.alive():
            self.restore(tensor)
        self.offloaded.end()

    def send(self, tensor: Tensor, device: Device | None) -> HostTensor:
        """Start the download that a later `transfer` will need [1].

        Returns:
            The host copy. Pass its tensor to `transfer` in place of ``tensor``, which may be dropped. ``tensor`` may be
            such a tensor already.
        """
        known = self._sent.get(id(tensor))
        if known is None:
            known = self._download(tensor.detach(), device)
            self._sent[id(known.tensor)] = known
        return known

    def _download(self, tensor: Tensor, device: Device | None) -> HostTensor:
        if tensor.is_nested:
            raise RoundPipeError(
                "a nested tensor (torch.nested) goes into a layer or out of it, and cannot be copied between devices: "
                "hand on a padded tensor and a mask (torch.nested.to_padded_tensor), or name the module that makes the "
                "nested tensor and computes with it in RoundPipeStrategy(layers=[...]), so that it is one layer."
            )
        if device is None:
            return HostTensor(tensor.clone() if self._staging is None else stage(tensor, self._staging), None)
        host = device.host_like(tensor)
        stream = device.activations_down
        stream.wait(device.compute.record())
        start = stream.record(timed=True)
        stream.copy(host, tensor)
        ready = stream.record(timed=True)
        copy = HostTensor(host, ready)
        self._recorder.add("download_activations", device.index, start, ready, self._microbatch, copy.nbytes)
        return copy

    def settle(self) -> None:
        """Make the compute streams wait for the downloads of all tensors saved so far.

        User code may overwrite a tensor as soon as the layer has returned. Without this wait, the download could read
        the new values.
        """
        for device, ready in self._pending:
            could = None if ready.done() else device.compute.record(timed=True)
            device.compute.wait(ready)
            if could is not None:
                self._recorder.waited(device.index, could, device.compute.record(timed=True))
        self._pending.clear()

    def end_forward(self) -> None:
        """Forget the saved tensors: from here on, a host copy lives as long as a call on the tape holds it."""
        self._saved.clear()

    # -- to a worker

    def transfer(self, tensor: Tensor, source: Device | None, target: Device | None) -> Tensor:
        """Return ``tensor`` on ``target``, copied over the host if it is elsewhere [3].

        Args:
            tensor: the tensor to move.
            source: the device that holds it; None for the host.
            target: the device to move it to; None for the host, in which case the calling thread waits.
        """
        if source is target:
            return tensor
        sent = self._sent.pop(id(tensor), None)
        copy = sent or self._download(tensor.detach(), source)
        if target is None:
            if copy.ready is not None:
                copy.ready.wait()
            return copy.tensor
        if target is self._device and id(copy) in self._here.get(target, ()):
            return self.on(target, copy)
        return self.fresh(target, copy)

    def bring(self, device: Device, copies: Iterable[HostTensor], room: PrefetchBudget) -> None:
        """Move the microbatch to ``device`` and start uploading ``copies`` that are not there and fit ``room`` [2]."""
        self.move_to(device)
        here = self._here.get(device, {})
        for copy in copies:
            if id(copy) not in here:
                self._brought(device, copy, room)

    def on(self, device: Device, copy: HostTensor) -> Tensor:
        """Move the microbatch to ``device`` and return ``copy`` there; uploaded once while the microbatch stays [3]."""
        self.move_to(device)
        return self._used(device, copy)

    def ahead_on(self, device: Device, copy: HostTensor) -> Tensor:
        """Return ``copy`` on ``device``, for a recomputation before the microbatch moves there.

        Unlike `on`, this keeps the microbatch's tensors on the device that it is on now.
        """
        self._ahead.add(device)
        return self._used(device, copy)

    def _brought(self, device: Device, copy: HostTensor, room: PrefetchBudget | None = None) -> _Here | None:
        """Upload ``copy`` unless it is on ``device``. Return None if it exceeds ``room``, where None is no limit."""
        with self._bringing:  # the worker may recompute ahead while the microbatch's thread prefetches
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
        here = self._here.get(device, {}).get(id(copy)) or self._brought(device, copy)
        assert here is not None, "what is needed asks for no room"
        if here.ahead:
            here.needed()
        device.compute.wait(here.end)
        return here.tensor

    def fresh(self, device: Device, copy: HostTensor) -> Tensor:
        """Upload ``copy`` to ``device`` into memory of its own, which the caller may keep [3]."""
        tensor, end = self._upload(device, copy, lent=False)
        device.compute.wait(end)
        return tensor

    def _upload(self, device: Device, copy: HostTensor, *, lent: bool) -> tuple[Tensor, Event]:
        up = stream = device.activations_up
        if copy.ready is not None and not copy.ready.done():
            stream = device.arrivals_up  # what is on the host already does not wait behind it
        tensor = device.device_like(copy.tensor, up if lent else stream, lent=lent)
        if lent and stream is not up:
            # Earlier work of `up`, which owns the memory, may still use it.
            stream.wait(up.record())
        if copy.ready is not None:
            stream.wait(copy.ready)
        start = stream.record(timed=True)
        stream.copy(tensor, copy.tensor)
        end = stream.record(timed=True)
        self._recorder.add("upload_activations", device.index, start, end, self._microbatch, copy.nbytes)
        return tensor, end

    def move_to(self, device: Device | None) -> None:
        """Move the microbatch to ``device``, and drop its tensors elsewhere except those for recomputations ahead.

        None means that the microbatch has ended: all its tensors are dropped.
        """
        if device is None:
            self._ahead.clear()
        elif device is not self._device:
            self._ahead.discard(device)
        else:
            return
        for other, copies in list(self._here.items()):  # a copy: workers that recompute ahead add to it concurrently
            if copies and other is not device and other not in self._ahead:
                self._drop(other, list(copies))
        self._device = device

    def leave(self, device: Device | None = None) -> None:
        """Drop the microbatch's tensors on ``device``, by default the one it is on: its last call there is done."""
        device = device or self._device
        if device is not None:
            self._ahead.discard(device)
            if copies := self._here.get(device):
                self._drop(device, list(copies))

    def drop(self, copies: Iterable[HostTensor]) -> None:
        """Drop ``copies`` from the present device [4]; memory is reused only after the compute that reads them."""
        if self._device is not None:
            self._drop(self._device, [id(copy) for copy in copies])

    def forget_dead(self) -> None:
        """Drop the copies of tensors that user code has freed. For evaluation, where no tape needs them."""
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
            if here.ahead:
                here.needed()
            here.tracked.release()
