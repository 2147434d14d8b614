"""Whole steps on devices that are not the host: the numbers are those of plain training on the CPU."""

from __future__ import annotations

import pytest
from harness import assert_same
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
