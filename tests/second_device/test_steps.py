"""Whole steps on devices that are not the host: the numbers are those of plain training on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import zoo
from harness import ATOL, RTOL, assert_same
from zoo_runs import expected, train

from second_device.play import trainers_on_devices


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("name", "lora"), [("mlp", False), ("llama", True)])
def test_equals_plain(name: str, lora: bool, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers, each has a device of its own, or both have one."""
    wanted = expected(name, lora, 3)
    made = trainers_on_devices(monkeypatch, shared=shared)
    result = train(name, lora, 2, num_microbatches=3)
    assert [str(device.torch_device) for device in made] == ["played:0", "played:0" if shared else "played:1"]
    assert_same(wanted, result)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_every_model_equals_plain(name: str, devices: list[Any]) -> None:
    """Attention sums in another order than the CPU's own kernel, so there is a little more rounding."""
    wanted = expected(name, False, 3)
    result = train(name, False, 2, num_microbatches=3)
    assert_same(wanted, result, rtol=2 * RTOL, atol=2 * ATOL)
