"""Which GPUs a run takes memory of: those of ``devices``, whichever thread works for it."""

from __future__ import annotations

import fake_cuda
import pytest
import zoo
from harness import ours, run


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cuda, "FIRST_GPU", 1)
    fake_cuda.trainers_on_gpus(monkeypatch)


def train() -> None:
    run(ours(num_microbatches=2), zoo.make_module("llama"), zoo.make_batches("llama", 2), devices=1)


def test_devices_1_leaves_gpu_0_alone(second_gpu: None) -> None:
    """A new thread's current GPU is number 0, and what enters a stream of another one restores it."""
    train()
    assert {1} == fake_cuda.CONTEXTS
