"""How many threads an operation has on emulated devices, and that it is the same wherever it runs."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import zoo
from harness import ours, run

from lightning_roundpipe.devices import intraop_threads
from lightning_roundpipe.updates.bucket_stepper import BucketStepper

BITS = """
import hashlib, sys
import lightning.pytorch as pl
import torch
from torch import nn
from lightning_roundpipe import RoundPipeStrategy

torch.set_num_threads(1)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(4))
        self.mix = nn.Parameter(torch.randn(300, 300) / 17)

    def training_step(self, batch, batch_idx):
        h = batch @ self.mix
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def bits(strategy, devices):
    torch.manual_seed(0)
    module = Module()
    data = torch.utils.data.DataLoader(torch.randn(256, 300), batch_size=128)
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, data, data)
    told = [*module.parameters(), trainer.callback_metrics["loss"]]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in told)).hexdigest()


for count in (1, 4):
    one, two, three = (bits(RoundPipeStrategy(num_microbatches=count), devices) for devices in (1, 2, 3))
    assert one == two == three, count
    assert count > 1 or one == bits("auto", 1), "plain training has other bits"
"""


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_devices():
    """With one thread for torch, and more for OpenMP, which a new thread would take for its first product."""
    environment = os.environ | {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}
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
