"""Inputs of a microbatch's calls on the host, and tensors on their way between workers.

    a layer is called ── a copy of each input is made on its device ── that goes to the host ── [1]
    the call runs on another worker, or is recomputed there ── it comes from the host ── [2]

The copy in [1] is made at once, so that nothing that user code or the layer writes later can reach it. Each tensor is
saved once, however many layers take it. Copies of one direction run in order on streams of their own. Whoever reads
what they write waits for their events.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device, Event
from lightning_roundpipe.devices.base import check_copy, stage
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.reporting.events import Recorder


class Arriving(NamedTuple):
    """A tensor on a device, and the event after which it is there; None if there is nothing to wait for."""

    tensor: Tensor
    event: Event | None


class Activations:
    """The saved tensors of one microbatch.

    Args:
        microbatch: its number.
        recorder: records copies.
        staging: device whose page-locked memory host tensors are staged in.
    """

    def __init__(self, microbatch: int, recorder: Recorder, staging: Device) -> None:
        self._microbatch, self._recorder, self._staging = microbatch, recorder, staging
        self._known: dict[int, tuple[weakref.ref[Tensor], int, HostTensor]] = {}
        self.nbytes = 0
        """Of what has been saved."""

    def save(self, tensor: Tensor, home: Device | None) -> HostTensor:
        """Return the values that ``tensor`` has now, on the host.

        Args:
            tensor: a tensor.
            home: the device that it is on; None for the host.
        """
        version = 0 if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        saved = download(tensor, home, self._recorder, self._microbatch, self._staging)
        if not tensor.is_inference():
            self._known[id(tensor)] = weakref.ref(tensor), version, saved
        self.nbytes += saved.nbytes
        return saved

    def bring(self, saved: HostTensor, device: Device, *, lent: bool = False) -> Arriving:
        """Enqueue a copy of a saved tensor to ``device``; see `Device.device_like` for ``lent``."""
        return upload(saved, device, self._recorder, self._microbatch, lent=lent)

    def move(self, tensor: Tensor, home: Device, to: Device, made: Event | None = None) -> Arriving:
        """Enqueue a copy of ``tensor``, which nobody writes to, to another device, through the host.

        Args:
            tensor: a tensor on ``home``.
            home: its device.
            to: the other device; if it is the same, nothing is copied.
            made: the point of the device's work behind which it is there; by default now.
        """
        if home is to:
            return Arriving(tensor, None)
        with torch.no_grad(), torch.inference_mode(False):
            host = home.host_like(tensor)
        made = made or home.compute.record()
        return self.bring(_downloaded(host, tensor, home, made, self._recorder, self._microbatch), to)


def download(tensor: Tensor, home: Device | None, recorder: Recorder, microbatch: int, staging: Device) -> HostTensor:
    """Enqueue a copy of ``tensor`` to the host. What is written to it afterwards does not matter."""
    with torch.no_grad(), torch.inference_mode(False):
        if home is None:
            return HostTensor(stage(tensor.detach(), staging), None)
        with home.compute.running():
            if tensor.layout is not torch.strided:
                return HostTensor(tensor.detach().cpu().clone(), None)
            host = home.host_like(tensor)
            to, of = check_copy(host, tensor)
            of = of.clone()
    return _downloaded(to, of, home, home.compute.record(), recorder, microbatch, host)


def _downloaded(
    to: Tensor, of: Tensor, home: Device, made: Event, recorder: Recorder, microbatch: int, whole: Tensor | None = None
) -> HostTensor:
    """Enqueue a copy to the host, behind ``made``. Returns ``whole``, of which ``to`` is what is written."""
    stream = home.activations_down
    stream.wait(made)
    start = stream.record(timed=True)
    stream.copy(to, of)
    end = stream.record(timed=True)
    recorder.add("download_activations", home.index, start, end, microbatch, of.nbytes)
    return HostTensor(to if whole is None else whole, end)


def upload(saved: HostTensor, device: Device, recorder: Recorder, microbatch: int, *, lent: bool = False) -> Arriving:
    """Enqueue a copy of ``saved`` to ``device``."""
    if saved.tensor.layout is not torch.strided:
        return Arriving(saved.tensor.to(device.torch_device, copy=True), None)
    stream = device.activations_up if saved.ready is None or saved.ready.done() else device.arrivals_up
    there = device.device_like(saved.tensor, stream, lent=lent)
    if saved.ready is not None:
        stream.wait(saved.ready)
    start = stream.record(timed=True)
    to, of = check_copy(there, saved.tensor)
    stream.copy(to, of)
    end = stream.record(timed=True)
    recorder.add("upload_activations", device.index, start, end, microbatch, of.nbytes)
    return Arriving(there, end)
