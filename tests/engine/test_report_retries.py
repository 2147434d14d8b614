"""An allocator that gives back all it keeps to find room: the report counts that, and says what helps."""

from __future__ import annotations

from typing import Any

import fake_cuda
import harness
import pytest
import zoo
from harness import ours, run

from lightning_roundpipe.devices import allocator
from lightning_roundpipe.devices.cuda import CudaDevice

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[CudaDevice]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return fake_cuda.trainers_on_gpus(monkeypatch)


class RetriesIn(zoo.PlainClassifier):
    """The allocator tries again in these batches."""

    def __init__(self, *batches: int) -> None:
        super().__init__(zoo.MLP())
        self.batches = batches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fake_cuda.RETRIES[0] = 3 * sum(there <= batch_idx for there in self.batches)
        return super().training_step(batch, batch_idx)


def test_retries_of_a_step_are_reported_with_the_remedy(gpus: list[CudaDevice]) -> None:
    used = ours(num_microbatches=2, plan=harness.single(6, 2))
    report = run(used, RetriesIn(5, 8), zoo.make_batches("mlp", 9), devices=2, watch=False).report
    assert report is not None
    assert report["alloc_retries"] == [3, 3]
    text = " ".join(str(report).split())
    assert "6 allocations tried again" in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text


def test_a_step_without_retries_gives_no_advice(gpus: list[CudaDevice]) -> None:
    used = ours(num_microbatches=2, plan=harness.single(6, 2))
    report = run(used, RetriesIn(1, 2), zoo.make_batches("mlp", 9), devices=2, watch=False).report
    assert report is not None
    assert report["alloc_retries"] == [0, 0]
    assert "tried again" not in str(report)
    assert "ALLOC_CONF" not in str(report)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
         "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"},
         "PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "smaller microbatches"),
    ],
)  # fmt: skip
def test_the_advice_begins_with_what_is_set(
    said: dict[str, str], expected: str, gpus: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert expected in allocator.advice()
