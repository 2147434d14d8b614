"""Packs one weight into four or eight bits with bitsandbytes, piece by piece.

On a CPU, bitsandbytes takes 14 bytes for each element of the weight that it packs: seven times the weight in 16 bits.
Blocks and rows are independent of each other, so pieces give the same bytes, and only one piece at a time takes that
memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64
"""Elements that share a scale in four bits, as bitsandbytes and QLoRA have it."""

_NESTED_BLOCK = 256
"""Scales that share a scale of their own, where scales are quantised too."""

_PIECE = 1 << 19
"""Elements of a piece for each core: they stay in its cache."""


class UnfitModelError(ValueError):
    """A model that cannot be packed or read as asked, although its files are whole."""


def pack_4bit(weight: Tensor, kind: str, double: bool, module: nn.Module | None = None) -> nn.Parameter:
    """Return ``weight`` as bitsandbytes' ``Params4bit``.

    Args:
        weight: in 16 or 32 bits, with any number of dimensions.
        kind: ``"nf4"`` or ``"fp4"``.
        double: quantise the scales too.
        module: the ``Linear4bit`` that the weight is for.
    """
    functional: Any = import_module("bitsandbytes.functional")
    params: Any = import_module("bitsandbytes.nn").Params4bit
    pieces = torch.split(weight.detach().contiguous().view(-1), _PIECE * torch.get_num_threads())
    packed = [functional.quantize_4bit(piece, blocksize=BLOCK, quant_type=kind) for piece in pieces]
    state = packed[-1][1]
    state.shape, state.absmax = weight.shape, torch.cat([of_piece.absmax for _, of_piece in packed])
    if double:  # over all scales at once: their mean is one number
        state.nested, state.offset = True, state.absmax.mean()
        state.absmax, state.state2 = functional.quantize_blockwise(state.absmax - state.offset, blocksize=_NESTED_BLOCK)
    stored = torch.cat([data for data, _ in packed])
    made: nn.Parameter = params(
        stored, quant_state=state, compress_statistics=double, quant_type=kind, module=module, bnb_quantized=True
    )
    if module is not None:
        module.quant_state = state
    return made


def pack_8bit(weight: Tensor) -> nn.Parameter:
    """Return a matrix as bitsandbytes' ``Int8Params``: each row has a scale."""
    functional: Any = import_module("bitsandbytes.functional")
    rows = max(1, _PIECE * torch.get_num_threads() // weight.shape[1])
    pieces = [functional.int8_vectorwise_quant(part.contiguous().half()) for part in torch.split(weight.detach(), rows)]
    packed, scales = (torch.cat([piece[i] for piece in pieces]) for i in range(2))
    made: nn.Parameter = import_module("bitsandbytes.nn").Int8Params(packed, requires_grad=False, CB=packed, SCB=scales)
    return made


def shape_to_unpack(shape: Sequence[int], block: int) -> Sequence[int]:
    """Return the shape in which bitsandbytes unpacks a weight of ``shape`` correctly, on every device.

    On CPUs with AVX-512 it begins each row with a scale of its own, also where blocks run on from row to row
    (bitsandbytes 0.50: rows of 96 in blocks of 64 get scales of other weights).
    """
    return shape if shape[-1] % block == 0 else (math.prod(shape),)
