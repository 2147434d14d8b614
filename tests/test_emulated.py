"""Emulated devices that are slow, late, small and unforgiving: the numbers stay the same, to the bit.

Freed buffers are filled with NaN, so a read after free is a NaN in the result; random delays before copies and layers
shake out waits that are missing; a limited link makes uploads late. All of it is measured against the same run on
devices that do nothing of the kind.
"""

from __future__ import annotations

import functools
from typing import Any

import harness
import pytest
import torch
import zoo
from harness import Result, assert_identical, loader, ours, run, trainer_of

MODELS = [("qwen3", True), ("t5", False), ("inplace", False)]


@functools.cache
def module(name: str, lora: bool) -> zoo.ZooModule:
    return zoo.make_module(name, lora)


def train(name: str, lora: bool, devices: int = 2, *, steps: int = 4, **options: Any) -> Result:
    used = module(name, lora)
    options = {"num_microbatches": 4, "round_microbatches": 2, "loss_weight": used.weighs} | options
    return run(ours(**options), used, zoo.make_batches(name, steps), devices=devices)


@functools.cache
def easy(name: str, lora: bool, steps: int = 4) -> Result:
    return train(name, lora, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), MODELS)
def test_unkind_devices_change_nothing(name: str, lora: bool) -> None:
    emulation = {"poison": True, "delay_seed": 1, "bandwidth": "100MB", "latency": 1e-4}
    result = train(name, lora, emulation=emulation)
    assert all(torch.isfinite(loss) for loss in result.losses)
    assert_identical(easy(name, lora), result, rng=True)


def test_evaluation_on_unkind_devices() -> None:
    used, batches = module("llama", False), zoo.make_batches("llama")
    found = []
    for emulation in (None, {"poison": True, "delay_seed": 3, "bandwidth": "200MB"}):
        trainer = trainer_of(ours(emulation=emulation), devices=2)
        found.append([trainer.validate(used, loader(batches), verbose=False), trainer.predict(used, loader(batches))])
    harness.assert_tensors_same(*found, rtol=0.0, atol=1e-30)


# ------------------------------------------------------------------------------------------------ weights really travel


# --------------------------------------------------------------------------------------------------- limits of a device


def test_a_device_that_is_too_small_says_so() -> None:
    with pytest.raises(Exception, match=r"(?i)memory") as caught:
        train("llama", False, emulation={"memory": "20KB"})
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "microbatch_size" in said or "memory_budget" in said or "emulation.memory" in said
    assert harness.roundpipe_threads() == []
    assert_identical(easy("llama", False), train("llama", False), rng=True)


def test_a_plan_that_lacks_calls_because_layers_are_cut_says_so() -> None:
    with pytest.raises(ValueError, match=r"is due\..* layers are cut here: model\.model\.layers\.\* into self_attn"):
        train("llama", False, plan="forward 0-2; fused 3-5; backward 0-2; round 2", emulation={"memory": "160KB"})
