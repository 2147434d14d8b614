"""Buffers of a layer's copy: each microbatch moves them once, a recomputation not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.runtime.buffers import Buffers
from lightning_roundpipe.runtime.weights import HostLayer


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class Sides:
    """A layer and its copy."""

    def __init__(self, module: nn.Module, device: Device) -> None:
        self.module = module
        self.layer = HostLayer(0, "layer", module, device, {})
        self.replica = Replica(module, torch.device("cpu"))
        self.buffers = Buffers(self.layer, self.replica)
        self.copy: Any = self.replica.module

    def forward(self, thorough: bool = False, change: Any = None) -> dict[int, Tensor]:
        snapshot = self.buffers.snapshot(thorough)
        self.buffers.load()
        with torch.no_grad():
            (change or (lambda copy: copy(torch.ones(1))))(self.copy)
        self.buffers.write_back(snapshot, thorough)
        return snapshot

    def recompute(self, snapshot: dict[int, Tensor]) -> float:
        """The count that a recomputation begins with."""
        self.buffers.load(snapshot)
        began = float(self.copy.count)
        with torch.no_grad():
            self.copy(torch.ones(1))
        self.buffers.discard()
        return began


@pytest.fixture
def sides(device: Device) -> Sides:
    made = Sides(Counting(), device)
    made.forward(thorough=True)  # the first batch, which learns what changes
    return made


def test_forwards_count_and_recomputations_see_what_their_forward_saw(sides: Sides) -> None:
    first, second = sides.forward(), sides.forward()
    assert float(sides.module.count) == 3.0  # type: ignore[arg-type]
    assert sides.recompute(second) == 2.0
    assert sides.recompute(first) == 1.0
    assert float(sides.module.count) == 3.0  # type: ignore[arg-type]
    assert sides.recompute(sides.forward()) == 3.0


def test_only_what_changes_is_copied(sides: Sides) -> None:
    assert set(sides.layer.mutable_buffers) == {0}
    assert list(sides.forward()) == [0]
    table = sides.copy.table
    sides.forward()
    assert sides.copy.table is table, "it was copied again"


def test_a_buffer_that_user_code_replaces_is_loaded_again(sides: Sides) -> None:
    sides.module.table = torch.full((3,), 7.0)
    sides.forward()
    assert sides.copy.table.tolist() == [7.0] * 3
    sides.module.table.mul_(2)
    sides.forward()
    assert sides.copy.table.tolist() == [14.0] * 3


def test_a_change_that_is_new_cannot_be_recomputed_and_is_refused(sides: Sides) -> None:
    with pytest.raises(RoundPipeError, match="buffer 'table' of Counting in layer 'layer'"):
        sides.forward(change=lambda copy: copy.table.add_(1))


def test_a_buffer_that_a_forward_replaces_or_makes_arrives(device: Device) -> None:
    made = Sides(Counting(), device)

    def change(copy: Any) -> None:
        copy.table = torch.zeros(5)

    host = made.module.table
    made.forward(thorough=True, change=change)
    assert made.module.table.shape == (5,) and made.module.table is not host  # type: ignore[union-attr]

    def make(copy: Any) -> None:
        copy.later = torch.ones(2)

    made.buffers.load()
    make(made.copy)
    made.buffers.write_back(None, thorough=True)
    assert made.module.later.tolist() == [1.0, 1.0]  # type: ignore[union-attr,operator]


def test_what_glue_writes_meanwhile_stays(sides: Sides) -> None:
    """Hooks of the layer itself are glue, and run for the next microbatch while this one is on a worker."""
    snapshot = sides.buffers.snapshot(thorough=True)
    sides.buffers.load()
    with torch.no_grad():
        sides.module.table.mul_(2)  # type: ignore[operator]
        sides.copy(torch.ones(1))
    sides.buffers.write_back(snapshot, thorough=True)
    assert sides.module.table.tolist() == [0.0, 2.0, 4.0]  # type: ignore[operator]
    assert float(sides.module.count) == 2.0  # type: ignore[arg-type]
    sides.forward()
    assert sides.copy.table.tolist() == [0.0, 2.0, 4.0]


def test_running_statistics_move_though_their_versions_do_not(device: Device) -> None:
    made, plain = Sides(nn.BatchNorm1d(3, affine=False), device), nn.BatchNorm1d(3, affine=False)
    x = torch.randn(4, 3)
    for _ in range(2):
        made.forward(thorough=True, change=lambda copy: copy(x))
        plain(x)
    for name, buffer in plain.named_buffers():
        assert torch.equal(made.module.get_buffer(name), buffer), name
