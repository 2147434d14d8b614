"""Random numbers depend on the seed and on what is computed, not on who computes it when."""

import random
import time

import harness
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Learner, callback, ours, run, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint


class Dropping(nn.Module):
    """Linear in each of its weights, so <weight, gradient> is the loss if forward and recomputation drop the same."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Dropout(0.5)) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class DroppingModule(Learner, lr=0.0):
    def __init__(self):
        super().__init__()
        with seeded(5):
            self.model = Dropping()

    def training_step(self, batch, batch_idx):
        noise = F.dropout(torch.ones(16), 0.5)  # user code draws, too
        return (self.model(batch["x"]) * noise).mean()


class LearningModule(DroppingModule):
    """The same, trained, with noise from Python's and NumPy's generators as well."""

    def training_step(self, batch, batch_idx):
        noise = random.random() + float(np.random.rand())
        return super().training_step({"x": batch["x"] + noise}, batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


DROPPING = DroppingModule()
LEARNING = LearningModule()
DROPPING_LAYERS = ["Sequential"]


def _wide(count):
    generator = torch.Generator().manual_seed(2)
    return [{"x": torch.randn(8, 16, generator=generator) + 1} for _ in range(count)]


def assert_linear(module, result):
    """Forward and recomputation have dropped the same; see `Dropping`."""
    weights = dict(module.named_parameters())
    for loss, grads in zip(result.losses, result.grads, strict=True):
        for name, weight in weights.items():
            product = float((weight.detach() * grads[name]).sum())
            assert product == pytest.approx(float(loss), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(("devices", "cut"), [(4, True), (2, False)])
def test_recomputation_drops_what_the_forward_dropped(devices, cut):
    plan = harness.per_call(5) if cut else None
    strategy = ours(num_microbatches=4, layers=DROPPING_LAYERS, plan=plan)
    result = run(strategy, DROPPING, _wide(4), devices=devices)
    assert len({round(float(loss), 6) for loss in result.losses}) == 4
    assert_linear(DROPPING, result)


class Checkpointed(nn.Sequential):
    """Drops again in its own backward, after others had the time to draw."""

    def forward(self, x):
        return checkpoint(self._slowly, x, use_reentrant=False)

    def _slowly(self, x):
        time.sleep(0.002)
        return super().forward(x)


class CheckpointedModule(DroppingModule):
    def __init__(self):
        super().__init__()
        with seeded(5):
            self.model.layers = nn.ModuleList(Checkpointed(*layer) for layer in self.model.layers)


def test_checkpoints_inside_layers_drop_what_they_dropped():
    strategy = ours(num_microbatches=4, layers=["Checkpointed"], plan=harness.per_call(5, 4))
    module = CheckpointedModule()
    assert_linear(module, run(strategy, module, _wide(6), devices=4))


def test_random_state_after_a_step_is_the_same_for_all():
    """What the caller draws next is the same for every N, M, R and plan, and is not the same number every time.

    From all three global generators, between steps, as augmentations and samplers do.
    """
    seen = []
    for devices, microbatches, plan in ((1, 1, None), (4, 8, None), (2, 4, harness.per_call(5, 2))):
        random.seed(3)
        np.random.seed(3)
        drawn = []

        def draw(*_, drawn=drawn):
            drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))

        strategy = ours(num_microbatches=microbatches, layers=DROPPING_LAYERS, plan=plan)
        run(strategy, LEARNING, _wide(3), devices=devices, callbacks=[callback(passive=True, on_train_batch_end=draw)])
        seen.append(drawn)
    assert all(drawn == seen[0] for drawn in seen)
    assert len({value for drawn in seen[0] for value in drawn}) == 9
