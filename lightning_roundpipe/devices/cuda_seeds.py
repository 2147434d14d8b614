"""Seeds the GPU that the calling code runs on, where torch would seed all of them.

``torch.manual_seed`` seeds the generators of all GPUs, and ``torch.random.fork_rng`` restores them. During a step, a
layer may be drawing on another GPU: its dropout mask would change, and its recomputation would draw another one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_users = 0
_before: tuple[Any, Any] = (None, None)


@contextmanager
def seeding_one_gpu() -> Iterator[None]:
    """Let both functions leave other GPUs alone inside the context. Any thread may enter, and several may be inside."""
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = torch.cuda.manual_seed_all, torch.random.fork_rng
            torch.cuda.manual_seed_all = _seed_own  # which torch.manual_seed calls
            torch.random.fork_rng = _forking_own(torch.random.fork_rng)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                torch.cuda.manual_seed_all, torch.random.fork_rng = _before


def _seed_own(seed: int) -> None:
    torch.cuda.manual_seed(seed)


def _forking_own(fork_rng: Any) -> Any:
    @functools.wraps(fork_rng)
    def forking_own(devices: Any = None, *args: Any, **kwargs: Any) -> Any:
        return fork_rng([torch.cuda.current_device()] if devices is None else devices, *args, **kwargs)

    return forking_own
