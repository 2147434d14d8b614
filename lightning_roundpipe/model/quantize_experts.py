"""Experts in four bits: transformers keeps all experts of a layer in one parameter, which bitsandbytes cannot pack.

It packs linear layers only. The weights of the experts, which are most of such a model, would silently stay in 16 bits
(bitsandbytes#1849). `ExpertWeights` takes the place of such a parameter, and unpacks it where it is multiplied.
Backward unpacks it again: otherwise the weights of all experts would be held in 16 bits until then. What is unpacked at
once depends on the ``experts_implementation`` of the model:

- ``grouped_mm`` multiplies with all experts in one operation, and all of them are unpacked for it;
- ``eager`` asks for one expert at a time (``self.gate_up_proj[expert]``), and only experts that have tokens.

On the CPU, experts without tokens are not unpacked for ``grouped_mm`` either: their part of the matrices is never read.
A GPU would have to be waited for in every product to know which these are.

The packed weight is what ``bitsandbytes.functional.quantize_4bit`` makes of the whole parameter: experts are slices of
it, and so are their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.quantize_weight import BLOCK, UnfitModelError, shape_to_unpack
from lightning_roundpipe.model.unpacked import find_copy

_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_GROUPED = {"grouped_mm", "_grouped_mm", "grouped_mm_fallback"}
"""Names of the operations that transformers' ``grouped_mm`` chooses from, by device and version of torch."""

_MOST_AT_ONCE = 2**31 - 2**20
"""Weights that bitsandbytes' kernels unpack in one call: they count them, in whole tiles, in 32 bits."""


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each parameter that holds a weight of all experts: its qualified name, its module, and its name there.

    Raises:
        UnfitModelError: a module is named like experts and keeps them in another way.
    """
    for prefix, module in model.named_modules():
        weights = [name for name, p in module._parameters.items() if p is not None and p.dim() == 3]
        known = hasattr(module, "is_transposed") and hasattr(module, "has_gate")  # by use_experts_implementation
        if weights and not known and type(module).__name__.endswith("Experts"):
            raise UnfitModelError(
                f"model.quantization: {prefix} ({type(module).__name__}) keeps its experts in a way that cannot be "
                "quantised. Load this model with model.quantization=null."
            )
        for name in weights if known else ():
            yield f"{prefix}.{name}", module, name


def check_sizes(name: str, shape: Sequence[int], block: int = BLOCK) -> None:
    """Raise unless each expert begins with a block of its own."""
    _, rows, columns = shape
    if rows * columns % block:
        raise UnfitModelError(
            f"model.quantization: each expert in {name} is a matrix of {rows} x {columns}, which no number of blocks "
            f"of {block} holds. Load this model with model.quantization=null."
        )


class AllExpertsError(RoundPipeError, AttributeError):
    """Code that takes the weights of several experts for a tensor was given experts that are packed."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            "experts in four bits are computed by grouped_mm or one by one, and code asked for more than that "
            f"({asked}): call model.set_experts_implementation('grouped_mm'), or 'eager'."
        )


class _AllExperts:
    """What torch's functions take for the weights of all experts of a layer."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        return _multiply_grouped(func, args, kwargs or {})


class ExpertWeights(_AllExperts, nn.Module):
    """A weight of all experts of a layer, in four bits.

    Args:
        weight: a ``Params4bit`` of shape (experts, rows, columns).
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.quant_state = cast(Any, weight).quant_state
        """That of the weight, which loses it in ``torch.save``, as those of bitsandbytes' modules do."""

    @property
    def shape(self) -> torch.Size:
        """That of the weight before it was packed."""
        return cast(torch.Size, cast(Any, self.weight).quant_state.shape)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """That of the products: the format that the weight was packed from, or what autocast makes of it."""
        kind = self.weight.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return cast(torch.dtype, cast(Any, self.weight).quant_state.dtype)

    def transpose(self, first: int, second: int) -> TransposedExperts:
        """Return the weight with the matrices of all experts transposed."""
        if {first % 3, second % 3} != {1, 2}:
            raise AllExpertsError("transpose")
        return TransposedExperts(self)

    def __getitem__(self, expert: Any) -> ExpertWeight:
        if isinstance(expert, Tensor) and expert.numel() != 1:
            raise AllExpertsError("several experts at once")
        return ExpertWeight(self.weight, int(expert))

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if hasattr(Tensor, name):
                raise AllExpertsError(name) from None
            raise

    @override
    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {cast(Any, self.weight).quant_state.quant_type}"

    @override
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save under the names that ``bitsandbytes.nn.parametrize`` has: the parameter's own, and ``name.absmax``..."""
        name = prefix.removesuffix(".")
        destination[name] = self.weight if keep_vars else self.weight.detach()
        for key, value in cast(Any, self.weight).quant_state.as_dict(packed=True).items():
            destination[f"{name}.{key}"] = value if keep_vars else value.detach()


