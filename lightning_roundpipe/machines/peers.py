"""Collective operations between the machines of one job, on tensors in host memory.

They are those of ``torch.distributed`` with gloo. What is added: every wait looks at `Liveness`, so that it ends when
another machine has; and objects travel as JSON, so that nothing that comes from the network is executed.

A process group must not be used by two threads at once, and one has one connection to each other machine. So there are
several:

    the main thread: Lightning's exchanges with the strategy ── `MAIN` ── [1]
    the optimizer's thread, or the main thread while that does not exist: gradients ── `GRADIENTS` ── [2]
    the same thread: updated weights, which travel beside later gradients ── `WEIGHTS` ── [3]
    messages of [2], and those of [3], take their `CONNECTIONS` in turn, in the same order on each machine ── [4]
    the main thread, in code that calls torch.distributed, such as torchmetrics ── the default group ── [5]

gloo takes what comes: it adds up the values of different exchanges, and ends the process where their sizes differ. So
before each exchange of [1] the machines compare what it is, and [5] cannot meet it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import threading
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.machines.file_tensors import FileTensors
from lightning_roundpipe.machines.liveness import Liveness
from lightning_roundpipe.messages import plural

MAIN, GRADIENTS, WEIGHTS = "main", "gradients", "weights"
"""The purposes of process groups."""
CONNECTIONS = 2
"""Process groups for gradients, and for weights. One alone is seldom busy in both directions. Four were faster than two
in two of four exchanges that were measured, and slower in the others (docs/decisions.md)."""
LOOK = 0.5
"""Seconds between two looks at the other machines while waiting."""
OPERATION = timedelta(hours=24)
"""How long an operation may take while all machines are alive."""
EXCHANGE = 200
"""Bytes of the text that says what a machine exchanges."""
PORTION = 2**22
"""Numbers of a tensor that travel in one message, where a tensor is sent as it is."""
SAME = "Start the same script with the same settings, data and installed packages on each machine."
"""What to do when machines differ."""


class Peers:
    """This machine and the others of the job, from `meet`. ``groups`` are the process groups of each purpose."""

    def __init__(
        self, rank: int, names: Sequence[str], liveness: Liveness, groups: Mapping[str, Sequence[Any]]
    ) -> None:
        self.rank, self.size, self.names = rank, len(names), list(names)
        self.liveness = liveness
        self._groups = {name: itertools.cycle(several) for name, several in groups.items()}

    # -- operations ---------------------------------------------------------------------------------------------------

    def start(self, operation: Any, tensor: Tensor, group: str, **kwargs: Any) -> Any:
        """Start a collective operation of ``torch.distributed`` and return its work [4]."""
        self.liveness.check()
        try:
            return operation(tensor, group=next(self._groups[group]), async_op=True, **kwargs)
        except RuntimeError as error:
            raise self.liveness.explain(error, group) from error

    def deliver(self, tensor: Tensor, sources: Sequence[int], to: int, group: str) -> Any:
        """Start to bring tensors of one size from ``sources`` to another machine and return the work.

        All machines call this: it is a collective operation. Messages from one machine to another would not do, as gloo
        closes all connections when a wait for one of them ends before it has come, and `wait` looks up in between.

        Args:
            tensor: contiguous. At a source, what it sends; at ``to``, which is none of them, memory for what the
                sources send, one behind the other; on other machines, anything of the same dtype.
        """
        raw = tensor.view(-1).view(torch.uint8)
        each = raw.numel() // len(sources)
        comes = [each if self.rank == to and other in sources else 0 for other in range(self.size)]
        goes = [raw.numel() if self.rank in sources and other == to else 0 for other in range(self.size)]
        received, sent = raw[: sum(comes)], raw[: sum(goes)]
        return self.start(
            dist.all_to_all_single, received, group, input=sent, output_split_sizes=comes, input_split_sizes=goes
        )

    def wait(self, work: Any, label: str, *, bounded: bool = True) -> None:
        """Wait for the end of ``work``, which brings what ``label`` says.

        ``bounded``: whether it sends one message of bounded size: a bucket, a portion, or less.

        Raises:
            MachineError: another machine has failed.
        """
        with self.liveness.waiting(label, bounded=bounded):
            while True:
                try:
                    work.wait(timedelta(seconds=LOOK))
                    return
                except RuntimeError as error:
                    if "Operation timed out" not in str(error):  # then the work has ended, and not only the wait
                        raise self.liveness.explain(error, label) from error
                self.liveness.check()

    def come_together(self, exchange: str) -> None:
        """Wait for all machines, and compare what they are about to exchange in `MAIN`, which ``exchange`` says.

        Raises:
            MachineError: they are about to do something else.
        """
        mine = exchange.encode()[:EXCHANGE].ljust(EXCHANGE, b"\0")
        texts = torch.zeros((self.size, EXCHANGE), dtype=torch.uint8)
        texts[self.rank] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self.wait(self.start(dist.all_reduce, texts, MAIN), exchange)
        if not texts.eq(texts[0]).all():
            everyones = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in texts]
            raise self.liveness.apart(dict(enumerate(everyones)))

    def sum(self, tensor: Tensor, label: str, group: str = MAIN, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sum ``tensor`` over the machines, in place, or combine it by another ``op``."""
        if group == MAIN:
            self.come_together(_exchange(label, tensor))
        self.wait(self.start(dist.all_reduce, tensor, group, op=op), label, bounded=tensor.numel() <= PORTION)
        return tensor

    def broadcast(self, tensor: Tensor, src: int, label: str) -> Tensor:
        """Overwrite ``tensor`` by that of machine ``src``."""
        self.wait(self.start(dist.broadcast, tensor, MAIN, src=src), label, bounded=tensor.numel() <= PORTION)
        return tensor

    def gather(self, tensor: Tensor, label: str, group: str = MAIN) -> list[Tensor]:
        """Return the ``tensor`` of each machine, by number. All have the same shape and dtype."""
        if group == MAIN:
            self.come_together(_exchange(label, tensor))
        found = tensor.new_zeros((self.size, *tensor.shape))
        found[self.rank] = tensor
        self.wait(self.start(dist.all_reduce, found, group), label, bounded=found.numel() <= PORTION)
        return list(found)

    # -- objects ------------------------------------------------------------------------------------------------------

    def broadcast_json(self, value: Any, src: int, label: str) -> Any:
        """Return the ``value`` of machine ``src``, which JSON can hold."""
        data = _encoded(value) if self.rank == src else b""
        self.come_together(f"{label} from machine {src}")
        size = self.broadcast(torch.tensor([len(data)]), src, label)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == src and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return json.loads(bytes(self.broadcast(buffer, src, label).tolist()))

    def gather_json(self, value: Any, label: str) -> list[Any]:
        """Return the ``value`` of each machine, by number."""
        return [self.broadcast_json(value, src, label) for src in range(self.size)]

    def agree(self, values: dict[str, Any], label: str, remedy: str = SAME) -> None:
        """Check that all machines have the same ``values``, of which each has a name.

        Raises:
            RoundPipeError: a value differs. The message names it and the machines, and ends with the ``remedy``.
        """
        first, *others = self.gather_json(values, label)
        for rank, theirs in enumerate(others, 1):
            for name in {**first, **theirs}:
                if first.get(name) != theirs.get(name):
                    raise RoundPipeError(
                        f"the machines differ in {name}: {self.liveness.name_of(0)} has {first.get(name)!r}, and "
                        f"{self.liveness.name_of(rank)} has {theirs.get(name)!r}. {remedy}"
                    )

    def gather_states(
        self, states: dict[int, dict[str, Any]], owners: Sequence[int], room: FileTensors, label: str
    ) -> dict[int, dict[str, Any]]:
        """Return on machine 0 what each machine has of an optimizer's state; on others, ``states``.

        Args:
            states: this machine's part, by number of the parameter.
            owners: the machine that has the state of each parameter.
            room: where machine 0 has room for what it receives.
        """
        found = dict(states)
        for source in range(1, self.size):
            mine = {n: states[n] for n, owner in enumerate(owners) if owner == source and n in states}
            described = {str(n): {name: _described(value) for name, value in mine[n].items()} for n in mine}
            for number, state in self.broadcast_json(described, source, label).items():
                received: dict[str, Any] = {}
                for name, (shape, dtype, value) in state.items():
                    received[name] = value
                    if dtype is None:
                        continue
                    if self.rank == source:
                        tensor = mine[int(number)][name].contiguous()
                    else:
                        tensor = received[name] = room.empty(shape if self.rank == 0 else [0], getattr(torch, dtype))
                    flat, size = tensor.view(-1), math.prod(shape)
                    for start in range(0, size, PORTION):
                        part = flat[start : min(start + PORTION, size)]
                        self.wait(self.deliver(part, [source], 0, MAIN), label)
                if self.rank == 0:
                    found[int(number)] = received
        return found

    # -- tensors that all machines have -------------------------------------------------------------------------------

    def share(self, tensors: Sequence[Tensor], label: str) -> None:
        """Give all machines the values of machine 0. Only tensors that differ travel.

        Args:
            tensors: on the host, the same ones on each machine.
            label: what they are.
        """
        mine = torch.tensor([checksum(tensor) for tensor in tensors], dtype=torch.int64)
        everyones = torch.stack(self.gather(mine, label))
        for tensor in itertools.compress(tensors, everyones.ne(everyones[0]).any(0).tolist()):
            raw = tensor.detach().contiguous()
            flat = raw.view(-1).view(torch.uint8)
            for start in range(0, flat.numel(), PORTION):
                self.broadcast(flat[start : start + PORTION], 0, label)
            if raw.data_ptr() != tensor.data_ptr():  # a copy of one that is not contiguous
                tensor.detach().copy_(raw)


