"""Threads that wait have no team of intra-op threads."""

import os
import sys
import threading

import lightning.pytorch as pl
import pytest
import torch
from harness import ours, run
from patience import until

from lightning_roundpipe.devices import core_semaphore, intraop_threads

TEAM = 3
pytestmark = pytest.mark.skipif(
    intraop_threads._openmp() is None, reason="torch's OpenMP is not GNU's, whose threads are left alone here"
)


@pytest.fixture(autouse=True)
def intra_op():
    intraop_threads.release_intraop_threads()  # or this thread's would be resized when it computes next
    alone, before = settled(), torch.get_num_threads()
    torch.set_num_threads(TEAM)
    yield
    torch.set_num_threads(before)
    intraop_threads.release_intraop_threads()
    eventually(alone)


def not_pythons():
    """Threads that Python did not start, the teams' among them."""
    assert sys.platform == "linux"
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def compute():
    """Something that needs a team; how many threads there are then."""
    torch.set_num_threads(TEAM)
    torch.ones(1 << 20).mul_(2)
    return not_pythons()


def eventually(threads):
    """A thread that has ended is listed until the system has cleared it away."""
    until(lambda: not_pythons() <= threads, f"more than {threads} threads are left")


def settled():
    """How many there are when those that ended before are cleared away, or a test would count one that then goes."""
    looks = []

    def same():
        looks.append(not_pythons())
        return len(looks) >= 100 and len(set(looks[-100:])) == 1

    until(same, "threads come and go")
    return looks[-1]


class Large(torch.nn.Module):
    """Its operation needs a team; ``one_team``: how many threads there are with nobody else's, ``calls`` of it."""

    one_team = calls = 0

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        y = x * self.weight
        until(lambda: not_pythons() == self.one_team, f"there never are just {self.one_team} threads")
        Large.calls += 1
        return y


class Between(pl.LightningModule):
    """Code between layers and before a step needs one, too."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Large() for _ in range(3))

    def on_train_batch_start(self, batch, batch_idx):
        compute()

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch * 1.01)
        return batch.sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("workers", [1, 2])
def test_in_a_step_only_the_thread_that_computes_has_a_team(workers, monkeypatch):
    monkeypatch.setattr(
        intraop_threads, "cores", lambda: TEAM * intraop_threads.CONCURRENT_DEVICES
    )  # or there would be none
    one = core_semaphore.Semaphore(1)
    monkeypatch.setattr(core_semaphore, "semaphore", lambda permits: one)
    alone = not_pythons()
    Large.one_team, Large.calls = alone + TEAM - 1, 0
    strategy = ours(num_microbatches=1, layers=["Large"], plan="forward 0; fused 1-2; backward 0; round 1")
    run(strategy, Between(), [torch.ones(1, 1 << 18)] * 3, devices=workers)
    assert Large.calls >= 3 * 4
