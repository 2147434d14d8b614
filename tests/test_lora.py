"""PEFT models work unchanged: frozen weights travel, adapters alone have gradients and optimizer state."""

import copy

import harness
import pytest
import torch
import zoo
from harness import assert_same, ours, run, seeded
from peft import LoraConfig, PeftModel, get_peft_model


def adapted(name, **config):
    """``name`` with adapters that differ from the zoo's."""
    with seeded(zoo.LORA_SEED):
        options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | config
        model = get_peft_model(zoo.make_module(name).model, LoraConfig(**options))
    return zoo.ENTRIES[name].module(model)


def trained(name, module=None, **options):
    chosen = ours(**({"num_microbatches": 3, "loss_weight": "targets"} | options))
    return run(chosen, module or zoo.make_module(name, lora=True), zoo.make_batches(name), devices=2)


def logits(model, name):
    model.eval()
    with torch.no_grad():
        batch = zoo.make_batches(name, 1)[0]
        return model(**batch).logits


@pytest.mark.parametrize("name", ["qwen3"])
def test_saved_adapters_load_in_plain_peft(name, tmp_path):
    result = trained(name)
    model = result.module.model
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 200_000
    loaded = PeftModel.from_pretrained(zoo.make_module(name).model, tmp_path)
    expected = logits(model, name)
    assert torch.equal(logits(loaded, name), expected)
    untrained = logits(zoo.make_module(name, lora=True).model, name)
    assert not torch.allclose(untrained, expected, atol=1e-2)
    harness.assert_tensors_same(expected, logits(loaded.merge_and_unload(), name), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inputs_that_require_gradients():
    """What trainers switch on for PEFT together with a model's own checkpointing: a hook on the embedding."""
    module = zoo.make_module("llama", lora=True)
    module.model.enable_input_require_grads()
    module.model.base_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = zoo.make_batches("llama")
    plain = run("auto", copy.deepcopy(module), batches)
    assert_same(plain, trained("llama", module))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "of embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    # PEFT keeps the original of a module that is trained as a whole, frozen, beside the copy that is trained.
    "beside a whole module": (
        "bert", {"target_modules": ["query", "value"], "modules_to_save": ["classifier"], "task_type": "SEQ_CLS"},
    ),
    "DoRA": ("llama", {"use_dora": True}),
    "of experts": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind):
    name, options = KINDS[kind]
    module = adapted(name, **options)
    assert_same(run("auto", module, zoo.make_batches(name)), trained(name, module))
