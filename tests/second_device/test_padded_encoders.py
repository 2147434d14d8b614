"""`nn.TransformerEncoder` and padded samples, on devices that are not the host."""

from __future__ import annotations

from typing import Any

import pytest
from harness import assert_same, assert_tensors_same, ours, run
from test_padded_encoders import Frozen, Padded, batches, made, predicted
from torch import Tensor


class MasksOnTheDevice(Padded):
    """The mask comes from what a layer has computed."""

    def encoded(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        padding = (h * 0.0).sum(-1) != (ids == 0)
        return self.encoder(h, src_key_padding_mask=padding)


@pytest.mark.parametrize("kind", [Padded, MasksOnTheDevice])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_padded_positions_are_zero(kind: type[Padded], microbatches: int, devices: list[Any]) -> None:
    module, data = made(kind, norm=True), batches(3)
    found = predicted(module, ours(num_microbatches=microbatches), 2, data)
    assert len(devices) == 2
    assert_tensors_same(predicted(module, "auto", 1, data), found, rtol=1e-4, atol=1e-5)


def test_a_frozen_encoder_in_training_step(devices: list[Any]) -> None:
    module, data = made(Frozen, norm=True), batches(3)
    assert_same(run("auto", module, data), run(ours(num_microbatches=4), module, data, devices=2))
    assert len(devices) == 2
