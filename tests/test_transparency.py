"""Training with the strategy gives plain Lightning's numbers: losses, outputs, logged values, gradients and weights.

Each case trains three steps: the first runs its microbatches one after another and finds the trace, later ones are
pipelined by a plan, so a fault of either way shows. Windows are compared with the same script under plain Lightning.
Batches that are cut are compared with plain Lightning on whole batches, and ``loss_weight="targets"`` weighs the parts
of padded ones. Tolerances are those of rounding, and the first tests show that they are: splitting a batch by hand
stays within half of them, while weighing padded parts by samples misses them by four orders of magnitude.
"""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import assert_identical, assert_same, by_hand, ours, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo_runs import batches, calls, expected, module, one_after_another, plain, train, trained


def _cases(names: Any) -> list[Any]:
    """Every model, and again with adapters where it has them."""
    return [
        pytest.param(name, lora, id=f"{name}-lora" if lora else name)
        for name in names
        for lora in ([False, True] if zoo.ENTRIES[name].lora else [False])
    ]


EVERY = [name for name, entry in zoo.ENTRIES.items() if not entry.other]
every_model = pytest.mark.parametrize(("name", "lora"), _cases(EVERY))
other_models = pytest.mark.parametrize(("name", "lora"), _cases(n for n, e in zoo.ENTRIES.items() if e.other))


def _slow_but(wanted: set[tuple[str, bool]], names: Any) -> list[Any]:
    """All of them, slow but for those ``wanted``."""
    return [
        case if case.values in wanted else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
        for case in _cases(names)
    ]


SOME = {("llama", False), ("qwen3", True), ("gpt2", False), ("t5", False)}
"""A plain one, adapters, tied weights, two stacks with outputs that many layers take."""


# ------------------------------------------------------------------------------------- can these comparisons be trusted


@pytest.mark.parametrize(("name", "lora"), _slow_but(SOME, EVERY))
def test_plain_training_repeats_to_the_bit(name: str, lora: bool) -> None:
    again = run("auto", module(name, lora), zoo.make_batches(name))
    assert_identical(plain(name, lora), again, outputs=True, rng=True)
    assert len(again.losses) == len(again.grads) == 3
    assert again.logged and any("train/loss_epoch" in metrics for _, metrics in again.logged)


@pytest.mark.parametrize(("name", "lora"), _slow_but({*SOME, ("batch_norm", False)}, EVERY))
def test_splitting_by_hand_is_well_within_the_tolerance(name: str, lora: bool) -> None:
    """Or it is far outside, where the samples of a batch have to do with each other."""
    if zoo.ENTRIES[name].coupled:
        with pytest.raises(AssertionError, match="differences"):
            assert_same(plain(name, lora), one_after_another(name, lora, 3), rtol=0.01, atol=0.01)
        return
    for microbatches in (2, 6):
        hand = one_after_another(name, lora, microbatches)
        assert_same(plain(name, lora), hand, rtol=harness.RTOL / 2, atol=harness.ATOL / 2)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_weighing_by_samples_is_far_outside_the_tolerance(name: str) -> None:
    hand = by_hand(module(name, False), zoo.make_batches(name), 3, weight=lambda batch: len(batch["labels"]))
    with pytest.raises(AssertionError, match="gradient of model"):
        assert_same(plain(name, False), hand, rtol=1000 * harness.RTOL, atol=1000 * harness.ATOL)


def test_a_difference_is_named() -> None:
    good = plain("mlp", False)
    bad = by_hand(module("mlp", False), zoo.make_batches("mlp"), 1)
    bad.grads[1]["model.blocks.2.up.weight"] = None
    bad.grads[2]["model.head.bias"] += 1.0  # type: ignore[operator]
    with pytest.raises(AssertionError) as failure:
        assert_same(good, bad)
    text = str(failure.value)
    assert "2 differences" in text
    assert "step 1: gradient of model.blocks.2.up.weight: tensor of shape (64, 32) in the first run, None" in text
    assert "step 2: gradient of model.head.bias: differs by 1" in text


# ---------------------------------------------------------------------------------------------- equal to plain training


@every_model
@pytest.mark.parametrize("window", [1, 3])
def test_equals_plain(name: str, lora: bool, window: int, devices: int = 2) -> None:
    result = trained(name, lora, devices, window)
    assert_same(plain(name, lora, window=window), result, outputs=True)
    assert result.report is not None
    assert result.report["microbatches"] == window


