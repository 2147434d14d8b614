"""Gradient sums: from a worker, which adds up a round's microbatches, through host memory to the optimizer.

Sums are kept per call, not per layer. A layer that is called twice then adds up in the same order under every plan. So
do rounds: the device buffer of a later round starts from the sum so far.

    worker: attach ── backward of the round's microbatches ── detach ── [1]
    a block of the pool ── download into it ── [2]
    arrived ── taken: read by the optimizer, or handed to .grad ── released: back to the pool ── [3]

With ``reduce_dtype`` the sum of a round travels in a narrower dtype, into which it is narrowed in place. Later rounds
then start from zero. So do rounds that run side by side, in any dtype. What arrives first stays as it has come: most
steps have one round, and nothing more arrives. What arrives behind it lands beside it, and a host thread adds it, one
for each worker. The sum has the gradients' own dtype from the second arrival on.

    worker: detach ── narrowed ── [4]
    download beside the first ── once what landed before has been added ── [5]
    added to the sum, on the worker's summing thread ── arrived; where it landed goes back to the pool ── [6]
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event, Stream, StreamAborted
from lightning_roundpipe.devices.errors import raise_kept, without_frames
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.memory.flat_params import ParamSlice, holders, in_a_row
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.optim.narrow_gradient import AnyGradient, NarrowGradient
from lightning_roundpipe.planning.memory import layers_in_flight
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.threads.task_thread import TaskThread

LEAST = 2**18
"""Elements that are narrowed through a temporary: in place they would overwrite others that are not narrowed yet."""
MULTIPLIED = 2**22
"""Elements that are multiplied at once: their product is a temporary, of 16 MiB in fp32."""


@dataclass(frozen=True)
class Reduction:
    """How gradients come to the host.

    Attributes:
        dtype: in which gradients travel if it is narrower than their own.
        thread: returns the thread that adds what has landed from a worker to the sums. What lands from one worker lands
            in order, so its thread waits for nothing that comes later.
        adding: taken for each sum, which alone takes all of the host's memory bandwidth, and of torch's threads.
    """

    dtype: torch.dtype | None
    thread: Callable[[int], TaskThread]
    adding: threading.Lock = field(default_factory=threading.Lock)


class GradientLayout:
    """The layout of the gradients of one layer's trainable parameters in a flat buffer.

    Args:
        trainable: per master, whether it is trained. Default: as it is now.
        dtype: in which gradients travel if it is narrower than their own.

    Attributes:
        positions, keys: of the trained masters, and their ids.
        segments, nbytes: slices and size of the sums, on a worker and on the host.
        travelling, travel_nbytes: likewise of what is downloaded.
    """

    def __init__(
        self, layer: HostLayer, trainable: Sequence[bool] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.trained = tuple(trainable or layer.weights.trainable())
        self.positions = [i for i, trained in enumerate(self.trained) if trained]
        masters = [layer.masters[position] for position in self.positions]
        self.keys = list(map(id, masters))
        dtypes = [master.dtype for master in masters]
        narrow = [dtype if dtype and own.is_floating_point and dtype.itemsize < own.itemsize else own for own in dtypes]
        self.segments, self.nbytes = in_a_row(masters, dtypes)
        self.travelling, self.travel_nbytes = in_a_row(masters, narrow)
        self.narrowed = narrow != dtypes


class _Block:
    """Host memory for gradients of a call, which sums use one after another. ``kept``: whether it is used again."""

    def __init__(self, flat: Tensor, home: _Blocks, *, kept: bool) -> None:
        self.flat, self.home, self.kept = flat, home, kept
        self.nbytes = flat.numel()
        self.generation = home.generation
        self.filled: Event | None = None
        """The end of the last download into it, or of the addition."""
        self.lent = False
        """Whether user code may hold views of it."""
        self._own_holders = holders(flat)
        self._views: dict[tuple[ParamSlice, ...], list[Tensor]] = {}

    def views(self, slices: tuple[ParamSlice, ...]) -> list[Tensor]:
        """Return the gradients as cached views. Making one takes longer than the update of a small parameter."""
        if (views := self._views.get(slices)) is None:
            views = self._views[slices] = [segment.view(self.flat) for segment in slices]
            self._own_holders += len(views)
        return views

    @property
    def is_free(self) -> bool:
        """Whether nothing uses the memory: its last sum may have been dropped while it was still on its way."""
        there = self.filled is None or self.filled.done()
        return there and not (self.lent and holders(self.flat) > self._own_holders)


class _Blocks:
    """Blocks of one kind, from memory that ``new`` allocates.

    A block is used again for gradients of at least half its size. Where a new one would exceed the limit, free blocks
    are given up for it. Memory that was handed to user code in ``.grad`` is used again once user code has dropped it.
    Nothing here waits: microbatches take blocks with the baton held.

    Attributes:
        held: bytes of the blocks that are taken. From ``limit`` on, downloads wait, and none are kept without need.
        generation: the number of calls of `clear`, after which blocks that were taken before do not come back.
    """

    def __init__(self, new: Callable[[int], Tensor], limit: int) -> None:
        self._new, self._limit = new, limit
        self.held = self.generation = 0
        self._lock = threading.Lock()
        self._given: list[_Block] = []
        """Blocks that were given back."""

    def exceed(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` beside what is taken are more than the limit."""
        return 0 < self.held > self._limit - nbytes

    def take(self, nbytes: int, *, keep: bool) -> _Block:
        """Return a block of at least ``nbytes``, whose contents are arbitrary. ``keep``: whether a new one is kept."""
        with self._lock:
            free = [block for block in self._given if block.is_free]
            suiting = [block for block in free if nbytes <= block.nbytes <= 2 * nbytes]
            found = min(suiting, key=lambda block: block.nbytes, default=None)
            if found is not None:
                self._given.remove(found)
            while found is None and free and self.held + sum(b.nbytes for b in self._given) > self._limit - nbytes:
                self._given.remove(free.pop(0))
            self.held += nbytes if found is None else found.nbytes
        return _Block(self._new(nbytes), self, kept=keep) if found is None else found

    def give(self, block: _Block, filled: Event | None, *, lent: bool) -> None:
        """Do what `GradientPool.give` does, but wake nothing."""
        block.filled, block.lent = filled, lent
        with self._lock:
            if block.generation == self.generation:
                self.held -= block.nbytes
                if block.kept:
                    self._given.append(block)

    def give_up_free(self) -> None:
        """Free the memory of blocks that nothing uses."""
        with self._lock:
            self._given.clear()

    def clear(self) -> None:
        """Free all memory but what is taken, which is freed with those who have it."""
        with self._lock:
            self.generation += 1
            self.held = 0
            self._given.clear()


