"""Weights that are uploaded rounded, and look unrounded to the layer.

Under autocast, ``F.linear(x, weight)`` first casts ``weight``. If a layer does nothing else with it, it can be cast
before the upload. To the layer's code and to autograd, a `RoundedWeight` is the fp32 parameter, with that ``dtype`` and
with fp32 gradients; only its values are rounded. A cast to the dtype of the rounding then gives the same bits as
without, and so does a cast of a view. All other operations need the unrounded values:

    F.linear(x, weight) ── autocast ── autograd records the cast ── here: a copy of the rounded values
    weight.sum(), norms, lookups, writes ──────────────────────── here: the value is fetched, and stays fetched

torch dispatches each operation to this class, in the layer's forward, its recomputation and its backward, so it misses
none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map_only

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
    """An fp32 parameter that has rounded values; or a view of one.

    Args:
        shape, stride, dtype, device: those of the unrounded parameter.
        requires_grad: whether gradients accumulate in it.
    """

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
        """Replace the values.

        Args:
            low: the rounded values.
            whole: returns the unrounded values, in memory of their own.
            of: the weight of which this is a view.
        """
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
