"""Keeps documents of a packed row apart in a causal language model of Hugging Face.

Position ids that begin again with each document tell such a model where documents begin. Most models make their
attention masks from them, some do not: there, each document attends to all that stand before it in the row. What a
model does is found by trying it, because nothing in its configuration says so.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

LENGTH = 16
"""Tokens of each of the two documents that a model is tried with."""


def masks_needed(model: nn.Module) -> bool:
    """Return whether ``model`` keeps documents of a packed row apart only if it is given masks (`document_masks`).

    The model runs on one row of 32 tokens and on the half of it, with the first layer of each kind only.

    Args:
        model: a causal language model, or adapters around one, on the host.

    Raises:
        ValueError: the model does not keep them apart in either way.
    """
    name = type(base_model(model)).__name__
    implementation = str(getattr(base_model(model).config, "_attn_implementation", ""))
    if implementation.startswith("flash_attention"):
        raise ValueError(
            f"attn_implementation={implementation} keeps documents of packed rows apart only where a microbatch is a "
            "single row: several rows would see what stands before them, without a word. Set "
            "attn_implementation=roundpipe, which needs no masks either, or sdpa; or data.rows=padded."
        )
    try:
        if not _mixes(model, masked=False):
            return False
    except TypeError as error:
        raise ValueError(
            f"{name} takes no position_ids ({error}), so it cannot tell the documents of a packed row apart. "
            "Set data.rows=padded, or data.rows=joined if documents may see what stands before them."
        ) from error
    with contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError):  # it takes no such masks
        if not _mixes(model, masked=True):
            return True
    raise ValueError(
        f"documents of a packed row see each other in {name}: it makes no mask from position_ids, and takes none. Set "
        "data.rows=padded, or data.rows=joined if documents may see what stands before them."
    )


def document_masks(model: nn.Module, position_ids: Tensor) -> Any:
    """Return the masks that keep documents apart, as ``attention_mask`` of ``model``.

    Args:
        model: a causal language model of Hugging Face.
        position_ids: of shape (rows, tokens); each document begins with 0.

    Returns:
        A mask of shape (rows, 1, tokens, tokens), or one for each kind of layer by its name; None or another form where
        the attention's implementation takes it.
    """
    base, given = base_model(model), inspect.signature(masking_utils.create_masks_for_generate).parameters
    dtype = base.get_input_embeddings().weight.dtype
    settings: dict[str, Any] = {
        "config": base.config,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids,
        # Only its first two dimensions, its dtype and its device are looked at.
        "inputs_embeds" if "inputs_embeds" in given else "input_embeds": position_ids.new_empty(
            (*position_ids.shape, 0), dtype=dtype
        ),
    }
    if "cache_position" in given:
        settings["cache_position"] = torch.arange(position_ids.shape[1], device=position_ids.device)
    return masking_utils.create_masks_for_generate(**settings)


def base_model(model: nn.Module) -> Any:
    """Return the model inside adapters."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _mixes(model: nn.Module, *, masked: bool) -> bool:
    """Return whether the second document has other logits beside the first one than alone."""
    row = some_tokens(model, (1, 2 * LENGTH))
    positions = torch.arange(LENGTH).repeat(2)[None]
    both: dict[str, Any] = {"input_ids": row, "position_ids": positions}
    alone: dict[str, Any] = {"input_ids": row[:, LENGTH:], "position_ids": positions[:, LENGTH:]}
    if masked:
        both["attention_mask"] = document_masks(model, positions)

    with _written_out(model):
        beside, by_itself = (logits[0, -LENGTH:].float() for logits in logits_of_few_layers(model, both, alone))
    return bool((beside - by_itself).abs().max() > rounding(model, by_itself))


def some_tokens(model: nn.Module, shape: tuple[int, int]) -> Tensor:
    """Return tokens that ``model`` knows, the same ones each time."""
    vocabulary = min(1000, base_model(model).get_input_embeddings().weight.shape[0])
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_of_few_layers(model: nn.Module, *batches: dict[str, Any]) -> list[Tensor]:
    """Return the logits of ``batches``, with the first layer of each kind only, as a large model takes minutes here."""
    with _evaluating(model):
        try:
            with _few_layers(base_model(model)):
                return [model(**batch, use_cache=False).logits for batch in batches]
        except (IndexError, ValueError, KeyError):  # the model counts its layers
            return [model(**batch, use_cache=False).logits for batch in batches]


def rounding(model: nn.Module, logits: Tensor) -> float:
    """Return by how much ``logits`` of ``model`` may differ where they are computed in another way."""
    lowest = base_model(model).get_input_embeddings().weight.dtype
    return max(1e-4, 8 * torch.finfo(lowest).eps) * float(logits.abs().max())


@contextlib.contextmanager
def _written_out(model: nn.Module) -> Iterator[None]:
    """With eager attention in place of `flex_attention`, for which the same functions make the masks.

    On a CPU, torch 2.13 compiles `flex_attention` with errors, or for some lengths to garbage.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    flexible = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == "flex_attention"]
    for config in flexible:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config in flexible:
            config._attn_implementation = "flex_attention"


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; modules get their modes back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _few_layers(model: nn.Module) -> Iterator[None]:
    """Leave out the layers after the first of each kind."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    kinds = getattr(config, "layer_types", None) or []
    count = max((list(kinds).index(kind) + 1 for kind in set(kinds)), default=1)
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    stacks = [stack for stack in stacks if len(stack) == getattr(config, "num_hidden_layers", 0) > count]
    left_out = [(stack, dict(stack._modules)) for stack in stacks]
    for stack in stacks:
        stack._modules = {key: module for key, module in stack._modules.items() if int(key) < count}
    try:
        yield
    finally:
        for stack, modules in left_out:
            stack._modules = modules
