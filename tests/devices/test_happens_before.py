"""Whole steps on GPUs that are played: no access, and no memory that is used again, that events do not order."""

from __future__ import annotations

from typing import Any

import fake_cuda
import harness
import pytest
import stress
import torch
import zoo
from fake_cuda import FakeEvent, FakeStream
from happens_before import HappensBefore, races
from harness import ours, run

from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.devices.cuda_streams import CudaStream
from lightning_roundpipe.memory import grad_buffers
from lightning_roundpipe.updates import async_optimizer

PLAN = "forward 0 1-3; fused 4-5; backward 2-3 0-1; round 2"
PLANS = {"llama": (6, PLAN), "vit": (6, PLAN), "gpt2": (7, PLAN.replace("4-5", "4-6"))}


def assert_no_races(found: HappensBefore) -> None:
    assert found.accesses > 500 and found.reused > 50, "nothing was followed"
    assert found.faults == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora", "options"),
    [
        ("llama", False, {"plan": PLAN + "; recompute ahead"}),
        ("llama", True, {"plan": PLAN, "staleness": 1}),
        ("llama", False, {"plan": PLAN + "; recompute ahead", "arena": 0.0}),
        ("llama", False, {"plan": PLAN.replace("round 4", "round 2"), "staleness": 1, "arena": 0.5}),
        pytest.param("gpt2", False, {"plan": PLANS["gpt2"][1], "staleness": 1}, marks=pytest.mark.slow),
        pytest.param("llama", True, {"plan": PLAN + "; recompute ahead"}, marks=pytest.mark.slow),
        pytest.param("vit", False, {"plan": PLAN + "; recompute ahead"}, marks=pytest.mark.slow),
        pytest.param(  # the decoder elsewhere
            "t5", False, {"plan": "forward 0-3; fused 4-8; backward 3 0-2; round 2"}, marks=pytest.mark.slow
        ),
        pytest.param("t5", False, {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_a_model_of_hugging_face(name: str, lora: bool, options: dict[str, Any]) -> None:
    module, batches = zoo.make_module(name, lora), zoo.make_batches(name, 4)
    share = options.get("arena", 1.0)
    options = {option: value for option, value in options.items() if option != "arena"}
    with races() as found, harness.arenas_of(share):
        run(ours(num_microbatches=4, **options), module, batches, devices=2)
    assert_no_races(found)


IN_GLUE = {"glue_parameters", "shared_scales"}
"""Have weights between layers. Torch brings their gradients to the host and waits; where all is the CPU it does not."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.ENTRIES if name not in IN_GLUE])
def test_every_model(name: str) -> None:
    """On workers that share a GPU, since user code of most combines what comes from several of them."""
    module, batches = zoo.make_module(name), zoo.make_batches(name, 3)
    plan = None
    for _ in range(2):  # first by the plan that is found, then by a cut at every call
        with races(shared=True) as found:
            report = run(ours(num_microbatches=3, plan=plan), module, batches, devices=2, watch=False).report
        assert_no_races(found)
        assert report is not None
        plan = harness.per_call(len(report["costs"]["calls"]), 2)


CASES = {
    "off the plan": stress.Case("forward 0 1; fused 2-5; backward 0-1; round 2", 2, 4, (8, 8, 8), extra=(1, 1, 2)),
    "off the plan ahead": stress.Case(
        "forward 0-1 2 3; fused 4-5; backward 3 2 0-1; round 4; recompute ahead", 2, 4, (8, 8, 8, 8), extra=(2, 0, 1)
    ),
    "planned": stress.Case(PLAN, 2),
    "ahead": stress.Case("forward 0 1 2 3; fused 4-5; backward 3 2 1 0; round 4; recompute ahead", 3),
    "overlapping": stress.Case("forward 0-1 2-3; fused 4-5; backward 2-3 0-1; round 2", 2, drops=False),
    "blocking": stress.Case(harness.per_call(6, 4), 3, blocking=True),
    "accumulating": stress.Case(harness.single(6), 2, sizes=(8, 7, 8, 8), accumulate=2, drops=False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("overlapping", "blocking") else pytest.mark.slow) for n in CASES]
)
def test_a_model_with_everything(name: str) -> None:
    """User code between all layers, with residuals and weights; a layer that writes to its input; one that is used
    twice.

    The workers share a GPU: residuals of one meet what the next one has computed.
    """
    with races(shared=True) as found:
        stress.train(CASES[name])
    assert_no_races(found)


def test_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of which a thread asks the driver, behind those that have been asked for."""
    with races(shared=True) as found, monkeypatch.context() as patch:  # which is undone before the other's
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
        stress.train(CASES["overlapping"])
    assert_no_races(found)


@pytest.mark.parametrize("options", [{"reduce_dtype": "bfloat16"}, {}], ids=["narrowed", "in parts"])
def test_gradients_that_are_narrowed_or_in_parts(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrowing makes and reads memory of the compute stream; parts of weights go up from the optimizer's thread."""
    monkeypatch.setattr(grad_buffers, "LEAST", 4)
    if not options:
        monkeypatch.setattr(grad_buffers, "STREAMED", 1)
        monkeypatch.setattr(grad_buffers, "PART", 64)
        monkeypatch.setattr(async_optimizer, "PIECE", 0)
    with races(shared=True) as found:
        stress.train(CASES["overlapping"], **options)
    assert_no_races(found)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_with_evaluation(staleness: int) -> None:
    """Several batches at a time, between steps."""
    module, batches = zoo.make_module("llama"), zoo.make_batches("llama", 3, 4)
    with races(shared=True) as found:
        run(
            ours(num_microbatches=2, plan=PLAN, staleness=staleness), module, batches, devices=2,
            val_batches=zoo.make_batches("llama", 4, 4), max_epochs=2,
        )  # fmt: skip
    assert_no_races(found)


class ReadsLoss(stress.StressModule):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


@pytest.mark.parametrize("name", [pytest.param("planned", marks=pytest.mark.slow), "overlapping"])
def test_no_operation_of_a_step_makes_the_host_wait(name: str) -> None:
    """Of ours, or of user code that runs in the stream of the layer before it."""
    with races() as found:
        stress.train(CASES[name])
    assert [thread for thread, _ in found.waits if thread.startswith("roundpipe-")] == []


def test_a_loss_that_is_read_makes_the_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "StressModule", ReadsLoss)
    with races() as found:
        stress.train(CASES["overlapping"])
    assert found.waits


# ------------------------------------------------------------------------------------- what is taken out shows

WAITS = [
    ("compute", "weights_up"),  # for weights, and for sums so far
    ("compute", "activations_up"),  # for inputs
    ("compute", "arrivals_up"),  # for gradients, and inputs that come from another worker
    ("compute", "activations_down"),  # before user code writes to what is being saved
    ("compute", "gradients_down"),  # before the arena of gradients is used again
    ("weights_up", "compute"),  # before the arena of weights is used again
    ("weights_up", "gradients_down"),  # for sums of an earlier round
    ("arrivals_up", "compute"),  # for memory that compute has used before
    ("arrivals_up", "activations_down"),  # for what comes from another worker
    ("activations_down", "compute"),  # for outputs and gradients
    ("gradients_down", "compute"),  # for the gradients of a slot
    ("weights_up", "weights_up"),  # for the chunk before, on the other one of two streams
    ("gradients_down", "gradients_down"),  # likewise
]
"""A stream, and what it waits for: each of these waits is needed by something."""


@pytest.mark.parametrize(
    ("waits", "of"),
    [pytest.param(*pair, marks=() if i in (3, 7, 8, 9, 11) else pytest.mark.slow) for i, pair in enumerate(WAITS)],
)
def test_a_missing_wait_shows(waits: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with races() as found:
        real = FakeStream.wait_event

        def wait_event(self: FakeStream, event: FakeEvent) -> None:
            assert event.stream is not None
            if not (self.name.endswith(f"-{waits}") and event.stream.name.endswith(f"-{of}")):
                real(self, event)

        with monkeypatch.context() as patch:
            patch.setattr(FakeStream, "wait_event", wait_event)
            stress.train(CASES["overlapping"])
    assert any(f"-{waits} " in fault for fault in found.faults), found.faults


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (CudaStream, "keep", "given back before"),  # what a copy reads or writes, until it is done
        pytest.param(
            CudaDevice, "free_after_compute", "given back before", marks=pytest.mark.slow
        ),  # what compute reads still
    ],
)
def test_what_is_not_kept_shows(kind: Any, name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with races() as found, monkeypatch.context() as patch:
        patch.setattr(kind, name, lambda self, *tensors: None)
        stress.train(CASES["overlapping"])
    assert any(words in fault for fault in found.faults), found.faults


def test_a_host_that_does_not_wait_for_gradients_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    with races(shared=True) as found, monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "synchronize", lambda event: None)
        patch.setattr(FakeEvent, "query", lambda event: True)
        stress.train(CASES["overlapping"])
    assert any(" on host does not wait for " in fault for fault in found.faults), found.faults


def test_memory_of_another_worker_of_the_same_gpu_would_show() -> None:
    """If workers that share a GPU had a stream each to compute in, which nothing orders between layers."""
    with races() as found:
        stress.train(CASES["planned"])
    assert any(f.startswith("memory of roundpipe-dev") and "compute is over" in f for f in found.faults)


def test_the_checker_itself() -> None:
    """A copy that waits and one that does not; and what it reads is kept until somebody has waited for it."""
    with races() as found:
        (device,) = fake_cuda.share_out([torch.device("cpu")], "off")
        with device.activate():
            one = torch.empty(1000).zero_()
        host = device.host_like(one)
        device.activations_down.wait(device.compute.record())
        device.activations_down.copy(host, one)
        del one
        assert found.faults == []
        device.activations_up.copy(device.device_like(host, device.activations_up), host)
        assert len(found.faults) == 1
        device.close()
    assert found.faults[0].startswith("aten::copy_ on roundpipe-dev0-activations_up does not wait for aten::copy_ on")
