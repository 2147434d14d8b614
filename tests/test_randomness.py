"""Random numbers depend on the seed and on what is computed, not on who computes it when."""

from __future__ import annotations

import random
import time
from typing import Any

import harness
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import Result, assert_identical, assert_same, ours, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PhimoeConfig, PhimoeForCausalLM

from lightning_roundpipe.engine.randomness import Randomness


class Dropping(nn.Module):
    """Linear in each of its weights, so <weight, gradient> is the loss if forward and recomputation drop the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Dropout(0.5)) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class DroppingModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.model = Dropping()

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        noise = F.dropout(torch.ones(16), 0.5)  # user code draws, too
        return (self.model(batch["x"]) * noise).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class LearningModule(DroppingModule):
    """The same, trained, with noise from Python's and NumPy's generators as well."""

    def training_step(self, batch: zoo.Batch, batch_idx: int) -> Tensor:
        noise = random.random() + float(np.random.rand())
        return super().training_step({"x": batch["x"] + noise}, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


DROPPING = DroppingModule()
LEARNING = LearningModule()
DROPPING_LAYERS = ["Sequential"]


def _wide(count: int) -> list[zoo.Batch]:
    generator = torch.Generator().manual_seed(2)
    return [{"x": torch.randn(8, 16, generator=generator) + 1} for _ in range(count)]


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("cut", [True, False])
def test_recomputation_drops_what_the_forward_dropped(devices: int, cut: bool) -> None:
    plan = harness.per_call(5) if cut else None
    strategy = ours(num_microbatches=4, layers=DROPPING_LAYERS, plan=plan)
    result = run(strategy, DROPPING, _wide(4), devices=devices)
    weights = dict(DROPPING.named_parameters())
    assert len({round(float(loss), 6) for loss in result.losses}) == 4
    for loss, grads in zip(result.losses, result.grads, strict=True):
        for name, weight in weights.items():
            product = float((weight.detach() * grads[name]).sum())
            assert product == pytest.approx(float(loss), rel=1e-4, abs=1e-6), name


class Checkpointed(nn.Sequential):
    """Drops again in its own backward, after others had the time to draw."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._slowly, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _slowly(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return super().forward(x)


class CheckpointedModule(DroppingModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.model.layers = nn.ModuleList(Checkpointed(*layer) for layer in self.model.layers)


def test_checkpoints_inside_layers_drop_what_they_dropped() -> None:
    strategy = ours(num_microbatches=4, layers=["Checkpointed"], plan=harness.per_call(5, 4))
    module = CheckpointedModule()
    result = run(strategy, module, _wide(6), devices=4)
    weights = dict(module.named_parameters())
    for loss, grads in zip(result.losses, result.grads, strict=True):
        for name, weight in weights.items():
            product = float((weight.detach() * grads[name]).sum())
            assert product == pytest.approx(float(loss), rel=1e-4, abs=1e-6), name


VARIANTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (3, {"plan": harness.per_call(5, 3), "emulation": {"delay_seed": 1, "poison": True}}),
    (4, {"plan": "forward 0 1-3; fused 4; backward 2-3 0-1; round 4"}),
    (2, {}),
    (4, {"round_microbatches": 1}),
    (2, {"plan": harness.per_call(5, 3)}),
    (3, {"plan": harness.single(5, 2)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "count"), [(8, 3), pytest.param(20, 7, marks=pytest.mark.slow)])
def test_many_steps_do_not_depend_on_workers_rounds_or_plan(steps: int, count: int) -> None:
    """Trained, so that one bit of one mask in any step would be in all that follow."""
    batches = _wide(steps)
    reference: Result | None = None
    for devices, options in VARIANTS[:count]:
        strategy = ours(num_microbatches=4, layers=DROPPING_LAYERS, **options)
        result = run(strategy, LEARNING, batches, devices=devices)
        reference = reference or result
        assert len(result.losses) == steps
        try:
            assert_identical(reference, result, rng=True)
        except AssertionError as error:
            raise AssertionError(f"devices={devices}, {options}: {error}") from None


def test_microbatches_drop_differently() -> None:
    """Equal samples in different microbatches: one mask for all would not be the randomness that was asked for."""

    class Kept(DroppingModule):
        def training_step(self, batch: zoo.Batch, batch_idx: int) -> Any:
            out = self.model(batch["x"])
            return {"loss": out.mean(), "kept": out.detach()}

    batches = [{"x": torch.ones(4, 16)}] * 2
    result = run(ours(num_microbatches=4, layers=DROPPING_LAYERS), Kept(), batches, devices=2)
    masks = [tuple((row != 0).tolist()) for outputs in result.outputs for row in outputs["kept"]]
    assert len(set(masks)) >= 7


def test_a_seed_decides() -> None:
    batches = _wide(3)
    one, same, other = (
        run(ours(num_microbatches=4, layers=DROPPING_LAYERS), DROPPING, batches, devices=2, seed=seed)
        for seed in (1, 1, 2)
    )
    assert_identical(one, same, rng=True)
    assert_identical(one, run(ours(num_microbatches=4, layers=DROPPING_LAYERS), DROPPING, batches, devices=3), rng=True)
    assert all(float(a) != float(b) for a, b in zip(one.losses, other.losses, strict=True))


class Drawing(pl.Callback):
    """Draws from all three global generators between steps, as augmentations and samplers do."""

    roundpipe_looks_away = True

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))


