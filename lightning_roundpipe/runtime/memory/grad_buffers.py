"""Gradients: from a worker, where they are summed over a round's microbatches, to the host, and on to who uses them up.

They are kept per call, not per layer: a layer that is used twice adds up in the same order whatever the plan is, and so
do rounds, because a later round's device buffer starts from the sum so far.

    worker: attach ── backward of the round's microbatches ── detach ── [1]
    download into the call's host buffer ── once the batch before has been used up ── [2]
    arrived ── taken: stepped from there, or handed to .grad ── consumed ── [3]

With ``reduce_dtype`` the sum of a round travels in fewer bytes. It is narrowed where it lies, and lands beside the sum,
to which a thread of the host adds it; so no later round has to start from it.

    worker: detach ── narrowed ── [4]
    download into the landing ── once what landed there before has been added ── [5]
    added to the call's host buffer, on the summing thread ── arrived ── [6]

A large layer's gradients travel in parts, so that the first are used while the last are on their way:
`async_optimizer`.

    download, part by part ── each part's own event ── [7]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event, Stream, StreamAborted
from lightning_roundpipe.devices.errors import raise_kept
from lightning_roundpipe.runtime.memory.flat_params import ParamSlice, holders, in_a_row
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.threads.sync import CancelScope, Waiter
from lightning_roundpipe.runtime.threads.task_thread import TaskThread

STREAMED = 2**27
"""Bytes of gradients from which on they travel, and are used, in parts: to download them takes five milliseconds."""
PART = 2**24
"""Bytes of a part: 16 MiB, half a millisecond of a link's time, four million fp32 numbers."""
LEAST = 2**18
"""Numbers that are narrowed through memory of their own: in place they would cover what is not narrowed yet."""
LOOK = 0.25
"""Seconds between two looks whether the summing thread is alive."""


@dataclass(frozen=True)
class Reduction:
    """How gradients travel in fewer bytes.

    Attributes:
        dtype: the format in which they travel, where that is a narrower one.
        thread: adds what has arrived to the sums.
    """

    dtype: torch.dtype
    thread: TaskThread


