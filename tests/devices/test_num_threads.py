"""How many threads an operation has on emulated devices, and that it is the same wherever it runs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import ours, run

from lightning_roundpipe.devices import intraop_threads
from lightning_roundpipe.updates.async_optimizer import AsyncOptimizer

linux = pytest.mark.skipif(
    intraop_threads._openmp() is None, reason="torch's OpenMP is not GNU's, which tells a thread's team"
)

SCRIPT = """
import ctypes, json, sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from lightning_roundpipe import RoundPipeStrategy

openmp = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
if len(sys.argv) > 2:
    torch.set_num_threads(int(sys.argv[2]))
found = {"layer": set(), "user code": set(), "optimizer": set()}


class Layer(torch.nn.Linear):
    def forward(self, x):
        found["layer"].add(openmp.omp_get_max_threads())  # asked of OpenMP, as torch would mend it when asked
        return super().forward(x)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(64, 64) for _ in range(4))

    def training_step(self, batch, batch_idx):
        found["user code"].add(openmp.omp_get_max_threads())
        for layer in self.layers:
            batch = layer(batch).relu()
        return batch.mean()

    def configure_optimizers(self):
        return Watched(self.parameters(), lr=0.1)


class Watched(torch.optim.SGD):
    def step(self, closure=None):
        found["optimizer"].add(openmp.omp_get_max_threads())
        return super().step(closure)


torch.manual_seed(0)
module = Module()
before = torch.get_num_threads()
trainer = pl.Trainer(
    accelerator="cpu", devices=int(sys.argv[1]), strategy=RoundPipeStrategy(num_microbatches=4), max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(torch.randn(24, 64), batch_size=8))
print(json.dumps({
    **{what: sorted(sizes) for what, sizes in found.items()},
    "after": torch.get_num_threads(), "before": before,
    "weights": [float(p.double().sum()) for p in module.parameters()],
}))
"""


@functools.cache
def in_a_process(devices: int, threads: int | None = None, openmp: str | None = None) -> dict[str, Any]:
    """What `SCRIPT` finds: a process of its own, as this one has settings of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {} if openmp is None else {"OMP_NUM_THREADS": openmp}
    arguments = [str(devices), *([] if threads is None else [str(threads)])]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@linux
def test_every_thread_has_the_team_that_torch_was_told() -> None:
    """A new thread takes OpenMP's default, 3 here, for its first product, unless it asks torch before."""
    found = in_a_process(2, threads=1, openmp="3")
    assert found["layer"] == found["user code"] == found["optimizer"] == [1]
    assert found["after"] == found["before"] == 1


@pytest.mark.slow
@linux
def test_by_default_emulated_devices_share_the_cores() -> None:
    """And the process has afterwards what it had before."""
    found = in_a_process(4)
    assert (
        found["layer"] == found["user code"] == [max(1, intraop_threads.cores() // intraop_threads.CONCURRENT_DEVICES)]
    )
    assert found["after"] == found["before"] >= found["layer"][0]


@pytest.mark.slow
@linux
def test_the_number_of_devices_does_not_matter() -> None:
    """The team's size, as torch was told it, is the same for any, and so are the numbers."""
    two, four = in_a_process(2, threads=1, openmp="3"), in_a_process(4, threads=1, openmp="3")
    assert two == four


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
def test_bits_do_not_depend_on_the_number_of_devices() -> None:
    """With one thread for torch, and more for OpenMP, which a new thread would take for its first product."""
    environment = os.environ | {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}
    subprocess.run([sys.executable, "-c", BITS], env=environment, check=True, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("cores", "told", "size"), [(1, 1, 1), (2, 2, 1), (7, 7, 1), (8, 8, 2), (16, 16, 4), (16, 2, 2)]
)
def test_the_size_of_a_team(cores: int, told: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intraop_threads, "cores", lambda: cores)
    torch.set_num_threads(told)
    assert intraop_threads.threads_per_device() == size
    with intraop_threads.limit_num_threads():
        assert torch.get_num_threads() == size
        with intraop_threads.limit_num_threads():
            assert torch.get_num_threads() == size
        assert torch.get_num_threads() == size
    assert torch.get_num_threads() == told


def test_who_leaves_first_does_not_end_it_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intraop_threads, "cores", lambda: 2)
    torch.set_num_threads(2)
    one, other = intraop_threads.limit_num_threads(), intraop_threads.limit_num_threads()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert torch.get_num_threads() == 1
    other.__exit__(None, None, None)
    assert torch.get_num_threads() == 2


needs_openmp = pytest.mark.skipif(intraop_threads._torch_cpu() is None, reason="torch's OpenMP is looked for on Linux")


@needs_openmp
@pytest.mark.parametrize(
    ("cores", "others", "told", "size"), [(8, 1, 8, 7), (8, 3, 8, 5), (8, 3, 2, 2), (2, 8, 2, 1), (1, 1, 1, 1)]
)
def test_a_thread_leaves_cores_to_others(
    cores: int, others: int, told: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intraop_threads, "cores", lambda: cores)
    torch.set_num_threads(told)
    seen: list[int] = []

    def leaves() -> None:
        with pytest.raises(ZeroDivisionError), intraop_threads.reserve_cores(others):
            seen.append(torch.get_num_threads())
            intraop_threads.release_intraop_threads()
            seen.append(torch.get_num_threads())
            raise ZeroDivisionError
        seen.append(torch.get_num_threads())

    for function in (leaves, lambda: seen.append(torch.get_num_threads())):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    assert seen == [size, size, told, told], "within, without a team, afterwards, and in a new thread"
    assert torch.get_num_threads() == told


SIZES: dict[str, set[int]] = {}


class Sized(zoo.PlainClassifier):
    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Any:
        SIZES.setdefault("user code", set()).add(torch.get_num_threads())
        return super().training_step(batch, batch_idx)


@needs_openmp
@pytest.mark.parametrize("workers", [1, 2])
def test_the_optimizer_leaves_a_core_to_each_gpu(
    workers: int, gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not it is used. On emulated devices, see above."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(intraop_threads, "cores", lambda: 5)
    torch.set_num_threads(4)
    SIZES.clear()
    real = AsyncOptimizer._apply

    def apply(self: AsyncOptimizer, *args: Any) -> None:
        SIZES.setdefault(threading.current_thread().name, set()).add(torch.get_num_threads())
        real(self, *args)

    monkeypatch.setattr(AsyncOptimizer, "_apply", apply)
    run(ours(num_microbatches=2), Sized(zoo.MLP()), zoo.make_batches("mlp"), devices=workers, watch=False)
    assert SIZES.items() == {"user code": {4}, "roundpipe-optimizer": {3}}.items()
    assert torch.get_num_threads() == 4


class Fails(zoo.PlainClassifier):
    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Any:
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError


@pytest.mark.parametrize("module", [zoo.PlainClassifier, Fails])
def test_the_number_is_put_back_however_training_ends(
    module: type[pl.LightningModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intraop_threads, "cores", lambda: 2)
    torch.set_num_threads(2)
    try:
        run(ours(), module(zoo.MLP()), zoo.make_batches("mlp"), devices=2, watch=False)
    except ZeroDivisionError:
        assert module is Fails
    assert torch.get_num_threads() == 2
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [2]
