"""What a thread carries that decides how torch computes, captured where a layer is called and re-entered where it runs.

Grad mode, inference mode, autocast and context variables are all per thread. A layer runs on a worker's thread, and
again for its recomputation much later, so all of it has to travel with the call. Autocast's cache of cast weights is
switched off throughout: it is shared by all threads and would hand out casts of weights that have left the arena.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ambient:
    """Torch's per-thread modes at a call."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def capture(cls, device_types: tuple[str, ...]) -> Ambient:
        """The calling thread's modes; ``device_types`` are those that can compute (``cpu``, ``cuda``)."""
        autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextlib.contextmanager
    def entered(self, *, grad: bool | None = None) -> Iterator[None]:
        """The same modes on this thread; ``grad`` overrides grad mode."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad if grad is None else grad))
            for device, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield
