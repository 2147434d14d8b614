"""Weights in four bits that a stage unpacks once, for all microbatches that it runs.

Otherwise each use of a packed weight unpacks it: in forward, recomputation and backward of every microbatch. Where the
plan says so, a worker keeps what the first use in a stage has unpacked, in memory that the plan counts, and later uses
in the stage read it there. The numbers are the same to the bit, because the copy is what the same operation gave.
A copy that finds no room is made for each use, as without a plan.

The state of a replica's weight refers to its `UnpackedCopies`, and linear layers of replicas are of a class that looks
for them. The user's own modules and other models of the process are those of bitsandbytes.
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
from torch import Tensor, nn
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
    """The ``values`` of a weight, and which experts of it are unpacked (``there``); of another weight, 0 if it is."""

    values: Tensor
    there: set[int] = field(default_factory=set)


class UnpackedCopies:
    """The copies that a replica of a layer keeps within a stage. ``wanted``: the bytes of each that was asked for."""

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
        nbytes = self._wanted[key] = math.prod(shape) * key[2].itemsize
        found = self._made.get(key)
        if found is not None or self._room is None or self._used + nbytes > self._room.numel():
            return found
        place = self._room[self._used : self._used + nbytes]
        self._used += _aligned(nbytes)
        made = self._made[key] = Copy(place.view(key[2]).view(*shape))
        return made


def room_for(wanted: dict[Key, int]) -> int:
    """Return the bytes of all copies that a layer asks for."""
    return sum(map(_aligned, list(wanted.values())))  # other workers may add to it meanwhile


def keep_copies(state: Any, copies: UnpackedCopies, position: int) -> None:
    """Have uses of the weight at ``position`` of its replica, whose ``QuantState`` is ``state``, look for a copy."""
    setattr(state, _COPIES, (copies, position))


def find_copy(state: Any, via: torch.dtype, dtype: torch.dtype) -> Copy | None:
    """Return the place of the copy of a weight that is unpacked to ``via`` and then has ``dtype``."""
    copies, position = vars(state).get(_COPIES) or (None, 0)
    return None if copies is None else copies.find((position, via, dtype), state.shape)


def class_in_replica(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` in a replica: for linear layers in four bits, one that looks for copies."""
    kind: Any = type(module)
    linear = getattr(sys.modules.get("bitsandbytes.nn"), "Linear4bit", None)
    if linear is None or not issubclass(kind, linear) or kind.forward is not linear.forward:
        return cast(type[nn.Module], kind)
    return _with_copies(kind)


@functools.cache
def _with_copies(kind: Any) -> type[nn.Module]:
    class WithCopies(kind):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            state: Any = getattr(self.weight, "quant_state", None)
            copies, _ = (None if state is None else vars(state).get(_COPIES)) or (None, 0)
            inputs: Tensor = x if self.compute_dtype is None else x.to(self.compute_dtype)
            if copies is None or not self.compute_type_is_set or not _reads_a_copy(inputs, state):
                return cast(Tensor, super().forward(x))
            if copies.is_open:
                bias = None if self.bias is None else self.bias.to(inputs.dtype)
                return _multiply(inputs, self.weight, bias, state).to(x.dtype)
            product: Tensor = super().forward(x)
            find_copy(state, inputs.dtype, inputs.dtype)
            if product.requires_grad:
                find_copy(state, state.dtype, autocast_dtype(x.device.type) or inputs.dtype)
            return product

    WithCopies.__name__, WithCopies.__qualname__ = kind.__name__, kind.__qualname__
    return WithCopies


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the format that autocast gives products on devices of this type; None: it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _reads_a_copy(x: Tensor, state: Any) -> bool:
    """Return whether bitsandbytes multiplies ``x`` with an unpacked copy of the weight, by ``linear``."""
    if x.shape[-1] != state.shape[1] or not x.numel() or (state.nested and state.state2.blocksize != 256):
        return False
    return x.device.type == "cpu" or x.numel() // x.shape[-1] > _MOST_ROWS_IN_REGISTERS


class _Product(torch.autograd.Function):
    """What ``bitsandbytes.autograd.MatMul4Bit`` computes, with copies that are kept."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.packed, ctx.state, ctx.bias_dtype = packed.detach(), state, None if bias is None else bias.dtype
        return functional.linear(x, _unpacked(packed, state, x.dtype, x.dtype), bias)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        of_bias = grad.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.matmul(grad, _unpacked(ctx.packed, ctx.state, ctx.state.dtype, grad.dtype))
        return of_x, None, of_bias, None


_multiply: Callable[..., Tensor] = _Product.apply


def _unpacked(packed: Tensor, state: Any, via: torch.dtype, dtype: torch.dtype) -> Tensor:
    found = find_copy(state, via, dtype)
    if found is not None and found.there:
        return found.values
    values = unpack(packed, state, via).to(dtype)
    if found is None:
        return values
    found.there.add(0)
    return found.values.copy_(values)


def unpack(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """Return a weight of four bits, unpacked to ``dtype`` by bitsandbytes."""
    from bitsandbytes.functional import dequantize_4bit

    if dtype is not state.dtype:
        state = copy.copy(state)
        state.dtype = dtype
    return dequantize_4bit(packed.view(-1, 1), state)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
