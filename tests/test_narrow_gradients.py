"""Gradients that travel narrowed are stepped as they are: the same numbers as if they were widened first."""

import contextlib

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import Learner, assert_identical, ours, run
from torch import nn
from torch.amp import GradScaler

from lightning_roundpipe import RoundPipePrecision
from lightning_roundpipe.optim import compiled
from lightning_roundpipe.optim.narrow_gradient import NarrowGradient


class Tied(Learner, optimizer=torch.optim.AdamW, lr=0.05, eps=0.001, weight_decay=0.1):
    """An embedding that is the output layer as well. Sizes are whole vectors: torch rounds what is left otherwise."""

    def __init__(self, in_user_code=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.in_user_code = in_user_code

    def training_step(self, batch, batch_idx):
        logits = self.head(torch.tanh(self.middle(self.embed(batch))))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.roll(-1, 1).flatten())
        return loss + 0.01 * self.embed.weight.float().square().sum() if self.in_user_code else loss


def tied(module=None, trainer=None, **options):
    batches = list(torch.randint(32, (6, 8, 5), generator=torch.Generator().manual_seed(1)))
    settings = {"num_microbatches": 4, "layers": ["Embedding", "Linear"], "plan": harness.per_call(3, 4)} | options
    settings = {"reduce_dtype": "bfloat16"} | settings
    return run(ours(**settings), module or Tied(), batches, devices=2, **(trainer or {}))


@pytest.fixture
def widened(monkeypatch):
    """The numbers of gradients that were widened."""
    numbers, real = list[int](), NarrowGradient.widened

    def noted(gradient, out=None):
        numbers.append(gradient.shape.numel())
        return real(gradient, out)

    monkeypatch.setattr(NarrowGradient, "widened", noted)
    monkeypatch.setattr(harness, "overheard", lambda *_: contextlib.nullcontext())  # which would widen them
    return numbers


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(compiled, "_compiled", lambda: None)


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({}, {}),
        ({"staleness": 1}, {}),
        ({}, {"precision": "bf16-true"}),
        ({"optimizer_state": "int8"}, {}),
        ({}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
        ({"emulation": {"poison": True, "delay_seed": 3, "bandwidth": "1MB"}}, {}),
    ],
    ids=lambda given: str(given),
)
def test_updates_by_layer_widen_no_gradient_and_change_no_bit(options, trainer, widened, request):
    narrow = tied(trainer=trainer, **options)
    assert not widened
    request.getfixturevalue("no_compiler")
    options = {name: value for name, value in options.items() if name != "emulation"}
    assert_identical(tied(trainer=trainer, **options), narrow)
    assert widened


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_scaled_and_clipped_gradients_are_widened_for_their_norm_alone(dtype, clip, widened, request):
    def trained():
        plugin = RoundPipePrecision("16-mixed", GradScaler("cpu", init_scale=3.0 * 2**10, growth_interval=2))
        return tied(reduce_dtype=dtype, trainer={"plugins": [plugin], "gradient_clip_val": clip})

    narrow = trained()
    each = [512, 256, 16]
    assert sorted(widened) == sorted(each * len(widened[::3])), "each as often as the others"
    looks = len(widened)
    request.getfixturevalue("no_compiler")
    assert_identical(trained(), narrow)
    assert len(widened) > 2 * looks


def test_what_user_code_adds_to_is_widened(widened, request):
    narrow = tied(Tied(in_user_code=True))
    assert set(widened) == {512}, "the layer that user code does not read is stepped as it is"
    request.getfixturevalue("no_compiler")
    assert_identical(tied(Tied(in_user_code=True)), narrow)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor])
def test_other_optimizers_get_what_they_expect(optimizer, widened):
    class Other(Tied):
        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=0.1)

    tied(Other())
    assert set(widened) == {512, 256, 16}
