"""Which modules become layers."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_roundpipe.model.layers import find_layers
from lightning_roundpipe.model.replica import ModuleState, Replica


class Holder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def names(model: nn.Module, requested: list[str | type] | None = None) -> list[str]:
    return [n.removeprefix("model.") for n in find_layers(Holder(model), requested)]


def test_llama() -> None:
    assert names(llama()) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]


def test_adapters_change_nothing() -> None:
    """Also around a plain layer: its adapters travel with it."""
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    found = names(model)
    assert [n.removeprefix("base_model.model.") for n in found] == names(llama())


def test_encoders_and_decoders() -> None:
    bert = BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )
    assert names(bert) == [
        "bert.embeddings",
        "bert.encoder.layer.0",
        "bert.encoder.layer.1",
        "bert.pooler",
        "classifier",
    ]
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2))
    assert {"shared", "encoder.block.1", "decoder.block.0", "lm_head"} <= set(names(t5))


def test_repeated_children_of_a_plain_model() -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]


def test_an_ordinary_cnn_does_not_become_hundreds_of_layers() -> None:
    def block(i: int, o: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(i, o, 3), nn.BatchNorm2d(o), nn.ReLU()) for _ in range(4)))

    stages = [nn.Sequential(*(block(2**i, 2**i) for _ in range(3))) for i in range(2, 6)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *stages, nn.Flatten(), nn.Linear(32, 5))
    assert len(names(model)) <= 20 < len([m for m in model.modules() if not list(m.children())])


def test_requested_layers() -> None:
    model = llama()
    mlp = type(model.model.layers[0].mlp)
    found = names(model, [mlp])
    assert "model.layers.0.mlp" in found and "model.layers.0" not in found and "lm_head" in found
    assert names(model, ["LlamaMLP"]) == found
    assert "model.model" in find_layers(Holder(model), ["model.model"])
    with pytest.raises(ValueError, match=r"(?s)layers='Nonsense'.*LlamaDecoderLayer"):
        names(model, ["Nonsense"])


def test_nothing_to_move() -> None:
    with pytest.raises(ValueError, match=r"self\.model"):
        find_layers(Holder(nn.ReLU()))


# ----------------------------------------------------------------------------------------------------------- copies


class Odd(nn.Module):
    """Holds its own parts in the ways that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.config = {"shared": object()}
        self.method = self.helper
        self.parts = [self.inner, "text"]
        self.weights = [self.inner.weight]

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(x)


def test_a_copy_refers_to_its_own_parts_and_shares_the_rest() -> None:
    layer = Odd()
    copy = Replica(layer, torch.device("cpu"))
    inside = copy.module
    assert inside.inner is not layer.inner and inside.method.__self__ is inside
    assert inside.parts == [inside.inner, "text"] and inside.weights[0] is copy.parameters[0]
    assert inside.config is layer.config
    copy.bind([torch.full_like(p, 2.0) for p in layer.parameters()], [True, True])
    assert inside(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]


def test_attributes_hold_for_a_call_and_again_for_its_recomputation() -> None:
    layer = Odd()
    copy, state = Replica(layer, torch.device("cpu")), ModuleState("layer", layer)
    layer.eval()
    layer.inner.flag = 1
    then = state.current()
    assert state.current() is then
    layer.train()
    del layer.inner.flag
    now = state.current()
    copy.apply(now)
    assert copy.module.training and not hasattr(copy.module.inner, "flag")
    copy.apply(then)
    assert not copy.module.training and copy.module.inner.flag == 1
    copy.apply(None)
    assert copy.module.training and not hasattr(copy.module.inner, "flag")
