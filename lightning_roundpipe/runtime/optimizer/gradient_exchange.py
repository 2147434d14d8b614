"""Sums gradients over machines, bucket by bucket, behind the backward that computes them.

    a bucket's gradients are complete on this machine ── packed into messages ── [1]
    each message is summed over all machines, while the next bucket is computed ── [2]
    messages arrive in the order in which they were sent; the last one of a bucket completes it ── [3]
    updated

All machines send the same messages in the same order: from the deepest bucket to the first, as backward completes them,
whatever a machine's plan is. A parameter without a gradient on one machine is zero there. The first message of a bucket
also counts the machines where each parameter has one, so that one without any stays without.

`AsyncOptimizer` calls this on its thread. Where gradients go to ``.grad``, the main thread does, and there is no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_roundpipe.machines.peers import GRADIENTS, Peers
from lightning_roundpipe.runtime.batch.contributions import LENGTH, Contribution, share
from lightning_roundpipe.runtime.memory.param_buckets import ParamBucket

MESSAGE = 2**25
"""Bytes of a message at most. At 10 Gbit/s it takes 30 milliseconds, and its latency does not count."""
FLYING = 4
"""Messages on their way at most."""


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


@dataclass
class _Flying:
    """A message on its way, and the gradients of this machine, which it will replace."""

    message: _Message
    bucket: ParamBucket
    buffer: Tensor
    gradients: dict[int, Tensor]
    work: Any


class GradientExchange:
    """Sums gradients over machines.

    Args:
        peers: the machines.
        buckets: all buckets of the model, in forward order, composed alike on each machine.
        dtype: dtype in which gradients travel if it is narrower than their own; None: in their own.

    Attributes:
        sent: bytes of gradients that were given to the network so far.
    """

    def __init__(self, peers: Peers, buckets: Sequence[ParamBucket], dtype: torch.dtype | None = None) -> None:
        self.peers = peers
        self.order = sorted(buckets, key=lambda bucket: (bucket.index == 0, -bucket.index))
        """Buckets in the order in which they are sent. That of parameters of no layer is complete last."""
        self.sent = 0
        self._dtype = dtype
        self._flying: deque[_Flying] = deque()
        self._there: list[tuple[ParamBucket, dict[int, Tensor]]] = []
        self._present: dict[ParamBucket, set[int]] = {}
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def share(self, contribution: Contribution | None) -> float:
        """Return the factor of this machine's gradients in those of all machines' batches."""
        mine = torch.tensor((contribution or Contribution()).encoded(), dtype=torch.float64)
        assert len(mine) == LENGTH
        rows = self.peers.gather(mine, "the weights of the batches", GRADIENTS)
        names = [self.peers.liveness.name_of(rank) for rank in range(self.peers.size)]
        return share(self.peers.rank, [Contribution.decoded(row.tolist()) for row in rows], names)

    def begin(self) -> None:
        """Drop what a failed step has left."""
        self._flying.clear()
        self._there.clear()
        self._present.clear()

    def add(self, bucket: ParamBucket, gradients: Mapping[int, Tensor]) -> list[tuple[ParamBucket, dict[int, Tensor]]]:
        """Send this machine's gradients of ``bucket`` [1], whose turn it must be. They may be overwritten.

        Returns:
            Buckets that are complete now, with their sums.
        """
        mine = dict(gradients)
        if not _trained(bucket):
            self._there.append((bucket, mine))
        for message in _messages(bucket):
            while len(self._flying) >= FLYING:
                self._land()
            self._send(bucket, message, mine)
        while self._flying and self._flying[0].work.is_completed():
            self._land()
        return self._taken()

    def rest(self) -> list[tuple[ParamBucket, dict[int, Tensor]]]:
        """Wait for all messages, and return the remaining buckets with their sums."""
        while self._flying:
            self._land()
        return self._taken()

    def summed(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the sums of all ``gradients``, by id of the master."""
        found: dict[int, Tensor] = {}
        self.begin()
        for bucket in self.order:
            mine = {id(master): gradients[id(master)] for master in bucket.masters if id(master) in gradients}
            for _, sums in self.add(bucket, mine):
                found.update(sums)
        for _, sums in self.rest():
            found.update(sums)
        return found

    # -- messages -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, bucket: ParamBucket, message: _Message, gradients: dict[int, Tensor]) -> None:
        dtype = self._travelling(message.dtype)
        masters = _trained(bucket) if message.first else []
        size = len(masters) + sum(end - start for _, start, end in message.pieces)
        buffer = self._buffer(dtype, size)
        for index, master in enumerate(masters):
            buffer[index] = 1.0 if id(master) in gradients else 0.0
        at = len(masters)
        for master, start, end in message.pieces:
            part, at = buffer[at : at + end - start], at + end - start
            if id(master) in gradients:
                part.copy_(_flat(gradients, id(master))[start:end])
            else:
                part.zero_()
        self.sent += buffer.nbytes
        work = self.peers.start(dist.all_reduce, buffer, GRADIENTS)  # [2]
        self._flying.append(_Flying(message, bucket, buffer, gradients, work))

    @torch.no_grad()
    def _land(self) -> None:
        """Wait for the oldest message, and unpack it [3]."""
        flying = self._flying.popleft()
        message, bucket, buffer = flying.message, flying.bucket, flying.buffer
        self.peers.wait(flying.work, f"the gradients of bucket {bucket.index}")
        masters = _trained(bucket) if message.first else []
        if message.first:
            counts = buffer[: len(masters)].tolist()
            self._present[bucket] = {id(master) for master, count in zip(masters, counts, strict=True) if count}
        present, at = self._present[bucket], len(masters)
        for master, start, end in message.pieces:
            part, at = buffer[at : at + end - start], at + end - start
            if id(master) in present:
                if id(master) not in flying.gradients:
                    flying.gradients[id(master)] = torch.empty_like(master, memory_format=torch.contiguous_format)
                _flat(flying.gradients, id(master))[start:end].copy_(part)
        self._free.setdefault(buffer.dtype, []).append(_whole(buffer))
        if message.last:
            del self._present[bucket]
            self._there.append((bucket, flying.gradients))

    def _taken(self) -> list[tuple[ParamBucket, dict[int, Tensor]]]:
        there, self._there = self._there, []
        return there

    def _travelling(self, dtype: torch.dtype) -> torch.dtype:
        narrow = self._dtype
        return narrow if narrow is not None and narrow.itemsize < dtype.itemsize else dtype

    def _buffer(self, dtype: torch.dtype, size: int) -> Tensor:
        """Return memory for a message of ``size`` numbers, the memory of an earlier one if it is large enough."""
        free = self._free.setdefault(dtype, [])
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
            message = next((m for m in made[-1:] if m.dtype is master.dtype and _size(m.pieces) < length), None)
            if message is None:
                made.append(message := _Message(master.dtype))
            end = min(master.numel(), start + length - _size(message.pieces))
            message.pieces.append((master, start, end))
            start = end
    if made:
        made[0].first = made[-1].last = True
    yield from made


def _size(pieces: Iterable[tuple[nn.Parameter, int, int]]) -> int:
    return sum(end - start for _, start, end in pieces)


def _flat(gradients: dict[int, Tensor], key: int) -> Tensor:
    if not gradients[key].is_contiguous():
        gradients[key] = gradients[key].contiguous()
    return gradients[key].view(-1)


def _whole(buffer: Tensor) -> Tensor:
    """Return all the memory that ``buffer`` is the beginning of."""
    return buffer if buffer._base is None else buffer._base
