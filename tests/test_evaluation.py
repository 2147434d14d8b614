"""Validation, test and prediction: what plain Lightning computes, with weights uploaded ahead of the calls."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_tensors_same, loader, ours, quiet, trainer_of
from torch import Tensor, nn

from lightning_roundpipe.runtime.modes import evaluation
from lightning_roundpipe.runtime.modes.evaluation import Evaluation

UNKIND = {"poison": True, "delay_seed": 4}
MLP = zoo.make_module("mlp").model


def strategies(**emulation: Any) -> list[tuple[Any, int]]:
    return [("auto", 1), (ours(emulation={"poison": True} | emulation), 2)]


# ---------------------------------------------------------------------------------------------------- Lightning's loops


class Noting(zoo.PlainClassifier):
    """What each loop was given, in which mode."""

    def __init__(self) -> None:
        super().__init__(copy.deepcopy(MLP))
        self.noted: list[Any] = []

    def _evaluate(self, kind: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        loss, logits = self.loss_and_logits(batch)
        self.noted.append((kind, batch_idx, dataloader_idx, torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        if kind != "predict":
            self.log(f"{kind}/loss", loss, on_step=True, on_epoch=True)
            self.log(f"{kind}/largest", logits.max(), reduce_fx="max")
        return logits

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self._evaluate("val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self._evaluate("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self._evaluate("predict", batch, batch_idx, dataloader_idx)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_loops(inference_mode: bool) -> None:
    """Sanity check, fit, validate, test and predict, with two data loaders and limits of all kinds."""
    module, found = Noting(), []
    for strategy, devices in strategies():
        used = copy.deepcopy(module)
        trainer = trainer_of(
            strategy, devices=devices, inference_mode=inference_mode, num_sanity_val_steps=1, val_check_interval=2,
            limit_train_batches=4, limit_val_batches=2, limit_test_batches=0.5, limit_predict_batches=3,
        )  # fmt: skip
        loaders = [loader(zoo.make_batches("mlp", 4, seed=seed)) for seed in (5, 6)]
        with quiet():
            trainer.fit(used, loader(zoo.make_batches("mlp", 6)), loaders)
            values: list[Any] = [dict(trainer.callback_metrics), trainer.validate(used, loaders, verbose=False)]
            values += [trainer.test(used, loaders, verbose=False), trainer.predict(used, loaders)]
        found.append((used.noted, values))
    (plain, plain_values), (noted, values) = found
    assert noted == plain
    assert len(plain) == 2 * 1 + 2 * 2 * 2 + 2 * 2 + 2 * 2 + 2 * 3
    assert ("test", 0, 1, inference_mode, False) in plain
    assert_tensors_same(plain_values, values)


# ------------------------------------------------------------------------------------------------------------- generate


class Generating(zoo.HuggingFace):
    """Generates in both kinds of step, and notes how long the inputs of its first block are: 1, where caches are on."""

    def __init__(self, model: Any, block: str, **options: Any) -> None:
        super().__init__(model)
        self.options = {"max_new_tokens": 4} | options
        self.lengths: list[int] = []
        self.texts: list[Tensor] = []
        self.block = block

    def targets(self, batch: Any) -> int:
        return len(batch["labels"])

    def note_lengths(self) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.lengths.append(hidden.shape[1])

        return self.model.get_submodule(self.block).register_forward_pre_hook(note, with_kwargs=True)

    def _text(self, batch: Any) -> Tensor:
        given = {name: batch[name][:3, :6] for name in ("input_ids", "attention_mask")}
        text: Tensor = self.model.generate(**given, **self.options)
        self.texts.append(text)
        return text

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)
        self.log("val/tokens", self._text(batch).float().mean())
        self.log("val/loss", self.loss_and_logits(batch)[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._text(batch)


BEAM = {"num_beams": 3}
SAMPLE = {"do_sample": True, "top_k": 20, "temperature": 2.0}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", {}, id="llama", marks=pytest.mark.slow),
        pytest.param("llama", BEAM, id="llama beam"),
        pytest.param("llama", SAMPLE, id="llama sampling"),
        pytest.param("t5", {}, id="t5", marks=pytest.mark.slow),
        pytest.param("t5", BEAM, id="t5 beam"),
        pytest.param("t5", SAMPLE, id="t5 sampling"),
    ],
)
def test_generate(name: str, options: Any) -> None:
    block = {"llama": "model.layers.0", "t5": "decoder.block.0"}[name]
    module, batches, found = Generating(zoo.make_module(name).model, block, **options), zoo.make_batches(name, 2), []
    for strategy, devices in strategies(**({"delay_seed": 2} if "num_beams" in options else {})):
        used = copy.deepcopy(module)
        handle = used.note_lengths()
        trainer = trainer_of(strategy, devices=devices)
        with quiet():
            trainer.validate(used, loader(batches[:1]), verbose=False)
            torch.manual_seed(8)
            texts = trainer.predict(used, loader(batches[1:]))
        handle.remove()
        found.append((used.lengths, used.texts, trainer.callback_metrics, texts))
    (lengths, *plain), (others, *result) = found
    assert lengths.count(1) >= 2 * 3
    assert [length for length in others if length == 1] == [length for length in lengths if length == 1]
    assert all(torch.equal(one, two) for one, two in zip(plain[0], result[0], strict=True))
    assert_tensors_same(plain[1:], result[1:])


# ------------------------------------------------------------------------------------------------------ uploading ahead


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[tuple[str, str]]]]:
    """Of each batch, what was enqueued, in that order: (kind, layer)."""
    batches: list[list[tuple[str, str]]] = []
    real = Evaluation.run

    def run(self: Any, *args: Any) -> Any:
        try:
            return real(self, *args)
        finally:
            batches.append([(kind, where.layer) for kind, *_, where in self.recorder._items if where.layer])
            assert all(end.done() for kind, _, _, end, *_ in self.recorder._items if kind == "upload_weights")

    monkeypatch.setattr(Evaluation, "run", run)
    yield batches


def validate(strategy: Any, module: pl.LightningModule, batches: Any, devices: int = 1) -> Any:
    with quiet():
        return trainer_of(strategy, devices=devices).validate(module, loader(batches), verbose=False)


def test_the_next_layer_is_uploaded_while_one_runs(recorded: Any) -> None:
    """On one worker, whose thread enqueues everything: the order is the same each time."""
    validate(ours(layers=["Linear", "ResidualBlock"]), zoo.PlainClassifier(MLP), zoo.make_batches("mlp", 3))
    first, *others = recorded
    names = [layer for kind, layer in first if kind == "forward"]
    assert len(names) == 6
    assert first == [(kind, layer) for layer in names for kind in ("upload_weights", "forward")]
    ahead = [("upload_weights", names[0])]
    for layer, following in zip(names, [*names[1:], None], strict=True):
        ahead += [("upload_weights", following)] * (following is not None) + [("forward", layer)]
    assert others == [ahead, ahead]


def test_without_prefetch_nothing_is_uploaded_ahead(recorded: Any) -> None:
    module = zoo.PlainClassifier(MLP)
    validate(ours(layers=["Linear", "ResidualBlock"], prefetch=0), module, zoo.make_batches("mlp", 2))
    assert [kind for kind, _ in recorded[0]] == ["upload_weights", "forward"] * 6
    assert recorded[0] == recorded[1]


def test_generate_uploads_each_weight_once_a_call(recorded: Any) -> None:
    """The way from the last layer back to the first is learned too. The end of a text is a wrong guess: its upload is
    over when the step is, as weights may be written to then."""
    module = Generating(zoo.make_module("llama").model, "model.layers.0", max_new_tokens=3)
    validate(ours(emulation={"latency": 0.003}), module, zoo.make_batches("llama", 2))
    for batch in recorded:
        calls = [layer for kind, layer in batch if kind == "forward"]
        uploads = [layer for kind, layer in batch if kind == "upload_weights"]
        assert len(calls) > 20
        assert 1 <= len(uploads) - len(calls) <= 2
    late = sum(batch[i - 1] == ("upload_weights", layer) for i, (kind, layer) in enumerate(batch) if kind == "forward")
    assert late <= 1


class Wandering(zoo.PlainClassifier):
    """Takes its blocks in another order in each batch, and one of them twice."""

    def loss_and_logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(int(batch["x"].sum() * 1000))
        h = self.model.stem(batch["x"])
        for i in torch.randint(len(self.model.blocks), (6,), generator=drawn).tolist():
            h = self.model.blocks[i](h)
        logits = self.model.head(h)
        return nn.functional.cross_entropy(logits, batch["y"]), logits


@pytest.mark.parametrize("devices", [1, 3])
def test_wrong_guesses_change_nothing(devices: int) -> None:
    module, batches = Wandering(MLP), zoo.make_batches("mlp", 6)
    strategy = ours(layers=["Linear", "ResidualBlock"], emulation=UNKIND)
    assert_tensors_same(validate("auto", module, batches), validate(strategy, module, batches, devices))


class Averaging(zoo.PlainClassifier):
    """Computes with other weights too, as an average of them would be put in place and taken out again."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("first", self.loss_and_logits(batch)[0])
        time.sleep(0.05)  # what is on its way arrives
        for parameter in self.parameters():
            parameter.data.mul_(0.5)
        self.log("second", self.loss_and_logits(batch)[0])
        for parameter in self.parameters():
            parameter.data.mul_(2.0)


