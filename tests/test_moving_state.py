"""State that user code moves on from step to step: a step's recomputation sees what its forward saw.

Buffers are kept for it, and batches are copied: a data set may fill the same memory for the next one.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from harness import assert_same, ours, run, seeded
from harness import trainer_of as trainer
from torch.utils.data import DataLoader, Dataset
from traps import Block, Net

from lightning_roundpipe import Microbatches

PLAN = "forward 0-1 2-3; fused 4; backward 2-3 0-1; round 4"
"""Much is to be recomputed when a step's outputs are there."""


class Scaled(Block):
    """Reads a buffer that only user code writes to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(zoo.WIDTH))

    def forward(self, x):
        return super().forward(x) * self.scale


class FilledInStep(zoo.PlainClassifier):
    def training_step(self, batch, batch_idx):
        self.model.blocks[1].scale.fill_(1 + 0.1 * batch_idx)
        return super().training_step(batch, batch_idx)


class DataBetween(zoo.PlainClassifier):
    """Writes as code of averaged models does, which increments no version."""

    roundpipe_passive_hooks = True

    def on_train_batch_end(self, *_):
        self.model.blocks[0].scale.data.mul_(1.2)
        self.model.blocks[1].scale.numpy()[:2] += 0.1
        self.model.blocks[2].scale.data = self.model.blocks[0].scale + 0.1


class ReplacedBetween(zoo.PlainClassifier):
    roundpipe_passive_hooks = True

    def on_train_batch_start(self, batch, batch_idx):
        for block in self.model.blocks:
            block.scale = torch.full((zoo.WIDTH,), 1 + 0.1 * batch_idx)


CASES = {
    "a buffer in the step": (FilledInStep, Scaled),
    "a buffer's data between steps": (DataBetween, Scaled),
    "another buffer": (ReplacedBetween, Scaled),
}


def train(strategy, kind, block, devices=1):
    with seeded(5):
        module = kind(Net(block))
    batches = zoo.make_batches("mlp", count=6, samples=8)
    return run(strategy, module, batches, devices=devices, watch=False)


@pytest.mark.parametrize("name", CASES)
def test_recomputation_sees_it_as_the_forward_did(name):
    plain = train("auto", *CASES[name])
    assert_same(plain, train(ours(num_microbatches=4, plan=PLAN), *CASES[name], devices=2))


class Refilling(Dataset[Any]):
    """Gives each batch in the same arrays."""

    def __init__(self, *, as_tensors=True):
        self.batches = zoo.make_batches("mlp", count=6, samples=8)
        self.arrays = {key: value.numpy().copy() for key, value in self.batches[0].items()}
        self.as_tensors = as_tensors

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        for key, value in self.batches[index].items():
            self.arrays[key][:] = value.numpy()
        return {k: torch.from_numpy(v) for k, v in self.arrays.items()} if self.as_tensors else dict(self.arrays)


class UsesBatchBetween(zoo.PlainClassifier):
    """Code between layers computes with the batch, and its backward with it once more."""

    def training_step(self, batch, batch_idx):
        batch = {key: torch.as_tensor(value) for key, value in batch.items()}
        model = self.model
        h = model.stem(batch["x"])
        for block in model.blocks:
            h = block(h) * (1 + batch["x"].mean(1, keepdim=True))
        return torch.nn.functional.cross_entropy(model.head(h), batch["y"])


def refilled(strategy, module, devices, *, as_tensors, parts=0):
    """Weights after training on batches as they come, or on their ``parts``: arrays are not cut."""
    module = copy.deepcopy(module)
    torch.manual_seed(1)
    data = DataLoader(Refilling(as_tensors=as_tensors), batch_size=None)
    if not as_tensors:
        data.collate_fn = lambda batch: (
            Microbatches({k: np.array_split(v, parts)[i] for k, v in batch.items()} for i in range(parts))
            if parts
            else batch
        )
    trainer(strategy, devices=devices).fit(module, data)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("as_tensors", [True, False])
def test_batches_in_the_same_memory(as_tensors):
    with seeded(5):
        module = UsesBatchBetween(Net(Block))
    plain = refilled("auto", module, 1, as_tensors=as_tensors)
    options = {"num_microbatches": 4} if as_tensors else {}
    parts = 0 if as_tensors else 4
    other = refilled(ours(**options, plan=PLAN), module, 2, as_tensors=as_tensors, parts=parts)
    for name, value in plain.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)