class GradientLayout:
    """Where the gradients of one layer's trainable parameters lie in a flat buffer.

    Args:
        layer: whose.
        trainable: which of its parameters those are; by default those that are trained now.
        dtype: that gradients travel in, where it is narrower than their own.

    Attributes:
        segments, nbytes: of the sums, on a worker and on the host.
        travelling, travel_nbytes: of what travels to the host.
        narrowed: whether these differ.
    """

    def __init__(
        self, layer: HostLayer, trainable: Sequence[bool] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.positions = [i for i, trained in enumerate(trainable or layer.trainable()) if trained]
        masters = [layer.masters[position] for position in self.positions]
        self.keys = list(map(id, masters))
        dtypes = [master.dtype for master in masters]
        narrow = [dtype if dtype is not None and _narrows(dtype, own) else own for own in dtypes]
        self.segments, self.nbytes = in_a_row(masters, dtypes)
        self.travelling, self.travel_nbytes = in_a_row(masters, narrow)
        self.narrowed = narrow != dtypes


def _narrows(dtype: torch.dtype, own: torch.dtype) -> bool:
    return own.is_floating_point and dtype.itemsize < own.itemsize


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
        return holders(self.flat) == self.alone


class HostGradBuffers:
    """The host memory for the gradients of one call's layer: one buffer, used again by every batch.

    What a batch leaves may be looked at for longer where it was handed to ``.grad``; then the next batch gets another
    one, and the two take turns.
    """

    def __init__(
        self, layer: HostLayer, device: Device, reduction: Reduction | None = None,
        trainable: Sequence[bool] | None = None,
    ) -> None:  # fmt: skip
        self.layer = layer
        self.layout = GradientLayout(layer, trainable, reduction.dtype if reduction is not None else None)
        self._device = device
        self._buffers: list[_Buffer] = []
        self._landing = _Landing(self.layout, device, reduction.thread) if reduction and self.layout.narrowed else None
        self._last: HostGradSums | None = None

    @property
    def used(self) -> bool:
        """Whether there was ever a batch that had gradients for it."""
        return self._last is not None

    def reserve(self) -> None:
        """Make the memory for the first batch now: to page-lock it takes time, and may stall what runs meanwhile."""
        self._unused()

    def begin(self) -> HostGradSums:
        """The sum of a new batch."""
        before = self._last
        while before is not None and before.unused:
            before = before.before
        buffer = before.buffer if before is not None and not before.handed_out else self._unused()
        self._last = HostGradSums(self.layer, self.layout, buffer, before, self._landing)
        return self._last

    def _unused(self) -> _Buffer:
        for buffer in self._buffers:
            if buffer.unused:
                return buffer
        nbytes = self.layout.nbytes
        if self._landing or not nbytes:  # no copy is enqueued to or from what the host itself adds to
            flat = torch.empty(nbytes, dtype=torch.uint8)
        else:
            flat = self._device.host_buffer(nbytes)
        views = [segment.view(flat) for segment in self.layout.segments]
        buffer = _Buffer(flat, views, holders(flat))
        self._buffers = [*self._buffers[-1:], buffer]
        return buffer


class _Landing:
    """Where the narrowed sums of a call's rounds land, one after another, before they are added up.

    Args:
        layout: of the call's gradients.
        device: gives the memory.
        thread: adds.
    """

    def __init__(self, layout: GradientLayout, device: Device, thread: TaskThread) -> None:
        self.flat = device.host_buffer(layout.travel_nbytes)
        self.thread = thread
        self._views = [segment.view(self.flat) for segment in layout.travelling]

    def add_to(self, sums: Sequence[Tensor], present: Sequence[bool], summed: Sequence[bool]) -> None:
        """Add what is ``present`` to ``sums``, of which some hold nothing yet."""
        for total, landed, here, before in zip(sums, self._views, present, summed, strict=True):
            if here and before:
                total.add_(landed)
            elif here:
                total.copy_(landed)


class _Added(Event):
    """The point at which what a download has brought is in the sum [6]."""

    def __init__(self, thread: TaskThread) -> None:
        self._thread = thread
        self._over = threading.Event()
        self._error: BaseException | None = None

    def after(self, landed: Event, landing: _Landing, sums: Sequence[Tensor], *present: Sequence[bool]) -> None:
        """On the summing thread: once ``landed``, reach the point."""
        try:
            landed.wait()
            landing.add_to(sums, *present)
        except BaseException as error:
            self._error = error
        self._over.set()

    def wait(self) -> None:
        while not self._over.wait(LOOK):
            if not self._thread.alive:
                raise RoundPipeError(
                    f"the thread that sums gradients has died ({self._thread.died!r})"
                ) from self._thread.died
        if self._error is not None:
            raise_kept(self._error, "gradients_down")

    def done(self) -> bool:
        return self._over.is_set()

    def time(self) -> float:
        raise RuntimeError("a sum has no time: ask for that of its download.")


class GradientMemory:
    """Host memory for the gradients of all calls; made when it is first needed.

    Args:
        layers: that are called.
        device: any device; gives host memory that copies asynchronously.
        reduction: how gradients travel, where that is in fewer bytes.
    """

    def __init__(self, layers: Sequence[HostLayer], device: Device, reduction: Reduction | None) -> None:
        self.reduction = reduction
        self._layers, self._device = layers, device
        self._buffers: dict[tuple[int, int, tuple[bool, ...] | None], HostGradBuffers] = {}
        self._reserves = self._reserved = False
        """Whether it is made before a batch asks for it, and whether some was, by no batch so far."""

    def of(
        self, layer: HostLayer, use: int, trainable: tuple[bool, ...] | None = None,
        make_room: Callable[[int], None] = lambda nbytes: None,
    ) -> HostGradBuffers:  # fmt: skip
        """That of a call.

        Args:
            use: how often the layer was called before.
            trainable: which of its parameters are trained, if not those that are now.
            make_room: called with the bytes of the sum where it is made now.
        """
        key = (layer.index, use, trainable)
        if key not in self._buffers:
            buffers = HostGradBuffers(layer, self._device, self.reduction, trainable)
            make_room(buffers.layout.nbytes)
            self._buffers[key] = buffers
        return self._buffers[key]

    def reserve(self) -> None:
        """Make that of one call of each layer now, before the first batch, which is measured."""
        for layer in self._layers:
            self.of(layer, 0).reserve()
        self._reserves = self._reserved = True

    def give_back(self) -> None:
        """Behind a batch: what was reserved and no call had gradients for. Should one have some later, it is made
        anew.
        """
        if self._reserved:
            self._reserved = False
            self._buffers = {key: buffers for key, buffers in self._buffers.items() if buffers.used}

    def drop(self) -> None:
        """What is in it will not be asked for, or never arrive."""
        self._buffers.clear()

    def reserve_again(self) -> None:
        """Other parameters are trained now, and what was there was dropped."""
        if self._reserves:
            self.reserve()


class HostGradSums:
    """The gradients of one call's layer, summed over one batch's microbatches, in host memory.

    ``present`` says per trainable parameter whether it got a gradient at all: one that did not must keep ``None``, or
    AdamW would decay it.

    Args:
        layer: whose gradients.
        layout: where they lie in ``buffer``.
        buffer: the call's.
        before: the last batch's, in the same buffer.
        landing: where they arrive narrowed; None: they arrive in ``buffer`` itself.
    """

    def __init__(
        self, layer: HostLayer, layout: GradientLayout, buffer: _Buffer, before: HostGradSums | None,
        landing: _Landing | None = None,
    ) -> None:  # fmt: skip
        self.layer = layer
        self.layout = layout
        self.buffer = buffer
        self.flat = buffer.flat
        self.landing = landing
        self.present = [False] * len(layout.segments)
        self.arrived: Event | None = None
        """The download, or sum, that must have finished before the sum may be read or overwritten."""
        self.handed_out = False
        """Whether views of the buffer were given to somebody who may keep them."""
        self.consumed = Waiter()
        """Woken when nobody needs what is in the buffer any more."""
        self.before = before
        """Whose remains are in the buffer until `make_room`."""
        self.parts: list[tuple[int, Event]] = []
        """Of a download in parts, where each ends and when it is there [7]."""
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
        """What the gradients of ``layer`` take on a worker now."""
        return GradientLayout(layer).nbytes

    def make_room(self, cancel_scope: CancelScope) -> None:
        """Before a download: wait until what the batch before left is used up [2], and what has landed is added [5]."""
        before, self.before = self.before, None
        if before is not None:
            cancel_scope.wait(before.consumed)
            # Nobody may have taken it, so that it is on its way still.
            before.wait()
        if self.landing is not None:
            self.wait()

    def land(self, landed: Event, present: Sequence[bool]) -> None:
        """What is ``present`` is on its way to the landing, until ``landed``: it is added to the sum."""
        assert self.landing is not None
        before, self.present = self.present, [a or b for a, b in zip(self.present, present, strict=True)]
        added = self.arrived = _Added(self.landing.thread)
        landing, views = self.landing, self.buffer.views
        self.landing.thread.submit(lambda: added.after(landed, landing, views, present, before))

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

    def wait_for_part(self, nbytes: int) -> None:
        """Wait for the first ``nbytes`` of the download, or for all of it."""
        arrived = next((event for end, event in self.parts if end >= nbytes), None)
        if arrived is None or self.arrived is self._there:
            self.wait()
            return
        try:
            arrived.wait()
        except StreamAborted:
            if self.arrived is not self._there:  # see `wait`
                raise

    def take_part(self, key: int, start: int, end: int, factor: float) -> Tensor:
        """Numbers ``start`` to ``end`` of the gradient of the master with the id ``key``, as `take` gives all of it."""
        index = self.layout.keys.index(key)
        segment = self.layout.segments[index]
        self.wait_for_part(segment.offset + end * segment.dtype.itemsize)
        part = self.buffer.views[index].view(-1)[start:end]
        return part if factor == 1.0 else part.mul_(factor)

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

    def view_of(self, key: int) -> Tensor:
        """The sum for the master with the id ``key``, as it lies in the buffer now."""
        return self.buffer.views[self.layout.keys.index(key)]

    def got(self) -> list[nn.Parameter]:
        """The masters that have a gradient in it."""
        positions = zip(self.layout.positions, self.present, strict=True)
        return [self.layer.masters[position] for position, present in positions if present]


class DeviceGradSums:
    """The same sum while its slot runs on a worker.

    Autograd accumulates into ``.grad`` of the copy's parameters. A parameter's first gradient is moved into the arena,
    and later ones are added to it there: by autograd, or here where they have another format or weight. A low-precision
    sum would lose what a microbatch adds.
    """

    def __init__(self, host: HostGradSums, segment: Tensor) -> None:
        self.host = host
        self.segment = segment
        self.views = [s.view(segment) for s in host.layout.segments]
        self.present = [False] * len(self.views) if host.landing is not None else list(host.present)

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

    def narrow(self) -> None:
        """Give the sum the format that it travels in [4]. On the compute stream; nothing is added to it afterwards."""
        layout = self.host.layout
        for own, travelling, present in zip(layout.segments, layout.travelling, self.present, strict=True):
            if present and travelling != own:
                _narrow(self.segment, own, travelling)

    def download(self, stream: Stream) -> None:
        """Enqueue the copy to the host, where there is room, and publish what is present."""
        landing, nbytes = self.host.landing, self.host.layout.travel_nbytes
        if landing is not None:
            stream.copy(landing.flat, self.segment[:nbytes])
            self.host.land(stream.record(), self.present)
            return
        parts = []
        for start in range(0, nbytes, PART if nbytes >= STREAMED else nbytes):
            end = min(start + PART, nbytes) if nbytes >= STREAMED else nbytes
            stream.copy(self.host.flat[start:end], self.segment[start:end])
            parts.append((end, stream.record()))
        self.host.parts, self.host.arrived = parts, parts[-1][1]
        self.host.present = self.present


def _narrow(buffer: Tensor, own: ParamSlice, narrow: ParamSlice) -> None:
    """Move numbers to where ``narrow`` says, in its format. That begins no later in ``buffer``, and takes less.

    What is written must not be what the same operation reads, so each takes as many numbers as there is room for in
    front of them, twice as many each time.
    """
    source = buffer[own.offset : own.offset + own.nbytes].view(own.dtype)
    target = buffer[narrow.offset : narrow.offset + narrow.nbytes].view(narrow.dtype)
    done = 0
    while done < len(source):
        free = (own.offset + done * source.itemsize - narrow.offset) // target.itemsize
        end = min(max(free, done + LEAST), len(source))
        part = source[done:end]
        target[done:end].copy_(part if end <= free else part.to(target.dtype, copy=True))
        done = end


def _adds_itself(parameter: nn.Parameter, view: Tensor, factor: float) -> bool:
    """Whether autograd's own addition is the right one."""
    return factor == 1.0 and parameter.dtype is view.dtype
