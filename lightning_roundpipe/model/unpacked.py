"""Packed weights that a stage unpacks once, for all microbatches that it runs.

Otherwise each use of a packed weight unpacks it: in forward, recomputation and backward of every microbatch. Where the
plan says so, a worker keeps what the first use in a stage has unpacked, in memory that the plan counts, and later uses
in the stage read it there. The numbers are the same to the bit, because the copy is what the same operation gave.
A copy that finds no room is made for each use, as without a plan.

The states of a replica's weights refer to its `UnpackedCopies`, so only replicas have any: the user's own modules, and
other models of the process, compute as ever.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

_ALIGNMENT = 256
_COPIES = "_roundpipe_copies"

_MOST_ROWS_IN_REGISTERS = 1536
"""Rows up to which bitsandbytes 0.50 may multiply on a GPU without a copy of the weight, and round otherwise."""

Key = tuple[int, torch.dtype, torch.dtype]
"""Position of a weight in its replica, the format that it is unpacked to, and the format of the copy."""


@dataclass
class Copy:
    """A weight, or the weights of all experts of a layer, unpacked.

    Attributes:
        values: of the whole weight.
        there: which experts of it are unpacked; of another weight, 0 if it is.
    """

    values: Tensor
    there: set[int] = field(default_factory=set)


class UnpackedCopies:
    """The copies that a replica of a layer keeps within a stage.

    Args:
        wanted: the bytes of each copy that the layer's code has asked for, with or without room. Added to.
    """

    def __init__(self, wanted: dict[Key, int]) -> None:
        self._wanted = wanted
        self._room: Tensor | None = None
        self._used = 0
        self._made: dict[Key, Copy] = {}

    @property
    def is_open(self) -> bool:
        return self._room is not None

    def open(self, room: Tensor | None) -> None:
        """Keep copies in ``room`` (uint8) from now on, and forget those before; None: keep none."""
        self._room, self._used = room, 0
        self._made.clear()

    def find(self, key: Key, shape: Sequence[int]) -> Copy | None:
        """Return the place of a copy, which the caller fills where nothing is there yet; None without room for it."""
        nbytes = math.prod(shape) * key[2].itemsize
        self._wanted[key] = nbytes
        found = self._made.get(key)
        if found is not None or self._room is None:
            return found
        if self._used + nbytes > self._room.numel():
            return None
        place = self._room[self._used : self._used + nbytes]
        self._used += aligned(nbytes)
        made = self._made[key] = Copy(place.view(key[2]).view(*shape))
        return made


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def room_for(wanted: dict[Key, int]) -> int:
    """Return the bytes of all copies that a layer asks for."""
    return sum(map(aligned, list(wanted.values())))  # other workers may add to it meanwhile


def keep_copies(state: Any, copies: UnpackedCopies, position: int) -> None:
    """Have uses of the weight at ``position``, whose ``QuantState`` this is, look for a copy in ``copies``."""
    _see_products()
    setattr(state, _COPIES, (copies, position))


def find_copy(state: Any, via: torch.dtype, dtype: torch.dtype) -> Copy | None:
    """Return the place of the copy of a weight that is unpacked to ``via`` and then has ``dtype``.

    Args:
        state: the weight's ``QuantState``.
        via: the format that it is unpacked to.
        dtype: the format of the copy.
    """
    copies, position = vars(state).get(_COPIES) or (None, 0)
    return None if copies is None else copies.find((position, via, dtype), state.shape)


@functools.cache
def _see_products() -> None:
    """Replace ``bitsandbytes.matmul_4bit``, by which its modules multiply, by one that knows of copies."""
    bitsandbytes: Any = sys.modules["bitsandbytes"]
    theirs = bitsandbytes.matmul_4bit
    unpacks_to_inputs = hasattr(torch.ops.bitsandbytes, "gemm_4bit")  # since 0.50; before, to the weight's own format

    @functools.wraps(theirs)
    def matmul_4bit(
        x: Tensor, packed: Tensor, quant_state: Any, out: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        copies = None if quant_state is None else vars(quant_state).get(_COPIES)
        if copies is None or out is not None or not _multiplies_with_a_copy(x, quant_state):
            return cast(Tensor, theirs(x, packed, quant_state, out=out, bias=bias))
        via = x.dtype if unpacks_to_inputs else quant_state.dtype
        if copies[0].is_open:
            return _multiply(x, packed, bias, quant_state, via)
        product: Tensor = theirs(x, packed, quant_state, bias=bias)
        find_copy(quant_state, via, x.dtype)
        if product.requires_grad:
            find_copy(quant_state, quant_state.dtype, product.dtype)
        return product

    bitsandbytes.matmul_4bit = matmul_4bit


def _multiplies_with_a_copy(x: Tensor, state: Any) -> bool:
    """Return whether bitsandbytes multiplies ``x`` with an unpacked copy of the weight, by ``linear``."""
    if len(state.shape) != 2 or x.shape[-1] != state.shape[1] or not x.numel():
        return False
    if getattr(state, "packing_format_for_cpu", False) or (state.nested and state.state2.blocksize != 256):
        return False
    return x.device.type == "cpu" or x.numel() // x.shape[-1] > _MOST_ROWS_IN_REGISTERS


class _Product(torch.autograd.Function):
    """What ``bitsandbytes.autograd.MatMul4Bit`` computes, with copies that are kept."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, state: Any, via: torch.dtype) -> Tensor:
        ctx.packed, ctx.state, ctx.bias_dtype = packed.detach(), state, None if bias is None else bias.dtype
        return functional.linear(x, _unpacked(packed, state, via, x.dtype), bias)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        of_x = of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            of_x = torch.matmul(grad, _unpacked(ctx.packed, ctx.state, ctx.state.dtype, grad.dtype))
        return of_x, None, of_bias, None, None


_multiply: Callable[..., Tensor] = _Product.apply


def _unpacked(packed: Tensor, state: Any, via: torch.dtype, dtype: torch.dtype) -> Tensor:
    found = find_copy(state, via, dtype)
    if found is not None and found.there:
        return found.values
    values = _unpack(packed, state, via).to(dtype)
    if found is None:
        return values
    found.values.copy_(values)
    found.there.add(0)
    return found.values


def _unpack(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    if dtype is not state.dtype:
        state = copy.copy(state)
        state.dtype = dtype
    return dequantize_4bit(packed.view(-1, 1), state)
