"""Validation, test and prediction: what plain Lightning computes, several batches at a time or one alone."""

import copy
import threading
import time

import harness
import pytest
import torch
import zoo
from harness import Chain, assert_tensors_same, loader, ours, quiet, trainer_of
from patience import longer_each_try
from torch import nn

from lightning_roundpipe.devices import emulated_work

UNKIND = {"poison": True, "delay_seed": 4}
MLP = zoo.make_module("mlp").model


def strategies(**emulation):
    return [("auto", 1), (ours(emulation={"poison": True} | emulation), 2)]


# ------------------------------------------------------------------------------------------------------------- generate


class Generating(zoo.HuggingFace):
    """Generates in both kinds of step, and notes how long the inputs of its first block are: 1, where caches are on."""

    def __init__(self, model, block, **options):
        super().__init__(model)
        self.options = {"max_new_tokens": 4} | options
        self.lengths = []
        self.texts = []
        self.block = block

    def targets(self, batch):
        return len(batch["labels"])

    def note_lengths(self):
        def note(module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            self.lengths.append(hidden.shape[1])

        return self.model.get_submodule(self.block).register_forward_pre_hook(note, with_kwargs=True)

    def _text(self, batch):
        given = {name: batch[name][:3, :6] for name in ("input_ids", "attention_mask")}
        text = self.model.generate(**given, **self.options)
        self.texts.append(text)
        return text

    def validation_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)
        self.log("val/tokens", self._text(batch).float().mean())
        self.log("val/loss", self.loss_and_logits(batch)[0])

    def predict_step(self, batch, batch_idx):
        return self._text(batch)


BEAM = {"num_beams": 3}
SAMPLE = {"do_sample": True, "top_k": 20, "temperature": 2.0}


@pytest.mark.parametrize(
    ("name", "options"), [pytest.param("llama", SAMPLE, id="llama sampling"), pytest.param("t5", BEAM, id="t5 beam")]
)
def test_generate(name, options):
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


def validate(strategy, module, batches, devices=1):
    with quiet():
        return trainer_of(strategy, devices=devices).validate(module, loader(batches), verbose=False)


class Averaging(zoo.PlainClassifier):
    """Computes with other weights too, as an average of them would be put in place and taken out again."""

    def validation_step(self, batch, batch_idx):
        self.log("first", self.loss_and_logits(batch)[0])
        time.sleep(0.05)  # what is on its way arrives
        for parameter in self.parameters():
            parameter.data.mul_(0.5)
        self.log("second", self.loss_and_logits(batch)[0])
        for parameter in self.parameters():
            parameter.data.mul_(2.0)


# --------------------------------------------------------------------------------------------------- several in flight


class Busy(nn.Module):
    """Counts how many calls run at once."""

    lock = threading.Lock()
    running = most = 0
    times = 1.0
    """How much longer each takes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with Busy.lock:
            Busy.running += 1
            Busy.most = max(Busy.most, Busy.running)
        emulated_work(0.02 * Busy.times)
        with Busy.lock:
            Busy.running -= 1
        return torch.tanh(self.linear(x))


@pytest.fixture
def busy():
    yield Busy
    Busy.times = 1.0


@longer_each_try
def test_all_devices_are_busy(busy, times):
    Busy.most, Busy.times = 0, times
    validate(ours(layers=[Busy]), Chain(Busy() for _ in range(6)), list(torch.randn(16, 2, 4)), 3)
    assert Busy.most == 3


class Counts(Chain):
    """Counts how many batches are in their steps at once."""

    running = most = 0

    def validation_step(self, batch, batch_idx):
        Counts.running += 1
        Counts.most = max(Counts.most, Counts.running)
        super().validation_step(batch, batch_idx)
        Counts.running -= 1


@pytest.mark.parametrize(
    ("options", "devices", "most"),
    [({"overlap": False}, 3, 1), ({"evaluation_batches": 1}, 1, 1), ({"evaluation_batches": 2}, 1, 2)],
)
def test_as_many_batches_at_once_as_the_options_say(options, devices, most):
    module, batches, Counts.most = Counts(Busy() for _ in range(2)), list(torch.randn(6, 2, 4)), 0
    found = validate(ours(layers=[Busy], **options), module, batches, devices)
    assert Counts.most == most
    assert_tensors_same(validate("auto", module, batches), found)


class Unlike(zoo.HuggingFace):
    """Does something else in its fourth batch, which runs beside others then."""

    def __init__(self, what):
        super().__init__(zoo.make_module("llama").model)
        self.what = what

    def targets(self, batch):
        return len(batch["labels"])

    def validation_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.log("other", self._other(batch))
        self.log("loss", self.loss_and_logits(batch)[0], on_step=True, on_epoch=True)
        if batch_idx == 4:
            self.log("another", self._other(batch))

    def _other(self, batch):
        given = {name: batch[name][:3, :6] for name in ("input_ids", "attention_mask")}
        if self.what == "generate":
            return self.model.generate(**given, max_new_tokens=3).float().mean()
        if self.what == "writes":
            for parameter in self.parameters():
                parameter.data.mul_(0.5)
        found = self.model(**given).logits.square().mean()
        if self.what == "writes":
            for parameter in self.parameters():
                parameter.data.mul_(2.0)
        return found


@pytest.mark.parametrize("what", ["generate", "writes", "a call"])
def test_batches_that_make_other_calls(what):
    found = []
    for strategy, count in (("auto", 1), (ours(emulation=UNKIND), 3)):
        trainer = trainer_of(strategy, devices=count, inference_mode=False)
        with quiet():
            found.append(trainer.validate(Unlike(what), loader(zoo.make_batches("llama", 10)), verbose=False))
    assert_tensors_same(*found)


# ------------------------------------------------------------------------------------------------------------ one alone


def test_weights_that_a_validation_step_puts_back_are_trained_on():
    """Halving and doubling leave every bit; but a working copy of the halved ones would stay."""
    states = []
    for kind in (zoo.PlainClassifier, Averaging):
        batches, more = zoo.make_batches("mlp", 3), {"val_batches": zoo.make_batches("mlp", 1), "val_check_interval": 1}
        states.append(harness.run(ours(staleness=1), kind(MLP), batches, devices=2, **more).state)
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
