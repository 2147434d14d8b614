"""Inputs of a microbatch's calls on the host, and tensors on their way between workers.

    a layer is called ── a copy of each input is made on its device ── that goes to the host ── [1]
    the call runs on another worker, or is recomputed there ── it comes from the host ── [2]
    its turn is next ── it comes already, if the worker has room beside what the plan needs ── [3]

The copy in [1] is made before the layer runs, so that nothing that user code or the layer writes later can reach it: at
once if it goes to another worker, else in the call's turn, as microbatches that wait for theirs would all hold one.
Each tensor is saved once, however many layers take it, and comes once for neighbouring calls of a stage. An output that
goes on unchanged to a call of the same backward stage is not kept where the stage is recomputed ahead: the
recomputation of its call gives it again, on the worker. Copies of one direction run in order on streams of their own;
whoever reads what they write waits for their events.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.base import check_copy, stage
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.estimates.crossing import tensor_bytes
from lightning_roundpipe.memory.host_tensor import HostTensor
from lightning_roundpipe.memory.peak_memory import INPUTS


class Arriving(NamedTuple):
    """A tensor on a device, and the event after which it is there; None if there is nothing to wait for."""

    tensor: Tensor
    event: Event | None


class Room:
    """The bytes of a worker's memory that tensors may take before the turn of the call that needs them.

    Attributes:
        limit: how many; None: any number.
        taken: how many do.
    """

    def __init__(self) -> None:
        self.limit: int | None = 0
        self.taken = 0

    def take(self, nbytes: int) -> bool:
        """Take so many bytes, and return whether they are there."""
        if self.limit is not None and self.taken + nbytes > self.limit:
            return False
        self.taken += nbytes
        return True


class _Here:
    """A saved tensor on a worker.

    Attributes:
        room: what its bytes are taken from, until its call begins.
        lent: whether it goes back at `Activations.drop`; else whoever refers to it keeps it.
    """

    __slots__ = ("arriving", "lent", "room", "saved")

    def __init__(self, saved: HostTensor, arriving: Arriving, room: Room | None, *, lent: bool) -> None:
        self.saved, self.arriving, self.room, self.lent = saved, arriving, room, lent

    def used(self) -> None:
        """Give the bytes back to the room: from now on the call needs them."""
        if self.room is not None:
            self.room.taken -= tensor_bytes(self.saved.tensor)
            self.room = None


class Activations:
    """The saved tensors of one microbatch. ``staging``: device whose page-locked memory host tensors are staged in."""

    def __init__(self, microbatch: int, recorder: Recorder, staging: Device) -> None:
        self._microbatch, self._recorder, self._staging = microbatch, recorder, staging
        self._known: dict[int, tuple[weakref.ref[Tensor], int, HostTensor]] = {}
        """By the id of a tensor that is alive: its version, and its values on the host."""
        self._here: dict[int, _Here] = {}
        """What has been brought for calls on the worker that it is on, or moves to next."""

    def save(self, tensor: Tensor, home: Device | None) -> HostTensor:
        """Return the values that ``tensor`` has now, on the host.

        ``home``: the device that it is on; None for the host.
        """
        version = 0 if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        saved = self._download(tensor, home)
        if not tensor.is_inference():
            alive = weakref.ref(tensor, functools.partial(self._known.pop, id(tensor)))
            self._known[id(tensor)] = alive, version, saved
        return saved

    def send(self, tensor: Tensor, home: Device, to: Device | None, ready: Event | None = None) -> HostTensor | Tensor:
        """Return a tensor that nobody writes to, or begin to copy it to the host if it is needed elsewhere.

        Args:
            tensor: a tensor on ``home``.
            to: the device that needs it; None for the host.
            ready: the point of the work of ``home`` behind which it is there; by default now.
        """
        if home is to:
            return tensor
        if tensor.layout is not torch.strided:
            return _sparse_on_host(tensor, home)
        ready = ready or home.compute.record()
        return self._downloaded(home.host_like(tensor), tensor, home, ready)

    def move(self, tensor: Tensor, home: Device, to: Device) -> Arriving:
        """Enqueue a copy of ``tensor``, which nobody writes to, from ``home`` to another device, through the host."""
        sent = self.send(tensor, home, to)
        if isinstance(sent, HostTensor):
            return self._upload(sent, to)
        return Arriving(sent, None)

    def bring_ahead(self, saved: Iterable[HostTensor], device: Device, room: Room, *, lent: bool = True) -> None:
        """Begin to bring what the next call on ``device`` needs, as far as there is room [3]."""
        for each in saved:
            if id(each) not in self._here and room.take(tensor_bytes(each.tensor)):
                arriving = self._upload(each, device, lent=lent)
                self._here[id(each)] = _Here(each, arriving, room, lent=lent)

    def on(self, saved: HostTensor | Tensor, device: Device, *, lent: bool = True) -> Arriving:
        """Return a saved tensor on ``device``, for a call whose turn it is. It is there until `drop`.

        One that is no `HostTensor` is there already.
        """
        if not isinstance(saved, HostTensor):
            return Arriving(saved, None)
        here = self._here.get(id(saved))
        if here is None:
            arriving = self._upload(saved, device, lent=lent)
            here = self._here[id(saved)] = _Here(saved, arriving, None, lent=lent)
        here.used()
        return here.arriving

    def drop(self, device: Device | None, keep: Collection[HostTensor] = ()) -> None:
        """Drop what is on ``device``, after a call, except for what the next call needs, too."""
        if not self._here:
            return
        kept = set(map(id, keep))
        gone = [self._here.pop(key) for key in list(self._here) if key not in kept]
        for here in gone:
            here.used()
        if gone and device is not None:
            device.free_after_compute([here.arriving.tensor for here in gone if here.lent])

    # -- copies -------------------------------------------------------------------------------------------------------

    def _download(self, tensor: Tensor, home: Device | None) -> HostTensor:
        """Enqueue a copy of ``tensor`` to the host. What is written to it afterwards does not matter."""
        if tensor.is_nested:
            raise RoundPipeError(
                "a nested tensor (torch.nested) goes into a layer or out of it, and cannot be copied between devices: "
                "hand on a padded tensor and a mask (torch.nested.to_padded_tensor), or name the module that makes the "
                "nested tensor and computes with it in RoundPipeStrategy(layers=[...]), so that it is one layer."
            )
        if home is None:
            with torch.inference_mode(False):
                return HostTensor(stage(tensor.detach(), self._staging), None)
        if tensor.layout is not torch.strided:
            return _sparse_on_host(tensor, home)
        with home.compute.running():
            host = home.host_like(tensor)
            to, of = check_copy(host, tensor)
            of = of.clone()
        return self._downloaded(to, of, home, home.compute.record(), host)

    def _downloaded(
        self, to: Tensor, of: Tensor, home: Device, ready: Event, whole: Tensor | None = None
    ) -> HostTensor:
        """Enqueue a copy to the host, behind ``ready``. Returns ``whole``, of which ``to`` is what is written."""
        stream = home.activations_down
        stream.wait(ready)
        start = stream.record(timed=True)
        stream.copy(to, of)
        end = stream.record(timed=True)
        self._recorder.add("download_activations", home.index, start, end, self._microbatch, of.nbytes)
        return HostTensor(to if whole is None else whole, end)

    def _upload(self, saved: HostTensor, device: Device, *, lent: bool = False) -> Arriving:
        """Enqueue a copy of ``saved`` to ``device``."""
        if saved.tensor.layout is not torch.strided:
            return Arriving(saved.tensor.to(device.torch_device, copy=True), None)
        stream = device.activations_up if saved.ready is None or saved.ready.done() else device.arrivals_up
        there = device.device_like(saved.tensor, stream, lent=lent)
        device.track_until_freed([there], INPUTS)
        if saved.ready is not None:
            stream.wait(saved.ready)
        start = stream.record(timed=True)
        stream.copy(there, saved.tensor)
        end = stream.record(timed=True)
        nbytes = tensor_bytes(saved.tensor)
        self._recorder.add("upload_activations", device.index, start, end, self._microbatch, nbytes)
        return Arriving(there, end)


def _sparse_on_host(tensor: Tensor, home: Device) -> HostTensor:
    """Return a copy of a tensor without one storage of its own, for which the host waits."""
    with torch.no_grad(), torch.inference_mode(False), home.compute.running():
        return HostTensor(tensor.detach().cpu().clone(), None)


def download_parts(
    whole: Tensor, parts: Iterable[tuple[Tensor, Tensor]], home: Device, recorder: Recorder, microbatch: int
) -> HostTensor:
    """Enqueue copies of tensors on ``home`` that nobody writes to, each to its part of ``whole`` on the host.

    They go in chunks, with gradients: a worker may wait for activations, and for these only in backward.
    """
    stream = home.gradients_down
    stream.wait(home.compute.record())
    start = stream.record(timed=True)
    for to, of in parts:
        stream.copy(to, of)
    end = stream.record(timed=True)
    recorder.add("download_activations", home.index, start, end, microbatch, whole.nbytes)
    return HostTensor(whole, end)
