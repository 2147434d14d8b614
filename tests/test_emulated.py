"""Emulated devices that are slow, late, small and unforgiving: the numbers stay the same, to the bit.

Freed buffers are filled with NaN, so a read after free is a NaN in the result; random delays before copies and layers
shake out waits that are missing; a limited link makes uploads late. All of it is measured against the same run on
devices that do nothing of the kind.
"""

from __future__ import annotations

import functools
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import Result, assert_identical, assert_same, loader, ours, run, trainer_of

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


@functools.cache
def plain(steps: int) -> Result:
    return run("auto", module("llama", False), zoo.make_batches("llama", steps))


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


class Tamper(pl.Callback):
    """Changes weights behind the optimizer's back, after the second and fourth step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            return
        for name, p in pl_module.named_parameters():
            if self.kind == "data swapped":
                p.data = p.data.flip(0).contiguous()
            elif self.kind == "one weight" and name.endswith("layers.1.mlp.up_proj.weight"):
                p.data[0] += 1.0
            elif self.kind == "freeze" and ".layers.0." in name:
                p.requires_grad_(batch_idx == 3)
        if self.kind == "load_state_dict":
            state = {key: value * 0.95 for key, value in pl_module.state_dict().items()}
            pl_module.load_state_dict(state)


@pytest.mark.parametrize("kind", ["data swapped", "one weight", "load_state_dict", "freeze"])
def test_a_change_of_weights_between_steps_is_seen(kind: str) -> None:
    """A stale copy on a device or on the host would show as plain training's numbers without the change."""
    used, batches = module("llama", False), zoo.make_batches("llama", 5)
    tampered = run("auto", used, batches, callbacks=[Tamper(kind)])
    strategy = ours(num_microbatches=3, loss_weight="targets", emulation={"poison": True})
    result = run(strategy, used, batches, devices=2, callbacks=[Tamper(kind)])
    with pytest.raises(AssertionError):
        assert_same(plain(5), result, rtol=100 * harness.RTOL, atol=100 * harness.ATOL)
    assert_same(tampered, result, rtol=10 * harness.RTOL, atol=10 * harness.ATOL)


# --------------------------------------------------------------------------------------------------- limits of a device


def test_a_device_that_is_too_small_says_so() -> None:
    with pytest.raises(Exception, match=r"(?i)memory") as caught:
        train("llama", False, emulation={"memory": "20KB"})
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "microbatch_size" in said or "memory_budget" in said or "emulation.memory" in said
    assert harness.roundpipe_threads() == []
    assert_identical(easy("llama", False), train("llama", False), rng=True)


def test_what_a_device_needs_is_what_it_is_given() -> None:
    """The reported peak is enough memory, and a good deal less is not."""
    report = easy("llama", False).report
    assert report is not None
    peaks = report["peak_device_bytes"]
    peak = max(peaks.values() if isinstance(peaks, dict) else peaks)
    plan = report["plan"]
    enough = train("llama", False, plan=plan, emulation={"memory": 4 * peak, "poison": True})
    assert_identical(easy("llama", False), enough, rng=True)
    with pytest.raises(Exception, match=r"(?i)memory"):
        train("llama", False, plan=plan, emulation={"memory": peak // 4})


def test_a_plan_that_lacks_calls_because_layers_are_cut_says_so() -> None:
    with pytest.raises(ValueError, match=r"is due\..* layers are cut here: model\.model\.layers\.\* into self_attn"):
        train("llama", False, plan="forward 0-2; fused 3-5; backward 0-2; round 2", emulation={"memory": "160KB"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora"),
    [("llama", True), ("t5", False)],
)
def test_a_worker_never_exceeds_its_budget(name: str, lora: bool) -> None:
    """From everything in one stage down to where nothing fits, each budget is kept to."""
    free = train(name, lora, devices=1).report  # one stage holds everything: one device has nobody to share it with
    assert free is not None
    whole = {call["layer"] for call in free["costs"]["calls"]}
    budget = 2 * max(free["peak_device_bytes"])
    plans: set[str] = set()
    while True:
        try:
            result = train(name, lora, devices=1, memory_budget=budget)
        except ValueError as error:
            assert "memory_budget" in str(error)
            break
        assert result.report is not None
        if {call["layer"] for call in result.report["costs"]["calls"]} == whole:
            assert_identical(easy(name, lora), result, rng=True)
        else:  # layers are cut inside, which rounds otherwise
            assert_same(easy(name, lora), result)
        assert max(result.report["peak_device_bytes"]) <= budget
        plans.add(result.report["plan"])
        budget //= 2
    assert len(plans) > 1
    plan = free["plan"]
    with pytest.raises(ValueError, match=r"plan: it needs .* but memory_budget allows"):
        train(name, lora, devices=1, plan=plan, memory_budget=max(free["peak_device_bytes"]) // 2)
