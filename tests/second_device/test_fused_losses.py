"""Losses that are given the output layer's weight: it travels once to each device, for all microbatches of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_same, ours, run
from test_recipes import Fused, OfTheHead, llama, plain_ids
from torch import Tensor

SEEN: list[tuple[torch.device, int]] = []


class Noted(Fused):
    """Notes where the weight is."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        SEEN.append((weight.device, weight.data_ptr()))
        return Fused.forward(ctx, hidden, weight, targets)


@pytest.mark.parametrize("tied", [False, True])
def test_the_weight_travels_once(tied: bool, devices: list[Any]) -> None:
    torch.manual_seed(1)
    module = OfTheHead(llama(tie_word_embeddings=tied), Noted.apply).float()
    batches = [plain_ids(i) for i in range(8)]
    expected = run("auto", module, batches, accumulate_grad_batches=4)
    SEEN.clear()
    assert_same(expected, run(ours(), module, batches, devices=2, accumulate_grad_batches=4))
    assert devices and len(SEEN) == 8
    for window in (SEEN[:4], SEEN[4:]):
        assert {device.type for device, _ in window} == {"played"}
        assert len(set(window)) == len({device for device, _ in window})