@pytest.mark.parametrize(("name", "lora"), _slow_but({("llama", False), ("t5", False)}, EVERY))
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("devices", [1, 4])
def test_any_number_of_workers_equals_plain(name: str, lora: bool, devices: int, window: int) -> None:
    test_equals_plain(name, lora, window, devices)


@every_model
def test_cut_at_every_call_and_uneven(name: str, lora: bool) -> None:
    """5 samples in 3 microbatches: 2, 2 and 1."""
    plan = harness.per_call(calls(name, lora))
    result = train(name, lora, 2, samples=5, num_microbatches=3, plan=plan)
    assert_same(expected(name, lora, 3, samples=5), result, outputs=not zoo.ENTRIES[name].coupled)
    assert result.report is not None
    assert result.report["plan"].split("; round")[0] == plan.split("; round")[0]


@pytest.mark.parametrize(("name", "lora"), _cases(["llama", "mlp"]))
def test_by_name(name: str, lora: bool) -> None:
    given = batches(name, window=3)
    result = run("roundpipe", module(name, lora), given, devices=2, accumulate_grad_batches=3)
    assert_same(plain(name, lora, window=3), result, outputs=True)


@pytest.mark.parametrize("name", ["llama", "mlp"])
def test_batches_of_different_sizes(name: str) -> None:
    """In windows, the last of which is short."""
    sizes = (6, 5, 2, 6, 1)
    given = [zoo.make_batches(name, 1, samples, seed=20 + samples)[0] for samples in sizes]
    script: dict[str, Any] = {"accumulate_grad_batches": 2}
    expected = run("auto", module(name, False), given, **script)
    assert_same(expected, run(ours(), module(name, False), given, devices=2, **script), outputs=True)


def test_without_a_watching_callback() -> None:
    """A callback that reads gradients may make the strategy finish them early; without one, nothing else may change."""
    given, script = batches("llama", window=3), {"accumulate_grad_batches": 3, "watch": False}
    expected = run("auto", module("llama", False), given, **script)
    assert_same(expected, run(ours(), module("llama", False), given, devices=2, **script))


@other_models
def test_other_architectures(name: str, lora: bool) -> None:
    result = train(name, lora, 2, window=3)
    assert_same(plain(name, lora, window=3), result, outputs=True)


# ---------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "t5", "bert"])
def test_blocks_become_layers(name: str) -> None:
    """Or the tests of plans below would test nothing."""
    assert calls(name, False) >= zoo.BLOCKS


@pytest.mark.parametrize(("name", "lora"), _slow_but(SOME, ["llama", "qwen3", "gpt2", "t5", "bert", "mlp"]))
def test_everything_fused(name: str, lora: bool) -> None:
    result = train(name, lora, 2, window=3, plan=harness.single(calls(name, lora)))
    assert_same(plain(name, lora, window=3), result)


@pytest.mark.parametrize(("name", "lora", "devices"), [("llama", False, 1), ("qwen3", True, 3), ("t5", False, 3)])
def test_cut_at_different_places_forward_and_backward(name: str, lora: bool, devices: int) -> None:
    plan = harness.halves(calls(name, lora))
    assert_same(plain(name, lora, window=3), train(name, lora, devices, window=3, plan=plan))


@pytest.mark.parametrize(
    ("name", "lora", "window"),
    [("llama", False, 4), ("llama", False, 3), ("qwen3", True, 3), ("gpt2", False, 3), ("t5", False, 3)],
)
def test_rounds(name: str, lora: bool, window: int) -> None:
    """Two full rounds, and one and a half."""
    result = train(name, lora, 2, window=window, round_microbatches=2)
    assert_same(plain(name, lora, window=window), result)
    assert result.report is not None
    assert {slot["round"] for slot in result.report["slots"]} == {0, 1}


def test_round_of_a_hand_made_plan() -> None:
    plan = harness.halves(calls("llama", False), round_microbatches=2)
    result = train("llama", False, 2, window=6, plan=plan)
    assert_same(plain("llama", False, window=6), result)
    assert result.report is not None
    assert {slot["round"] for slot in result.report["slots"]} == {0, 1, 2}


def test_the_plan_in_use_can_be_given_back() -> None:
    first = trained("llama", False, 2, 3)
    assert first.report is not None
    again = train("llama", False, 2, window=3, plan=first.report["plan"])
    assert again.report is not None
    assert again.report["plan"] == first.report["plan"]
    assert_identical(first, again)


# ----------------------------------------------------------------------------------------------------- equal to the bit


