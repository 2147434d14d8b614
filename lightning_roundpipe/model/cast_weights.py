"""Finds the weights of a layer that autocast casts wherever they are used.

A dispatch mode watches the first batch's forward, recomputation and backward. It sees every operation, and finds the
weight by the memory of the operation's arguments. An operation that is neither a cast nor a view needs the weight as it
is. So do weights that are cast to several dtypes, or to none because they are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_roundpipe.model.below_modes import call_below
from lightning_roundpipe.model.quantized import is_stored_as_is
from lightning_roundpipe.model.rounded import TO, casts_to, keeps_values


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