class Ready(Protocol):
    """A step whose gradients the optimizer uses layer by layer."""

    @property
    def has_ready(self) -> bool:
        """Whether there are complete gradients that the optimizer has not used yet."""


class GradientPool:
    """Host memory for gradients in flight, from their download to the update that uses them.

    The sum of a call takes a block when its first download begins, and gives it back when it is consumed. The pool
    grows with what is in flight. Where the optimizer needs all gradients before it uses any (clipping by norm, loss
    scaling, several rounds, several machines), that is a block for each layer. Where it uses them layer by layer, a
    download that would exceed ``limit`` bytes waits for it, while it has complete gradients to go on with. It waits for
    nothing else: what is incomplete may come with the very download that would wait. What is to be added has a block
    until it is; a download that would exceed ``limit`` bytes of these waits for that. In later windows of one round
    nothing is added, so what the first window has for that is given up behind it.

    Args:
        device: any device; allocates host memory that copies asynchronously.
        limit: see above.
        largest: bytes of the largest sum in the gradients' own dtypes: what is kept where narrowed ones are widened.

    Attributes:
        keeps: whether new blocks are kept for reuse. In the first window, whose microbatches run one after another, all
            sums exist at once: their memory is freed as the optimizer uses it, which then allocates its state.
        draining: the step whose gradients the optimizer uses layer by layer at the moment.
    """

    def __init__(self, device: Device, limit: int, largest: int) -> None:
        self.limit = limit
        self.keeps = False
        self.draining: Ready | None = None
        self._arriving, self._landing = (_Blocks(device.host_buffer, limit) for _ in range(2))
        # Only the host writes to narrowed gradients' sums, so these need no page-locked memory.
        self._wide = _Blocks(partial(torch.empty, dtype=torch.uint8), largest)
        self._lock = threading.Lock()
        self._waiters: list[Waiter] = []

    def begin_window(self, *, keeps: bool) -> None:
        """Begin a window. For ``keeps`` see above."""
        if keeps and not self.keeps:
            self._landing.give_up_free()
        self.keeps = keeps

    def give_up_free(self) -> None:
        """Free the memory that no sum has at the moment."""
        for blocks in (self._arriving, self._landing, self._wide):
            blocks.give_up_free()

    def is_full(self, nbytes: int) -> bool:
        """Return whether the first download of a sum waits for an update."""
        draining = self.draining
        return draining is not None and self._arriving.exceed(nbytes) and draining.has_ready

    def is_landing(self, nbytes: int) -> bool:
        """Return whether a download that is to be added waits for additions."""
        return self._landing.exceed(nbytes) if self.keeps else self._landing.held > 0

    def wait(self, full: Callable[[int], bool], nbytes: int, cancel_scope: CancelScope) -> None:
        """Wait as long as the pool is ``full`` for a download of ``nbytes``."""
        while True:
            waiter = Waiter()
            with self._lock:
                if not full(nbytes):
                    return
                self._waiters.append(waiter)
            cancel_scope.wait(waiter)

    def take(self, nbytes: int) -> _Block:
        """Return a block for the first download of a sum."""
        return self._arriving.take(nbytes, keep=self.keeps)

    def take_landing(self, nbytes: int) -> _Block:
        """Return a block for a download that is to be added."""
        return self._landing.take(nbytes, keep=True)

    def take_wide(self, nbytes: int) -> _Block:
        """Return a block for a sum of narrowed gradients."""
        return self._wide.take(nbytes, keep=self.keeps)

    def give(self, block: _Block, filled: Event | None, *, lent: bool = False) -> None:
        """Take a block back, whose last download ends at ``filled``; ``lent``: user code may hold views of it."""
        block.home.give(block, filled, lent=lent)
        self.look_again()

    def look_again(self) -> None:
        """Let downloads that wait look whether they still have to."""
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()

    def clear(self) -> None:
        """Free all memory but what sums hold, which is freed with them: downloads may never arrive there."""
        for blocks in (self._arriving, self._landing, self._wide):
            blocks.clear()


