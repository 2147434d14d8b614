"""Modules that are built on the meta device in `configure_model`: filled there, or from a checkpoint."""

import harness
import pytest
import zoo
from harness import assert_identical, assert_same, loader, ours, run, trainer_of
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file, save_file
from torch import nn


class Late(zoo.CausalLM):
    """Builds its model in `configure_model`."""

    def __init__(self, build):
        super().__init__(nn.Identity())
        self.build = build
        self.built = False

    def configure_model(self):
        if not self.built:
            self.model, self.built = self.build(self), True


def on_meta(name):
    """The zoo's model without values; what no checkpoint has is computed."""
    model = zoo.make_module(name).model
    tables = {key for key, _ in model.named_buffers()} - model.state_dict().keys()
    kept = {key: model.get_buffer(key) for key in tables}
    model.to("meta")
    for key, table in kept.items():
        holder, _, attribute = key.rpartition(".")
        setattr(model.get_submodule(holder), attribute, table)
    model.tie_weights()
    return model


def filled_in(name, path):
    def build(module):
        model = on_meta(name)
        model.load_state_dict(load_file(path), assign=True)
        return model

    return build


def test_weights_are_put_into_it(tmp_path):
    """As plain Lightning trains what was built with them."""
    usual, batches = zoo.make_module("llama"), zoo.make_batches("llama")
    save_file(usual.model.state_dict(), tmp_path / "a.safetensors")
    found = run(ours(num_microbatches=3), Late(filled_in("llama", tmp_path / "a.safetensors")), batches, devices=2)
    assert_same(run("auto", usual, batches), found)


BUILDS = {"meta": lambda module: on_meta("gpt2"), "empty": lambda module: empty(module, "gpt2")}


def empty(module, name):
    """In Lightning's own words for it."""
    with module.trainer.init_module(empty_init=True):
        return zoo.make_module(name).model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a model with tied weights, after a step of plain training."""
    path = tmp_path_factory.mktemp("meta") / "at.ckpt"
    trainer = trainer_of(max_steps=1)
    with harness.quiet():
        trainer.fit(zoo.make_module("gpt2"), loader(zoo.make_batches("gpt2", 1)))
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("how", "precision"), [("empty", "32-true"), pytest.param("meta", "bf16-true", marks=pytest.mark.slow)]
)
def test_a_checkpoint_is_loaded_into_it(how, precision, checkpoint):
    batches = zoo.make_batches("gpt2", 3)
    options = {"fit": {"ckpt_path": checkpoint}, "precision": precision, "max_epochs": 2}
    results = []
    for build in (lambda module: zoo.make_module("gpt2").model, BUILDS[how]):
        results.append(run(ours(num_microbatches=3), Late(build), batches, devices=2, **options))
    assert len(results[1].losses) > 1
    assert_identical(*results)
    model = results[1].module.model
    assert model.lm_head.weight is model.transformer.wte.weight


def test_validating_what_a_checkpoint_fills(checkpoint):
    values = []
    for strategy, build in (("auto", lambda module: zoo.make_module("gpt2").model), (ours(), BUILDS["meta"])):
        trainer = trainer_of(strategy)
        values.append(
            trainer.validate(Late(build), loader(zoo.make_batches("gpt2", 1)), ckpt_path=checkpoint, verbose=False)
        )
    harness.assert_tensors_same(*values)
    with pytest.raises(MisconfigurationException, match="on the meta device, without values"):
        trainer_of(ours()).validate(Late(BUILDS["meta"]), loader(zoo.make_batches("gpt2", 1)), verbose=False)
