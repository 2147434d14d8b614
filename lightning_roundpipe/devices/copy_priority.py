"""The order of copies on a device's link, and the chunks of those that wait.

Activations are on the critical path: a worker is idle until they arrive. Weights and gradients are needed a stage later
and are much larger. So activations go first. A copy that has started cannot be interrupted, here or on a GPU, so all
other copies go in short chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_WAIT_S = 1e-3
"""Longest time, in seconds, that activations wait for a chunk of another copy."""

MIN_CHUNK_BYTES = 1 << 16
"""Smallest chunk on a GPU. Launching a smaller copy takes longer than the copy."""


def chunks(dst: Tensor, src: Tensor, nbytes: float) -> list[tuple[Tensor, Tensor]]:
    """Split ``dst <- src``, a pair of `check_copy`, into copies of at most ``nbytes`` (but at least one element) each.

    Tensors that are not contiguous stay whole; large ones rarely are.
    """
    if not (dst.is_contiguous() and src.is_contiguous()) or dst.numel() * dst.element_size() <= nbytes:
        return [(dst, src)]
    elements = max(1, int(nbytes) // dst.element_size())
    return list(zip(torch.split(dst.view(-1), elements), torch.split(src.view(-1), elements), strict=True))
