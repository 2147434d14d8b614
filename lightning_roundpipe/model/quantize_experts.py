"""Experts in four bits: transformers keeps all experts of a layer in one parameter, which bitsandbytes cannot pack.

It packs linear layers only. The weights of the experts, which are most of such a model, would silently stay in 16 bits
(bitsandbytes#1849). `ExpertWeights` takes the place of such a parameter, and unpacks it for transformers'
``grouped_mm``, which multiplies with all experts in one operation. Backward unpacks it again: otherwise the weights of
all experts would be held in 16 bits until then.

On the CPU, experts without tokens are not unpacked: their part of the matrices is never read. A GPU would have to be
waited for in every product to know which these are.

The packed weight is what ``bitsandbytes.functional.quantize_4bit`` makes of the whole parameter: experts are slices of
it, and so are their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.unpacked import autocast_dtype, find_copy

BLOCK = 64
"""Elements that share a scale in four bits, as bitsandbytes and QLoRA have it."""

IMPLEMENTATION = "grouped_mm"
"""The only one of transformers' ``experts_implementation`` that takes packed experts."""

_MOST_AT_ONCE = 2**31 - 2**20
"""Weights that bitsandbytes' kernels unpack in one call: they count them, in whole tiles, in 32 bits."""


class UnfitModelError(ValueError):
    """A model that cannot be packed or read as asked, although its files are whole."""


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


def routers(model: nn.Module) -> list[str]:
    """Return the linear layers that choose among the experts beside them, or weigh an expert that all tokens see."""
    found = set()
    for name, module, own in fused_experts(model):
        block = name.rsplit(".", 2)[0]
        sizes = (1, len(module.get_parameter(own)))
        beside = model.get_submodule(block).named_children()
        found |= {f"{block}.{n}" for n, child in beside if isinstance(child, nn.Linear) and child.out_features in sizes}
    return sorted(found)


def check_sizes(name: str, shape: Sequence[int], block: int = BLOCK) -> None:
    """Raise unless each expert begins with a block of its own, and ``grouped_mm`` takes it: its rows take 16 bytes."""
    _, rows, columns = shape
    if rows % 8 or columns % 8 or rows * columns % block:
        raise UnfitModelError(
            f"model.quantization: each expert in {name} is a matrix of {rows} x {columns}, which must be multiples of "
            f"8, and their product one of {block}. Load this model with model.quantization=null."
        )


class AllExpertsError(RoundPipeError, AttributeError):
    """Code that takes the weights of several experts for a tensor was given packed ones."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"experts in four bits are computed by {IMPLEMENTATION}, and code asked for more than that ({asked}): call "
            f"model.set_experts_implementation('{IMPLEMENTATION}')."
        )


class ExpertWeights(nn.Module):
    """A weight of all experts of a layer, in four bits. ``grouped_mm`` takes it as if it were the parameter.

    Args:
        weight: a ``Params4bit`` of shape (experts, rows, columns).
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """That of the products: the format that the weight was packed from, or what autocast makes of it."""
        return autocast_dtype(self.device.type) or cast(Any, self.weight).quant_state.dtype

    def transpose(self, first: int, second: int) -> TransposedExperts:
        """Return the weight with the matrices of all experts transposed."""
        if {first % 3, second % 3} != {1, 2}:
            raise AllExpertsError("transpose")
        return TransposedExperts(self)

    def __getitem__(self, _: Any) -> Any:
        raise AllExpertsError("one expert at a time")

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if hasattr(Tensor, name):
                raise AllExpertsError(name) from None
            raise

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        return _multiply_grouped(func, args, kwargs or {})

    @override
    def extra_repr(self) -> str:
        state = cast(Any, self.weight).quant_state
        return f"{tuple(state.shape)}, {state.quant_type}"

    @override
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save under the names that ``bitsandbytes.nn.parametrize`` has: the parameter's own, and ``name.absmax``..."""
        name = prefix.removesuffix(".")
        destination[name] = self.weight if keep_vars else self.weight.detach()
        for key, value in cast(Any, self.weight).quant_state.as_dict(packed=True).items():
            destination[f"{name}.{key}"] = value if keep_vars else value.detach()


