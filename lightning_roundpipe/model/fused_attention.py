"""Attention without masks of length x length, for Hugging Face's models: sliding windows, sinks and packed documents.

PyTorch's attention computes causal attention in a fused kernel, whose memory grows with the length. For a window, for
documents of a packed row and for padding, Hugging Face gives it a mask of length x length for each row, and models with
sinks compute all scores. `NAME` is an implementation for Hugging Face's attention interface that needs neither:

    a document, or what stands between padding ── a causal product of its own ── [1]
    a window ── blocks as long as the window, each with the block before it and one small mask; backward computes each
    group of blocks again, so that nothing of them is kept ── [2]
    a sink ── a first token that all see, with the sink as its score and zeros as its value ── [3]

Numbers are those of the same attention with masks, to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lightning_roundpipe.model.packed_rows import base_model

NAME = "roundpipe"
"""Of the implementation, as Hugging Face's ``attn_implementation``."""
_GROUP = 4096
"""Tokens, or one block of a window: blocks that are computed at once."""
_MULTIPLE = 8
"""Fused kernels take heads whose size is a multiple of this."""
_KNOWN = frozenset({"position_ids", "output_attentions", "use_cache", "cache_position", "output_router_logits"})
"""Arguments of attention that change nothing here."""


def attend_without_masks(model: nn.Module, *, packed: bool = False) -> bool:
    """Let ``model`` attend without masks where PyTorch's attention would be given some: windows, sinks, packed rows.

    Args:
        model: a causal language model of Hugging Face, or adapters around one.
        packed: whether rows have documents that do not see each other. Each is then computed on its own, as soon as the
            host knows where it ends, which is worth it in rows of many thousand tokens.

    Returns:
        Whether it does. A model without windows and sinks stays as it is, and so does one whose configuration caps or
        drops scores or has other kinds of layers, or whose attention cannot be exchanged.
    """
    inner = base_model(model)
    implementation = getattr(getattr(inner, "config", None), "_attn_implementation", None)
    if implementation == NAME:
        register()  # in a process that has not made the model
        return True
    if implementation not in ("sdpa", "eager") or not inner._supports_attention_backend:
        return False
    text = inner.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    changed = getattr(text, "attn_logit_softcapping", None) or getattr(text, "attention_dropout", 0.0)
    if changed or not kinds <= {"full_attention", "sliding_attention"}:
        return False
    windows = "sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None) is not None
    if not (packed or windows or any(name.endswith(".sinks") for name, _ in inner.named_parameters())):
        return False
    register()
    inner.set_attn_implementation(NAME)
    return True


