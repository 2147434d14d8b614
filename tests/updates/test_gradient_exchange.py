"""Gradients of two machines, threads here, are added up, and weights that one of them updates reach the other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.machines.peers import GRADIENTS, WEIGHTS, Peers
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.updates import gradient_exchange
from lightning_roundpipe.updates.gradient_exchange import GradientExchange

MACHINES = 2


class Work:
    """An operation of all machines, which happens when the last one has come to it."""

    def __init__(self):
        self.came = {}
        self.done = threading.Event()

    def is_completed(self):
        return self.done.is_set()


class Connected(Peers):
    """A machine whose operations are done in the memory of all of them."""

    def __init__(self, rank, works, lock):
        liveness = SimpleNamespace(name_of=lambda rank: f"machine {rank}")
        super().__init__(rank, [f"machine {rank}" for rank in range(MACHINES)], liveness, {})
        self._works, self._lock, self._numbers = works, lock, {GRADIENTS: 0, WEIGHTS: 0}

    def _join(self, group, tensor, operation):
        with self._lock:
            work = self._works.setdefault((group, self._numbers[group]), Work())
            self._numbers[group] += 1
            work.came[self.rank] = operation, tensor
            if len(work.came) == MACHINES:
                operation([work.came[rank][1] for rank in range(MACHINES)])
                work.done.set()
        return work

    def start(self, operation, tensor, group, src=0):
        def reduce(tensors):
            total = torch.stack(tensors).sum(0) if operation is dist.all_reduce else tensors[src].clone()
            for each in tensors:
                each.copy_(total)

        return self._join(group, tensor, reduce)

    def deliver(self, tensor, sources, to, group):
        def bring(tensors):
            tensors[to].copy_(torch.cat([tensors[source] for source in sources]))

        return self._join(group, tensor, bring)

    def wait(self, work, label, *, bounded=True):
        assert work.done.wait(PATIENCE_S), label

    def sum(self, tensor, label, group=GRADIENTS, op=None):
        self.wait(self.start(dist.all_reduce, tensor, group), label)
        return tensor


class Machine:
    """A model of three buckets, the last of them frozen, and its exchange."""

    def __init__(self, peers, **options):
        torch.manual_seed(3)
        self.rank = peers.rank
        made = [torch.randn(4, 6), torch.randn(5), torch.randn(6, 3).t(), torch.randn(7), torch.randn(2)]
        self.masters = [nn.Parameter(tensor.double()) for tensor in made]
        self.masters[-1].requires_grad_(False)
        first, second, third, fourth, last = self.masters
        self.buckets = [ParamBucket(i, some) for i, some in enumerate(([first, second], [third, fourth], [last]))]
        self.exchange = GradientExchange(peers, self.buckets, **options)

    def gradients(self):
        """Its own: the first machine has none of the second parameter, and no machine has any of the fourth."""
        generator = torch.Generator().manual_seed(self.rank)
        found = [torch.randn(m.shape, generator=generator, dtype=m.dtype) for m in self.masters[:3]]
        found[0] = found[0].t().contiguous().t()
        return {id(m): g for i, (m, g) in enumerate(zip(self.masters, found, strict=False)) if (self.rank, i) != (0, 1)}

    def named(self, sums):
        """Sums by the position of their master."""
        return {i: sums[id(master)] for i, master in enumerate(self.masters) if id(master) in sums}

    def step(self):
        """Add this machine's gradients bucket by bucket, and return the sums that come."""
        mine, came = self.gradients(), list[tuple[ParamBucket, dict[int, Tensor]]]()
        self.exchange.begin()
        for bucket in self.exchange.order:
            came += self.exchange.add(bucket, {id(m): mine[id(m)] for m in bucket.masters if id(m) in mine})
        came += self.exchange.rest()
        assert [bucket for bucket, _ in came] == [bucket for bucket in self.exchange.order if bucket in dict(came)]
        return self.named({key: gradient for _, sums in came for key, gradient in sums.items()})


def on_all(job, **options):
    """What ``job`` gives on each machine, beside the other one."""
    works, lock = dict[tuple[str, int], Work](), threading.Lock()
    machines = [Machine(Connected(rank, works, lock), **options) for rank in range(MACHINES)]
    with ThreadPoolExecutor(MACHINES) as threads:
        return machines, [found.result(PATIENCE_S) for found in [threads.submit(job, one) for one in machines]]


def expected(machines):
    first, second = (machine.named(machine.gradients()) for machine in machines)
    return {0: first[0] + second[0], 1: second[1], 2: first[2] + second[2]}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[i], wanted[i]) for i in wanted)


@pytest.mark.parametrize("message", [2**25, 64])
def test_all_machines_get_the_sums(message, monkeypatch):
    """In one message a bucket, or in more than may be on their way at once."""
    monkeypatch.setattr(gradient_exchange, "MESSAGE", message)
    machines, found = on_all(Machine.step)
    for sums in found:
        assert_equal(sums, expected(machines))


def test_gradients_travel_in_fewer_bits():
    machines, found = on_all(Machine.step, dtype=torch.bfloat16)
    narrow, wide = machines[0].exchange.sent, on_all(Machine.step)[0][0].exchange.sent
    assert narrow == wide // 4
    assert_equal(found[0], found[1])
    for i, wanted in expected(machines).items():
        torch.testing.assert_close(found[0][i], wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("message", [2**25, 64])
def test_an_owner_gets_the_sums_of_its_buckets_and_sends_their_weights(message, monkeypatch):
    monkeypatch.setattr(gradient_exchange, "MESSAGE", message)

    def step(machine):
        exchange = machine.exchange
        exchange.set_asynchronous(True)
        sums = machine.step()
        updated = []
        for bucket in exchange.order:
            if exchange.owns(bucket):
                for i, master in enumerate(machine.masters):
                    if i in sums and any(master is one for one in bucket.masters):
                        master.data -= sums[i]
            exchange.send_weights(bucket)
            updated += exchange.weights(wait=False)
        updated += exchange.weights(wait=True)
        assert sorted(bucket.index for bucket in updated) == [0, 1, 2]
        return sums

    machines, (first, second) = on_all(step, shards=True)
    assert first.keys() & second.keys() == set()
    wanted = expected(machines)
    assert_equal(first | second, wanted)
    start = on_all(lambda machine: None)[0][0].masters
    for i, before in enumerate(start):
        after = before.data - wanted[i] if i in wanted else before.data
        assert all(torch.equal(machine.masters[i].data, after) for machine in machines)


def test_shared_out_state_needs_the_same_way_of_stepping_everywhere():
    """The errors name the setting with which each machine has all state."""

    def differ(machine):
        machine.exchange.set_asynchronous(machine.rank == 0)
        with pytest.raises(RoundPipeError, match=r"on machine 1 a hook.*or set shard_optimizer=False"):
            machine.exchange.share(None)

    def change(machine):
        machine.exchange.refuse_rebuilding()
        machine.exchange.set_asynchronous(True)
        with pytest.raises(RoundPipeError, match="set shard_optimizer=False, or change the model before training"):
            machine.exchange.refuse_rebuilding()
        with pytest.raises(RoundPipeError, match=r"came during training.*set shard_optimizer=False"):
            machine.exchange.set_asynchronous(False)

    on_all(differ, shards=True)
    on_all(change, shards=True)
