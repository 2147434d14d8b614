"""Validation, test and prediction: what plain Lightning computes, several batches at a time or one alone."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_tensors_same, loader, ours, quiet, trainer_of
from torch import Tensor, nn

from lightning_roundpipe.devices import emulated_work
from lightning_roundpipe.engine.events import Recorder

UNKIND = {"poison": True, "delay_seed": 4}
MLP = zoo.make_module("mlp").model
LAYERS = ["Linear", "ResidualBlock"]


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


# -------------------------------------------------------------------------------------------------------------- uploads


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was enqueued."""
    kinds: list[str] = []
    real = Recorder.add

    def add(self: Any, kind: str, *args: Any) -> None:
        kinds.append(kind)
        real(self, kind, *args)

    monkeypatch.setattr(Recorder, "add", add)
    return kinds


def validate(strategy: Any, module: pl.LightningModule, batches: Any, devices: int = 1) -> Any:
    with quiet():
        return trainer_of(strategy, devices=devices).validate(module, loader(batches), verbose=False)


def test_generate_uploads_each_weight_once_a_call(recorded: list[str]) -> None:
    module = Generating(zoo.make_module("llama").model, "model.layers.0", max_new_tokens=3)
    validate(ours(), module, zoo.make_batches("llama", 2))
    assert recorded.count("upload_weights") == recorded.count("forward") > 40


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
    strategy = ours(layers=LAYERS, emulation=UNKIND)
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


# --------------------------------------------------------------------------------------------------- several in flight


class Busy(nn.Module):
    """Counts how many calls run at once."""

    lock = threading.Lock()
    running = most = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with Busy.lock:
            Busy.running += 1
            Busy.most = max(Busy.most, Busy.running)
        emulated_work(0.02)
        with Busy.lock:
            Busy.running -= 1
        return torch.tanh(self.linear(x))


class Chain(pl.LightningModule):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Busy() for _ in range(layers)])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", self.layers(batch).mean())


def test_all_devices_are_busy() -> None:
    Busy.most = 0
    validate(ours(layers=[Busy]), Chain(), list(torch.randn(16, 2, 4)), 3)
    assert Busy.most == 3


@pytest.mark.parametrize("layers", [1, 6])
def test_batches_in_flight_share_uploads(layers: int, recorded: list[str]) -> None:
    """With fewer layers than devices, several devices have the same one."""
    validate(ours(layers=[Busy]), Chain(layers), list(torch.randn(1 + 12, 2, 4)), 3)  # six in flight
    rounds = 2 * 3 if layers == 1 else 2
    assert recorded.count("upload_weights") == layers * (1 + rounds)


class Counts(Chain):
    """Counts how many batches are in their steps at once."""

    running = most = 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        Counts.running += 1
        Counts.most = max(Counts.most, Counts.running)
        super().validation_step(batch, batch_idx)
        Counts.running -= 1


@pytest.mark.parametrize(
    ("options", "devices", "most"),
    [({"overlap": False}, 3, 1), ({"evaluation_batches": 1}, 1, 1), ({"evaluation_batches": 2}, 1, 2)],
)
def test_as_many_batches_at_once_as_the_options_say(options: Any, devices: int, most: int) -> None:
    module, batches, Counts.most = Counts(2), list(torch.randn(6, 2, 4)), 0
    found = validate(ours(layers=[Busy], **options), module, batches, devices)
    assert Counts.most == most
    assert_tensors_same(validate("auto", module, batches), found)


class Unlike(zoo.HuggingFace):
    """Does something else in its fourth batch, which runs beside others then."""

    def __init__(self, what: str) -> None:
        super().__init__(zoo.make_module("llama").model)
        self.what = what

    def targets(self, batch: Any) -> int:
        return len(batch["labels"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.log("other", self._other(batch))
        self.log("loss", self.loss_and_logits(batch)[0], on_step=True, on_epoch=True)
        if batch_idx == 4:
            self.log("another", self._other(batch))

    def _other(self, batch: Any) -> Tensor:
        given = {name: batch[name][:3, :6] for name in ("input_ids", "attention_mask")}
        if self.what == "generate":
            return self.model.generate(**given, max_new_tokens=3).float().mean()
        if self.what == "gradients":
            with torch.enable_grad():
                embedded = self.model.get_input_embeddings()(given["input_ids"]).detach().requires_grad_()
                self.model(inputs_embeds=embedded).logits.square().mean().backward()
            assert embedded.grad is not None
            self.zero_grad()
            return embedded.grad.norm()
        if self.what == "writes":
            for parameter in self.parameters():
                parameter.data.mul_(0.5)
        found = self.model(**given).logits.square().mean()
        if self.what == "writes":
            for parameter in self.parameters():
                parameter.data.mul_(2.0)
        return found


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("what", ["generate", "gradients", "writes", "a call"])
def test_batches_that_make_other_calls(what: str, devices: int) -> None:
    found = []
    for strategy, count in (("auto", 1), (ours(emulation=UNKIND), devices)):
        trainer = trainer_of(strategy, devices=count, inference_mode=False)
        with quiet():
            found.append(trainer.validate(Unlike(what), loader(zoo.make_batches("llama", 10)), verbose=False))
    assert_tensors_same(*found)


class Draws(zoo.PlainClassifier):
    def validation_step(self, batch: zoo.Batch, batch_idx: int) -> None:
        noisy = self.model(batch["x"] + 0.1 * torch.randn_like(batch["x"]))
        self.log("loss", nn.functional.cross_entropy(noisy, batch["y"]), on_step=True, on_epoch=True)


def test_steps_that_draw_random_numbers_run_in_order() -> None:
    found = []
    for strategy, devices in strategies():
        torch.manual_seed(3)
        found.append(validate(strategy, Draws(MLP), zoo.make_batches("mlp", 6), devices))
    assert_tensors_same(*found)


def test_a_default_dtype() -> None:
    """It is the process's: hooks run when no batch does."""

    class Hooked(zoo.PlainClassifier):
        def on_validation_batch_end(self, *_: Any) -> None:
            assert torch.get_default_dtype() is torch.float32

        def validation_step(self, batch: zoo.Batch, batch_idx: int) -> None:
            assert torch.get_default_dtype() is torch.float64
            self.log("loss", self.loss_and_logits(batch)[0])

    found = []
    for strategy, devices in strategies():
        trainer = trainer_of(strategy, devices=devices, precision="64-true")
        with quiet():
            found += trainer.validate(Hooked(copy.deepcopy(MLP)), loader(zoo.make_batches("mlp", 11)), verbose=False)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-12)


class Breaks(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Tensor:
        if index == 6:
            raise KeyError("no such file")
        return torch.full((2, 4), float(index))


def test_errors_of_data_sets_come_up_where_lightning_comes_to_the_batch() -> None:
    class Notes(Chain):
        def on_validation_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            ended.append(batch_idx)

    for strategy, devices in strategies():
        ended: list[int] = []
        data = torch.utils.data.DataLoader(Breaks(), batch_size=None)
        with quiet(), pytest.raises(KeyError, match="no such file"):
            trainer_of(strategy, devices=devices).validate(Notes(2), data, verbose=False)
        assert ended == [*range(6)]
    assert harness.roundpipe_threads() == []


def test_errors_of_layers_fail_their_own_batch() -> None:
    class Picky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x == 5).all()):
                raise KeyError("five")
            return super().forward(x)

    class Notes(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Picky(4, 4), nn.Linear(4, 4)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("mean", self.second(self.first(batch)).mean())

        def on_validation_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            ended.append(batch_idx)

    for strategy, devices in (("auto", 1), (ours(layers=[nn.Linear], emulation=UNKIND), 2)):
        ended: list[int] = []
        batches = [torch.full((2, 4), float(i)) for i in range(9)]
        with quiet(), pytest.raises(KeyError, match="five"):
            trainer_of(strategy, devices=devices).validate(Notes(), loader(batches), verbose=False)
        assert ended == [*range(5)]


# ------------------------------------------------------------------------------------------------------------ one alone


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
    trainer = trainer_of(ours(layers=LAYERS, emulation=UNKIND), devices=2)
    with quiet(), pytest.raises(KeyError, match="once"):
        trainer.validate(module, loader(batches), verbose=False)
    module.fails = False
    with quiet():
        found = trainer.validate(module, loader(batches), verbose=False)
    assert_tensors_same(validate("auto", module, batches), found)
    assert harness.roundpipe_threads() == []


def test_weights_that_a_validation_step_puts_back_are_trained_on() -> None:
    """Halving and doubling leave every bit; but a working copy of the halved ones would stay."""
    states = []
    for kind in (zoo.PlainClassifier, Averaging):
        batches, more = zoo.make_batches("mlp", 3), {"val_batches": zoo.make_batches("mlp", 1), "val_check_interval": 1}
        states.append(harness.run(ours(staleness=1), kind(MLP), batches, devices=2, **more).state)
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
