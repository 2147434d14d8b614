"""Under autocast, weights that it casts at every use travel cast, and nobody can tell but by the bytes.

What is compared with is the same run with all weights sent as they are: to the bit, gradients and weights. What that
gives is compared with plain training in other tests.
"""

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import Learner, assert_identical, callback, ours, run
from test_precision_scaling import scaler
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe import RoundPipePrecision
from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine import planner as engine_planner

WIDTH = 16


class Sent:
    """What the last run's layers have sent rounded, by the names of weights; of each time that a plan was made."""

    def __init__(self):
        self.names = []
        self.real = engine_planner.send_rounded

    def __call__(self, layers, workers, sharing):
        # Without shared memory, in which one number in 131,072 differs in its last place.
        changed = self.real(layers, workers, set())
        names = {
            id(p): f"{layer.name}.{name}" if layer.name else name
            for layer in layers
            for name, p in layer.module.named_parameters()
        }
        self.names.append({names[id(layer.masters[i])] for layer in layers for i in layer.weights.rounded})
        return changed


def both(make, batches, precision="bf16-mixed", **options):
    """Train with and without; the results are the same. What was sent rounded, and the result with it."""
    results, sent = [], Sent()
    with pytest.MonkeyPatch.context() as patch:
        for rounding in (lambda *_: False, sent):
            patch.setattr(engine_planner, "send_rounded", rounding)
            chosen = {"num_microbatches": 3} | options.get("strategy", {})
            if precision == "16-mixed":  # or Lightning takes bf16 on the CPU
                chosen["precision_plugin"] = RoundPipePrecision(precision, scaler())
            rest = {key: value for key, value in options.items() if key != "strategy"}
            flag = {} if "precision_plugin" in chosen else {"precision": precision}
            results.append(run(ours(**chosen), make(), batches, **({"devices": 2} | flag | rest)))
    assert_identical(*results)
    return sent.names, results[1]


