"""Hugging Face models' own code around layers: masks, positions, rotary tables. Weights are on the device, as layers'
are, and inputs on the host, as the engine leaves them."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    T5ForConditionalGeneration,
)

from lightning_roundpipe.user_code.mode import UserCodeMode
from second_device import backend

HOME = torch.device(backend.NAME, 0)
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": SIZES,
    "gemma2": SIZES | {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
    "bert": SIZES,
    "t5": {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
}
READS = {
    ("bert", "eager"), ("t5", "eager"),
    *((family, "sdpa") for family in ("llama", "gpt2", "bert", "t5")),
}  # fmt: skip
"""Families that read a number of a padded mask on the device, also under plain Lightning."""
READS_POSITIONS = {"llama", "gemma2", "gpt2"}
"""Those that, without a mask, read from positions on the device whether rows are packed, also under plain Lightning."""
EAGER = {"gemma2", "bloom"}
"""Those that have no other attention."""


def _model(family, attention):
    config = AutoConfig.for_model(family, **FAMILIES[family])
    torch.manual_seed(0)
    if family == "t5":
        return T5ForConditionalGeneration(config)
    made = AutoModelForSequenceClassification if family == "bert" else AutoModelForCausalLM
    return made.from_config(config, attn_implementation=attention)


def _inputs(family, masked):
    words = torch.randint(1, 64, (3, 10), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": words, "labels": words % 2 if family != "bert" else words[:, 0] % 2}
    if masked:
        given["attention_mask"] = (torch.arange(10) < torch.tensor([[10], [7], [4]])).long()
    return given


def mode():
    """What is active in user code between layers; host tensors go to ``HOME`` through pinned memory."""

    def host_like(t):
        return torch.empty_like(t, pin_memory=True)

    facade = SimpleNamespace(torch_device=HOME, host_like=host_like, free_after_compute=lambda tensors: None)
    return UserCodeMode(set(), lambda master: master, train=True, accelerator=backend.NAME, devices=[facade])


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("family", "attention"), [(f, a) for f in FAMILIES for a in ("sdpa", "eager") if a == "eager" or f not in EAGER]
)
def test_masks(family, attention, masked, request):
    if masked and (family, attention) in READS:
        request.applymarker(pytest.mark.xfail(reason="transformers reads the mask on the device", strict=True))
    if not masked and family in READS_POSITIONS:
        request.applymarker(pytest.mark.xfail(reason="transformers reads positions on the device", strict=True))
    model, given = _model(family, attention).eval(), _inputs(family, masked)
    options = {} if family == "bert" else {"use_cache": False}
    expected = model(**given, **options)
    there = copy.deepcopy(model).to(HOME)
    with mode(), backend.waits() as waits:
        result = there(**given, **options)
    assert waits == [], "\n".join(sorted({str(wait)[:400] for wait in waits}))
    assert result.logits.device == HOME
    torch.testing.assert_close(result.logits.cpu(), expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.loss.cpu(), expected.loss, rtol=1e-4, atol=1e-5)
