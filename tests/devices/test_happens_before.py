"""Whole steps on GPUs that are played: no access, and no memory that is used again, that events do not order."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import stress
import torch
from fake_cuda import FakeEvent, FakeStream
from happens_before import HappensBefore, races
from torch import Tensor
from without import take_out

from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.devices.cuda_streams import CudaStream
from lightning_roundpipe.engine.executor import Executor
from lightning_roundpipe.memory import grad_buffers
from lightning_roundpipe.memory.arenas import address_of
from lightning_roundpipe.updates import bucket_stepper

PLAN = "forward 0 1-3; fused 4-5; backward 2-3 0-1; round 2"


def assert_no_races(found: HappensBefore) -> None:
    assert found.accesses > 500 and found.reused > 50, "nothing was followed"
    assert found.faults == []


CASES = {
    "off the plan ahead": stress.Case(
        "forward 0-1 2 3; fused 4-5; backward 3 2 0-1; round 4; recompute ahead", 2, 4, (8, 8, 8, 8), extra=(2, 0, 1)
    ),
    "overlapping": stress.Case("forward 0-1 2-3; fused 4-5; backward 2-3 0-1; round 2", 2, drops=False),
    "carrying": stress.Case("forward 0-1 2-3; fused 4-5; backward 2-3 0-1; round 2; carry 0-3", 2, drops=False),
    "carrying ahead": stress.Case("forward 0-3; fused 4-5; backward 0-3; round 4; recompute ahead; carry 0 2-3", 3),
    "blocking": stress.Case(harness.per_call(6, 4), 3, blocking=True),
    "repeating": stress.Case(harness.single(6), 1, 2, (8, 8), extra=(1, 0, 3), drops=False),
    "accumulating": stress.Case(harness.single(6), 2, sizes=(8, 7, 8, 8), accumulate=2, drops=False),
}
QUICK = ("overlapping", "carrying", "blocking", "repeating")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES],
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
        monkeypatch.setattr(bucket_stepper, "PIECE", 0)
    with races(shared=True) as found:
        stress.train(CASES["overlapping"], **options)
    assert_no_races(found)


def test_a_gradient_that_a_layer_hands_on_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer may return the gradient of its output as that of its input. The stream of uploads uses its memory again,
    without waiting for what computes with the gradient next.
    """
    real, handed_on = Executor.backward, []

    def forward(self: Any, h: Tensor, keep: Tensor) -> Tensor:
        return h + keep * torch.tanh(self.lin(h.detach()))

    def backward(self: Any, call: Any, slot: Any, inputs: Any, gradients: Any, *rest: Any) -> Any:
        uploaded = {address_of(part.tensor) for parts in gradients for part in parts if part.event is not None}
        found = real(self, call, slot, inputs, gradients, *rest)
        handed_on.extend(address_of(gradient) in uploaded for gradient in found if uploaded and gradient is not None)
        return found

    monkeypatch.setattr(Executor, "backward", backward)
    monkeypatch.setattr(stress.Block, "forward", forward)
    with races(shared=True) as found:
        stress.train(CASES["overlapping"])
    assert_no_races(found)
    assert handed_on and not any(handed_on)


# ------------------------------------------------------------------------------------- what is taken out shows

WAITS = [
    ("compute", "activations_down"),  # before user code writes to what is being saved
    ("arrivals_up", "compute"),  # for memory that compute has used before
    ("arrivals_up", "activations_down"),  # for what comes from another worker
    ("activations_down", "compute"),  # for outputs and gradients
    ("weights_up", "weights_up"),  # for the chunk before, on the other one of two streams
]
"""A stream, and what it waits for; `engine/test_waits` takes out all waits, one after another."""


@pytest.mark.parametrize(
    ("waits", "of"),
    WAITS,
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


def test_products_that_do_not_wait_for_compute_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on the same stream still wait for it."""
    with races(shared=True) as found, monkeypatch.context() as patch:
        take_out(patch, "engine.carrying:download_parts", "stream.wait(home.compute.record())")
        stress.train(CASES["carrying"])
    assert any("-gradients_down does not wait for " in fault for fault in found.faults), found.faults


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
