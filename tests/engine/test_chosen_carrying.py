"""The strategy's own choice to carry products: where the link and the host have room, and faster there."""

from dataclasses import replace

import pytest
import torch
from harness import Chain, ours, run
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from lightning_roundpipe.devices import emulated_work
from lightning_roundpipe.engine import planner
from lightning_roundpipe.planning.costs import Costs
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.pipeline import Rules, run_steps
from lightning_roundpipe.planning.schedule import Plan

FORWARD_S, BACKWARD_S = 0.03, 0.06
ELEMENTS = 250_000
"""A megabyte, so that a link of 50 MB/s carries a product in two thirds of its time."""


@torch.library.custom_op("roundpipe_tests::slow_product", mutates_args=())
def slow_product(x: Tensor, weight: Tensor) -> Tensor:
    emulated_work(FORWARD_S)
    return (x.sum() * weight).expand(ELEMENTS).clone()


@torch.library.custom_op("roundpipe_tests::slow_gradient", mutates_args=())
def slow_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    emulated_work(BACKWARD_S)
    total = grad.sum()
    return (total * weight).expand_as(x).clone(), (total * x.sum()).reshape(1)


slow_product.register_autograd(
    lambda ctx, grad: slow_gradient(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
register_flop_formula(torch.ops.roundpipe_tests.slow_product)(lambda *_, **__: 1)


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1e-3))

    def forward(self, x):
        made = slow_product(x, self.weight)
        return torch.tanh(made[:4])


def fit(bandwidth):
    strategy = ours(num_microbatches=4, layers=["Slow"], carry_products=True, emulation={"bandwidth": bandwidth})
    return run(strategy, Chain(Slow() for _ in range(9)), torch.ones(4, 4), steps=4, devices=2, watch=False).report


def test_a_fast_link_carries_and_is_faster_than_any_recomputation():
    """By the times that it has measured. What a step takes depends on what else the machine does."""
    report = fit(50e6)
    plan, costs = Plan.parse(report["plan"]), Costs.from_dict(report["costs"])
    assert len(plan.carry) > 2
    carried, recomputed = (
        run_steps(each, costs, 2, 4, Rules(links=Links(50e6, 50e6))).makespan_s
        for each in (plan, replace(plan, carry=()))
    )
    assert carried < 0.97 * recomputed


@pytest.mark.parametrize("bandwidth", [2e6, None])
def test_a_slow_or_unknown_link_recomputes(bandwidth):
    assert not Plan.parse(fit(bandwidth)["plan"]).carry


def test_a_small_host_recomputes(monkeypatch):
    monkeypatch.setattr(planner, "free_bytes", lambda: 1_000_000)
    assert not Plan.parse(fit(50e6)["plan"]).carry
