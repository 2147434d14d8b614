"""Weights that are uploaded rounded, and look unrounded to the layer.

Under autocast, ``F.linear(x, weight)`` first casts ``weight``. If a layer does nothing else with it, it can be cast
before the upload. To the layer's code and to autograd, a `RoundedWeight` is the fp32 parameter, with that ``dtype`` and
with fp32 gradients; only its values are rounded. A cast to the dtype of the rounding then gives the same bits as
without, and so does a cast of a view. All other operations need the unrounded values:

    F.linear(x, weight) ── autocast ── autograd records the cast ── here: a copy of the rounded values
    weight.sum(), norms, lookups, writes ──────────────────────── here: the value is fetched, and stays fetched

torch dispatches each operation to this class, in the layer's forward, its recomputation and its backward, so it misses
none. `CastWatcher`, a dispatch mode, finds the weights for it in the first window, by the memory of operations'
arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_iter, tree_map_only

from lightning_roundpipe.model.quantized import is_stored_as_is

_aten = torch.ops.aten
TO = tuple(getattr(_aten.to, name) for name in _aten.to.overloads())  # type: ignore[no-untyped-call]
"""``Tensor.to`` itself, which is dispatched as such in inference mode only; otherwise torch decomposes it before."""
_OTHER_VIEWS = (_aten.view.dtype, _aten.as_strided.default)
"""Views that reinterpret the memory rather than the values."""


def casts_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype if the operation is the cast that autocast applies to a weight; else None."""
    if func is not _aten._to_copy.default or len(args) != 1:
        return None
    given = {key for key, value in kwargs.items() if value not in (None, False)}
    return kwargs["dtype"] if given == {"dtype"} else None


def keeps_values(func: Any) -> bool:
    """Return whether the operation returns a view of its first argument with the same values."""
    return bool(func.is_view) and func not in _OTHER_VIEWS and func not in TO


class RoundedWeight(Tensor):
    """An fp32 parameter that has rounded values; or a view of one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _is_param = True
    _low: Tensor
    _whole: Tensor | None
    _get_whole: Callable[[], Tensor]
    _of: RoundedWeight | None

    @staticmethod
    def __new__(
        cls, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool
    ) -> RoundedWeight:
        made: RoundedWeight = Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
        )
        return made

    def set_values(self, low: Tensor, whole: Callable[[], Tensor], of: RoundedWeight | None = None) -> None:
        """Replace the rounded values, what returns the unrounded ones, and the weight of which this is a view."""
        self._low, self._get_whole, self._whole, self._of = low, whole, None, of

    def release(self) -> None:
        """Drop the values until the next `set_values`."""
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        self.set_values(nothing, lambda: nothing)

    def whole(self) -> Tensor:
        """Return the unrounded values. All later operations use these, because the caller may write to them."""
        if self._whole is None:
            self._whole = self._get_whole()
        return self._whole

    def data_ptr(self) -> int:
        """Return the address of the unrounded values, because the caller is about to read memory."""
        return self.whole().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.whole().untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    @property
    def is_whole(self) -> bool:
        """Whether the unrounded values were fetched, for this weight or for the one of which it is a view."""
        return self._whole is not None or (self._of is not None and self._of.is_whole)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in TO:
            return func.decompose(*args, **kwargs)
        weight = args[0] if args else None
        if isinstance(weight, cls) and not tree_any(lambda value: isinstance(value, cls), (args[1:], kwargs)):
            if casts_to(func, args, kwargs) is weight._low.dtype:
                return func(weight.whole() if weight.is_whole else weight._low, **kwargs)
            if keeps_values(func):
                return _view(weight, lambda values: func(values, *args[1:], **kwargs))
        result = func(*tree_map_only(cls, cls.whole, args), **tree_map_only(cls, cls.whole, kwargs))
        return weight if isinstance(weight, cls) and result is weight._whole else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RoundedWeight({tuple(self.shape)}, {self.dtype} from {self._low.dtype})"


def _view(weight: RoundedWeight, function: Callable[[Tensor], Any]) -> Any:
    """Return the views of a weight that ``function`` creates: one, or several."""
    found = function(weight._low)
    several = isinstance(found, (list, tuple))
    views: list[RoundedWeight] = []
    for index, low in enumerate(found if several else [found]):
        views.append(RoundedWeight(low.shape, low.stride(), weight.dtype, low.device, False))
        views[-1].set_values(low, functools.partial(_part, weight, function, index if several else None), weight)
    return type(found)(views) if several else views[0]


def _part(weight: RoundedWeight, function: Callable[[Tensor], Any], index: int | None) -> Tensor:
    found = function(weight.whole())
    part: Tensor = found if index is None else found[index]
    return part


class Uses:
    """The uses of one layer's weights, by position, seen so far. They only accumulate."""

    def __init__(self, module: nn.Module, masters: Sequence[nn.Parameter]) -> None:
        lists = {id(p) for inner in module.modules() if isinstance(inner, nn.RNNBase) for p in inner.parameters()}
        self._candidates = {
            i
            for i, p in enumerate(masters)
            if p.dtype is torch.float32 and p.numel() and id(p) not in lists and not is_stored_as_is(p)
        }
        self._formats: dict[int, torch.dtype] = {}

    def cast(self, position: int, dtype: torch.dtype) -> None:
        """Record a cast to ``dtype``."""
        if self._formats.setdefault(position, dtype) is not dtype or dtype.itemsize != 2:
            self.otherwise([position])

    def otherwise(self, positions: Iterable[int]) -> None:
        """Record uses that are not casts."""
        self._candidates -= set(positions)

    def only_cast(self) -> dict[int, torch.dtype]:
        """Return the weights that are cast at every use, with the dtype."""
        return {i: dtype for i, dtype in self._formats.items() if i in self._candidates}


class CastWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the uses of ``parameters``, which lie in a worker's arena, while it is active."""

    def __init__(self, uses: Uses, parameters: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uses = uses
        self._places: dict[int, list[tuple[int, int, int]]] = {}
        for position, parameter in enumerate(parameters):
            start = parameter.data_ptr()
            places = self._places.setdefault(parameter.untyped_storage()._cdata, [])
            places.append((start, start + parameter.nbytes, position))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions stay compiled; otherwise torch would never compile them again."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in TO:
            with self:
                return func.decompose(*args, **kwargs)
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._see(leaf, func, args, kwargs)
        return call_below(func, args, kwargs)

    def _see(self, tensor: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            places = self._places.get(tensor.untyped_storage()._cdata)
            start = tensor.data_ptr() if places else 0
        except (RuntimeError, NotImplementedError):  # a tensor subclass that may stand for any weight
            self._uses.otherwise(position for places in self._places.values() for _, _, position in places)
            return
        found = [position for first, end, position in places or () if first <= start < end]
        if not found:
            return
        dtype = casts_to(func, args, kwargs)
        if tensor is not args[0] or (dtype is None and not keeps_values(func)):
            self._uses.otherwise(found)
        elif dtype is not None:
            self._uses.cast(found[0], dtype)


def call_below(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what the operator ``func`` gives without a mode above it: with autocast for operators of packages.

    PyTorch calls ``__torch_dispatch__`` below autocast, which has cast the arguments of its own operators by then, and
    turns autocast off there. An operator of a package (``torch.library``) has kernels that may call operators of
    PyTorch, as bitsandbytes' product with a packed weight does, and these would compute in fp32.
    """
    if func.__module__ == "torch._ops.aten" or not isinstance(func, OpOverload):
        return func(*args, **kwargs)
    device = next((a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
    if device is None or not torch.amp.is_autocast_available(device):
        return func(*args, **kwargs)
    with enable_reentrant_dispatch():  # the thread's state above the mode
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if dtype is None:
        return func(*args, **kwargs)
    with torch.autocast(device, dtype=dtype, cache_enabled=False):
        return func(*args, **kwargs)
