"""Packs one weight into four or eight bits, piece by piece, into the bytes that bitsandbytes makes of the whole weight.

On a CPU, bitsandbytes computes with PyTorch's operations on the whole weight, which takes 14 bytes for each of its
elements: seven times the weight in 16 bits. Blocks and rows are independent of each other, so pieces give the same
bytes, and only one piece at a time takes that memory. PyTorch's operations use all cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn

BLOCK = 64
"""Elements that share a scale in four bits, as bitsandbytes and QLoRA have it."""

NESTED_BLOCK = 256
"""Scales that share a scale of their own, where scales are quantised too."""

_PIECE = 1 << 19
"""Elements of a piece for each core: they stay in its cache."""


class UnfitModelError(ValueError):
    """A model that cannot be packed or read as asked, although its files are whole."""


class BrokenWeightsError(ValueError):
    """Files of packed weights that lack some of what unpacks them, or have it in another size."""


def pack_4bit(weight: Tensor, kind: str, double: bool, module: nn.Module | None = None) -> nn.Parameter:
    """Return ``weight`` as bitsandbytes' ``Params4bit``.

    Args:
        weight: in 16 or 32 bits, with any number of dimensions.
        kind: ``"nf4"`` or ``"fp4"``.
        double: quantise the scales too.
        module: the ``Linear4bit`` that the weight is for.
    """
    functional, params = _bitsandbytes()
    flat = weight.detach().contiguous().view(-1)
    packed = torch.empty((flat.numel() + 1) // 2, 1, dtype=torch.uint8)
    scales = torch.empty(-(-flat.numel() // BLOCK), dtype=torch.float32)
    size = _PIECE * torch.get_num_threads()
    for start in range(0, flat.numel(), size):
        piece = flat[start : start + size]
        bytes_of_it, scales_of_it = torch.ops.bitsandbytes.quantize_4bit.default(piece, BLOCK, kind, torch.uint8)
        packed[start // 2 :][: len(bytes_of_it)] = bytes_of_it
        scales[start // BLOCK :][: len(scales_of_it)] = scales_of_it
    nested: dict[str, Any] = {}
    if double:
        offset = scales.mean()
        scales, state = functional.quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
        nested = {"offset": offset, "state2": state}
    state = functional.QuantState(
        absmax=scales,
        shape=weight.shape,
        dtype=weight.dtype,
        blocksize=BLOCK,
        code=functional.get_4bit_type(kind, device="cpu"),
        quant_type=kind,
        **nested,
    )
    made: nn.Parameter = params.Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK,
        compress_statistics=double,
        quant_type=kind,
        module=module,
        bnb_quantized=True,
    )
    if module is not None:
        cast(Any, module).quant_state = state
    return made


def shape_to_unpack(shape: Sequence[int], block: int) -> Sequence[int]:
    """Return the shape in which bitsandbytes unpacks a weight of ``shape`` correctly, on every device.

    On CPUs with AVX-512 it begins each row with a scale of its own, also where blocks run on from row to row
    (bitsandbytes 0.50: rows of 96 in blocks of 64 get scales of other weights).
    """
    return shape if shape[-1] % block == 0 else (math.prod(shape),)


def pack_8bit(weight: Tensor) -> nn.Parameter:
    """Return a matrix as bitsandbytes' ``Int8Params``: each row has a scale."""
    functional, params = _bitsandbytes()
    weight = weight.detach()
    packed = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32)
    rows = max(1, _PIECE * torch.get_num_threads() // weight.shape[1])
    for start in range(0, len(weight), rows):
        piece = weight[start : start + rows].contiguous().to(torch.float16)
        packed[start : start + rows], scales[start : start + rows], _ = functional.int8_vectorwise_quant(piece)
    made: nn.Parameter = params.Int8Params(packed, requires_grad=False, CB=packed, SCB=scales)
    return made


def _bitsandbytes() -> tuple[Any, Any]:
    """Return its modules of functions and of parameters: the package is optional."""
    return import_module("bitsandbytes.functional"), import_module("bitsandbytes.nn")
