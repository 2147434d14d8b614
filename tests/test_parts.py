"""A large layer whose gradients came narrowed is stepped in parts: the same numbers, in less memory."""

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import Learner, assert_identical, ours, run
from torch import nn

from lightning_roundpipe.memory.grad_buffers import GradientPool
from lightning_roundpipe.optim.partial_optimizer import PartialOptimizer
from lightning_roundpipe.updates import bucket_stepper

PART = 128
"""Bytes: 32 numbers in fp32."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def stepped(monkeypatch):
    """Everything is large, and the lengths of all parts that were stepped."""
    monkeypatch.setattr(bucket_stepper, "WIDENED_BYTES", PART)
    monkeypatch.setattr(bucket_stepper, "PIECE", 0)  # what is large is alone
    lengths = []
    real = PartialOptimizer.step_part

    def step_part(self, values, key, gradient, start, end):
        lengths.append(end - start)
        real(self, values, key, gradient, start, end)

    monkeypatch.setattr(PartialOptimizer, "step_part", step_part)
    return lengths


class Tied(Learner, optimizer=torch.optim.AdamW, lr=0.05, eps=0.001, weight_decay=0.1):
    """An embedding that is the output layer as well, as many language models have it."""

    def __init__(self, in_user_code=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 9)
        self.middle = nn.Linear(9, 9)
        self.head = nn.Linear(9, 30, bias=False)
        self.head.weight = self.embed.weight
        self.in_user_code = in_user_code

    def training_step(self, batch, batch_idx):
        logits = self.head(torch.tanh(self.middle(self.embed(batch))))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.roll(-1, 1).flatten())
        return loss + 0.01 * self.embed.weight.float().square().sum() if self.in_user_code else loss


def tied(module=None, trainer=None, **options):
    batches = list(torch.randint(30, (6, 8, 5), generator=torch.Generator().manual_seed(1)))
    settings = {"num_microbatches": 4, "layers": ["Embedding", "Linear"], "plan": harness.per_call(3, 4)} | options
    strategy = ours(reduce_dtype="bfloat16", **settings)
    result = run(strategy, module or Tied(), batches, devices=2, **(trainer or {}))
    result.grads = []  # of parts nobody is told
    return result


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({}, {}),
        ({"staleness": 1}, {}),
        ({}, {"precision": "bf16-true"}),
        ({}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
        ({"emulation": {"poison": True, "delay_seed": 3, "bandwidth": "1MB"}}, {}),
    ],
    ids=lambda given: str(given),
)
def test_parts_change_no_bit(options, trainer, stepped, monkeypatch):
    parts = tied(trainer=trainer, **options)
    steps = 5  # In the first window, more is added to what has come.
    assert stepped.count(30 * 9 % 32) == steps and stepped.count(32) == steps * (30 * 9 // 32 + 9 * 9 // 32)
    monkeypatch.undo()
    torch.set_num_threads(1)
    assert_identical(tied(trainer=trainer, **{k: v for k, v in options.items() if k != "emulation"}), parts)


def test_no_gradient_is_widened_whole(stepped, monkeypatch):
    taken, real = [], GradientPool.take_wide

    def take_wide(pool, nbytes):
        taken.append(pool.keeps)  # not in the first window
        return real(pool, nbytes)

    monkeypatch.setattr(GradientPool, "take_wide", take_wide)
    tied()
    assert stepped and not any(taken)
    monkeypatch.setattr(bucket_stepper, "WIDENED_BYTES", 2**26)
    tied()
    assert any(taken), "small layers are"


def test_what_user_code_adds_to_is_taken_whole(stepped, monkeypatch):
    parts = tied(Tied(in_user_code=True))
    assert stepped and set(stepped) <= {32, 9, 81 % 32}, "the layer that user code does not read has parts"
    monkeypatch.undo()
    assert_identical(tied(Tied(in_user_code=True)), parts)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor])
def test_an_optimizer_without_a_kernel_of_parts_steps_whole_layers(optimizer, stepped):
    """Adafactor's update of a weight looks at all of it."""

    class Other(Tied):
        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=0.1)

    tied(Other())
    assert not stepped
