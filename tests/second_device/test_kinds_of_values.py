"""What goes from layer to layer beside tensors of a device: values on the host, and masks of `flex_attention`."""

import pytest
import torch
from harness import Learner, assert_same, ours, run
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask


class Counting(nn.Module):
    """Returns whole numbers on the host beside its output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.inner(x)), torch.arange(3)


class Attending(nn.Module):
    """Attends where the mask's function says, as `flex_attention` does on devices that it is compiled for."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, mask):
        rows, length = (torch.arange(size, device=x.device) for size in x.shape[:2])
        assert mask.kv_num_blocks.device == x.device
        seen = mask.mask_mod(rows[:, None, None], rows[0], length[:, None], length)
        h = self.inner(x)
        return x + F.scaled_dot_product_attention(h, h, h, seen)


def with_numbers(layers, h, documents):
    for layer in layers:
        h, numbers = layer(h)
        h = h + numbers.sum()
    return h


def with_a_mask(layers, h, documents):
    """Its function sees tensors in its closures: they go with the mask to each device."""
    numbers = documents.clone()

    def same(row, head, query, key):
        return (numbers[row, query] == numbers[row, key]) & (key <= query)

    mask = create_block_mask(same, len(h), None, h.shape[1], h.shape[1], device=h.device, BLOCK_SIZE=4)
    for layer in layers:
        h = layer(h, mask)
    return h


class Net(Learner):
    def __init__(self, layer, body):
        super().__init__()
        torch.manual_seed(2)
        self.layers, self.body = nn.ModuleList(layer() for _ in range(4)), body

    def training_step(self, batch, batch_idx):
        return self.body(self.layers, batch["x"], batch["documents"]).square().mean()


@pytest.mark.parametrize(("layer", "body"), [(Counting, with_numbers), (Attending, with_a_mask)])
def test_equal_plain(layer, body, devices):
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"x": torch.randn(4, 12, 8, generator=generator), "documents": torch.arange(12).repeat(4, 1) // length}
        for length in (4, 5, 3)
    ]
    expected = run("auto", Net(layer, body), batches)
    plan = "forward 0-0 1-1; fused 2-3; backward 1-1 0-0; round 2"
    result = run(ours(num_microbatches=2, layers=[layer], plan=plan), Net(layer, body), batches, devices=2)
    assert devices
    assert_same(expected, result)
