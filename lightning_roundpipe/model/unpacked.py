"""Packed weights that a stage unpacks once, for all microbatches that it runs.

Otherwise each use of a packed weight unpacks it: in forward, recomputation and backward of every microbatch. Where the
plan says so, a worker keeps what the first use in a stage has unpacked, in memory that the plan counts, and later uses
in the stage read it there. The numbers are the same to the bit, because the copy is what the same operation gave.
A copy that finds no room is made for each use, as without a plan.

GPUs multiply weights of eight bits in eight bits, and unpack them for the gradient of the inputs only. On CPUs,
training multiplies with a copy in forward, too.

Products here also take the right scales where bitsandbytes' kernel for CPUs does not; see `shape_to_unpack`.

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

from lightning_roundpipe.model.quantize_weight import shape_to_unpack

_ALIGNMENT = 256
_COPIES = "_roundpipe_copies"

_MOST_ROWS_IN_REGISTERS = 1536
"""Rows up to which bitsandbytes 0.50 may multiply on a GPU without a copy of the weight, and round otherwise."""

Key = tuple[int, torch.dtype, torch.dtype, bool]
"""Position of a weight in its replica, the format that it is unpacked to, the format of the copy, and whether only
backward reads it."""


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

    def want(self, key: Key, shape: Sequence[int]) -> int:
        """Tell that the layer's code asks for a copy, and return its bytes."""
        nbytes = self._wanted[key] = math.prod(shape) * key[2].itemsize
        return nbytes

    def find(self, key: Key, shape: Sequence[int]) -> Copy | None:
        """Return the place of a copy, which the caller fills where nothing is there yet; None without room for it."""
        nbytes = self.want(key, shape)
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


def room_for(wanted: dict[Key, int], *, forward: bool = False) -> int:
    """Return the bytes of all copies that a layer asks for, or of those that its forward asks for."""
    present = list(wanted.items())  # other workers may add to it meanwhile
    return sum(aligned(nbytes) for (*_, in_backward), nbytes in present if not (forward and in_backward))


def keep_copies(state: Any, copies: UnpackedCopies, position: int) -> None:
    """Have uses of the weight at ``position`` look for a copy in ``copies``.

    Args:
        state: the ``QuantState`` or ``MatmulLtState`` that the weight is multiplied with.
        copies: those of the weight's replica.
        position: of the weight in the replica.
    """
    see_products()
    setattr(state, _COPIES, (copies, position))


def find_copy(state: Any, via: torch.dtype, dtype: torch.dtype) -> Copy | None:
    """Return the place of the copy of a weight that is unpacked to ``via`` and then has ``dtype``.

    Args:
        state: the weight's ``QuantState``.
        via: the format that it is unpacked to.
        dtype: the format of the copy.
    """
    copies, position = vars(state).get(_COPIES) or (None, 0)
    return None if copies is None else copies.find((position, via, dtype, False), state.shape)


