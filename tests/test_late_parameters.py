"""Parameters that are registered during training: in a hook they are trained, within training_step refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import Result, assert_tensors_same, ours, run
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError

WIDTH = zoo.WIDTH
Use = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        return x + torch.tanh(self.inner(x * gain))


class Net(pl.LightningModule):
    """Calls ``use`` on what the blocks return, from the batch ``late`` on."""

    def __init__(self, use: Use, late: int = 3) -> None:
        super().__init__()
        self.use, self.late = use, late
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def joined(self, *parameters: nn.Parameter) -> None:
        self.trainer.optimizers[0].add_param_group({"params": list(parameters), "lr": 0.05})

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        h = self.stem(batch["x"])
        for block in self.blocks:
            h = block(h)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx >= self.late:
            h = self.use(self, h)
        else:
            h = h * self.gain
        return F.cross_entropy(self.head(h), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def values(size: int = WIDTH) -> nn.Parameter:
    return nn.Parameter(torch.linspace(0.5, 0.9, size))


def registers(net: Any, h: Tensor) -> Tensor:
    if not hasattr(net, "extra"):
        net.extra = values()
        net.joined(net.extra)
    return h * net.gain * net.extra


def gives_it_to_a_layer(net: Any, h: Tensor) -> Tensor:
    if not hasattr(net, "extra"):
        net.extra = values()
        net.joined(net.extra)
    return net.blocks[0](h, net.extra)


def replaces(net: Any, h: Tensor) -> Tensor:
    if float(net.gain.detach().std()) < 0.05:
        net.gain = values()
        net.joined(net.gain)
    return h * net.gain


def in_hook(net: Any, h: Tensor) -> Tensor:
    return h * net.gain * net.extra


class Hooked(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.late:
            self.extra = values()
            self.joined(self.extra)


def train(strategy: Any, net: Net, devices: int = 1, **options: Any) -> Result:
    torch.manual_seed(3)
    batches = zoo.make_batches("mlp", count=7, samples=6)
    return run(strategy, net, batches, devices=devices, watch=False, **options)


@pytest.mark.parametrize("use", [registers, replaces, gives_it_to_a_layer])
@pytest.mark.parametrize(("late", "options"), [(3, {}), (0, {}), (3, {"num_microbatches": 3}), (3, {"staleness": 1})])
def test_within_training_step_it_is_refused(use: Use, late: int, options: Any) -> None:
    """Each microbatch would register its own, and the optimizer does not know it."""
    with pytest.raises(RoundPipeError, match=r"registered parameter .*Register it between steps"):
        train(ours(**options), Net(use, late), 2)


def test_between_steps_it_is_trained_from_there_on() -> None:
    torch.manual_seed(3)
    net = Hooked(in_hook)
    assert_tensors_same(train("auto", net).state, train(ours(), net).state)
