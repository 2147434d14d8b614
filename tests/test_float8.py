"""``convert_to_float8``: which layers it takes. That they train as under plain Lightning is in ``test_recipes.py``."""

import sys

import pytest
import torch
from test_recipes import llama
from torch import nn

from lightning_roundpipe.model.quantize import quantize
from lightning_roundpipe.tasks import CausalLM, convert_to_float8


def test_layers_of_sizes_that_gpus_multiply_but_the_output_layer():
    model = llama(intermediate_size=24)
    convert_to_float8(model, "rowwise", emulate=True)
    linear = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    kept = {name for name, kind in linear.items() if kind == "Linear"}
    assert kept == {"lm_head", *(f"model.layers.{i}.mlp.{n}_proj" for i in range(2) for n in ("gate", "up", "down"))}
    assert {linear[name] for name in linear.keys() - kept} == {"Float8Linear"}
    CausalLM(model, lambda named: torch.optim.SGD([p for _, p in named], 0.1))  # which needs the output layer as it was


@pytest.mark.parametrize(
    ("model", "recipe", "message"),
    [
        (llama, "blockwise", "float8.recipe='blockwise' must be one of tensorwise, rowwise"),
        (lambda: llama(hidden_size=24, num_attention_heads=3, num_key_value_heads=3), "rowwise", "has no linear layer"),
    ],
)
def test_refused(model, recipe, message):
    with pytest.raises(ValueError, match=message):
        convert_to_float8(model(), recipe)


def test_packed_weights_are_refused():
    pytest.importorskip("bitsandbytes")
    model = llama(hidden_size=64, intermediate_size=64)
    model = quantize(model, "nf4")
    with pytest.raises(ValueError, match=r"weights are packed.* Set float8=none, or model.quantization=null"):
        convert_to_float8(model)


def test_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(
        ImportError, match="float8=tensorwise needs torchao, which is not installed: pip install torchao"
    ):
        convert_to_float8(llama())
