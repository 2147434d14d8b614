"""PEFT models work unchanged: frozen weights travel, adapters alone have gradients and optimizer state."""

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


def logits(model):
    with torch.no_grad():
        return model.eval()(**zoo.make_batches("qwen3", 1)[0]).logits


def test_saved_adapters_load_in_plain_peft(tmp_path):
    model = trained("qwen3").module.model
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 200_000
    loaded = PeftModel.from_pretrained(zoo.make_module("qwen3").model, tmp_path)
    expected = logits(model)
    assert torch.equal(logits(loaded), expected)
    assert not torch.allclose(logits(zoo.make_module("qwen3", lora=True).model), expected, atol=1e-2)
    harness.assert_tensors_same(expected, logits(loaded.merge_and_unload()), rtol=1e-4, atol=1e-4)


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
