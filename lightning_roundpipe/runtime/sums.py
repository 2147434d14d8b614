"""Gradients: from a worker, where they are summed over a round's microbatches, to the host, and on to who uses them up.

They are kept per call, not per layer: a layer that is used twice adds up in the same order whatever the plan is, and so
do rounds, because a later round's device buffer starts from the sum so far.

    worker: attach ── backward of the round's microbatches ── detach ── [1]
    download into the call's host buffer ── once the batch before has been used up ── [2]
    arrived ── taken: stepped from there, or handed to .grad ── consumed ── [3]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event, Stream, StreamAborted
from lightning_roundpipe.runtime.control import Control, Waiter
from lightning_roundpipe.runtime.flats import Segment, aligned, segment_of
from lightning_roundpipe.runtime.weights import HostLayer


class GradientLayout:
    """Where the gradients of one layer's trainable parameters lie in a flat buffer.

    Args:
        layer: whose.
        trainable: which of its parameters those are; by default those that are trained now.
    """

    def __init__(self, layer: HostLayer, trainable: Sequence[bool] | None = None) -> None:
        self.positions = [i for i, trained in enumerate(trainable or layer.trainable()) if trained]
        self.keys = [id(layer.masters[position]) for position in self.positions]
        self.segments: list[Segment] = []
        offset = 0
        for position in self.positions:
            self.segments.append(segment_of(layer.masters[position], offset))
            offset += aligned(self.segments[-1].nbytes)
        self.nbytes = offset


@dataclass(frozen=True)
class _Buffer:
    """Host memory for the gradients of a call's layer.

    Attributes:
        views: the gradients in it, made once: making one takes longer than to step a small parameter.
        alone: how many hold its memory when there is nobody else.
    """

    flat: Tensor
    views: list[Tensor]
    alone: int

    @property
    def unused(self) -> bool:
        return _holders(self.flat) == self.alone


class GradientBuffers:
    """The host memory for the gradients of one call's layer: one buffer, used again by every batch.

    What a batch leaves may be looked at for longer where it was handed to ``.grad``; then the next batch gets another
    one, and the two take turns.
    """

    def __init__(self, layer: HostLayer, device: Device, layout: GradientLayout | None = None) -> None:
        self.layer = layer
        self.layout = layout or GradientLayout(layer)
        self._device = device
        self._buffers: list[_Buffer] = []
        self._last: HostGradients | None = None

    @property
    def used(self) -> bool:
        """Whether there was ever a batch that had gradients for it."""
        return self._last is not None

    def reserve(self) -> None:
        """Make the memory for the first batch now: to page-lock it takes time, and may stall what runs meanwhile."""
        self._unused()

    def begin(self) -> HostGradients:
        """The sum of a new batch."""
        before = self._last
        while before is not None and before.unused:
            before = before.before
        buffer = before.buffer if before is not None and not before.handed_out else self._unused()
        self._last = HostGradients(self.layer, self.layout, buffer, before)
        return self._last

    def _unused(self) -> _Buffer:
        for buffer in self._buffers:
            if buffer.unused:
                return buffer
        nbytes = self.layout.nbytes
        flat = self._device.host_buffer(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
        views = [segment.view(flat) for segment in self.layout.segments]
        buffer = _Buffer(flat, views, _holders(flat))
        self._buffers = [*self._buffers[-1:], buffer]
        return buffer


def _holders(flat: Tensor) -> int:
    """How many hold ``flat``'s memory: views of it count, such as somebody's ``.grad``."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


