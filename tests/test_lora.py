"""PEFT models work unchanged: frozen weights travel, adapters alone have gradients and optimizer state."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import torch
import zoo
from harness import assert_identical, assert_same, ours, run
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

MODELS = ["llama", "qwen3", "gpt2"]


def adapted(name: str, **config: Any) -> zoo.ZooModule:
    """``name`` with adapters that differ from the zoo's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zoo.LORA_SEED)
        options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | config
        model = get_peft_model(zoo.make_module(name).model, LoraConfig(**options))
    return zoo.ENTRIES[name].module(model)


def trained(name: str, module: zoo.ZooModule | None = None, **options: Any) -> harness.Result:
    chosen = ours(**({"num_microbatches": 3, "loss_weight": "targets"} | options))
    return run(chosen, module or zoo.make_module(name, lora=True), zoo.make_batches(name), devices=2)


def logits(model: nn.Module, name: str) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        batch = zoo.make_batches(name, 1)[0]
        return model(**batch).logits


@functools.cache
def decayed(name: str) -> tuple[zoo.ZooModule, harness.Result]:
    """A module, and what training it with much weight decay gives."""
    module = zoo.make_module(name, lora=True)
    module.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)
    return module, trained(name, module)


@pytest.mark.parametrize("name", MODELS)
def test_only_adapters_have_gradients_and_optimizer_state(name: str) -> None:
    module, result = decayed(name)
    trainable = {key for key, p in module.named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora_" in key for key in trainable)
    for grads in result.grads:
        assert {key for key, grad in grads.items() if grad is not None} == trainable
    assert result.trainer is not None
    assert result.module is not None
    names = {id(p): key for key, p in result.module.named_parameters()}
    optimizer = result.trainer.optimizers[0]
    assert {names[id(p)] for p, state in optimizer.state.items() if state} == trainable
    assert {key for key, p in result.module.named_parameters() if p.requires_grad} == trainable


@pytest.mark.parametrize("name", MODELS)
def test_base_weights_do_not_change_a_bit(name: str) -> None:
    """Not even with weight decay, which would move weights whose gradient is zero instead of absent."""
    module, result = decayed(name)
    before = module.state_dict()
    for key, value in result.state.items():
        assert torch.equal(value, before[key]) == ("lora_" not in key), key


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_saved_adapters_load_in_plain_peft(name: str, tmp_path: Path) -> None:
    result = trained(name)
    assert result.module is not None
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
def test_adapters_saved_here_equal_those_of_plain_training(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain, own = run("auto", zoo.make_module("qwen3", lora=True), zoo.make_batches("qwen3")), trained("qwen3")
    assert_same(plain, own)
    names = []
    for kind, result in (("plain", plain), ("ours", own)):
        assert result.module is not None
        result.module.model.save_pretrained(tmp_path / kind)
        saved = load_file(tmp_path / kind / "adapter_model.safetensors")
        for name, value in saved.items():
            assert torch.equal(value, result.state[f"model.{name.replace('.weight', '.default.weight')}"]), name
        names.append(sorted(saved))
    assert names[0] == names[1]


@pytest.mark.slow
def test_an_optimizer_on_the_adapters_only() -> None:
    class Filtered(zoo.CausalLM):
        def configure_optimizers(self) -> Any:
            return zoo.sgd(p for p in self.parameters() if p.requires_grad)

    module = Filtered(zoo.make_module("llama", lora=True).model)
    assert_same(run("auto", module, zoo.make_batches("llama")), trained("llama", module))


@pytest.mark.slow
def test_usual_initialisation() -> None:
    """B starts as zero: A has a gradient of zeros then, not none."""
    module = adapted("llama", init_lora_weights=True)
    plain = run("auto", module, zoo.make_batches("llama"))
    assert any(grad is not None and not grad.any() for grad in plain.grads[0].values())
    assert_same(plain, trained("llama", module))


@pytest.mark.parametrize("layers", [[2], [0], [1]])
def test_adapters_in_some_blocks_only(layers: list[int]) -> None:
    """Blocks below the first adapter need no backward at all."""
    module = adapted("llama", layers_to_transform=layers, target_modules=["q_proj", "up_proj"])
    assert_same(run("auto", module, zoo.make_batches("llama")), trained("llama", module))


@pytest.mark.slow
def test_modules_that_are_trained_as_a_whole() -> None:
    """PEFT keeps the original of such a module, frozen, beside the copy that is trained."""
    module = adapted("bert", target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS")
    plain = run("auto", module, zoo.make_batches("bert"))
    assert any("modules_to_save" in key and grad is not None for key, grad in plain.grads[0].items())
    assert_same(plain, trained("bert", module))


def test_adapted_embedding_and_head() -> None:
    module = adapted("llama", target_modules=["embed_tokens", "lm_head", "q_proj"])
    assert_same(run("auto", module, zoo.make_batches("llama")), trained("llama", module))


@pytest.mark.slow
def test_inputs_that_require_gradients() -> None:
    """What trainers switch on for PEFT together with a model's own checkpointing: a hook on the embedding."""
    module = zoo.make_module("llama", lora=True)
    module.model.enable_input_require_grads()
    module.model.base_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = zoo.make_batches("llama")
    plain = run("auto", copy.deepcopy(module), batches)
    assert_same(plain, trained("llama", module))


@pytest.mark.slow
def test_adapter_dropout_does_not_depend_on_workers() -> None:
    module = adapted("qwen3", lora_dropout=0.3)
    batches = zoo.make_batches("qwen3")
    one, four = (run(ours(num_microbatches=3), module, batches, devices=n) for n in (1, 4))
    assert_identical(one, four, rng=True)


@pytest.mark.slow
def test_frozen_weights_travel_up_and_only_adapters_come_down() -> None:
    """Gradients of frozen weights would be ten times what is expected here."""
    full, lora = trained("llama", zoo.make_module("llama")), trained("llama")

    def downloaded(result: harness.Result) -> int:
        assert result.report is not None
        return sum(row["nbytes"] for row in result.report["events"] if row["kind"] == "download_gradients")

    weights = sum(p.numel() * 4 for p in zoo.make_module("llama").parameters())
    assert downloaded(full) - downloaded(lora) > 0.5 * weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"use_dora": True}),
        ("llama", {"use_rslora": True, "lora_alpha": 2}),
        (
            "gpt_oss",
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        ),
    ],
)
def test_kinds_of_adapters(name: str, options: dict[str, Any]) -> None:
    module = adapted(name, **options)
    assert_same(run("auto", module, zoo.make_batches(name)), trained(name, module))


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_frozen_weights_are_in_host_memory_once(staleness: int) -> None:
    """The user's parameters are what uploads read: not even with an update on its way is there a copy of them."""
    strategy = ours(num_microbatches=3, staleness=staleness)
    seen: list[int] = []

    class Look(pl.Callback):
        roundpipe_looks_away = True

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for layer in strategy._engine.model.layers:
                for master in layer.masters:
                    pointers = {master.data_ptr(), layer.read(master).data_ptr()}
                    seen.append(len(pointers) if master.requires_grad == bool(staleness) else 0)
                    assert master.requires_grad or len(pointers) == 1

    run(strategy, zoo.make_module("llama", lora=True), zoo.make_batches("llama"), devices=2, callbacks=[Look()])
    assert set(seen) == ({0, 2} if staleness else {0, 1})
