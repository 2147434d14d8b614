"""Masks of `flex_attention`, whose function sees tensors in its closures: they go with the mask to each device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from harness import assert_same, ours, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


class Attending(nn.Module):
    """Attends where the mask's function says, as `flex_attention` does on devices that it is compiled for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        rows, length = (torch.arange(size, device=x.device) for size in x.shape[:2])
        assert mask.kv_num_blocks.device == x.device
        seen = mask.mask_mod(rows[:, None, None], rows[0], length[:, None], length)
        h = self.inner(x)
        return x + F.scaled_dot_product_attention(h, h, h, seen)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(Attending() for _ in range(4))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h, numbers = batch["x"], batch["documents"].clone()

        def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (numbers[row, query] == numbers[row, key]) & (key <= query)

        mask = create_block_mask(same, len(h), None, h.shape[1], h.shape[1], device=h.device, BLOCK_SIZE=4)
        for layer in self.layers:
            h = layer(h, mask)
        return h.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_equal_plain(devices: list[Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"x": torch.randn(4, 12, 8, generator=generator), "documents": torch.arange(12).repeat(4, 1) // length}
        for length in (4, 5, 3)
    ]
    expected = run("auto", Net(), batches)
    plan = "forward 0-0 1-1; fused 2-3; backward 1-1 0-0; round 2"
    result = run(ours(num_microbatches=2, layers=["Attending"], plan=plan), Net(), batches, devices=2)
    assert devices
    assert_same(expected, result)
