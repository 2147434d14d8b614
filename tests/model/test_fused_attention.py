"""Attention without masks gives what Hugging Face's own gives with them, in models that have windows or sinks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from lightning_roundpipe.model import fused_attention
from lightning_roundpipe.model.fused_attention import NAME, attend_without_masks, documents, register
from lightning_roundpipe.model.packed_rows import document_masks

USUAL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 2, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
MODELS: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**USUAL, sliding_window=4),
    "qwen3": Qwen3Config(**USUAL, **WINDOWS, use_sliding_window=True),
    "gemma3": Gemma3TextConfig(**USUAL, **WINDOWS),
    "gpt_oss": GptOssConfig(**USUAL, **WINDOWS, num_local_experts=4, num_experts_per_tok=2),
}


def model_of(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        copy.deepcopy(config), experts_implementation="eager"
    ).double()  # grouped: no fp64


def padded(length: int) -> dict[str, Tensor]:
    """Two rows, one with padding to the left and one with padding to the right."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :3], mask[1, -2:] = 0, 0
    return {"attention_mask": mask}


def packed(length: int) -> dict[str, Tensor]:
    """Two rows of documents whose lengths have nothing to do with the window."""
    first = torch.cat([torch.arange(n) for n in (5, 1, length - 6)])
    return {"position_ids": torch.stack([first, torch.arange(length)])}


def numbers(model: nn.Module, given: dict[str, Tensor], length: int, *, masked: bool) -> list[Tensor]:
    """The logits of tokens that are there, and all gradients. ``masked``: documents are kept apart by masks."""
    model.zero_grad()
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(1))
    there = given.get("attention_mask", torch.ones(2, length)).bool()
    masks = {"attention_mask": document_masks(model, given["position_ids"])} if masked else {}
    logits = model(input_ids=ids, **given, **masks, use_cache=False).logits[there]
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("rows", ["whole", "padded", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_attention_with_masks(name: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "_GROUP", 8)  # several groups, of two blocks each
    length = 23
    given = {"whole": {}, "padded": padded(length), "packed": packed(length)}[rows]
    model, masked = model_of(MODELS[name]), rows == "packed"
    with_masks = numbers(model, given, length, masked=masked)
    assert attend_without_masks(model)
    without = numbers(model, given, length, masked=masked)
    for one, other in zip(with_masks, without, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_under_autocast(name: str) -> None:
    """Rotated queries and keys are in fp32, values are not, and backward runs without autocast."""
    model, found = model_of(MODELS[name]).float(), []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(numbers(model, {}, 23, masked=False))
        assert attend_without_masks(model)
    norms = [torch.cat([t.float().flatten() for t in tensors]) for tensors in found]
    assert float((norms[0] - norms[1]).norm() / norms[0].norm()) < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_generated_text_is_the_same(name: str) -> None:
    model = model_of(MODELS[name]).eval()
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": padded(9)["attention_mask"], "max_new_tokens": 8, "do_sample": False}
    given["attention_mask"][1, -2:] = 1
    expected = model.generate(**given)
    assert attend_without_masks(model)
    assert torch.equal(model.generate(**given), expected)


def test_models_that_need_no_masks_stay_as_they_are() -> None:
    for config in (LlamaConfig(**USUAL), Gemma2Config(**USUAL, **WINDOWS)):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        before = model.config._attn_implementation
        assert not attend_without_masks(model)
        assert model.config._attn_implementation == before


def test_twice_is_as_once() -> None:
    model = model_of(MODELS["mistral"])
    assert attend_without_masks(model) and attend_without_masks(model)


def test_no_tensor_is_as_large_as_a_mask() -> None:
    """Neither in forward nor in what the graph keeps."""
    length, sizes = 512, []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[name-defined]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))
            return out

    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS["gpt_oss"]))
    ids = torch.randint(1, 64, (1, length))
    for implementation, quadratic in (("eager", True), (NAME, False)):
        register()
        model.set_attn_implementation(implementation)
        sizes.clear()
        with Sizes():
            model(input_ids=ids, use_cache=False).logits.mean().backward()
        assert (max(sizes) >= length * length) == quadratic


def test_what_it_does_not_know_is_refused() -> None:
    register()
    model = AutoModelForCausalLM.from_config(Gemma2Config(**USUAL, **WINDOWS))
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="cannot stand for the attention of Gemma2Attention, which takes softcap"):
        model(input_ids=torch.ones(1, 9, dtype=torch.long))

    def ahead(rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return keys < queries + 2

    with pytest.raises(ValueError, match="looks ahead"):
        documents(1, 4, 4, mask_function=ahead)
    with pytest.raises(ValueError, match="masks of its own"):
        documents(1, 4, 4, mask_function=ahead, use_vmap=True)
