"""How writes to tensors show: by the name of the operation, and by torch's version counters."""

from __future__ import annotations

import re

import torch
from torch import Tensor

IN_PLACE = re.compile(
    r"[a-z].*[^_]_|__(setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__"
)
"""Names of tensor methods that write to their first argument."""


def witness(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of ``tensor`` but not its memory."""
    same = tensor.detach()
    same.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return same
