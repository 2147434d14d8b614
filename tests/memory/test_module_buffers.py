"""Buffers of a layer's copy: each microbatch moves them once, a recomputation not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.memory.module_buffers import BufferValue, HostBuffers, ReplicaBuffers
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.user_code.mode import UserCodeMode


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

    def __init__(self, module: nn.Module, device: Device, shared: HostBuffers | None = None) -> None:
        self.module = module
        self.layer = HostLayer(0, "layer", module, device, {})
        self.layer.buffers = shared if shared is not None else self.layer.buffers
        self.replica = Replica(module, torch.device("cpu"))
        self.buffers = ReplicaBuffers(
            self.layer.name, self.layer.buffers, self.layer.mutable_buffers, [], self.replica, device
        )
        self.copy: Any = self.replica.module

    def forward(self, thorough: bool = False, change: Any = None, settle: bool = True) -> dict[int, BufferValue]:
        snapshot = self.buffers.snapshot()
        self.buffers.load()
        with torch.no_grad():
            (change or (lambda copy: copy(torch.ones(1))))(self.copy)
        self.buffers.write_back(snapshot, thorough, 0)
        if settle:
            self.layer.buffers.settle()
        return snapshot

    def recompute(self, snapshot: dict[int, BufferValue]) -> float:
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
    first = sides.forward()
    table = sides.copy.table
    second = sides.forward()
    assert [index for index in first if first[index] is not second[index]] == [0]
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
    made.buffers.write_back(None, thorough=True, microbatch=0)
    made.layer.buffers.settle()
    assert made.module.later.tolist() == [1.0, 1.0]  # type: ignore[union-attr,operator]


def test_what_user_code_writes_meanwhile_stays(sides: Sides) -> None:
    """Hooks of the layer itself are user code, and run for the next microbatch while this one is on a worker."""
    snapshot = sides.buffers.snapshot()
    sides.buffers.load()
    with torch.no_grad():
        sides.module.table.mul_(2)  # type: ignore[operator]
        sides.copy(torch.ones(1))
    sides.buffers.write_back(snapshot, thorough=True, microbatch=0)
    sides.layer.buffers.settle()
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


def test_values_go_from_call_to_call_and_are_settled_once(sides: Sides) -> None:
    module: Any = sides.module
    first, second = sides.forward(settle=False), sides.forward(settle=False)
    assert float(module.count) == 1.0 and sides.layer.buffers
    assert sides.recompute(second) == 2.0 and sides.recompute(first) == 1.0
    version = module.count._version
    sides.layer.buffers.settle()
    assert float(module.count) == 3.0 and module.count._version == version + 1
    assert not sides.layer.buffers
    sides.forward(settle=False)
    sides.layer.buffers.drop()  # the step has failed
    assert float(module.count) == 3.0 and float(sides.forward()[0].host) == 3.0  # type: ignore[arg-type]


def test_a_copy_that_is_up_to_date_is_not_loaded_again(sides: Sides) -> None:
    sides.forward(settle=False)
    count = sides.copy.count
    sides.forward(settle=False)
    assert sides.copy.count is count
    sides.layer.buffers.settle()
    sides.forward()
    assert sides.copy.count is count


def test_what_user_code_writes_between_calls_counts(sides: Sides) -> None:
    module: Any = sides.module
    sides.forward(settle=False)
    assert sides.layer.buffers.awaits(module.count) and not sides.layer.buffers.awaits(module.table)
    sides.layer.buffers.settle()  # as the mode of user code does
    module.count.fill_(10)
    sides.forward()
    assert float(module.count) == 11.0
    module.count = torch.tensor(20.0)
    sides.forward(settle=False)
    module.count.fill_(7)  # unseen: what calls have made overwrites it
    sides.forward()
    assert float(module.count) == 22.0


def test_what_a_call_leaves_as_it_was_is_not_written(sides: Sides) -> None:
    """User code may write to it meanwhile."""
    module: Any = sides.module
    sides.forward(settle=False, change=lambda copy: None)
    module.count.fill_(5)
    sides.forward()
    assert float(module.count) == 6.0


def test_layers_that_share_a_module_share_its_buffers(device: Device) -> None:
    inner = Counting()
    shared = HostBuffers()
    one, other = Sides(nn.Sequential(inner), device, shared), Sides(nn.Sequential(inner), device, shared)
    for _ in range(2):
        one.forward(thorough=True, settle=False)
        other.forward(thorough=True, settle=False)
    one.layer.buffers.settle()
    assert float(inner.count) == 4.0


def test_user_code_finds_what_calls_have_made(sides: Sides) -> None:
    module: Any = sides.module
    mode = UserCodeMode((), lambda p: p, train=True, accelerator=None, buffers=sides.layer.buffers)
    sides.forward(settle=False)
    with mode:
        assert module.table.shape == (3,) and sides.layer.buffers
        view = module.count.view(1)
        assert view.tolist() == [2.0]
        sides.forward(settle=False)
        assert view.tolist() == [3.0]
        sides.forward(settle=False)
        assert module.state_dict()["count"].item() == 4.0
        sides.forward(settle=False)
        module.count.zero_()
    sides.forward()
    assert float(module.count) == 1.0
