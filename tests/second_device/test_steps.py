"""Whole steps on devices that are not the host: the numbers are those of plain training on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import zoo
from harness import assert_same
from zoo_runs import expected, train

from second_device.play import trainers_on_devices

EVERY = [
    pytest.param(name, lora, id=f"{name}-lora" if lora else name)
    for name, entry in zoo.ENTRIES.items()
    for lora in ([False, True] if entry.lora else [False])
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("name", "lora"), [("mlp", False), ("llama", False), ("t5", False)])
def test_equals_plain(name: str, lora: bool, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers, each has a device of its own, or both have one."""
    wanted = expected(name, lora, 3)
    made = trainers_on_devices(monkeypatch, shared=shared)
    result = train(name, lora, 2, num_microbatches=3)
    assert [str(device.torch_device) for device in made] == ["played:0", "played:0" if shared else "played:1"]
    assert_same(wanted, result)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), EVERY)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_model_equals_plain(name: str, lora: bool, microbatches: int, devices: list[Any]) -> None:
    wanted = expected(name, lora, microbatches)
    assert_same(wanted, train(name, lora, 2, num_microbatches=microbatches))
