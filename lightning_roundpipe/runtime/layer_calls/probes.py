"""Whether a layer computes something else in other circumstances: found out, once, by running it again.

The first batch pays for it, so that later steps may choose the circumstances by what is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Again = Callable[[], Sequence[Tensor]]


def differs(first: Sequence[Tensor], again: Again, forget: Callable[[], None]) -> bool:
    """Whether ``again`` gives anything else than ``first``, or fails; then it is to be forgotten what it wrote."""
    try:
        second = again()
    except Exception:
        forget()
        return True
    return len(second) != len(first) or any(map(_differ, first, second))


def differs_outside(first: Sequence[Tensor], again: Again, forget: Callable[[], None], outside: torch.dtype) -> bool:
    """The same under the default format ``outside``, which is the whole process's: nothing else may run now."""
    within = torch.get_default_dtype()
    torch.set_default_dtype(outside)
    try:
        return differs(first, again, forget)
    finally:
        torch.set_default_dtype(within)


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.dtype is not other.dtype or not torch.equal(one, other)
