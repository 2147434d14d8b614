"""What a driver would be asked for again and again: pages that are pinned, and devices that become current."""

import random
import threading

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import ours, run

from lightning_roundpipe.devices import cuda_streams
from second_device import backend
from second_device.play import trainers_on_devices

pytestmark = pytest.mark.slow
WARM = 4
"""Batches after which nothing is new."""
AFTER = 6
"""Batches in which then nothing may happen."""
LONGEST = 60


class Counts(pl.Callback):
    """What happens from batch ``WARM`` on."""

    roundpipe_passive_hooks = True

    def __init__(self):
        self.first = self.registrations = 0
        self.current = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.first = backend.CUDART.registrations
        if batch_idx == WARM:
            self.registrations = backend.CUDART.registrations

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.first = backend.CUDART.registrations - self.first
        if batch_idx == WARM + AFTER - 1:
            self.registrations = backend.CUDART.registrations - self.registrations
            self.current = {name: set(found) for name, found in backend.MADE_CURRENT.items()}


def _counted(batches, workers):
    counts = Counts()
    strategy = ours(num_microbatches=2, plan="forward 0-2; fused 3-5; backward 1-2 0; round 2")
    run(strategy, zoo.make_module("llama"), batches, devices=workers, callbacks=[counts], watch=False)
    return counts


def _batches(lengths):
    """Long enough for several pages."""
    generator = torch.Generator().manual_seed(1)
    return [zoo.ENTRIES["llama"].batch(generator, 12, length) for length in lengths]


def test_batches_of_random_lengths_pin_nothing_more(devices):
    lengths = random.Random(3)
    others = [lengths.randint(2, LONGEST) for _ in range(WARM + AFTER - 1)]
    assert _counted(_batches([LONGEST, *others]), 2).registrations == 0


def test_devices_that_are_not_used_do_not_become_current(monkeypatch):
    backend.MADE_CURRENT.clear()  # as in a process that has used no device
    monkeypatch.setattr(cuda_streams, "_thread", threading.local())
    made = trainers_on_devices(monkeypatch, first=1)
    counts = _counted(_batches([LONGEST] * (WARM + AFTER)), 1)
    assert [str(device.torch_device) for device in made] == ["played:1"]
    assert {index for found in counts.current.values() for index in found} == {1}
    threads = {"MainThread", "roundpipe-microbatch0", "roundpipe-microbatch1"}
    assert threads <= counts.current.keys()
