"""Weights that arrive rounded, and are seen as what they were.

Under autocast ``F.linear(x, weight)`` first casts ``weight``. If that is all that a layer does with it, it may as well
have been cast before it was sent. To the layer's code, and to autograd, a `RoundedWeight` is the parameter in fp32,
with its ``dtype`` and with gradients in fp32; only the values in it are rounded. A cast to the format that they were
rounded to is then what it would have been, to the bit, and so are views. All else needs the values as they were before:

    F.linear(x, weight) ── autocast ── autograd notes the cast ── here: a copy of the rounded values
    weight.sum(), norms, lookups, writes ──────────────────────── here: the value is fetched, and stays fetched

torch asks here at each operation, in the layer's forward, its recomputation and its backward, so none is overlooked.
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
"""``Tensor.to`` itself, which arrives whole in inference mode; elsewhere torch takes it apart before."""
_OTHER_VIEWS = (_aten.view.dtype, _aten.as_strided.default)
"""They look at the memory, not at the values."""


def casts_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The format, if the operation is what autocast does to a weight; else None."""
    if func is not _aten._to_copy.default or len(args) != 1:
        return None
    given = {key for key, value in kwargs.items() if value not in (None, False)}
    return kwargs["dtype"] if given == {"dtype"} else None


def keeps_values(func: Any) -> bool:
    """Whether the operation gives a view of its first argument, whose values are that one's."""
    return bool(func.is_view) and func not in _OTHER_VIEWS and func not in TO


class RoundedWeight(Tensor):
    """A parameter in fp32 of which there are the rounded values; or a view of one.

    Args:
        shape, stride, dtype, device: what it is seen as.
        requires_grad: whether gradients are to be added up in it.
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
        """Get other values.

        Args:
            low: rounded.
            whole: gives them as they were before that, in memory of its own.
            of: that it is a view of.
        """
        self._low, self._get_whole, self._whole, self._of = low, whole, None, of

    def release(self) -> None:
        """Have no values until `set_values` is called."""
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        self.set_values(nothing, lambda: nothing)

    def whole(self) -> Tensor:
        """The values before they were rounded. From now on all is computed from these, for they may be written to."""
        if self._whole is None:
            self._whole = self._get_whole()
        return self._whole

    def data_ptr(self) -> int:
        """Who asks for memory wants to look at it."""
        return self.whole().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.whole().untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    @property
    def is_whole(self) -> bool:
        """Whether somebody has asked for that, of it or of what it is a view of."""
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
    """What ``function`` makes of a weight: one view or several."""
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
