"""A slot that closes before its last weights are published: its place is free behind their upload, not before."""

import functools
import time
from types import SimpleNamespace

import pytest
import torch
from harness import Learner, assert_same, ours, run
from ordering import Ordering
from patience import longer_each_try
from torch import nn

from lightning_roundpipe.devices.queued import ThreadEvent
from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.engine.slots import Slot, SlotGradients
from lightning_roundpipe.engine.uploads import SlotMemory
from lightning_roundpipe.engine.worker import GradientSender
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.updates import bucket_stepper
from lightning_roundpipe.updates.bucket_stepper import BucketStepper


class Skips(Learner):
    """The first layer is frozen, so it never waits for an update; some batches leave the others out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        h = self.first(batch["x"])
        if not batch["skips"][0]:
            h = self.third(self.second(h).tanh())
        return h.square().mean() * torch.ones((), requires_grad=True)


@functools.partial(longer_each_try, each=(1.0, 4.0, 16.0))
def test_its_place_is_free_behind_all_that_uses_it(times):
    """The weights that were used, and those that no call has asked for, which arrive after the slot has closed."""
    generator = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(4, 8, generator=generator), "skips": torch.full((4,), n == 2)} for n in range(4)]
    expected = run("auto", Skips(), batches, watch=False)
    apply, free_place, ordered = BucketStepper._apply, GradientSender._free_place, list[bool]()

    def late(*args):
        time.sleep(0.05 * times)
        apply(*args)

    def free(self, slot, memory, end, pending):
        place, uploads = slot.weights.place, slot.weights.uploads
        free_place(self, slot, memory, end, pending)
        if pending:
            assert place is not None
            last = ordering.point_of(place.weights.last_use)
            ordered.extend(last >= ordering.point_of(event) for event in (end, *(uploads[n].end for n in pending)))

    strategy = ours(layers=["Linear"], num_microbatches=2, plan="forward none; fused 0-2; backward none; round 2")
    with pytest.MonkeyPatch.context() as patch, Ordering() as ordering:
        patch.setattr(bucket_stepper, "PIECE", 0)  # bucket by bucket
        patch.setattr(BucketStepper, "_apply", late)
        patch.setattr(GradientSender, "_free_place", free)
        found = run(strategy, Skips(), batches, devices=1, watch=False)
    assert_same(expected, found)
    assert ordered, "no slot closed before its weights were published"
    assert all(ordered)


def test_a_place_that_sends_nothing_is_free_behind_what_computes(device, monkeypatch):
    """Who gets its gradients' memory waits for their copies alone, and no copy has waited for the worker."""
    sender, memory, computed = GradientSender(device), SlotMemory(device), ThreadEvent("compute", device._switch, False)
    spec = SimpleNamespace(scope=CancelScope(), readiness=None)
    slot = Slot(0, 0, "backward", [], [], [0], spec, SlotGradients())
    monkeypatch.setattr(device.compute, "record", lambda **_: computed)
    try:
        memory.arena.make(1024)
        slot.weights.place = memory.arena.enter([])
        region = memory.arena.add_gradients(slot.weights.place, [64])
        sender.free_place(slot, memory, [])
        assert region.last_use is not None and not region.last_use.done()
        computed.settle(None)
        region.last_use.wait()
    finally:
        sender.stop()
        sender.join()


def test_gradients_behind_others_take_no_room(device):
    """Those that come before may need it, and what waits behind them would give it back only after them."""
    sender, before, asked, scope = GradientSender(device), Waiter(), [], CancelScope()

    def make_room(cancel_scope=None):
        asked.append(cancel_scope)
        raise InterruptedError

    gradients = SimpleNamespace(present=[True], narrow=lambda: None, host=SimpleNamespace(make_room=make_room))
    slot = SimpleNamespace(
        gradients=SimpleNamespace(on_worker={0: gradients}, after=[]), spec=SimpleNamespace(scope=scope)
    )
    try:
        sender.submit(before.wait)
        sender.send(slot, [0])
        assert not asked
        before.wake()
        assert sender.fence().wait_for(10)
        assert asked == [scope]
    finally:
        before.wake()
        sender.stop()
        sender.join()
