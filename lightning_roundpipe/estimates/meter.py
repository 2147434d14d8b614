"""Counts the time and memory of operations while they run.

An operation is bound by arithmetic (matrix products) or by memory traffic (everything else, without compilation); see
`Hardware.product_s`. Both follow from shapes, so a `Meter` needs no data and runs on the meta device. It counts memory
as storages that are alive at the same time. A `Counter` counts operations that do compute, and leaves memory out.

On the meta device, `attention` stands for a fused kernel that never writes its scores (flash attention). Hugging Face's
attention interface knows it by the name `ATTENTION`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_roundpipe.estimates.packing import Packed
from lightning_roundpipe.planning.profile import Format, Hardware

ATTENTION = "roundpipe_meter"
"""Name of `attention` in Hugging Face's attention interface."""

_BACKWARD_FLOPS = 2.5
"""FLOPs of flash attention's backward relative to its forward: five products (one of them again) instead of two."""

_TILE = 128
"""Rows of a tile in a kernel for experts' products. On average, the last tile of an expert is half empty."""

_MORE = 8
"""Elements by which a sink widens a head."""

_FORMATS: Mapping[torch.dtype, Format] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_FREE = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::lift_fresh", "aten::_local_scalar_dense")
_ROWS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")
"""Operations that read as many bytes of their first input as they write, not all of it."""

aten = torch.ops.aten