def test_random_state_after_a_step_is_the_same_for_all() -> None:
    """What the caller draws next is the same for every N, M, R and plan, and is not the same number every time."""
    seen = []
    for devices, microbatches, plan in ((1, 1, None), (1, 4, None), (4, 8, None), (2, 4, harness.per_call(5, 2))):
        random.seed(3)
        np.random.seed(3)
        drawing = Drawing()
        strategy = ours(num_microbatches=microbatches, layers=DROPPING_LAYERS, plan=plan)
        run(strategy, LEARNING, _wide(3), devices=devices, callbacks=[drawing])
        seen.append(drawing.drawn)
    assert all(drawn == seen[0] for drawn in seen)
    assert len({value for drawn in seen[0] for value in drawn}) == 9


class Checkpointing(nn.Linear):
    """Runs again in its backward, where a checkpoint saves the generator's state and puts it back."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._slowly, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _slowly(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().forward(x)


def test_what_the_main_thread_draws_is_not_put_back_by_a_checkpoint() -> None:
    """Nothing draws in the model, so the backward of a step might go on beside the loop, which draws."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*(Checkpointing(6, 6) for _ in range(3)))

        def training_step(self, batch: Tensor) -> Tensor:
            return self.model(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    batches, drawn = [torch.randn(4, 6) for _ in range(6)], []
    for strategy in ("auto", ours(num_microbatches=2, layers=["Checkpointing"], plan=harness.per_call(3, 2))):
        random.seed(3)
        np.random.seed(3)
        drawing = Drawing()
        run(strategy, Module(), batches, callbacks=[drawing])
        drawn.append(drawing.drawn)
    assert drawn[0] == drawn[1]


def test_one_draws_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated devices share a generator: four workers draw what one does, however long from seeding to drawing."""

    def begin(self: Randomness, *args: Any) -> bool:
        draws = real(self, *args)
        time.sleep(0.001 * draws)
        return draws

    real = Randomness.begin
    options: dict[str, Any] = {"num_microbatches": 4, "layers": DROPPING_LAYERS}
    reference = run(ours(**options), DROPPING, _wide(3), devices=1)
    monkeypatch.setattr(Randomness, "begin", begin)
    result = run(ours(**options, plan=harness.per_call(5, 4)), DROPPING, _wide(3), devices=4)
    assert_identical(reference, result, rng=True)


@pytest.mark.slow
def test_dropout_of_a_real_model() -> None:
    """GPT-2 with its three kinds of dropout, and attention's own in the kernel."""
    module = zoo.make_module("gpt2")
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.2
    batches = zoo.make_batches("gpt2")
    one, four = (run(ours(num_microbatches=3), module, batches, devices=n) for n in (1, 4))
    assert_identical(one, four, rng=True)
    with pytest.raises(AssertionError):
        assert_same(run("auto", zoo.make_module("gpt2"), batches), one)


@pytest.mark.parametrize("noise", [True, False])
def test_a_router_that_draws_for_each_token(noise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PhiMoE's, over flattened tokens: with noise, devices give the same bits; without, plain training's numbers."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = zoo.modules.CausalLM(PhimoeForCausalLM(PhimoeConfig(**sizes, **heads)))
        tokens = [torch.randint(5, 96, (4, 8)) for _ in range(2)]
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
    if not noise:
        monkeypatch.setattr(Tensor, "exponential_", lambda self: self.fill_(0.7))
        monkeypatch.setattr(Tensor, "uniform_", lambda self, *args: self.fill_(0.6))
    two = run(ours(num_microbatches=2, plan=harness.per_call(5)), module, batches, devices=2)
    if noise:
        assert_identical(run(ours(num_microbatches=2, plan=harness.single(5)), module, batches), two)
    else:
        assert_same(run("auto", module, batches), two)
