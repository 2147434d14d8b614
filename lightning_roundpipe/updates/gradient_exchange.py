"""Sums gradients over machines, bucket by bucket, behind the backward that computes them.

    a bucket's gradients are complete on this machine ── packed into messages ── [1]
    each message is summed over all machines, while the next bucket is computed ── [2]
    messages arrive in the order in which they were sent; the last one of a bucket completes it ── [3]
    updated, on all machines alike

If the optimizer's state is shared out, each bucket has an owner, which has its state and updates it:

    a message goes to the owner only, which adds up what it gets in the order of the machines ── [4]
    the owner updates the bucket, and sends its weights to the others, beside later gradients ── [5]
    they have arrived ── the others publish the bucket ── [6]

All machines send the same messages in the same order: from the deepest bucket to the first, as backward completes them,
whatever a machine's plan is. A parameter without a gradient on one machine is zero there. The first message of a bucket
also counts the machines where each parameter has one, so that one without any stays without.

`AsyncOptimizer` calls this on its thread. Where gradients go to ``.grad``, the main thread does, and there is no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_roundpipe.batches.weights import Contribution
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.machines.peers import GRADIENTS, WEIGHTS, Peers
from lightning_roundpipe.memory.param_buckets import ParamBucket

MESSAGE = 2**25
"""Bytes of a message at most. At 10 Gbit/s it takes 30 milliseconds, and its latency does not count."""
MAX_IN_FLIGHT = 4
"""Messages on their way at most."""
KINDS = ("samples", "targets", "sum", "a function")
"""What microbatches are weighed by, on all machines alike."""


@dataclass
class _Message:
    """A part of a bucket's gradients.

    Attributes:
        pieces: for each piece, the master and the range of its elements.
        first: whether the counts of gradients come first.
        last: whether it completes the bucket.
    """

    dtype: torch.dtype
    pieces: list[tuple[nn.Parameter, int, int]] = field(default_factory=list)
    first: bool = False
    last: bool = False

    @property
    def size(self) -> int:
        return sum(end - start for _, start, end in self.pieces)

    def parts(self, buffer: Tensor, at: int = 0) -> Iterator[tuple[nn.Parameter, slice, Tensor]]:
        """Yield the master of each piece, the range of its elements, and their place in ``buffer``, from ``at`` on."""
        for master, start, end in self.pieces:
            yield master, slice(start, end), buffer[at : at + end - start]
            at += end - start


@dataclass
class _InFlight:
    """A message of gradients or weights on its way.

    Attributes:
        work: what to wait for.
        gradients: those of this machine, which a message of gradients will replace.
        received: what comes from the other machines, in their order; only at an owner.
    """

    message: _Message
    bucket: ParamBucket
    buffer: Tensor
    work: Any
    gradients: dict[int, Tensor] = field(default_factory=dict)
    received: Tensor | None = None


class GradientExchange:
    """Sums gradients over machines.

    Args:
        buckets: all buckets of the model, in forward order, composed alike on each machine.
        dtype: dtype in which gradients travel if it is narrower than their own; None: in their own.
        shards: whether each bucket is updated on one machine only.

    Attributes:
        owner: the machine that updates a bucket; empty if all do.
        sent: bytes of gradients that were given to the network so far.
    """

    def __init__(
        self, peers: Peers, buckets: Sequence[ParamBucket], dtype: torch.dtype | None = None, *, shards: bool = False
    ) -> None:
        self.peers = peers
        self.owner = _owners(buckets, peers.size) if shards else {}
        self.order = sorted(buckets, key=lambda bucket: (bucket.index == 0, -bucket.index))
        """Buckets in the order in which they are sent. That of parameters of no layer is complete last."""
        self.sent = 0
        self._dtype = dtype
        self._in_flight: deque[_InFlight] = deque()
        self._complete: list[tuple[ParamBucket, dict[int, Tensor]]] = []
        self._present: dict[ParamBucket, set[int]] = {}
        self._free: dict[torch.dtype, list[Tensor]] = {}
        self._weights: deque[_InFlight] = deque()
        self._updated: list[ParamBucket] = []
        """Buckets whose new weights are there."""
        self._asynchronous = False
        """Whether this machine's optimizer steps on its own thread."""

    def owns(self, bucket: ParamBucket) -> bool:
        """Return whether this machine updates ``bucket``."""
        return not self.owner or self.owner[bucket] == self.peers.rank

    def set_asynchronous(self, asynchronous: bool) -> None:
        """Say who steps: the optimizer's thread, bucket by bucket, or the caller, who steps all parameters.

        Raises `RoundPipeError` if the caller cannot, as this machine has not the state of all parameters any more.
        """
        if self._asynchronous and not asynchronous and self.owner:
            raise RoundPipeError(
                "a hook, callback or optimizer that needs all gradients or optimizer state on each machine came during "
                "training, and each machine has the optimizer's state of its own layers only: set "
                "shard_optimizer=False, or add it before training."
            )
        self._asynchronous = asynchronous

    def refuse_rebuilding(self) -> None:
        """Raise if the buckets must not change, as each machine has the optimizer's state of its own ones only."""
        if self._shares_out:
            raise RoundPipeError(
                "the model is made of other modules or parameters than before, and each machine has the optimizer's "
                "state of its own layers only: set shard_optimizer=False, or change the model before training."
            )

    def share(self, contribution: Contribution | None) -> float:
        """Return the factor of this machine's gradients in those of all machines' windows.

        Machines weigh their windows as one machine weighs microbatches: by samples, targets or what the user's function
        returns; sums add up. A machine without gradients counts for nothing.
        """
        kind = -1 if contribution is None else KINDS.index(contribution.kind)
        total = 0.0 if contribution is None else contribution.total
        mine = torch.tensor([float(kind), total, float(self._shares_out)], dtype=torch.float64)
        everyones = [row.tolist() for row in self.peers.gather(mine, "the weights of the windows", GRADIENTS)]
        if len({asynchronous for *_, asynchronous in everyones}) > 1:
            waiting = [rank for rank, (*_, asynchronous) in enumerate(everyones) if not asynchronous]
            names = ", ".join(map(self.peers.liveness.name_of, waiting))
            raise RoundPipeError(
                f"on {names} a hook, callback or optimizer needs gradients or weights after each batch, and on other "
                "machines it does not: use the same callbacks on each machine, or set shard_optimizer=False."
            )
        if contribution is None:
            return 0.0
        if contribution.kind == "sum":
            return 1.0
        weight = sum(total for kind, total, _ in everyones if kind >= 0)
        giving = sum(kind >= 0 for kind, *_ in everyones)
        return float(contribution.total / weight if weight else 1 / giving)

    def begin(self) -> None:
        """Drop what a failed step has left."""
        self._in_flight.clear()
        self._complete.clear()
        self._present.clear()
        self._weights.clear()
        self._updated.clear()

    def add(self, bucket: ParamBucket, gradients: Mapping[int, Tensor]) -> list[tuple[ParamBucket, dict[int, Tensor]]]:
        """Send this machine's gradients of ``bucket`` [1], whose turn it must be. They may be overwritten.

        Returns buckets that are complete now, with their sums.
        """
        mine = dict(gradients)
        if not _trained(bucket):
            self._complete.append((bucket, mine))
        for message in _messages(bucket):
            while len(self._in_flight) >= MAX_IN_FLIGHT:
                self._wait_oldest()
            self._send(bucket, message, mine)
        while self._in_flight and self._in_flight[0].work.is_completed():
            self._wait_oldest()
        return self._taken()

    def rest(self) -> list[tuple[ParamBucket, dict[int, Tensor]]]:
        """Wait for all messages, and return the remaining buckets with their sums."""
        while self._in_flight:
            self._wait_oldest()
        return self._taken()

    def summed(self, gradients: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the ids of masters and the sums of this machine's ``gradients``, by id of the master."""
        self.begin()
        asynchronous, self._asynchronous = self._asynchronous, False
        try:
            for bucket in self.order:
                mine = {id(master): gradients[id(master)] for master in bucket.masters if id(master) in gradients}
                yield from (pair for _, sums in self.add(bucket, mine) for pair in sums.items())
            yield from (pair for _, sums in self.rest() for pair in sums.items())
        finally:
            self._asynchronous = asynchronous

    # -- messages -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, bucket: ParamBucket, message: _Message, gradients: dict[int, Tensor]) -> None:
        dtype = self._travelling(message.dtype)
        masters = _trained(bucket) if message.first else []
        size = len(masters) + message.size
        buffer = self._buffer(dtype, size)
        for index, master in enumerate(masters):
            buffer[index] = 1.0 if id(master) in gradients else 0.0
        for master, elements, part in message.parts(buffer, len(masters)):
            if id(master) in gradients:
                part.copy_(_flat(gradients, id(master))[elements])
            else:
                part.zero_()
        self.sent += buffer.nbytes
        if (to := self._receiver(bucket)) is None:
            work = self.peers.start(dist.all_reduce, buffer, GRADIENTS)  # [2]
            self._in_flight.append(_InFlight(message, bucket, buffer, work, gradients))
            return
        others = [other for other in range(self.peers.size) if other != to]
        received = self._buffer(dtype, size * len(others)) if to == self.peers.rank else None
        tensor = buffer if received is None else received
        work = self.peers.deliver(tensor, others, to, GRADIENTS)  # [4]
        self._in_flight.append(_InFlight(message, bucket, buffer, work, gradients, received))

    @torch.no_grad()
    def _wait_oldest(self) -> None:
        """Wait for the oldest message, and unpack it [3]."""
        oldest = self._in_flight.popleft()
        message, bucket, buffer = oldest.message, oldest.bucket, oldest.buffer
        self.peers.wait(oldest.work, f"the gradients of bucket {bucket.index}")
        total = buffer
        if oldest.received is not None:
            parts = list(oldest.received.view(-1, buffer.numel()))
            parts.insert(self.peers.rank, buffer)
            total = parts[0]
            for part in parts[1:]:
                total.add_(part)  # [4]
        if self._receiver(bucket) in (None, self.peers.rank):
            self._unpack(oldest, total)
        else:
            oldest.gradients.clear()
        for memory in (buffer, oldest.received) if oldest.received is not None else (buffer,):
            self._free.setdefault(memory.dtype, []).append(_whole(memory))
        if message.last:
            self._present.pop(bucket, None)
            self._complete.append((bucket, oldest.gradients))

    def _unpack(self, oldest: _InFlight, buffer: Tensor) -> None:
        message, bucket = oldest.message, oldest.bucket
        masters = _trained(bucket) if message.first else []
        if message.first:
            counts = buffer[: len(masters)].tolist()
            self._present[bucket] = {id(master) for master, count in zip(masters, counts, strict=True) if count}
        present = self._present[bucket]
        for master, elements, part in message.parts(buffer, len(masters)):
            if id(master) in present:
                if id(master) not in oldest.gradients:
                    oldest.gradients[id(master)] = torch.empty_like(master, memory_format=torch.contiguous_format)
                _flat(oldest.gradients, id(master))[elements].copy_(part)

    @property
    def _shares_out(self) -> bool:
        return self._asynchronous and bool(self.owner)

    def _receiver(self, bucket: ParamBucket) -> int | None:
        """Return the machine that gets the sums of ``bucket``; None if all do."""
        return self.owner[bucket] if self._shares_out else None

    # -- weights ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send_weights(self, bucket: ParamBucket) -> None:
        """Send the weights of ``bucket``, which its owner has updated, to the other machines [5]."""
        messages = list(_messages(bucket))
        if not messages:
            self._updated.append(bucket)
        for message in messages:
            while len(self._weights) >= MAX_IN_FLIGHT:
                self._wait_oldest_weights()
            buffer = self._buffer(message.dtype, message.size)
            if self.owns(bucket):
                for master, elements, part in message.parts(buffer):
                    part.copy_(master.data.reshape(-1)[elements])
                self.sent += buffer.nbytes
            work = self.peers.start(dist.broadcast, buffer, WEIGHTS, src=self.owner[bucket])
            self._weights.append(_InFlight(message, bucket, buffer, work))

    def weights(self, *, wait: bool) -> list[ParamBucket]:
        """Return buckets whose new weights are there [6], each once. ``wait``: whether to wait for all."""
        while self._weights and (wait or self._weights[0].work.is_completed()):
            self._wait_oldest_weights()
        there, self._updated = self._updated, []
        return there

    @torch.no_grad()
    def _wait_oldest_weights(self) -> None:
        """Wait for the oldest message of weights, and unpack it."""
        weights = self._weights.popleft()
        self.peers.wait(weights.work, f"the weights of bucket {weights.bucket.index}")
        if not self.owns(weights.bucket):
            _put(weights.message, weights.buffer)
        self._free.setdefault(weights.buffer.dtype, []).append(_whole(weights.buffer))
        if weights.message.last:
            self._updated.append(weights.bucket)

    def combined_norms(
        self, norms: Mapping[int, Tensor], keys: Sequence[int], finite: bool
    ) -> tuple[list[Tensor], bool]:
        """Return the norms of all gradients, in the order of ``keys``, and whether all machines have finite ones.

        ``norms`` and ``finite`` are those of the gradients that this machine owns.
        """
        mine = torch.zeros((2, len(keys) + 1), dtype=torch.float64)
        for index, key in enumerate(keys):
            if key in norms:
                mine[0, index], mine[1, index] = norms[key].double(), 1.0
        mine[1, -1] = 0.0 if finite else 1.0
        total = self.peers.sum(mine, "the norms of gradients", GRADIENTS)
        dtypes = {norm.dtype for norm in norms.values()} or {torch.float32}
        found = [total[0, i].to(next(iter(dtypes))) for i in range(len(keys)) if total[1, i]]
        return found, not total[1, -1]

    def _taken(self) -> list[tuple[ParamBucket, dict[int, Tensor]]]:
        there, self._complete = self._complete, []
        return there

    def _travelling(self, dtype: torch.dtype) -> torch.dtype:
        narrow = self._dtype
        return narrow if narrow is not None and narrow.itemsize < dtype.itemsize else dtype

    def _buffer(self, dtype: torch.dtype, size: int) -> Tensor:
        """Return memory for a message of ``size`` numbers, the memory of an earlier one if it is large enough."""
        free = self._free.setdefault(dtype, [])
        free.sort(key=Tensor.numel)
        for index, memory in enumerate(free):
            if memory.numel() >= size:
                return free.pop(index)[:size]
        if free:
            free.pop()
        return torch.empty(size, dtype=dtype)


def _trained(bucket: ParamBucket) -> list[nn.Parameter]:
    return [master for master in bucket.masters if master.requires_grad]


def _messages(bucket: ParamBucket) -> Iterator[_Message]:
    """Cut the trained masters of ``bucket`` into messages; none if nothing is trained."""
    made: list[_Message] = []
    for master in _trained(bucket):
        start, length = 0, MESSAGE // master.itemsize
        while start < master.numel():
            message = next((m for m in made[-1:] if m.dtype is master.dtype and m.size < length), None)
            if message is None:
                made.append(message := _Message(master.dtype))
            end = min(master.numel(), start + length - message.size)
            message.pieces.append((master, start, end))
            start = end
    if made:
        made[0].first = made[-1].last = True
    yield from made


def _owners(buckets: Sequence[ParamBucket], machines: int) -> dict[ParamBucket, int]:
    """Give each bucket to a machine, so that each has about as many parameters to update."""
    load = [0] * machines
    owners = {}
    for bucket in sorted(buckets, key=lambda bucket: (-_weight(bucket), bucket.index)):
        owners[bucket] = load.index(min(load))
        load[owners[bucket]] += _weight(bucket)
    return owners


def _weight(bucket: ParamBucket) -> int:
    return sum(master.numel() for master in _trained(bucket))


def _put(message: _Message, buffer: Tensor) -> None:
    """Write weights that have arrived into the masters, whose versions stay: user code has not changed them."""
    for master, elements, part in message.parts(buffer):
        data = master.data
        flat = data.reshape(-1)  # a copy where the master is not contiguous
        flat[elements] = part
        if not data.is_contiguous():
            data.copy_(flat.view(data.shape))


def _flat(gradients: dict[int, Tensor], key: int) -> Tensor:
    if not gradients[key].is_contiguous():
        gradients[key] = gradients[key].contiguous()
    return gradients[key].view(-1)


def _whole(buffer: Tensor) -> Tensor:
    """Return all the memory that ``buffer`` is the beginning of."""
    return buffer if buffer._base is None else buffer._base
