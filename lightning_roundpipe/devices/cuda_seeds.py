"""Seeds the GPU that the calling code runs on, where torch would seed all of them.

``torch.manual_seed`` seeds the generators of all GPUs, and ``torch.random.fork_rng`` restores them. During a step, a
layer may be drawing on another GPU: its dropout mask would change, and its recomputation would draw another one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from lightning_roundpipe.devices.process_context import shared_context


@shared_context
def seeding_one_gpu() -> Iterator[None]:
    """Let both functions leave other GPUs alone inside the context. Any thread may enter, and several may be inside."""
    before = torch.cuda.manual_seed_all, torch.random.fork_rng
    torch.cuda.manual_seed_all = _seed_own  # which torch.manual_seed calls
    torch.random.fork_rng = _forking_own(torch.random.fork_rng)
    yield
    torch.cuda.manual_seed_all, torch.random.fork_rng = before


def _seed_own(seed: int) -> None:
    torch.cuda.manual_seed(seed)


def _forking_own(fork_rng: Any) -> Any:
    @functools.wraps(fork_rng)
    def forking_own(devices: Any = None, *args: Any, **kwargs: Any) -> Any:
        return fork_rng([torch.cuda.current_device()] if devices is None else devices, *args, **kwargs)

    return forking_own