def unpack(packed: Tensor, state: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a weight of four bits, unpacked with its own scales on every device.

    Args:
        packed: its bytes.
        state: its ``QuantState``.
        dtype: the format to unpack it to. Default: the weight's own.
    """
    from bitsandbytes.functional import dequantize_4bit

    shape = shape_to_unpack(state.shape, state.blocksize)
    if dtype not in (None, state.dtype) or shape is not state.shape:
        whole, state = state.shape, copy.copy(state)
        state.dtype, state.shape = dtype or state.dtype, torch.Size(shape)
        return dequantize_4bit(packed.view(-1, 1), state).view(whole)
    return dequantize_4bit(packed.view(-1, 1), state)


@functools.cache
def see_products() -> None:
    """Replace the functions by which bitsandbytes' modules multiply.

    The new ones know of copies, and of weights that are on the host while their input is on a GPU: the kernels do not
    check where scales are, and an address of the host makes CUDA fail at every further call.
    """
    bitsandbytes: Any = sys.modules["bitsandbytes"]
    of_four_bits, of_eight_bits, read = (
        bitsandbytes.matmul_4bit,
        bitsandbytes.matmul,
        bitsandbytes.functional.dequantize_4bit,
    )
    unpacks_to_inputs = hasattr(torch.ops.bitsandbytes, "gemm_4bit")  # since 0.50; before, to the weight's own format

    @functools.wraps(of_four_bits)
    def matmul_4bit(
        x: Tensor, packed: Tensor, quant_state: Any, out: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        copies = None if quant_state is None else vars(quant_state).get(_COPIES)
        if copies is None and quant_state is not None and quant_state.absmax.device != x.device:
            packed, quant_state = _data_on(packed, x.device), _state_on(quant_state, x.device)
            bias = bias if bias is None else bias.to(x.device)
        if copies is None or out is not None or not _multiplies_with_a_copy(x, quant_state):
            return cast(Tensor, of_four_bits(x, packed, quant_state, out=out, bias=bias))
        via = x.dtype if unpacks_to_inputs else quant_state.dtype
        if copies[0].is_open or _are_rows_misread(x, quant_state):
            return _multiply_4bit(x, packed, bias, quant_state, via)
        product: Tensor = of_four_bits(x, packed, quant_state, bias=bias)
        find_copy(quant_state, via, x.dtype)
        if product.requires_grad:
            find_copy(quant_state, quant_state.dtype, product.dtype)
        return product

    @functools.wraps(of_eight_bits)
    def matmul(
        x: Tensor,
        packed: Tensor,
        out: Tensor | None = None,
        state: Any = None,
        threshold: float = 0.0,
        bias: Tensor | None = None,
    ) -> Tensor:
        copies, position = (None if state is None else vars(state).get(_COPIES)) or (None, 0)
        if copies is None and state is not None and state.CB is not None and state.CB.device != x.device:
            packed, state = _data_on(packed, x.device), _state_on(state, x.device)
            bias = bias if bias is None else bias.to(x.device)
        if copies is None or out is not None or state.CB is None or not x.numel():
            return cast(Tensor, of_eight_bits(x, packed, out=out, state=state, threshold=threshold, bias=bias))
        in_forward = state.is_training and x.device.type == "cpu"
        if x.requires_grad:  # known before the first backward
            copies.want((position, x.dtype, x.dtype, not in_forward), state.CB.shape)
        multiply = None if in_forward else functools.partial(of_eight_bits, threshold=threshold)
        return _multiply_8bit(x, packed, bias, state, multiply)

    @functools.wraps(read)
    def dequantize_4bit(packed: Tensor, quant_state: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        whole = quant_state is None or len(quant_state.shape) < 2 or _COPIES not in vars(quant_state)
        if whole or args or kwargs or packed.shape[0] == 1 or not _are_rows_misread(packed, quant_state):
            return cast(Tensor, read(packed, quant_state, *args, **kwargs))
        return unpack(packed, quant_state)

    bitsandbytes.matmul_4bit, bitsandbytes.matmul = matmul_4bit, matmul
    bitsandbytes.functional.dequantize_4bit = dequantize_4bit  # by which DoRA reads weights


def _data_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on ``device``. A quantised parameter's own ``to`` would move its state in place."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return tensor.detach().as_subclass(Tensor).to(device)


def _state_on(state: Any, device: torch.device) -> Any:
    """Return a copy of a state of bitsandbytes, with its tensors, and those of the states in it, on ``device``."""
    moved = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            setattr(moved, name, _data_on(value, device))
        elif type(value) is type(state):
            setattr(moved, name, _state_on(value, device))
    return moved


def _multiplies_with_a_copy(x: Tensor, state: Any) -> bool:
    """Return whether bitsandbytes multiplies ``x`` with an unpacked copy of the weight, by ``linear``."""
    if len(state.shape) != 2 or x.shape[-1] != state.shape[1] or not x.numel():
        return False
    if getattr(state, "packing_format_for_cpu", False) or (state.nested and state.state2.blocksize != 256):
        return False
    return x.device.type == "cpu" or x.numel() // x.shape[-1] > _MOST_ROWS_IN_REGISTERS


def _are_rows_misread(x: Tensor, state: Any) -> bool:
    """Return whether bitsandbytes may take wrong scales for the weight."""
    return x.device.type == "cpu" and shape_to_unpack(state.shape, state.blocksize) is not state.shape


def _gradient_of_bias(ctx: Any, grad: Tensor) -> Tensor | None:
    return grad.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[2] else None


class _ProductOfFourBits(torch.autograd.Function):
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
        of_x, of_bias = None, _gradient_of_bias(ctx, grad)
        if ctx.needs_input_grad[0]:
            of_x = torch.matmul(grad, _unpacked(ctx.packed, ctx.state, ctx.state.dtype, grad.dtype))
        return of_x, None, of_bias, None, None


class _ProductOfEightBits(torch.autograd.Function):
    """What ``bitsandbytes.matmul`` computes, with copies that are kept. It keeps no inputs, which theirs do.

    ``multiply``: their product, which unpacks nothing; None: forward multiplies with a copy.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, state: Any, multiply: Callable[..., Tensor] | None
    ) -> Tensor:
        ctx.state, ctx.shape, ctx.dtype, ctx.in_forward = state, x.shape, x.dtype, multiply is None
        ctx.bias_dtype = None if bias is None else bias.dtype
        if multiply is not None:
            return multiply(x, packed, state=state, bias=bias)
        return functional.linear(x, _unpacked_rows(state, x.dtype, in_forward=True), bias)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        of_x, of_bias = None, _gradient_of_bias(ctx, grad)
        if ctx.needs_input_grad[0]:
            if grad.dim() == 3:
                grad = grad.reshape(-1, grad.shape[-1])
            weight = _unpacked_rows(ctx.state, ctx.dtype, in_forward=ctx.in_forward)
            of_x = torch.matmul(grad.to(ctx.dtype), weight).view(ctx.shape)
        return of_x, None, of_bias, None, None


_multiply_4bit: Callable[..., Tensor] = _ProductOfFourBits.apply
_multiply_8bit: Callable[..., Tensor] = _ProductOfEightBits.apply


def _unpacked(packed: Tensor, state: Any, via: torch.dtype, dtype: torch.dtype) -> Tensor:
    return _filled(find_copy(state, via, dtype), lambda: unpack(packed, state, via).to(dtype))


def _unpacked_rows(state: Any, dtype: torch.dtype, *, in_forward: bool) -> Tensor:
    copies, position = vars(state)[_COPIES]
    found = copies.find((position, dtype, dtype, not in_forward), state.CB.shape)
    return _filled(found, lambda: _unpack_rows(state.CB, state.SCB, dtype))


def _filled(found: Copy | None, make: Callable[[], Tensor]) -> Tensor:
    if found is not None and found.there:
        return found.values
    values = make()
    if found is None:
        return values
    found.values.copy_(values)
    found.there.add(0)
    return found.values


def _unpack_rows(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight of eight bits, unpacked: each row has a scale, which is its largest value."""
    return packed.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
