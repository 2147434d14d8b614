"""An allocator that gives back all it keeps to find room: it is reported, and what helps is said where it goes on."""

from __future__ import annotations

import warnings
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


def warned(*batches: int) -> tuple[list[str], harness.Result]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        used = ours(num_microbatches=2, plan=harness.single(6, 2))
        result = run(used, RetriesIn(*batches), zoo.make_batches("mlp", 9), devices=2, watch=False)
    return [text for warning in caught if "allocator" in (text := str(warning.message))], result


def test_in_steady_state_it_is_said_once_what_helps(gpus: list[CudaDevice]) -> None:
    [text], result = warned(5, 6, 7, 8)
    assert text.startswith("roundpipe: ")
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    assert result.report is not None
    assert result.report["alloc_retries"] == [3, 3]
    assert "6 allocations tried again" in " ".join(str(result.report).split())


def test_while_a_plan_is_new_it_is_not_said(gpus: list[CudaDevice]) -> None:
    texts, result = warned(0, 1, 2, 3, 7)
    assert texts == []
    assert result.report is not None
    assert result.report["alloc_retries"] == [0, 0]
    assert "tried again" not in str(result.report)


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