def register() -> None:
    """Make `NAME` an ``attn_implementation`` of Hugging Face's models."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, documents)


def documents(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    *,
    device: Any = None,
    use_vmap: bool = False,
    **others: Any,
) -> Tensor | None:
    """Return in place of a mask the number of each token's document; None if there is one.

    Numbers are int32 of shape (rows, 1, 1, tokens): models pass on what has four dimensions as it is.

    A mask function is asked whether a token sees the one before it, which costs a comparison a token. With a cache,
    where queries are few, a real mask is returned.
    """
    assert mask_function is not None
    if use_vmap:
        raise ValueError(
            f"attn_implementation={NAME!r} knows windows and documents, and this model adds masks of its own. Choose "
            "another one, with model.set_attn_implementation('eager')."
        )
    if q_length != kv_length or q_offset != kv_offset:
        mask: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device,
            allow_is_causal_skip=False, **{k: v for k, v in others.items() if k != "allow_is_causal_skip"},
        )  # fmt: skip
        return mask
    rows = torch.arange(batch_size, device=device)[:, None]
    here = torch.arange(1, q_length, device=device)[None]
    heads = torch.zeros_like(rows)
    before, behind = (
        torch.as_tensor(mask_function(rows, heads, one, other), device=device).expand(batch_size, q_length - 1)
        for one, other in ((here, here - 1), (here - 1, here))
    )
    begins = F.pad(~before, (1, 0))
    if attention_mask is not None:
        given = attention_mask[:, -kv_length:].to(torch.bool)
        begins[:, 1:] |= given[:, 1:] != given[:, :-1]
    several, ahead = torch.stack([begins.any(), behind.any()]).tolist()
    if ahead:
        raise ValueError(
            f"attn_implementation={NAME!r} is causal, and this model looks ahead. Choose another one, with "
            "model.set_attn_implementation('eager')."
        )
    return begins.cumsum(1, dtype=torch.int32)[:, None, None] if several else None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend from each token to those before it, itself included.

    Args:
        module: whose attention it is.
        query: of shape (rows, heads, tokens, size).
        key, value: the same, with as many heads or a part of them.
        attention_mask: `documents` of the rows, a mask where queries are fewer than keys, or None.
        scaling: of scores; None: one by the square root of the size.
        dropout: must be 0.
        sliding_window: how many tokens each one sees, itself included; None: all.
        s_aux: sinks, a score for each head.
        is_causal: must not be false.

    Returns:
        Outputs of shape (rows, tokens, heads, size), and no weights.

    Raises:
        ValueError: the model's attention does something else, such as capping scores.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    more = [name for name, given in others.items() if name not in _KNOWN and given is not None and given is not False]
    if not causal or dropout or more:
        what = f"takes {more[0]}" if more else "drops weights" if dropout else "looks ahead"
        raise ValueError(
            f"attn_implementation={NAME!r} cannot stand for the attention of {type(module).__name__}, which {what}. "
            "Choose another one, with model.set_attn_implementation('eager')."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    size, device = value.shape[-1], query.device.type
    if torch.is_autocast_enabled(device):  # which is off in backward, and rotated queries and keys are in fp32
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    if s_aux is not None:
        query, key, value = _with_sinks(query, key, value, s_aux, scale)
    how = _How(scale, sliding_window, s_aux is not None)
    if attention_mask is None:
        found = _one_document(query, key, value, how)
    elif attention_mask.dtype is torch.int32:
        found = _by_documents(query, key, value, attention_mask[:, 0, 0], how)
    else:
        found = _masked(query, key, value, attention_mask[..., : key.shape[2]], how)
    return found[..., :size].transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class _How:
    """What all tokens have in common.

    Attributes:
        scale: of scores.
        window: tokens that each one sees; None: all before it.
        sink: whether the last number of a query is the score of its sink.
    """

    scale: float
    window: int | None
    sink: bool


def _by_documents(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, how: _How) -> Tensor:
    """Each document of each row on its own [1]."""
    rows = []
    for row, of_row in enumerate(numbers.tolist()):
        lengths = [len(list(same)) for _, same in itertools.groupby(of_row)]
        parts = (torch.split(t[row : row + 1], lengths, 2) for t in (query, key, value))
        rows.append(torch.cat([_one_document(q, k, v, how) for q, k, v in zip(*parts, strict=True)], 2))
    return torch.cat(rows)


def _one_document(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    if how.window is not None and query.shape[2] > how.window:
        found: Tensor = _Windowed.apply(query, key, value, how)  # type: ignore[no-untyped-call]
        return found
    return _causal(query, key, value, how)


def _causal(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    if not how.sink:
        return _product(query, key, value, how.scale, causal=True)
    with_first = (F.pad(query, (0, 0, 1, 0)), *_behind_sink(key, value))  # whatever the first token asks
    return _product(*with_first, how.scale, causal=True)[:, :, 1:]


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: _How) -> Tensor:
    if how.sink:
        key, value = _behind_sink(key, value)
        mask = F.pad(mask, (1, 0), value=True)
    return _product(query, key, value, how.scale, mask)


def _product(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


# -- windows


class _Windowed(torch.autograd.Function):
    """Attention to a window, group after group [2]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(query, key, value)
        found = torch.empty_like(query)
        for here, seen in _groups(query.shape[2], how.window or 0):
            found[:, :, here] = _group(query[:, :, here], key[:, :, seen], value[:, :, seen], how)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        of_query = torch.empty_like(query)
        of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
        for here, seen in _groups(query.shape[2], ctx.how.window):
            q, k, v = (t.detach().requires_grad_() for t in (query[:, :, here], key[:, :, seen], value[:, :, seen]))
            with torch.enable_grad():
                found = _group(q, k, v, ctx.how)
            made = torch.autograd.grad(found, (q, k, v), gradient[:, :, here])
            of_query[:, :, here] = made[0]
            of_key[:, :, seen] += made[1]
            of_value[:, :, seen] += made[2]
        return of_query, of_key, of_value, None


def _groups(length: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Yield which tokens are computed at once and which they see: the first block, then whole blocks, then the rest."""
    yield slice(0, window), slice(0, window)
    size = max(1, _GROUP // window) * window
    whole = length // window * window
    for start in range(window, whole, size):
        yield slice(start, min(start + size, whole)), slice(start - window, min(start + size, whole))
    if whole < length:
        yield slice(whole, length), slice(whole - window, length)


def _group(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """Blocks of a window, each with the block before it; or, where there is none, as many keys as queries."""
    window, length = how.window, query.shape[2]
    assert window is not None
    if key.shape[2] == length:
        return _causal(query, key, value, how)
    rows, block = query.shape[0], min(window, length)
    heads = query.shape[1] // key.shape[1]
    query = query.reshape(rows, -1, length // block, block, query.shape[-1]).transpose(1, 2).flatten(0, 1)
    key, value = (  # each head's own, since kernels that take masks know no shared ones
        t.unfold(2, window + block, block).permute(0, 2, 1, 4, 3).flatten(0, 1).repeat_interleave(heads, 1)
        for t in (key, value)
    )
    queries, keys = torch.arange(block, device=query.device)[:, None], torch.arange(window + block, device=query.device)
    found = _masked(query, key, value, (keys > queries) & (keys <= queries + window), how)
    return found.reshape(rows, length // block, *found.shape[1:]).transpose(1, 2).flatten(2, 3)


# -- sinks


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Give each query its sink's score as a last number, and fill up to a size that kernels take [3]."""
    rows, heads, length, size = query.shape
    score = (sinks.to(query.dtype) / scale).view(1, heads, 1, 1).expand(rows, heads, length, 1)
    more = -(size + 1) % _MULTIPLE
    return torch.cat([F.pad(query, (0, more)), score], -1), F.pad(key, (0, more + 1)), F.pad(value, (0, more + 1))


def _behind_sink(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Put the token that stands for the sink in front, whose key takes a query's last number as it is."""
    first = F.pad(key.new_ones(()).expand(*key.shape[:2], 1, 1), (key.shape[-1] - 1, 0))
    return torch.cat([first, key], 2), F.pad(value, (0, 0, 1, 0))
