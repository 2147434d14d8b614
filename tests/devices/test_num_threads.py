"""How many threads an operation has on emulated devices, and that it is the same wherever it runs."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import zoo
from harness import ours, run

from lightning_roundpipe.devices import intraop_threads
from lightning_roundpipe.updates.bucket_stepper import BucketStepper

TESTS = Path(__file__).parents[1]
BITS = """
import torch
from harness import Chain, assert_identical, ours, run
from torch import nn


class Mixed(Chain):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(300, 300), nn.Tanh()) for _ in range(4))
        self.mix = nn.Parameter(torch.randn(300, 300) / 17)

    def loss(self, batch):
        return super().loss(batch @ self.mix)


torch.set_num_threads(1)
module, batches = Mixed(), list(torch.randn(2, 128, 300))
for count in (1, 4):
    first, *others = (
        run(ours(num_microbatches=count, layers=["Sequential"]), module, batches, devices=devices, val_batches=batches)
        for devices in (1, 2, 3)
    )
    if count == 1:
        others.append(run("auto", module, batches, val_batches=batches))
    for other in others:
        assert_identical(first, other)
"""


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_devices():
    """With one thread for torch, and more for OpenMP, which a new thread would take for its first product."""
    environment = os.environ | {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(TESTS)}
    subprocess.run([sys.executable, "-c", BITS], env=environment, check=True, capture_output=True, text=True)


@pytest.mark.parametrize(("cores", "told", "size"), [(1, 1, 1), (7, 7, 1), (8, 8, 2), (16, 2, 2)])
def test_the_size_of_a_team(cores, told, size, monkeypatch):
    monkeypatch.setattr(intraop_threads, "cores", lambda: cores)
    torch.set_num_threads(told)
    assert intraop_threads.threads_per_device() == size
    with intraop_threads.limit_num_threads():
        assert torch.get_num_threads() == size
        with intraop_threads.limit_num_threads():
            assert torch.get_num_threads() == size
        assert torch.get_num_threads() == size
    assert torch.get_num_threads() == told


needs_openmp = pytest.mark.skipif(intraop_threads._torch_cpu() is None, reason="torch's OpenMP is looked for on Linux")


SIZES = {}


class Sized(zoo.PlainClassifier):
    def training_step(self, batch, batch_idx):
        SIZES.setdefault("user code", set()).add(torch.get_num_threads())
        return super().training_step(batch, batch_idx)


@needs_openmp
@pytest.mark.parametrize("workers", [1, 2])
def test_the_optimizer_leaves_a_core_to_each_gpu(workers, gpus, monkeypatch):
    """Whether or not it is used. On emulated devices, see above."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(intraop_threads, "cores", lambda: 5)
    torch.set_num_threads(4)
    SIZES.clear()
    real = BucketStepper._apply

    def apply(self, *args):
        SIZES.setdefault(threading.current_thread().name, set()).add(torch.get_num_threads())
        real(self, *args)

    monkeypatch.setattr(BucketStepper, "_apply", apply)
    run(ours(num_microbatches=2), Sized(zoo.MLP()), zoo.make_batches("mlp"), devices=workers, watch=False)
    assert SIZES.items() == {"user code": {4}, "roundpipe-optimizer": {3}}.items()
    assert torch.get_num_threads() == 4