@pytest.mark.parametrize("staleness", [0, 1])
def test_weights_that_user_code_writes_to_are_not_uploaded_ahead(staleness: int) -> None:
    """With staleness 1 uploads read a working copy, which has to follow."""
    module, batches = Averaging(MLP), zoo.make_batches("mlp", 3)
    plain, found = (validate(strategy, module, batches) for strategy in ("auto", ours(staleness=staleness)))
    assert plain[0]["first"] != plain[0]["second"]
    assert_tensors_same(plain, found)


def test_after_an_error_the_next_batch_is_right() -> None:
    """What was foreseen when it happened is forgotten."""

    class Failing(zoo.PlainClassifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            h = self.model.stem(batch["x"])
            if batch_idx == 1 and self.fails:
                raise KeyError("once")
            self.log("loss", self.model.head(self.model.blocks[0](h)).square().mean())

        fails = True

    module, batches = Failing(MLP), zoo.make_batches("mlp", 3)
    trainer = trainer_of(ours(layers=["Linear", "ResidualBlock"], emulation=UNKIND), devices=2)
    with quiet(), pytest.raises(KeyError, match="once"):
        trainer.validate(module, loader(batches), verbose=False)
    module.fails = False
    with quiet():
        found = trainer.validate(module, loader(batches), verbose=False)
    assert_tensors_same(validate("auto", module, batches), found)
    assert harness.roundpipe_threads() == []


def test_a_long_text_keeps_no_tensors_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    real = Evaluation.call

    def call(self: Any, *args: Any) -> Any:
        kept.append(len(self._activations._saved) + sum(map(len, self._activations._here.values())))
        return real(self, *args)

    monkeypatch.setattr(Evaluation, "call", call)
    monkeypatch.setattr(evaluation, "OFTEN", 10)
    module = Generating(zoo.make_module("llama").model, "model.layers.0", max_new_tokens=20, min_new_tokens=20)
    validate(ours(num_microbatches=1), module, zoo.make_batches("llama", 1), devices=2)
    assert len(kept) > 100
    assert max(kept) < 50  # without looking, 180


def test_weights_that_a_validation_step_puts_back_are_trained_on() -> None:
    """Halving and doubling leave every bit; but a working copy of the halved ones would stay."""
    states = []
    for kind in (zoo.PlainClassifier, Averaging):
        batches, more = zoo.make_batches("mlp", 3), {"val_batches": zoo.make_batches("mlp", 1), "val_check_interval": 1}
        states.append(harness.run(ours(staleness=1), kind(MLP), batches, devices=2, **more).state)
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