class TransposedExperts:
    """The weights of all experts, each transposed, as ``grouped_mm`` takes them. It is no tensor."""

    def __init__(self, experts: ExpertWeights) -> None:
        self.experts, self.device, self.dtype = experts, experts.device, experts.dtype

    __torch_function__ = ExpertWeights.__torch_function__

    def __getattr__(self, name: str) -> Any:
        raise AllExpertsError(name) if hasattr(Tensor, name) else AttributeError(name)


class _GroupedProduct(torch.autograd.Function):
    """Rows of ``x`` times the weight of the expert that they belong to, or times its transpose, by ``product``."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, ends: Tensor, transposed: bool, product: Any) -> Tensor:
        ctx.save_for_backward(weight, ends)
        ctx.state, ctx.transposed, ctx.product = cast(Any, weight).quant_state, transposed, product
        matrices = unpack_experts(weight, ctx.state, ends, x.dtype)
        return cast(Tensor, product(x, matrices.transpose(-2, -1) if transposed else matrices, offs=ends))

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight, ends = ctx.saved_tensors
        matrices = unpack_experts(weight, ctx.state, ends, grad.dtype)
        matrices = matrices if ctx.transposed else matrices.transpose(-2, -1)
        return ctx.product(grad.contiguous(), matrices, offs=ends), None, None, None, None


_apply_grouped: Callable[..., Tensor] = _GroupedProduct.apply


def _multiply_grouped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what ``func`` gives, an operation of torch that was given experts; raise if it is no product of rows."""
    given = {key for key, value in kwargs.items() if value is not None}
    if len(args) != 2 or given != {"offs"} or not isinstance(args[0], Tensor):
        raise AllExpertsError(getattr(func, "__name__", str(func)))
    x, own = args
    transposed = isinstance(own, TransposedExperts)
    experts: ExpertWeights = own.experts if transposed else own
    return _apply_grouped(x, experts.weight, kwargs["offs"], transposed, func)


def unpack_experts(packed: Tensor, state: Any, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrices of all experts, whose rows end at ``ends``. On the CPU, those without rows hold anything."""
    found = find_copy(state, dtype, dtype)
    experts, rows, columns = state.shape
    there: set[int] = set() if found is None else found.there
    if ends.device.type != "cpu" or torch.compiler.is_compiling():
        most = max(1, _MOST_AT_ONCE // (rows * columns))
        runs = [] if there else [(first, min(most, experts - first)) for first in range(0, experts, most)]
    else:
        last = [0, *ends.tolist()]
        runs = [(e, 1) for e in range(experts) if last[e] < last[e + 1] and e not in there]
    if runs == [(0, experts)] and found is None:
        return _unpack(packed, state, 0, experts, dtype)
    matrices = torch.empty(*state.shape, dtype=dtype, device=packed.device) if found is None else found.values
    for first, count in runs:
        matrices[first : first + count] = _unpack(packed, state, first, count, dtype)
        there.update(range(first, first + count))
    return matrices


def _unpack(packed: Tensor, state: Any, first: int, count: int, dtype: torch.dtype) -> Tensor:
    _, rows, columns = state.shape
    size = state.blocksize
    begin, end = first * rows * columns // size, (first + count) * rows * columns // size
    # In rows of one block: on CPUs with AVX-512, bitsandbytes begins each row with a scale of its own, also where
    # blocks run on from row to row (0.50: with rows of 96 and blocks of 64, weights get scales of others).
    unpacked: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed.view(-1, 1)[begin * size // 2 : end * size // 2], _scales(state, begin, end), size, state.quant_type,
        (end - begin, size), dtype,
    )  # fmt: skip
    return unpacked.view(count, rows, columns)


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
