"""Masks that keep the documents of a packed row apart in a causal language model of Hugging Face.

Position ids that begin again with each document say where documents begin. Most models make their attention masks from
them, some do not, and nothing in a model's class or configuration says which. So every model is given masks, which
transformers makes for its configuration and its attention.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import masking_utils

_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers that read nothing of a row but what their mask lets them see."""
_REMEDY = "Set data.rows=padded, or data.rows=joined if documents may see what stands before them."


def check_packed_rows(model: nn.Module) -> None:
    """Raise if masks cannot keep the documents of a packed row apart in ``model``, perhaps with adapters around it.

    Raises:
        ValueError: the model takes no ``position_ids`` or no masks, or its layers read rows in another way.
    """
    base = base_model(model)
    config, name = base.config.get_text_config(), type(base).__name__
    implementation = str(getattr(base.config, "_attn_implementation", ""))
    if implementation.startswith("flash_attention"):
        raise ValueError(
            f"attn_implementation={implementation} takes no masks of documents, so those of a packed row would see "
            "each other. Set attn_implementation=flex_attention, which needs no large masks either, or sdpa; or "
            "data.rows=padded."
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS)
    if base._is_stateful or others:
        what = f"layers of kind {', '.join(others)}" if others else "layers with a state"
        raise ValueError(f"documents of a packed row see each other in {name}: it has {what}. {_REMEDY}")
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ValueError(f"documents of a packed row see each other in {name}: it takes no position_ids. {_REMEDY}")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"the routers' loss of {name} takes no masks of documents. Set output_router_logits=False in the model's "
            "configuration, or data.rows=padded."
        )


def document_masks(model: nn.Module, position_ids: Tensor) -> Any:
    """Return the masks that keep documents apart, as ``attention_mask`` of a causal language model of Hugging Face.

    Args:
        position_ids: of shape (rows, tokens); each document begins with 0.

    Returns:
        A mask of shape (rows, 1, tokens, tokens), or one for each kind of layer by its name; None or another form where
            the attention's implementation takes it.
    """
    base = base_model(model)
    # Only its first two dimensions, its dtype and its device are looked at.
    embedded = position_ids.new_empty((*position_ids.shape, 0), dtype=base.get_input_embeddings().weight.dtype)
    return masking_utils.create_masks_for_generate(base.config, embedded, None, None, position_ids)


def base_model(model: nn.Module) -> Any:
    """Return the model inside adapters."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner
