"""Who goes first on a device's link, and in what pieces the others go.

Activations are on the critical path: a worker has nothing to do until they are there. Weights and gradients are needed
a stage later, and are much larger. So activations go first; and since a copy that is under way cannot be interrupted,
neither here nor on a GPU, all else goes in chunks that are short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

MAX_WAIT_S = 1e-3
"""How long activations may wait for a chunk of something else."""

MIN_CHUNK_BYTES = 1 << 16
"""Of a chunk on a GPU: copies of less cost more to start than to make."""

_in_order = False


@contextlib.contextmanager
def fifo_copies() -> Iterator[None]:
    """Emulated devices that are made inside have one queue for each direction, from which copies go whole, as asked.

    To compare with, as one stream for each direction of a GPU would do it. No user wants it.
    """
    global _in_order
    _in_order = True
    try:
        yield
    finally:
        _in_order = False


def is_fifo() -> bool:
    return _in_order


def chunks(dst: Tensor, src: Tensor, nbytes: float) -> list[tuple[Tensor, Tensor]]:
    """``dst <- src`` as copies of at most ``nbytes`` (and at least one element) each, in order.

    What is not contiguous, as few things are that are large, goes whole.
    """
    if not (dst.is_contiguous() and src.is_contiguous()) or dst.numel() * dst.element_size() <= nbytes:
        return [(dst, src)]
    elements = max(1, int(nbytes) // dst.element_size())
    return list(zip(torch.split(_flat(dst), elements), torch.split(_flat(src), elements), strict=True))


def _flat(t: Tensor) -> Tensor:
    with torch.no_grad():
        return t.view(-1)