class _Added(Event):
    """Reached once a download has been added to the sum [6]."""

    def __init__(self, thread: TaskThread) -> None:
        self._thread = thread
        self._over = threading.Event()
        self._error: BaseException | None = None

    def after(self, landed: Event, add: Callable[[], None], then: Sequence[Callable[[], None]] = ()) -> None:
        """Wait for ``landed``, add to the sum, do what is to be done ``then``, failed or not, and reach the event."""
        try:
            landed.wait()
            add()
        except BaseException as error:
            self._error = error.with_traceback(None)  # whose frames refer to the sum, which refers to this
        for work in then:  # the next download may wait for the memory, and nothing looks at this one's error before
            work()
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """End the wait: the download does not come."""
        if not self._over.is_set():
            self._error = error
            self._over.set()

    def wait(self) -> None:
        self._thread.watch(self._over.wait)
        if self._error is not None:
            raise_kept(self._error, "gradients_down")

    def done(self) -> bool:
        return self._over.is_set()

    def time(self) -> float:
        raise RuntimeError("a sum has no time: ask for that of its download.")


_Call = tuple[int, tuple[int, ...], tuple[bool, ...] | None]
"""A call of a layer: the layer's index, what tells its calls apart, and what is trained."""


class GradientMemory:
    """Host memory for the gradients of all calls."""

    def __init__(self, layers: Sequence[HostLayer], device: Device, reduction: Reduction, workers: int) -> None:
        self.reduction = reduction
        self._layers = layers
        self._see_trained()
        self._layouts: dict[_Call, GradientLayout] = {}
        all_trained = [GradientLayout(layer, [True] * len(layer.masters), reduction.dtype) for layer in layers]
        in_flight = heapq.nlargest(layers_in_flight(workers), (layout.travel_nbytes for layout in all_trained))
        self.pool = GradientPool(device, sum(in_flight), max((layout.nbytes for layout in all_trained), default=0))

    def begin(
        self, layer: HostLayer, use: tuple[int, ...], trainable: tuple[bool, ...] | None = None, *,
        own_sums: bool = False,
    ) -> HostGradSums:  # fmt: skip
        """Return the sum of one call's gradients in a new window.

        Args:
            use: tells the calls of the layer apart.
            trainable: per master, whether it is trained. Default: as it was at the last `drop`.
            own_sums: whether each round's sum travels alone, and the host adds it.
        """
        call = layer.index, use, trainable
        if (layout := self._layouts.get(call)) is None:
            trained = self._trained[layer.index] if trainable is None else trainable
            layout = self._layouts[call] = GradientLayout(layer, trained, self.reduction.dtype)
        adds = layout.narrowed or (own_sums and layout.nbytes > 0)
        return HostGradSums(layer, layout, self.pool, self.reduction if adds else None)

    def drop(self) -> None:
        """Drop all memory: its gradients will not be read, or never arrive; or other parameters are trained now."""
        self._layouts.clear()
        self.pool.clear()
        self._see_trained()

    def _see_trained(self) -> None:
        self._trained: dict[int, tuple[bool, ...]] = {layer.index: layer.weights.trainable() for layer in self._layers}