class TransposedExperts(_AllExperts):
    """The weights of all experts, each transposed, as ``grouped_mm`` takes them. It is no tensor."""

    def __init__(self, experts: ExpertWeights) -> None:
        self._experts = experts

    @property
    def device(self) -> torch.device:
        return self._experts.device

    @property
    def dtype(self) -> torch.dtype:
        return self._experts.dtype

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(Tensor, name):
            raise AllExpertsError(name)
        raise AttributeError(name)


class ExpertWeight:
    """The weight of one expert, as a matrix that is unpacked where it is used.

    It is no tensor. PyTorch's functions take it all the same, because it has ``__torch_function__``.
    """

    def __init__(self, weight: nn.Parameter, expert: int) -> None:
        self._weight = weight
        self._expert = expert

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix, by default in the format that it was packed from."""
        state = cast(Any, self._weight).quant_state
        return _unpack_one(self._weight.detach(), state, self._expert, dtype or state.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not kwargs and isinstance(args[1], cls):
            x, own, *bias = args
            product = _multiply(x, own._weight, own._expert, True)
            return product + bias[0] if bias and bias[0] is not None else product
        if func in _MATMULS and not kwargs and isinstance(args[1], cls):
            return _multiply(args[0], args[1]._weight, args[1]._expert, False)
        unpacked = [a.unpacked() if isinstance(a, cls) else a for a in args]
        return func(*unpacked, **{k: v.unpacked() if isinstance(v, cls) else v for k, v in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.unpacked(), name)


class _Product(torch.autograd.Function):
    """``x`` times the weight of an expert, or times its transpose as ``linear`` has it."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, expert: int, transposed: bool) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.state, ctx.expert, ctx.transposed = cast(Any, weight).quant_state, expert, transposed
        matrix = _unpack_one(weight, ctx.state, expert, x.dtype)
        return functional.linear(x, matrix) if transposed else x @ matrix

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (weight,) = ctx.saved_tensors
        matrix = _unpack_one(weight, ctx.state, ctx.expert, grad.dtype)
        return grad @ (matrix if ctx.transposed else matrix.t()), None, None, None


_multiply: Callable[..., Tensor] = _Product.apply


class _GroupedProduct(torch.autograd.Function):
    """Rows of ``x`` times the weight of the expert that they belong to, or times its transpose.

    Args:
        product: one of the operations in `_GROUPED`.
        ends: where the rows of each expert end.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, ends: Tensor, transposed: bool, product: Any) -> Tensor:
        ctx.save_for_backward(weight, ends)
        ctx.state, ctx.transposed, ctx.product = cast(Any, weight).quant_state, transposed, product
        matrices = _unpack_used(weight, ctx.state, ends, x.dtype)
        return cast(Tensor, product(x, matrices.transpose(-2, -1) if transposed else matrices, offs=ends))

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight, ends = ctx.saved_tensors
        matrices = _unpack_used(weight, ctx.state, ends, grad.dtype)
        matrices = matrices if ctx.transposed else matrices.transpose(-2, -1)
        return ctx.product(grad.contiguous(), matrices, offs=ends), None, None, None, None


_apply_grouped: Callable[..., Tensor] = _GroupedProduct.apply


def _multiply_grouped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what ``func`` gives, an operation of torch that was given all experts of a layer.

    Raises:
        AllExpertsError: it is no product of rows with these experts.
    """
    name = getattr(func, "__name__", str(func))
    given = {key for key, value in kwargs.items() if value is not None}
    if name not in _GROUPED or len(args) != 2 or given != {"offs"} or not isinstance(args[0], Tensor):
        raise AllExpertsError(name)
    x, own = args
    transposed = isinstance(own, TransposedExperts)
    experts: ExpertWeights = own._experts if transposed else own
    return _apply_grouped(x, experts.weight, kwargs["offs"], transposed, func)