# ---------------------------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize(
    ("name", "lora", "precision"),
    [
        ("llama", False, "bf16-mixed"),
        pytest.param("qwen3", True, "16-mixed", marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_models(name, lora, precision):
    names, _ = both(lambda: zoo.make_module(name, lora), zoo.make_batches(name), precision)
    block = {n for n in names[0] if ".0." in n}
    assert len(block) >= (14 if lora else 4)
    assert not any("norm" in n or "ln_" in n or "embed" in n for n in names[0])
    assert any("base_layer" in n for n in block) == lora  # frozen ones, too


# ------------------------------------------------------------------------------------------------------ uses of weights


class Sum(torch.autograd.Function):
    """Saves the weight itself, and uses it in its backward alone."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        (weight,) = ctx.saved_tensors
        return grads[0] * weight.sum(), None


def parts(self, x):
    first, second = self.weight.chunk(2)
    return torch.cat([F.linear(x, first), F.linear(x, second), F.linear(x, self.weight[:2])], -1)[..., :WIDTH]


def attributes(self, x):
    assert isinstance(self.weight, nn.Parameter) and self.weight.is_leaf and self.weight.shape == (WIDTH, WIDTH)
    return F.linear(x.to(self.weight.dtype) * self.weight.numel() * self.weight.element_size() / 1e3, self.weight)


def without_autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), self.weight)


def linear(self, x):
    return F.linear(x, self.weight)


def sum_of(self, x):
    return F.linear(x, self.weight) + self.weight.sum()


def returned(self, x):
    return F.linear(x, self.weight), self.weight


def returned_cast(self, x):
    return F.linear(x, self.weight), self.weight.to(torch.bfloat16).float()


CAST = [
    linear, parts, attributes, returned,
    lambda self, x: F.linear(torch.tanh(F.linear(x, self.weight)), self.weight),
    lambda self, x: (x.to(torch.bfloat16) @ self.weight.to(torch.bfloat16)).float(),
    lambda self, x: checkpoint(lambda y: torch.tanh(F.linear(y, self.weight)), x, use_reentrant=False),
]  # fmt: skip
SEEN = [
    sum_of, without_autocast,
    lambda self, x: F.linear(x, self.weight) + F.embedding((x[:, 0] > 0).long(), self.weight),
    lambda self, x: Sum.apply(F.linear(x, self.weight).float(), self.weight),
]  # fmt: skip
NOT_SEEN = [
    lambda self, x: F.linear(x, self.weight) * float(self.weight.detach().numpy()[0, 0]) + self.weight.tolist()[1][1]
]
"""Before it is too late, but then they are."""


class Block(nn.Module):
    """Uses its weight as ``usual``, or, if it is told so, as ``unusual``."""

    def __init__(self, usual, unusual):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.norm = nn.LayerNorm(WIDTH)
        self.usual, self.unusual = usual, unusual

    def forward(self, x, unusual):
        found = (self.unusual if unusual else self.usual)(self, self.norm(x))
        return found if isinstance(found, tuple) else x + torch.tanh(found)


class Model(Learner, optimizer=torch.optim.AdamW, lr=0.01, eps=0.001, foreach=False):
    """A block for each of ``unusual``, which is what it does with its weight in batches that say so."""

    def __init__(self, *unusual, usual=linear, tied=False):
        super().__init__()
        torch.manual_seed(3)
        unusual = unusual or (linear, linear, linear)
        self.blocks = nn.ModuleList(Block(returned_cast if u is returned else usual, u) for u in unusual)
        if tied:
            self.blocks[2].weight = self.blocks[0].weight

    def loss(self, batch):
        x, penalty = batch["x"], torch.zeros(())
        for block in self.blocks:
            x = block(x, bool(batch["unusual"].any()))
            if isinstance(x, tuple):
                x, weight = x
                penalty = penalty + weight.square().mean()
        return F.mse_loss(x, batch["y"]) + penalty

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))


def make_batches(count=4, unusual=-1):
    """``count`` batches, of which one says that its weights are used otherwise."""
    generator = torch.Generator().manual_seed(5)
    made = [{name: torch.randn(7, WIDTH, generator=generator) for name in "xy"} for _ in range(count)]
    return [{**batch, "unusual": torch.full((7,), index == unusual)} for index, batch in enumerate(made)]


def weights(*blocks):
    return {f"blocks.{i}.weight" for i in blocks}


def test_what_autocast_casts_travels_cast():
    names, result = both(lambda: Model(*CAST), make_batches(unusual=0), strategy={"layers": ["Block"]})
    assert names == [weights(*range(len(CAST)))]
    sizes = {call["weight_bytes"] for call in result.report["costs"]["calls"]}
    assert sizes == {2 * WIDTH * WIDTH + 2 * 256}  # with the norm's, in blocks of 256


def test_what_is_used_otherwise_travels_as_it_is():
    uses = [*SEEN, *NOT_SEEN, linear]
    names, _ = both(lambda: Model(*uses), make_batches(2, unusual=0), strategy={"layers": ["Block"]})
    assert names == [weights(len(SEEN), len(SEEN) + 1)]


def test_a_tied_weight_travels_as_it_is():
    names, _ = both(lambda: Model(tied=True), make_batches(), strategy={"layers": ["Block"]})
    assert names == [weights(1)]


# ------------------------------------------------------------------------------------------ what was not to be expected


def test_a_later_batch_uses_a_weight_otherwise():
    """It gets the weight as it is, and so does every batch after that."""
    uses = [*SEEN, *NOT_SEEN, linear]
    names, _ = both(lambda: Model(*uses), make_batches(5, unusual=2), strategy={"layers": ["Block"]})
    assert names == [weights(*range(len(uses))), weights(len(uses) - 1)]


def test_an_evaluation_uses_a_weight_otherwise():
    validation = {"val_batches": make_batches(2, unusual=1), "val_check_interval": 2}
    names, _ = both(lambda: Model(linear, sum_of), make_batches(5), strategy={"layers": ["Block"]}, **validation)
    assert names == [weights(0, 1), weights(0)]


def test_with_staleness_it_is_refused():
    options = {"layers": ["Block"], "num_microbatches": 3, "staleness": 1}
    with pytest.raises(
        RoundPipeError, match=r"uses its weight 'weight' otherwise than in the first batch.*staleness=0"
    ):
        run(ours(**options), Model(linear, sum_of), make_batches(5, unusual=2), precision="bf16-mixed", devices=2)


# ----------------------------------------------------------------------------------------------------------- all around


def writes(trainer, module, batch, batch_idx):
    """In ways that move no counter."""
    if batch_idx == 2:
        module.blocks[0].weight.data.mul_(1.5)
        module.blocks[2].weight.data = module.blocks[2].weight.data * 1.5


def freezes(trainer, module, batch, batch_idx):
    module.blocks[1].requires_grad_(batch_idx not in (2, 3))


@pytest.mark.parametrize(("change", "plans"), [(writes, 1), (freezes, 3)])
def test_between_steps(change, plans):
    """Weights are written to, and other ones are trained."""
    changing = callback(passive=change is freezes, on_train_batch_start=change)
    names, _ = both(Model, make_batches(6), strategy={"layers": ["Block"]}, callbacks=[changing])
    assert names == plans * [weights(0, 1, 2)]
