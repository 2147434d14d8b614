"""Carried products on devices that compute behind the host. Their bits are those of ``test_stress``."""

import weakref
from typing import Any

import pytest
import zoo
from harness import ours, run, seeded
from traps import Block, Net

from lightning_roundpipe.engine import carrying


@pytest.mark.parametrize("queues", ["idle"], indirect=True)
def test_products_of_two_calls_are_on_their_way_at_most(devices, queues, monkeypatch):
    """However far the host is ahead of the device, which does nothing here before the host waits."""
    alive, most, real = weakref.WeakSet[Any](), 0, carrying.copy_alike

    def copy(tensor):
        nonlocal most
        made = real(tensor)
        alive.add(made.untyped_storage())
        most = max(most, len(alive))
        return made

    monkeypatch.setattr(carrying, "copy_alike", copy)
    with seeded(5):
        module = zoo.PlainClassifier(Net(Block))
    plan = "forward 0-3; fused 4; backward 0-3; round 4; carry 0-3"
    run(ours(num_microbatches=4, layers=["Linear", "Block"], plan=plan), module, zoo.make_batches("mlp", samples=8))
    assert most == 2 * 2  # each block has two products