_LIKE = {
    aten.addmm_: aten.addmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
"""Operations that torch's FLOP registry lacks, with an equivalent that it has."""

_SUMS_IN_FP32 = (aten.mm.dtype, aten.addmm.dtype_out)
"""Products whose dtype differs from that of their factors."""

_OF_LINEAR = (aten.mm.default, aten.addmm.default)
"""Products of linear layers. Their last two arguments are the factors."""

_FOUR_BITS = ("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit")
"""Products with a packed weight, whose shape is their third argument. Each counts as writing a copy of the weight in
the dtype of the other factor, and a product with that copy: bitsandbytes does so for many rows."""

_EIGHT_BITS = {
    "bitsandbytes::int8_linear_matmul": 1,
    "bitsandbytes::int8_scaled_mm": 1,
    "bitsandbytes::int8_mixed_scaled_mm": 2,
}
"""Products of int8 factors, with the index of the weight argument. They count at the rate of bf16, which is slower."""


@dataclass
class Memory:
    """Memory of one or several scopes.

    Attributes:
        live: bytes of the storages that are alive.
        peak: maximum of ``live``.
    """

    live: int = 0
    peak: int = 0

    def allocate(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def free(self, nbytes: int) -> None:
        self.live -= nbytes


@dataclass
class Work:
    """Totals of a scope.

    Attributes:
        seconds: estimated time.
        flops: of matrix products and attention.
        nbytes: memory traffic.
        operations: how many there were, views included.
        unpackings: operations that dequantise packed weights, which ``operations`` leaves out.
        unpack_s: seconds of those whose copies a stage may keep.
        products: bytes of outputs and seconds of products that a plan may carry, by FLOPs for each byte.
        memory: the storages that were made in it, and in other scopes that share it.
    """

    seconds: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0
    operations: int = 0
    unpackings: int = 0
    unpack_s: float = 0.0
    products: dict[int, tuple[int, float]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts all operations, and estimates their time from their shapes."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hardware = hardware
        self._scopes = [Work()]
        self.times = 1
        """Number of runs that each operation stands for."""
        self.fp8 = False
        """Whether products of linear layers in bf16 count in fp8, as ``torchao.float8`` computes them."""

    @property
    def work(self) -> Work:
        """Totals outside of all scopes."""
        return self._scopes[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._scopes[-1].operations += self.times
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        name = func._schema.name
        grouped = "grouped_mm" in name
        if not func.is_view and not name.startswith(_FREE):
            given = {key: value for key, value in kwargs.items() if key != "out"}  # ``out`` is written
            inputs = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
            written = sum(map(_touched, outputs))
            if name in _ROWS:
                read = min(_touched(inputs[0]), written) + sum(map(_touched, inputs[1:]))
            else:
                read = sum(map(_touched, inputs))
            form = _FORMATS.get(inputs[0].dtype, "fp32") if inputs else "fp32"
            if name in _EIGHT_BITS:
                form = "bf16"
            if name in _FOUR_BITS:
                read += 2 * math.prod(args[2]) * args[0].element_size()  # written and read
            if func in _SUMS_IN_FP32:  # the last of the inputs is a factor
                form = _summed_in_fp32(_FORMATS.get(inputs[-1].dtype, "fp32"))
            if grouped:
                # Each row of experts' inputs is multiplied with the matrix of one expert.
                flops = 2.0 * args[0].numel() * args[1].shape[-1]
                self.add(flops, read + written, _summed_in_fp32(form), _filling(*args, **kwargs))
            else:
                flops = flops_of(func, args, kwargs, out)
                if self._is_fp8(func, args):
                    form, read = "fp8", read - self._cast(args[-2:])
                seconds = self.add(flops, read + written, form)
                if func._overloadpacket in flop_registry:
                    self.count_product(flops, written, seconds)

    def _is_fp8(self, func: Any, args: Any) -> bool:
        return self.fp8 and func in _OF_LINEAR and args[-1].dtype is torch.bfloat16

    def _cast(self, factors: Iterable[Tensor]) -> int:
        """Count the casts of a product's factors, and return the bytes that the product reads less than in bf16.

        Each cast is two fused kernels: one reads the factor for its largest value, and one writes it in fp8.
        """
        for factor in factors:
            self.add(0.0, _touched(factor), "bf16")
            self.add(0.0, _touched(factor) * 3 // 2, "bf16")
            self._scopes[-1].operations += 2 * self.times
        return sum(map(_touched, factors)) // 2

    def add(self, flops: float, nbytes: float, form: Format, filling: float = 1.0, *, attention: bool = False) -> float:
        """Count one operation. Returns its seconds.

        Args:
            flops: its FLOPs.
            nbytes: its memory traffic.
            form: number format of its products.
            filling: factor of what it computes in tiles that are not full.
            attention: whether it is attention, which has an efficiency of its own.
        """
        work = self._scopes[-1]
        efficiency = self._hardware.attention_efficiency if attention else None
        seconds = self.times * self._hardware.product_s(flops * filling, nbytes, form, efficiency)
        work.seconds += seconds
        work.flops += self.times * flops
        work.nbytes += self.times * nbytes
        return seconds

    def count_product(self, flops: float, nbytes: int, seconds: float) -> None:
        """Count a product, which takes ``seconds``, among those that a plan may carry."""
        products, kind = self._scopes[-1].products, int(flops) // max(1, nbytes)
        before, before_s = products.get(kind, (0, 0.0))
        products[kind] = before + self.times * nbytes, before_s + seconds


class Meter(Counter):  # type: ignore[no-untyped-call]
    """Counts operations on tensors without data, and their memory, into the innermost `scope`.

    Args:
        hardware: rates of the device.
    """

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(hardware)
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._packed: dict[int, tuple[Tensor, Packed]] = {}
        """Packed weights by the addresses of their storages."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        grouped = "grouped_mm" in func._schema.name
        memory = self._scopes[-1].memory
        copies = self._unpack(func, args, kwargs)
        if self._is_fp8(func, args):
            copies += sum(factor.numel() for factor in args[-2:])
        memory.allocate(copies)
        out = _grouped(*args, **kwargs) if grouped else func(*args, **kwargs)
        self._hold(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        self._count(func, args, kwargs, out)
        memory.free(copies)
        return out

    def _unpack(self, func: Any, args: Any, kwargs: Any) -> int:
        """Count the dequantised copies that an operation reads, and return their bytes."""
        if not self._packed or func.is_view or func._schema.name.startswith(_FREE):
            return 0
        copies = 0
        for leaf in tree_leaves((args, kwargs)):
            found = self._packed.get(leaf.untyped_storage()._cdata) if isinstance(leaf, Tensor) else None
            if found is None:
                continue
            weight, packed = found
            work = self._scopes[-1]
            before_s = work.seconds
            self.add(0.0, packed.nbytes + weight.nbytes + packed.scratch_bytes, "fp32")
            launching = self.times * (packed.kernels - 1) * self._hardware.kernel_s
            work.seconds += launching
            work.unpack_s += work.seconds - before_s if packed.kept else 0.0
            work.unpackings += self.times * (packed.kernels + packed.views)
            copies += weight.nbytes + packed.buffer_bytes
        return copies

    @contextmanager
    def scope(self, work: Work | None = None) -> Iterator[Work]:
        """Count operations into ``work``, and not into the scope around it."""
        self._scopes.append(work or Work())
        try:
            yield self._scopes[-1]
        finally:
            self._scopes.pop()

    def go_on_with(self, work: Work) -> None:
        """Count what follows in the innermost scope into ``work``."""
        self._scopes[-1] = work

    def pack(self, packed: Mapping[nn.Parameter, Packed]) -> None:
        """Declare weights as packed: an operation that reads one of them reads a dequantised copy."""
        self._packed |= {weight.untyped_storage()._cdata: (weight, one) for weight, one in packed.items()}

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of these tensors, nor views of them."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage())

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                memory, nbytes = self._scopes[-1].memory, storage.nbytes()
                memory.allocate(nbytes)
                weakref.finalize(storage, memory.free, nbytes)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    sliding_window: int | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return attention without data: (batch, heads, length, size) becomes (batch, length, heads, size).

    There are no masks of length x length. Sinks widen the heads. With a window, backward computes the forward again,
    so its graph keeps the inputs only.
    """
    window = sliding_window if getattr(module, "is_causal", True) else 0
    size = value.shape[-1]
    if s_aux is not None:
        query, key, value = (F.pad(t, (0, _MORE)) for t in (query, key, value))
    found: Tensor = _Attention.apply(query, key, value, window)  # type: ignore[no-untyped-call]
    return (found if s_aux is None else found[..., :size].contiguous()), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        batch, heads, length, size = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        again = bool(window) and length > (window or 0)
        ctx.save_for_backward(query, key, value, *(() if again else (out, sums)))
        ctx.flops = 2 * batch * heads * _pairs(length, key.shape[-2], window) * (size + value.shape[-1])
        seconds = _count(ctx.flops, (query, key, value, out, sums))
        if (meter := current_meter()) is not None:  # torch counts all pairs, whatever the mask
            pairs = 2.0 * batch * heads * length * key.shape[-2] * (size + value.shape[-1])
            meter.count_product(pairs, _touched(out) + _touched(sums), seconds)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved = ctx.saved_tensors
        made = [torch.empty_like(tensor) for tensor in saved[:3]]
        _count(_BACKWARD_FLOPS * ctx.flops, (*saved, *grads, *made))
        return made[0], made[1], made[2], None


def attention_flops(batch: int, heads: int, length: int, size: int) -> float:
    """Return the FLOPs of causal attention, forward and backward, as `attention` counts them."""
    return (1 + _BACKWARD_FLOPS) * 2 * batch * heads * _pairs(length, length, None) * 2 * size


def _count(flops: float, tensors: Iterable[Tensor]) -> float:
    meter = current_meter()
    if meter is None:
        return 0.0
    tensors = list(tensors)
    form = _summed_in_fp32(_FORMATS.get(tensors[0].dtype, "fp32"))
    return meter.add(flops, sum(map(_touched, tensors)), form, attention=True)


def _summed_in_fp32(form: Format) -> Format:
    """Return the format whose rate counts with sums in fp32, as in attention and experts' products: bf16 for fp16."""
    return "bf16" if form == "fp16" else form


def current_meter() -> Meter | None:
    """Return the innermost active meter."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, Meter)), None)


def _pairs(length: int, keys: int, window: int | None) -> float:
    """Return the number of pairs of query and key; ``window`` None: causal without a window, 0: all pairs."""
    if window == 0 or length != keys:
        return float(length * keys)
    seen = min(length, window or length)
    return seen * length - seen * (seen - 1) / 2


def _touched(tensor: Tensor) -> int:
    """Return the bytes that are read or written. Expanded dimensions count once."""
    lengths = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)
    return math.prod(lengths) * tensor.element_size()


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of an operation, by torch's registry; 0 if that lacks it."""
    name = func._schema.name
    if name in _FOUR_BITS:
        return 2.0 * float(args[0].numel() * args[2][0])
    if name in _EIGHT_BITS:
        return 2.0 * float(args[0].numel() * args[_EIGHT_BITS[name]].shape[0])
    counted = flop_registry.get(func._overloadpacket) or flop_registry.get(_LIKE.get(func._overloadpacket))
    if counted is None:
        return 0.0
    args = [arg for arg in args if not isinstance(arg, torch.dtype)]
    if "scaled_dot_product" in name:
        args = _with_all_heads(args)
    return float(counted(*args, **kwargs, out_val=out))


def _with_all_heads(args: list[Any]) -> list[Any]:
    """Return arguments of attention as shapes, with a key and a value head for each query head.

    A kernel computes as much if several query heads share them. torch before 2.12 refuses to count shared heads.
    """
    heads = max(arg.shape[1] for arg in args if isinstance(arg, Tensor) and arg.ndim == 4)
    shapes = [tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in args]
    return [(s[0], heads, *s[2:]) if isinstance(s, tuple) and len(s) == 4 else s for s in shapes]


def _filling(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> float:
    """Return the factor by which partly empty tiles lengthen experts' products, for rows spread over all experts."""
    if offsets is None or left.ndim == 3:
        return 1.0
    rows = left.shape[0] if right.ndim == 3 else left.shape[1]  # products for weights' gradients sum over the rows
    experts = min(len(offsets), rows)
    return max(rows + experts * _TILE / 2, experts * _TILE) / rows if rows else 1.0


def _grouped(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the result of ``grouped_mm`` without data. On the meta device, PyTorch's own takes one dtype only."""
    rows, columns = left.shape[-2], right.shape[-1]
    groups = left.ndim == right.ndim
    if not groups:
        return left.new_empty(rows, columns)
    return left.new_empty(len(offsets) if offsets is not None and left.ndim == 2 else len(left), rows, columns)