class HostGradSums:
    """The gradients of one call's layer, summed over one window's microbatches, in host memory.

    ``present`` says per trainable parameter whether it got a gradient. One that got none must keep ``.grad`` None, or
    AdamW would decay it. Without ``reduction``, a later download continues the sum, and overwrites it.
    """

    def __init__(
        self, layer: HostLayer, layout: GradientLayout, pool: GradientPool, reduction: Reduction | None = None
    ) -> None:
        self.layer = layer
        self.layout = layout
        self.adds = reduction is not None
        self.present = [False] * len(layout.segments)
        self.handed_out = False
        """Whether views of the block were handed to user code, which may keep them."""
        self.arrived: Event | None = None
        """The end of the last download, or its addition: the sum may be read or overwritten afterwards."""
        self._pool, self._reduction = pool, reduction
        self._block: _Block | None = None
        """The memory of the sum: of what has arrived first, as it has come; then in the gradients' own dtypes."""
        self._slices = layout.travelling
        """How the sum lies there."""
        self._landing: tuple[_Block, _Block | None] | None = None
        """Where the next download lands, to be added; and what has arrived first, if the sum lacks it."""
        self._there: Event | None = None

    @property
    def flat(self) -> Tensor:
        """The memory of the sum, from `make_room` to `release`."""
        assert self._block is not None, "the sum has no memory"
        return self._block.flat[: self.layout.nbytes]

    def make_room(self, cancel_scope: CancelScope | None = None) -> bool:
        """Before a download: take a block for it [2].

        Without a ``cancel_scope``, returns False, and does nothing, where this or the download would wait.
        """
        layout, pool, arrived = self.layout, self._pool, self.arrived
        nbytes, is_first = layout.travel_nbytes, self._block is None
        if not (is_first or self.adds):
            return True
        full = pool.is_full if is_first else pool.is_landing
        if cancel_scope is not None:
            pool.wait(full, nbytes, cancel_scope)
        elif full(nbytes) or not (arrived is None or arrived.done()):
            return False
        if is_first:
            self._block, self._slices = pool.take(nbytes), layout.travelling
            return True
        is_narrow = self._slices != layout.segments
        self._landing = pool.take_landing(nbytes), self._block if is_narrow else None
        if is_narrow:
            self._block, self._slices = pool.take_wide(layout.nbytes), layout.segments
        return True

    def release(self) -> None:
        """Give the memory back, whose contents are no longer needed [3]. Idempotent."""
        block, self._block = self._block, None
        if block is not None:
            self._pool.give(block, self.arrived, lent=self.handed_out)

    def download(
        self, stream: Stream, source: Tensor, worker: int, present: Sequence[bool],
        begun: Callable[[], object] = lambda: None, failed: Callable[[BaseException], object] = lambda error: None,
    ) -> None:  # fmt: skip
        """Enqueue the download of a worker's gradients that are ``present``, in place of the sum or to be added to it.

        Call after `make_room`. For the arguments see `DeviceGradSums.download`.
        """
        if self._landing is not None:
            return self._land(stream, source, worker, present, begun, failed)
        assert self._block is not None, "the sum has no memory"
        stream.copy(self._block.flat[: len(source)], source)
        self.arrived, self.present = stream.record(), list(present)
        begun()

    def _land(
        self, stream: Stream, source: Tensor, worker: int, present: Sequence[bool], begun: Callable[[], object],
        failed: Callable[[BaseException], object],
    ) -> None:  # fmt: skip
        """Enqueue the download of what is to be added, once what has landed before is added [5]."""
        assert self._landing is not None and self._block is not None and self._reduction is not None
        (landing, first), sums, self._landing = self._landing, self._block.flat, None
        summed, before, thread = self.present, self.arrived, self._reduction.thread(worker)
        self.present = [a or b for a, b in zip(summed, present, strict=True)]
        self.arrived = added = _Added(thread)
        try:
            if before is not None:
                before.wait()
            stream.copy(landing.flat[: len(source)], source)
            add = partial(self._add, landing, first, sums, present, summed)
            give = [partial(self._pool.give, block, None) for block in (landing, first) if block is not None]
            thread.submit(partial(added.after, stream.record(), add, give))
            begun()
        except BaseException as error:
            failed(error)
            added.fail(without_frames(error, stream.name))  # frames refer to the sum, which refers to the event
            raise

    def _add(
        self, landing: _Block, first: _Block | None, sums: Tensor, present: Sequence[bool], summed: Sequence[bool]
    ) -> None:
        """Add the gradients that are ``present`` to those that are ``summed``, which may lie in ``first``."""
        assert self._reduction is not None
        slices = zip(self.layout.travelling, self.layout.segments, present, summed, strict=True)
        with self._reduction.adding:
            for travelling, own, comes, is_there in slices:
                total, landed = own.view(sums), travelling.view(landing.flat)
                if first is not None and is_there:
                    total.copy_(travelling.view(first.flat))
                if comes and is_there:
                    total.add_(landed)
                elif comes:
                    total.copy_(landed)

    def wait(self) -> None:
        """Wait for the download. Any thread may."""
        if (arrived := self.arrived) is None or arrived is self._there:
            return
        try:
            arrived.wait()
        except StreamAborted:
            if arrived is not self._there:  # another thread may have waited for it before the device was aborted
                raise
        self._there = arrived

    def take(self, factor: float, *, widen: bool = True) -> dict[int, AnyGradient]:
        """Multiply the gradients by ``factor`` in place and return them by id of the master, in the sum's memory.

        After a hand-out, the caller owns the views. Otherwise they are cached, and the next window uses them, too.

        ``widen``: whether all are tensors of the gradients' own dtypes. If not, what has arrived narrowed stays so.
        """
        if not any(self.present):
            return {}
        self.wait()
        if widen and self._slices != self.layout.segments:
            self._widen()
        assert self._block is not None, "the sum has no memory"
        slices = self._slices
        views = [place.view(self._block.flat) for place in slices] if self.handed_out else self._block.views(slices)
        taken: dict[int, AnyGradient] = {}
        for key, view, own, present in zip(self.layout.keys, views, self.layout.segments, self.present, strict=True):
            if not present:
                continue
            if view.dtype is not own.dtype:
                taken[key] = NarrowGradient([view], factor, own.dtype)
            else:
                taken[key] = view if factor == 1.0 else view.mul_(factor)
        return taken

    def _widen(self) -> None:
        """Give the sum, which is what has arrived first, the gradients' own dtypes."""
        narrow, travelling = self._block, self._slices
        assert narrow is not None, "the sum has no memory"
        self._block, self._slices = self._pool.take_wide(self.layout.nbytes), self.layout.segments
        for view, own, present in zip(
            narrow.views(travelling), self._block.views(self._slices), self.present, strict=True
        ):
            if present:
                own.copy_(view)
        self._pool.give(narrow, self.arrived)

    def got(self) -> list[nn.Parameter]:
        """Return the masters that got a gradient."""
        positions = zip(self.layout.positions, self.present, strict=True)
        return [self.layer.masters[position] for position, present in positions if present]