class HostGradients:
    """The gradients of one call's layer, summed over one batch's microbatches, in host memory.

    ``present`` says per trainable parameter whether it got a gradient at all: one that did not must keep ``None``, or
    AdamW would decay it.

    Args:
        layer: whose gradients.
        layout: where they lie in ``buffer``.
        buffer: the call's.
        before: the last batch's, in the same buffer.
    """

    def __init__(self, layer: HostLayer, layout: GradientLayout, buffer: _Buffer, before: HostGradients | None) -> None:
        self.layer = layer
        self.layout = layout
        self.buffer = buffer
        self.flat = buffer.flat
        self.present = [False] * len(layout.segments)
        self.arrived: Event | None = None
        """The download that must have finished before anybody reads or overwrites the sum."""
        self.handed_out = False
        """Whether views of the buffer were given to somebody who may keep them."""
        self.consumed = Waiter()
        """Woken when nobody needs what is in the buffer any more."""
        self.before = before
        """Whose remains are in the buffer until `make_room`."""
        self._there: Event | None = None
        self._over = False

    @property
    def unused(self) -> bool:
        """Whether nothing was ever sent to it, so that the buffer holds what it held before."""
        return self._over and self.arrived is None and self.before is not None

    def end(self) -> None:
        """The step is over, nothing more is sent to it."""
        self._over = True
        if self.arrived is None and self.before is not None and self.before.unused:
            self.before = self.before.before  # or they would become ever more

    @staticmethod
    def bytes_of(layer: HostLayer) -> int:
        """What the gradients of ``layer`` take now."""
        return GradientLayout(layer).nbytes

    def make_room(self, control: Control) -> None:
        """Before the batch's first download: wait until what the batch before left is used up [2]."""
        before, self.before = self.before, None
        if before is not None:
            control.wait(before.consumed)
            # Nobody may have taken it, so that it is on its way still.
            before.wait()

    def wait(self) -> None:
        """Wait for the download. Several threads may; and once it is there, whatever becomes of the device."""
        arrived = self.arrived
        if arrived is not None and arrived is not self._there:
            try:
                arrived.wait()
            except StreamAborted:
                if arrived is not self._there:  # who stopped the device may have waited for it first
                    raise
            self._there = arrived

    def take(self, factor: float) -> dict[int, Tensor]:
        """The gradients by id of the master, times ``factor``; views into the buffer.

        Once they were handed out they are for whoever got them alone; else the next batch finds them in the same ones.
        """
        self.wait()
        views = self.buffer.views
        if self.handed_out:
            views = [segment.view(self.flat) for segment in self.layout.segments]
        taken = {key: view for key, view, present in zip(self.layout.keys, views, self.present, strict=True) if present}
        if factor != 1.0:
            for view in taken.values():
                view.mul_(factor)
        return taken

    def got(self) -> list[nn.Parameter]:
        """The masters that have a gradient in it."""
        positions = zip(self.layout.positions, self.present, strict=True)
        return [self.layer.masters[position] for position, present in positions if present]


class DeviceGradients:
    """The same sum while its slot runs on a worker.

    Autograd accumulates into ``.grad`` of the copy's parameters. A parameter's first gradient is moved into the arena,
    and later ones are added to it there: by autograd, or here where they have another format or weight. A low-precision
    sum would lose what a microbatch adds.
    """

    def __init__(self, host: HostGradients, segment: Tensor) -> None:
        self.host = host
        self.segment = segment
        self.views = [s.view(segment) for s in host.layout.segments]
        self.present = list(host.present)

    def upload(self, stream: Stream) -> None:
        """Enqueue the sum of earlier rounds, which this round goes on adding to."""
        stream.copy(self.segment[: self.host.layout.nbytes], self.host.flat)

    def attach(self, parameters: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        """Before a microbatch's backward, whose gradients are to be multiplied by ``factor``."""
        for view, position, present in zip(self.views, self.host.layout.positions, self.present, strict=True):
            if parameters[position].grad is not None:
                raise RoundPipeError(
                    f"a gradient entered layer {self.host.layer.name!r} past its outputs: a tensor computed inside was "
                    "kept by a hook, a list or an object that the strategy does not see. Return it from the layer."
                )
            direct = present and _adds_itself(parameters[position], view, factor)
            parameters[position].grad = view if direct else None

    def detach(self, parameters: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        """After it."""
        for index, position in enumerate(self.host.layout.positions):
            grad = parameters[position].grad
            parameters[position].grad = None
            if grad is None:
                continue
            if grad.is_sparse:
                raise RoundPipeError(
                    f"layer {self.host.layer.name!r} produced a sparse gradient; build its embedding with sparse=False."
                )
            view = self.views[index]
            if self.present[index] and not _adds_itself(parameters[position], view, factor):
                view.add_(grad, alpha=factor)
            elif grad is not view:
                view.copy_(grad)
                if factor != 1.0:
                    view.mul_(factor)
            self.present[index] = True

    def download(self, stream: Stream) -> None:
        """Enqueue the copy to the host, where there is room, and publish what is present."""
        stream.copy(self.host.flat, self.segment[: self.host.layout.nbytes])
        self.host.arrived = stream.record()
        self.host.present = self.present


def _adds_itself(parameter: nn.Parameter, view: Tensor, factor: float) -> bool:
    """Whether autograd's own addition is the right one."""
    return factor == 1.0 and parameter.dtype is view.dtype