def _unpack_one(packed: Tensor, state: Any, expert: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix of one expert, of ``packed`` bytes of all of them."""
    found = find_copy(state, dtype, dtype)
    if found is None:
        return _unpack(packed, state, expert, 1, dtype)[0]
    _fill(found.values, packed, state, {expert} - found.there)
    found.there.add(expert)
    return found.values[expert]


def _unpack_used(packed: Tensor, state: Any, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrices of all experts. On the CPU, those without rows may hold anything; see ``ends`` above."""
    found = find_copy(state, dtype, dtype)
    used = set(range(state.shape[0]))
    if ends.device.type == "cpu" and not torch.compiler.is_compiling():
        last = [0, *ends.tolist()]
        used = {expert for expert in used if last[expert] < last[expert + 1]}
    if found is None:
        return _unpack_all(packed, state, dtype) if len(used) == state.shape[0] else _new(packed, state, used, dtype)
    _fill(found.values, packed, state, used - found.there)
    found.there |= used
    return found.values


def _unpack_all(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """Return the matrices of all experts."""
    experts, rows, columns = state.shape
    if experts * rows * columns <= _MOST_AT_ONCE:
        return _unpack(packed, state, 0, experts, dtype)
    return _new(packed, state, range(experts), dtype)


def _new(packed: Tensor, state: Any, experts: Collection[int], dtype: torch.dtype) -> Tensor:
    matrices = torch.empty(*state.shape, dtype=dtype, device=packed.device)
    _fill(matrices, packed, state, experts)
    return matrices


def _fill(matrices: Tensor, packed: Tensor, state: Any, experts: Collection[int]) -> None:
    """Unpack ``experts`` to their places, in few operations."""
    _, rows, columns = state.shape
    most = max(1, _MOST_AT_ONCE // (rows * columns))
    for _, run in groupby(enumerate(sorted(experts)), lambda pair: pair[1] - pair[0]):
        several = [expert for _, expert in run]
        for first in range(several[0], several[-1] + 1, most):
            count = min(most, several[-1] + 1 - first)
            matrices[first : first + count] = _unpack(packed, state, first, count, matrices.dtype)


def _unpack(packed: Tensor, state: Any, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the matrices of ``count`` experts from ``first`` on."""
    _, rows, columns = state.shape
    size = rows * columns
    begin, end = first * size, (first + count) * size
    unpack: Callable[..., Tensor] = torch.ops.bitsandbytes.dequantize_4bit.default
    scales = _scales(state, begin // state.blocksize, end // state.blocksize)
    bytes_of_them = packed.view(-1, 1)[begin // 2 : end // 2]
    shape = shape_to_unpack((count, rows, columns), state.blocksize)
    unpacked = unpack(bytes_of_them, scales, state.blocksize, state.quant_type, shape, dtype)
    whole = (count, rows, columns)
    return unpacked if unpacked.shape == whole else unpacked.view(whole)


def _scales(state: Any, first: int, last: int) -> Tensor:
    """Return the scales of these blocks. Quantised scales have blocks of their own, which need not begin there."""
    if not state.nested:
        return cast(Tensor, state.absmax[first:last])
    nested = state.state2
    size = nested.blocksize
    outer, end = first // size, -(-last // size)
    scales: Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
        state.absmax[outer * size : last], nested.absmax[outer:end], nested.code, size, nested.dtype
    )
    offset: Tensor = state.offset
    return scales[first - outer * size :] + offset