class DeviceGradSums:
    """The sum of one call's gradients on a worker, while its slot runs.

    Autograd accumulates into ``.grad`` of the replica's parameters. A parameter's first gradient is copied into the
    arena. Later ones are added to it there: by autograd, or by `detach` where they need a factor or have another dtype,
    because a sum in low precision would lose a microbatch's contribution.
    """

    def __init__(self, host: HostGradSums, segment: Tensor) -> None:
        self.host = host
        self.segment = segment
        with torch.inference_mode(False):  # of the user code that opens the slot, or no backward could write to them
            self.views = [s.view(segment) for s in host.layout.segments]
        self.present = self.continued(host)

    @staticmethod
    def continued(host: HostGradSums) -> list[bool]:
        """Return, per trainable parameter, whether a slot goes on from the sum of an earlier round."""
        return [False] * len(host.present) if host.adds else list(host.present)

    def upload(self, stream: Stream) -> None:
        """Enqueue the upload of the earlier rounds' sum, which this round continues."""
        stream.copy(self.segment[: self.host.layout.nbytes], self.host.flat)

    def attach(self, parameters: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        """Prepare ``.grad`` for a microbatch's backward, whose gradients will be multiplied by ``factor``."""
        for view, position, present in zip(self.views, self.host.layout.positions, self.present, strict=True):
            parameter = parameters[position]
            if parameter.grad is not None:
                raise RoundPipeError(
                    f"a gradient entered layer {self.host.layer.name!r} past its outputs: a tensor computed inside was "
                    "kept by a hook, a list or an object that the strategy does not see. Return it from the layer."
                )
            if present and _adds_itself(parameter, view, factor):
                parameter.grad = view

    def detach(self, parameters: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        """Add the microbatch's gradients times ``factor`` to the sum and clear ``.grad``, after its backward."""
        for index, position in enumerate(self.host.layout.positions):
            grad = parameters[position].grad
            if grad is None:
                continue
            parameters[position].grad = None
            if grad is self.views[index] and self.present[index]:
                continue  # autograd has added to it
            if grad.is_sparse:  # of an embedding with sparse=True: the sum of microbatches is dense
                grad = grad.to_dense()
            view = self.views[index]
            if self.present[index] and not _adds_itself(parameters[position], view, factor):
                _add_product(view, grad, factor)
            elif grad is not view:
                view.copy_(grad)
                if factor != 1.0:
                    view.mul_(factor)
            self.present[index] = True

    def narrow(self) -> None:
        """Convert the sum to the travelling dtype on the compute stream [4]. Nothing is added to it afterwards."""
        layout = self.host.layout
        for own, travelling, present in zip(layout.segments, layout.travelling, self.present, strict=True):
            if present and travelling != own:
                _narrow(self.segment, own, travelling)

    def download(
        self, stream: Stream, worker: int, begun: Callable[[], object] = lambda: None,
        failed: Callable[[BaseException], object] = lambda error: None,
    ) -> None:  # fmt: skip
        """Enqueue the download and publish which gradients are present. Call after `HostGradSums.make_room`.

        Args:
            stream: of ``worker``'s downloads of gradients.
            begun: called once another worker's download to the same sums may follow.
            failed: called with an error, which the caller gets as well, before other workers may meet it.
        """
        source = self.segment[: self.host.layout.travel_nbytes]
        self.host.download(stream, source, worker, self.present, begun, failed)


def _narrow(buffer: Tensor, own: ParamSlice, narrow: ParamSlice) -> None:
    """Convert the elements of ``own`` into ``narrow``, which begins no later in ``buffer`` and takes fewer bytes.

    One operation must not write what it reads. So each pass converts as many elements as fit into the free bytes in
    front of them, about twice as many each time; at first it converts `LEAST` through a temporary.
    """
    source, target = own.bytes_of(buffer).view(own.dtype), narrow.bytes_of(buffer).view(narrow.dtype)
    done = 0
    while done < len(source):
        free = (own.offset + done * source.itemsize - narrow.offset) // target.itemsize
        end = min(max(free, done + LEAST), len(source))
        part = source[done:end]
        target[done:end].copy_(part if end <= free else part.to(target.dtype, copy=True))
        done = end


def _add_product(total: Tensor, grad: Tensor, factor: float) -> None:
    """Add ``grad`` times ``factor`` to ``total``, rounding the product.

    ``add_`` with ``alpha`` does not round it, as the hardware multiplies and adds at once. But the sum of a round of
    one microbatch travels as a rounded product, and every plan must give the same bits.
    """
    if factor == 1.0:
        total.add_(grad)
        return
    if not (grad.is_contiguous() and total.is_contiguous()):
        total.add_(grad.to(total.dtype, copy=True).mul_(factor))
        return
    flat, flat_grad = total.view(-1), grad.view(-1)
    for start in range(0, len(flat), MULTIPLIED):
        part = slice(start, start + MULTIPLIED)
        flat[part].add_(flat_grad[part].to(total.dtype, copy=True).mul_(factor))


def _adds_itself(parameter: nn.Parameter, view: Tensor, factor: float) -> bool:
    """Whether autograd may accumulate into ``view`` directly."""
    return factor == 1.0 and parameter.dtype is view.dtype