def variants(name: str, lora: bool) -> list[tuple[int, dict[str, Any]]]:
    """How else the same can be computed. The first four differ from each other in everything."""
    n = calls(name, lora)
    return [
        (4, {}),
        (3, {"round_microbatches": 3}),
        (2, {"plan": harness.per_call(n)}),
        (2, {"plan": harness.halves(n, 2)}),
        (1, {}),
        (2, {}),
        (2, {"round_microbatches": 2}),
        (1, {"plan": harness.single(n)}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora", "count"), [("mlp", False, 4), *((n, lora, 8) for n, lora in sorted(SOME))])
def test_workers_rounds_and_plans_do_not_change_a_bit(name: str, lora: bool, count: int) -> None:
    """Given the microbatches, nothing else decides an order of summation."""
    reference = train(name, lora, 1, window=3)
    for devices, options in variants(name, lora)[:count]:
        result = train(name, lora, devices, window=3, **options)
        try:
            assert_identical(reference, result, rng=True)
        except AssertionError as error:
            raise AssertionError(f"devices={devices}, {options}: {error}") from None


@pytest.mark.slow
def test_attention_whose_bias_begins_at_zero() -> None:
    """Torch chooses another attention kernel without grad, and in the first batch both return the same bits."""
    fused, alone = (harness.single(calls("swin", False), 3), harness.per_call(calls("swin", False)))
    first, second = (train("swin", False, 2, window=3, plan=plan) for plan in (fused, alone))
    assert_identical(first, second, rng=True)


# ------------------------------------------------------------------------------------------ user code of unusual shapes


class UserCode(nn.Module):
    """Layers, and a function that says what happens between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem = nn.Linear(8, zoo.WIDTH)
        self.blocks = nn.ModuleList(zoo.ResidualBlock(zoo.WIDTH) for _ in range(4))
        self.table = nn.Embedding(zoo.WIDTH, zoo.WIDTH)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(zoo.WIDTH, 5)
        self.kind = kind
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.stem(x)
        return self.head(getattr(self, self.kind)(h))

    def one_layer_three_times(self, h: Tensor) -> Tensor:
        for _ in range(3):
            h = self.blocks[0](h)
        return h

    def distant_outputs_combined(self, a: Tensor) -> Tensor:
        b = self.blocks[0](a)
        d = self.blocks[2](self.blocks[1](b) + b)
        return self.blocks[3](d + a) + 0.5 * a

    def one_gate_for_all(self, h: Tensor) -> Tensor:
        gate = torch.sigmoid(h.mean(1, keepdim=True))
        for block in self.blocks:
            h = h + gate * block(h)
        return h

    def checkpointed(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h

    def kept_on_the_module(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
            self.kept = h
        assert self.kept is not None
        return h + self.kept.tanh()

    def weight_read_outside(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h + F.linear(F.linear(h, self.stem.weight.t()), self.stem.weight)

    def weight_as_an_argument(self, h: Tensor) -> Tensor:
        for mixer in self.mixers:
            h = mixer(h, self.table.weight)
        return h

    def views(self, h: Tensor) -> Tensor:
        h = h.view(-1, 2, zoo.WIDTH // 2).flatten(1)
        for block in self.blocks:
            first, second = block(h).chunk(2, -1)
            h = torch.cat([second, first], -1)
        return h

    def without_gradients_in_part(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.blocks[0](h)
        h = self.blocks[1](h + target)
        return self.blocks[2](h.detach()) + h

    def autograd_in_user_code(self, h: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
        return self.blocks[0](h) + slope

    def hook_on_a_tensor(self, h: Tensor) -> Tensor:
        h.register_hook(lambda grad: grad * 2)
        return self.blocks[0](h)

    def output_changed_and_used_twice(self, h: Tensor) -> Tensor:
        out = self.blocks[0](h)
        out[:, :3] = 0
        out.add_(h)
        return self.blocks[1](out) + out


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) @ table.softmax(0)


@pytest.mark.parametrize(
    "kind",
    [
        "one_layer_three_times",
        "distant_outputs_combined",
        "one_gate_for_all",
        "checkpointed",
        "kept_on_the_module",
        "weight_read_outside",
        "weight_as_an_argument",
        "views",
        "without_gradients_in_part",
        "autograd_in_user_code",
        "hook_on_a_tensor",
        "output_changed_and_used_twice",
    ],
)
def test_unusual_user_code(kind: str) -> None:
    odd = zoo.PlainClassifier(UserCode(kind))
    given, script = batches("mlp", window=3), {"accumulate_grad_batches": 3}
    layers = ["Linear", "ResidualBlock", "Mixer", "Embedding"]
    assert_same(run("auto", odd, given, **script), run(ours(layers=layers), odd, given, devices=2, **script))
