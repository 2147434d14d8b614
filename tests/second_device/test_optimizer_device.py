"""Optimizer steps on devices: a parameter's copies, its step and its way back are in no order but that of events."""

from __future__ import annotations

from typing import Any

import pytest
from harness import assert_tensors_same, ours, run
from test_composed_optimizers import BY_LAYER, LAYERS, Trained, batches

from second_device.late import late
from second_device.play import trainers_on_devices


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("trainer", [{}, {"precision": "bf16-mixed"}], ids=["fp32", "halves"])
def test_devices_step_as_the_host_does(trainer: dict[str, Any], shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers, each has a device of its own, or both have one."""

    def train(device: str) -> Any:
        strategy = ours(layers=LAYERS, optimizer_device=device)
        module = Trained(BY_LAYER["MuonAdamW"])
        return run(strategy, module, batches(6), devices=2, accumulate_grad_batches=2, watch=False, **trainer)

    with late(0) as queues:
        trainers_on_devices(monkeypatch, shared=shared)
        host, device = train("cpu"), train("worker")
        assert queues.streams.delays, "everything was done at once"
    assert_tensors_same(host.state, device.state)
