"""Whole runs on a GPU: what holds on emulated devices holds there. The same GPU twice, or thrice, is several workers.

``make test-gpu`` runs these; where there is no CUDA device they are skipped.
"""

import copy

import harness
import pytest
import torch
import zoo
from harness import assert_identical, assert_same, ours, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
DEVICE = torch.device("cuda", 0)
PLAN = "forward 0 1-3; fused 4-5; backward 2-3 0-1; round 2"


def on_gpu(workers, **options):
    """A strategy for ``workers`` on one GPU. (Lightning's own ``devices=[0, 0]`` wants GPUs to be different ones.)"""
    return ours(parallel_devices=[DEVICE] * workers, **options)


def train(workers, name, batches, *, lora=False, **options):
    return run(on_gpu(workers, **options), zoo.make_module(name, lora), batches, accelerator="auto", devices="auto")


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("name", "lora"), [("llama", False), ("llama", True), ("mlp", False)])
def test_numbers_are_those_of_plain_training(name, lora, workers):
    """Plain training on the CPU: a GPU's kernels round otherwise, so only about."""
    batches = zoo.make_batches(name, 3)
    expected = run("auto", zoo.make_module(name, lora), copy.deepcopy(batches))
    result = train(workers, name, batches, lora=lora, num_microbatches=2)
    for ours_, theirs in zip(result.losses, expected.losses, strict=True):
        torch.testing.assert_close(ours_.cpu(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("end", ["", "; recompute ahead", "; carry 0-3", "; recompute ahead; carry 1-3"])
def test_workers_change_nothing(staleness, end):
    batches = zoo.make_batches("llama", 4)
    options = {"num_microbatches": 4, "staleness": staleness}
    one = train(1, "llama", batches, plan=PLAN, **options)
    for workers in (2, 3):
        assert_identical(one, train(workers, "llama", batches, plan=PLAN + end, **options))


def test_stale_numbers_are_those_of_emulated_devices():
    batches = zoo.make_batches("llama", 4)
    options = {"num_microbatches": 2, "staleness": 1, "plan": PLAN}
    expected = run(ours(**options), zoo.make_module("llama"), batches, devices=2)
    for ours_, theirs in zip(train(2, "llama", batches, **options).losses, expected.losses, strict=True):
        torch.testing.assert_close(ours_.cpu(), theirs, rtol=1e-3, atol=1e-4)


def test_a_failure_leaves_a_device_that_works(monkeypatch):
    batches, real, calls = zoo.make_batches("mlp", 3), zoo.ResidualBlock.forward, [0]

    def forward(self, h):
        calls[0] += 1
        if calls[0] == 40:
            raise ZeroDivisionError("on purpose")
        return real(self, h)

    options = {"num_microbatches": 2, "layers": ["Linear", "ResidualBlock"]}
    expected = train(2, "mlp", batches, **options)
    with monkeypatch.context() as patch:
        patch.setattr(zoo.ResidualBlock, "forward", forward)
        with pytest.raises(ZeroDivisionError):
            train(2, "mlp", batches * 5, **options)
    assert harness.roundpipe_threads() == []
    assert_same(expected, train(2, "mlp", batches, **options))


def test_nothing_is_left_on_the_device():
    before = torch.cuda.memory_allocated(DEVICE)
    train(2, "llama", zoo.make_batches("llama", 3), num_microbatches=2)
    assert torch.cuda.memory_allocated(DEVICE) <= before + 64 * 2**20  # what cuBLAS keeps for each stream
