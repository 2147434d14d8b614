"""Losses that are given the output layer's weight: it travels once to each device, for all microbatches of a step."""

import pytest
import torch
from harness import assert_same, ours, run
from test_recipes import Fused, OfTheHead, llama, plain_ids

SEEN = []


class Noted(Fused):
    """Notes where the weight is."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        SEEN.append((weight.device, weight.data_ptr()))
        return Fused.forward(ctx, hidden, weight, targets)


def tied():
    return llama(tie_word_embeddings=True)


def frozen():
    net = llama()
    net.lm_head.requires_grad_(False)
    return net


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("make", [llama, tied, frozen])
def test_the_weight_travels_once(make, precision, devices):
    """Also if the function's ``apply`` was kept before training began, as libraries do."""
    torch.manual_seed(1)
    module = OfTheHead(make(), Noted.apply).float()
    options = {"accumulate_grad_batches": 4, "precision": precision}
    batches = [plain_ids(i) for i in range(8)]
    expected = run("auto", module, batches, **options)
    SEEN.clear()
    result = run(ours(), module, batches, devices=2, **options)
    rounding = {} if precision == "32-true" else {"rtol": 0.1, "atol": 0.02}
    assert_same(expected, result, **rounding)
    assert devices and len(SEEN) == 8
    for window in (SEEN[:4], SEEN[4:]):
        assert {device.type for device, _ in window} == {"played"}
        assert len(set(window)) == len({device for device, _ in window})
