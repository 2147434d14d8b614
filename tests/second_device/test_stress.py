"""Whole steps of `stress`, as late as they may be: what no event orders, and memory that is used again, shows in bits.

Memory belongs to the stream that was the current one when it was allocated, and is that stream's again when its last
reference is gone. `ordering` follows the waits of emulated devices, which have no memory of that kind.
"""

from dataclasses import replace

import harness
import pytest
import stress
import torch
from without import take_out

from lightning_roundpipe.devices.base import Event
from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.devices.cuda_chunks import ChunkedCopyStream
from lightning_roundpipe.devices.cuda_streams import CudaEvent, CudaStream
from lightning_roundpipe.engine.executor import Executor
from lightning_roundpipe.memory import grad_buffers
from lightning_roundpipe.memory.arenas import address_of
from second_device.late import late
from second_device.play import trainers_on_devices

AHEAD = "forward 0-1 2 3; fused 4-5; backward 3 2 0-1; round 4; recompute ahead"
CARRYING = "forward 0-1 2-3; fused 4-5; backward 2-3 0-1; round 2; carry 0-3"
CASES = {
    "off the plan ahead": stress.Case(AHEAD, 2, 4, (8, 8, 8, 8), extra=(2, 0, 1), drops=False),
    "cut": stress.Case(harness.per_call(6, 2), 2, 4, (6, 6, 6), drops=False),
    "carrying": stress.Case(CARRYING, 2, drops=False),
    "blocking": stress.Case(harness.per_call(6, 4), 3, blocking=True, drops=False),
    "repeating": stress.Case(harness.single(6), 1, 2, (8, 8), extra=(1, 0, 3), drops=False),
    "accumulating": stress.Case(harness.single(6), 2, sizes=(8, 7, 8, 8), accumulate=2, drops=False),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Tensors of small models have several, too."""
    monkeypatch.setattr(ChunkedCopyStream, "chunk_bytes", 64)


def check(name, order, *, pin_memory="on", shared=False, **options):
    """The bits are those of one emulated device that does all at once."""
    case = replace(CASES[name], **options)
    expected = stress.reference(case)
    with pytest.MonkeyPatch.context() as patch, late(order):
        trainers_on_devices(patch, pin_memory=pin_memory, shared=shared)
        found = stress.train(case)
    for one, other in ((expected.losses, found.result.losses), (expected.state, found.result.state)):
        harness.assert_tensors_same(one, other, rtol=0.0, atol=0.0)
    assert found.user_code.faults == []


@pytest.mark.parametrize(("order", "shared"), [("random", False), ("newest first", False), ("compute last", True)])
@pytest.mark.parametrize("name", CASES)
def test_a_model_with_everything(name, order, shared):
    """User code between all layers, with residuals and weights; a layer that writes to its input; one used twice."""
    check(name, order, shared=shared)


def test_pageable_memory():
    """Copies of which a thread asks the driver, behind those that have been asked for."""
    check("cut", "newest first", pin_memory="off")


def test_gradients_that_are_narrowed(monkeypatch):
    """Narrowing makes and reads memory of the compute stream."""
    monkeypatch.setattr(grad_buffers, "LEAST", 4)
    check("cut", "newest first", reduce_dtype="bfloat16")


def test_a_gradient_that_a_layer_hands_on_has_memory_of_its_own(monkeypatch):
    """A layer may return the gradient of its output as that of its input. The stream of uploads uses its memory again,
    without waiting for what computes with the gradient next.
    """
    real, handed_on = Executor.backward, []

    def forward(self, h, keep):
        return h + keep * torch.tanh(self.lin(h.detach()))

    def backward(self, call, slot, inputs, gradients, *rest):
        uploaded = {address_of(part.tensor) for parts in gradients for part in parts if part.event is not None}
        found = real(self, call, slot, inputs, gradients, *rest)
        handed_on.extend(address_of(gradient) in uploaded for gradient in found if uploaded and gradient is not None)
        return found

    monkeypatch.setattr(Executor, "backward", backward)
    monkeypatch.setattr(stress.Block, "forward", forward)
    with late("idle"):
        trainers_on_devices(monkeypatch)
        stress.train(CASES["cut"])
    assert handed_on and not any(handed_on)


# ------------------------------------------------------------------------------------- what is taken out shows


def without_wait(waits, of):
    """A stream, and what it no longer waits for."""

    def mutate(patch):
        real_wait, real_record, recorded_by = CudaStream.wait, CudaStream.record, dict[Event, str]()

        def record(self, *, timed=False):
            event = real_record(self, timed=timed)
            recorded_by[event] = self.name
            return event

        def wait(self, event):
            if not (f"-{waits}" in self.name and f"-{of}" in recorded_by.get(event, "")):
                real_wait(self, event)

        patch.setattr(CudaStream, "record", record)
        patch.setattr(CudaStream, "wait", wait)

    return mutate


def without(owner, name):
    return lambda patch: patch.setattr(owner, name, lambda *_: None)


MUTATIONS = {
    "outputs do not wait for compute": (without_wait("activations_down", "compute"), "cut", "compute last"),
    "arrivals do not wait for memory": (without_wait("arrivals_up", "compute"), "carrying", "compute last"),
    "arrivals do not wait for another worker": (
        without_wait("arrivals_up", "activations_down"), "cut", "activations_down last",
    ),
    "chunks do not wait for each other": (without_wait("weights_up", "weights_up"), "cut", "odd-weights_up last"),
    "products do not wait for compute": (
        lambda patch: take_out(patch, "engine.carrying:download_parts", "stream.wait(home.compute.record())"),
        "carrying",
        "compute last",
    ),
    "copies do not keep their memory": (without(CudaStream, "keep"), "cut", "activations_down last"),
    "compute does not keep memory": (without(CudaDevice, "free_after_compute"), "cut", "compute last"),
    "the host does not wait": (without(CudaEvent, "wait"), "cut", "compute last"),
}  # fmt: skip


@pytest.mark.parametrize("what", MUTATIONS)
def test_what_is_missing_shows(what, monkeypatch):
    """The stream that is held goes no further than others wait for it: what does not wait is ahead of it."""
    mutate, name, order = MUTATIONS[what]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(name, order)
