"""Finds out whether a layer computes something else under other conditions, by running it again.

The first batch pays for it once, so that later steps may choose the faster condition.

Equal bits do not show that two conditions are equal: attention whose trained bias is still zero returns the same from
two kernels, and other bits a step later. So the operations that ran are compared as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.model.below_modes import call_below
from lightning_roundpipe.runtime.layer_calls.layer_mode import LayerMode

Again = Callable[[], Sequence[Tensor]]

aten = torch.ops.aten

_COPIES = {
    aten._to_copy.default, aten._unsafe_view.default, aten.clone.default, aten.copy_.default, aten.lift_fresh.default,
}  # fmt: skip
"""Operations that return what they are given. Autocast, matrix products and autograd make more or fewer of them with
grad mode."""


class LayerOpRecorder(LayerMode):  # type: ignore[no-untyped-call]
    """Records which operations run, views and copies left out.

    Attributes:
        operations: the operations in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not getattr(func, "is_view", False) and func not in _COPIES:
            self.operations.append(func)
        return call_below(func, args, kwargs or {})


def differs(first: Sequence[Tensor], again: Again, forget: Callable[[], None]) -> bool:
    """Return whether ``again`` raises or returns other values than ``first``.

    If it raises, ``forget`` drops what it has written.
    """
    try:
        second = again()
    except Exception:
        forget()
        return True
    return len(second) != len(first) or any(map(_differ, first, second))


def differs_outside(first: Sequence[Tensor], again: Again, forget: Callable[[], None], outside: torch.dtype) -> bool:
    """Do the same under the default dtype ``outside``. It is process-wide, so no other thread may compute now."""
    within = torch.get_default_dtype()
    torch.set_default_dtype(outside)
    try:
        return differs(first, again, forget)
    finally:
        torch.set_default_dtype(within)


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.dtype is not other.dtype or not torch.equal(one, other)
