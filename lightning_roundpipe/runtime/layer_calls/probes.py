"""Finds out whether a layer computes something else under other conditions, by running it again.

The first batch pays for it once, so that later steps may choose the faster condition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Again = Callable[[], Sequence[Tensor]]


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
