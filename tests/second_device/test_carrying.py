"""Carried products on devices that compute behind the host, as late as they may: the bits of recomputation."""

import weakref
from typing import Any

import pytest
import torch
import zoo
from harness import assert_identical, call_count, ours, per_call, run, seeded
from traps import Block, Net

from lightning_roundpipe.engine import carrying

at_random_and_idle = pytest.mark.parametrize("queues", ["random", "idle"], indirect=True)


class _Saved(torch.autograd.Function):
    """Its gradient is what its forward has saved."""

    @staticmethod
    def forward(ctx, x, made):
        ctx.save_for_backward(made)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


class ReturnsProducts(Block):
    """One as its output, which its backward reads, and one as a gradient."""

    def forward(self, x):
        kept = _Saved.apply(x, self.inner(x).detach())
        made = self.other(kept)
        return made, made.square()


class Wide(Net):
    """User code writes to what layers return."""

    def body(self, h):
        for block in self.blocks:
            h, square = block(h)
            h *= 1.5
            h = torch.tanh(h + square)
        return h


@at_random_and_idle
@pytest.mark.parametrize("workers", [1, 2])
def test_user_code_writes_to_products_that_are_on_their_way(workers, devices, queues):
    with seeded(5):
        module = zoo.PlainClassifier(Wide(ReturnsProducts))
    plan, batches = per_call(5, 4), zoo.make_batches("mlp", samples=8)
    plain, found = (
        run(ours(num_microbatches=4, layers=["Linear", "ReturnsProducts"], plan=text), module, batches, devices=workers)
        for text in (plan, f"{plan}; carry 0-3")
    )
    assert_identical(plain, found)


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


@at_random_and_idle
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_no_bit_depends_on_what_is_carried(name, devices, queues):
    module, batches = zoo.make_module(name), zoo.make_batches(name)
    plain = run(ours(num_microbatches=3), module, batches, devices=2)
    n = call_count(plain.report["plan"])
    plan = f"{per_call(n, 3)}; carry 0-{n - 2}"
    assert_identical(plain, run(ours(num_microbatches=3, plan=plan), module, batches, devices=2))
