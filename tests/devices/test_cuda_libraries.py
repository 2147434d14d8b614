"""Streams that last as long as the process, and cuBLAS's workspaces, of which there is one for a thread in a stream."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import fake_cuda
import lightning.pytorch as pl
import ordering
import pytest
import torch
from counted_memory import Counted, counted
from fake_cuda import play_cuda
from harness import halves, ours, run
from ordering import HOST
from stress import all_reports
from torch import Tensor, nn

from lightning_roundpipe.devices.cuda import CudaDevice, share_out

GPU = torch.device("cpu")


def streams(device: CudaDevice) -> list[Any]:
    chunked = (device.weights_up, device.gradients_down)
    lanes = [lane for stream in chunked for lane in stream.lanes]
    return [stream.stream for stream in (device.compute, *lanes, device.activations_up, device.activations_down)]


def test_the_next_run_has_the_same_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the allocator and cuBLAS keep for a stream would be lost with it; and two strategies may be open at once."""
    play_cuda(monkeypatch)
    found = []
    for _ in range(2):
        devices: list[Any] = share_out([GPU, GPU], "off")
        found.append([streams(device) for device in devices])
        for device in devices:
            device.close()
    assert found[0] == found[1]
    first, second = found[0]
    assert first[0] is second[0], "workers of one GPU compute in one stream"
    assert len({*first, *second}) == 13, "and copy in streams of their own"


def test_workspaces_are_cleared_with_the_last_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another strategy's threads may be multiplying, and would lose theirs."""
    play_cuda(monkeypatch)
    first, second = (CudaDevice(i, GPU, "off", sharers=1) for i in range(2))
    first.settle_libraries([first], threads=4)
    first.close()
    assert fake_cuda.CLEARED == []
    second.settle_libraries([second], threads=4)
    assert fake_cuda.CLEARED == [1]
    second.close()
    assert fake_cuda.CLEARED == [1, 0]


MULTIPLY = {"aten::mm", "aten::addmm", "aten::bmm"}
KIB = 64
WORKSPACE = KIB * 1024


class Workspaces(dict[tuple[str, str], Tensor]):
    """cuBLAS's, by thread and stream; what devices count has them in it."""

    def __init__(self, found: Counted, patch: pytest.MonkeyPatch) -> None:
        self._found, real = found, Counted.operation
        self._making = threading.Lock()

        def operation(counting: Counted, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            real(counting, func, args, kwargs, result)
            stream = getattr(ordering._local, "stream", HOST)
            if func._schema.name in MULTIPLY and stream.endswith("-compute"):
                self._take(stream)

        patch.setattr(Counted, "operation", operation)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", f":{KIB}:1")

    def _take(self, stream: str) -> None:
        with self._making:
            key = threading.current_thread().name, stream
            if key not in self:
                self[key] = torch.empty(WORKSPACE, dtype=torch.uint8)
                self._found.allocated(stream, [], [self[key]])

    @property
    def threads(self) -> set[str]:
        return {thread for thread, _ in self}


class Multiplies(pl.LightningModule):
    """Between layers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def _loss(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
            batch = batch + (batch.unsqueeze(1) @ batch.unsqueeze(2)).squeeze(1)
        return batch.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Looks(pl.Callback):
    """Which threads have workspaces when a batch begins."""

    roundpipe_looks_away = True

    def __init__(self, workspaces: Workspaces) -> None:
        self.workspaces = workspaces
        self.threads: list[set[str]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.threads.append(self.workspaces.threads)


@contextlib.contextmanager
def workspaces() -> Iterator[Workspaces]:
    with counted() as found, pytest.MonkeyPatch.context() as patch:
        yield Workspaces(found, patch)


def test_the_peak_is_what_was_planned_with_workspaces() -> None:
    """Each microbatch's thread has one, because calls run there, as code between layers does."""
    batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    with workspaces() as held, all_reports() as made:
        looks = Looks(held)
        used = ours(num_microbatches=4, layers=["Linear"], plan=halves(4, 4))
        run(used, Multiplies(), [batch] * 6, devices=1, watch=False, callbacks=[looks])
        assert not held, "kept after the run"
    reports = [report for make in made if not (report := make())["profiled"]]
    assert len(reports) == 5
    many = 1 + 4  # autograd's, too
    assert reports[-1]["planned_device_bytes"] >= many * WORKSPACE
    more = WORKSPACE  # what a call needs was measured where the first thread got its own
    for report in reports:
        peak = report["peak_device_bytes"][0]
        assert 0.93 * (report["planned_device_bytes"] - more) < peak < 1.05 * report["planned_device_bytes"]
    assert len(looks.threads[-1]) == many