def _exchange(label: str, tensor: Tensor) -> str:
    """Return what is exchanged. Tensors of one number are alike, whatever their shapes."""
    shape = "" if tensor.numel() == 1 else f" {list(tensor.shape)}"
    return f"{label}{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _described(value: Any) -> tuple[list[int] | None, str | None, Any]:
    """Return shape, dtype and None of a tensor; None, None and the value of anything else."""
    if isinstance(value, Tensor):
        return list(value.shape), str(value.dtype).removeprefix("torch."), None
    return None, None, value


def checksum(tensor: Tensor) -> int:
    """Return a checksum of the bytes of a tensor on the host."""
    flat = tensor.detach().contiguous().view(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return zlib.crc32(raw)


def meet(rank: int, size: int, timeout: float) -> Peers:
    """Connect to the other machines within ``timeout`` seconds, or return to connections that an earlier run has left.

    Raises:
        RoundPipeError: the machines do not find each other.
    """
    if "peers" not in _met:
        _met["peers"] = _connected(rank, size, timeout)
    return _met["peers"]


def _connected(rank: int, size: int, timeout: float) -> Peers:
    """Connect to the other machines: nothing watches them yet, so each wait ends by itself."""
    patience = timedelta(seconds=timeout)
    ours = not dist.is_initialized()
    try:
        if ours:
            started = _store(rank, patience)
            _await_all(started, rank, size, patience)
            dist.init_process_group("gloo", store=started, rank=rank, world_size=size, timeout=patience)
        everyone = list(range(size))
        groups: dict[str, list[Any]] = {MAIN: [dist.new_group(everyone, timeout=patience, backend="gloo")]}
        for name in (GRADIENTS, WEIGHTS):
            groups[name] = [dist.new_group(everyone, timeout=patience, backend="gloo") for _ in range(CONNECTIONS)]
        base: Any = dist.distributed_c10d._get_default_store()
        store = base.clone()
        store.set_timeout(timedelta(seconds=max(1.0, timeout / 4)))
        store.set(f"roundpipe/name/{rank}", socket.gethostname())
        dist.barrier(group=groups[GRADIENTS][0])
        names = [store.get(f"roundpipe/name/{other}").decode() for other in everyone]
        liveness = Liveness(store, rank, names, timeout)
        liveness.enter()
        dist.barrier(group=groups[GRADIENTS][0])
    except (RuntimeError, ValueError) as error:  # torch's DistStoreError is a RuntimeError
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RoundPipeError(
            f"machine {rank} of {size} has not met the others at {place} (MASTER_ADDR, MASTER_PORT) within "
            f"machine_timeout={timeout:g} seconds: {(str(error).splitlines() or [type(error).__name__])[0]} Start one "
            "process on each machine, with the same address and port, and let the network's firewall pass them and the "
            "connections of gloo, whose interface GLOO_SOCKET_IFNAME names. Set a larger machine_timeout if one "
            "machine needs longer than another until it trains."
        ) from error
    for group in itertools.chain(*groups.values(), [dist.group.WORLD] if ours else []):
        dist.distributed_c10d._set_pg_timeout(OPERATION, group)  # from here on `Liveness` ends a wait
    return Peers(rank, names, liveness, groups)


def _await_all(store: Any, rank: int, size: int, patience: timedelta) -> None:
    """Wait until all machines have come to the store.

    Raises:
        RuntimeError: some have not; it names them.
    """
    keys = [f"here/{other}" for other in range(size)]
    store.set(keys[rank], socket.gethostname())
    try:
        store.wait(keys, patience)
    except RuntimeError as error:
        came = [store.check([key]) for key in keys]
        here = ", ".join(f"{i} ({store.get(key).decode()})" for i, key in enumerate(keys) if came[i])
        missing = ", ".join(str(i) for i in range(size) if not came[i])
        if not missing:
            raise
        raise RuntimeError(
            f"{plural(came.count(False), 'machine')} did not come: {missing}. Here are {here}."
        ) from error


def _store(rank: int, patience: timedelta) -> Any:
    """Return the job's store, without what processes that torchrun has replaced have left in it.

    The store of ``torchrun --master-addr`` outlives them, with addresses at which nobody answers. One that fails ends
    all others, so processes that belong together are the same restart of their machines.
    """
    store, _, _ = next(rendezvous("env://", rank, 1, timeout=patience))  # would wait for ``size`` and name none
    store.set_timeout(patience)
    return dist.distributed_c10d.PrefixStore(f"roundpipe/start/{store.add(f'roundpipe/starts/{rank}', 1)}", store)


_met: dict[str, Peers] = {}
"""The connections of this process, under ``"peers"``: torch.distributed has one job in a process."""


def _encoded(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise RoundPipeError(
            f"strategy.broadcast() of a {type(value).__name__} between machines: {error}. Only what JSON can hold "
            "travels (numbers, text, lists and dicts of them); send tensors with self.all_gather() or "
            "strategy.reduce()."
        ) from error


def is_main_thread() -> bool:
    """Return whether the calling thread may use the default group [1]."""
    return threading.current_thread() is threading.main_thread()
