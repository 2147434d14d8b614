"""Errors of devices, beside those that torch raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch

from lightning_roundpipe.messages import gib


class StreamAborted(RuntimeError):
    """A wait ended because its device was aborted or closed.

    It is never the first error: another thread failed and called ``Device.abort()``, which raises this in all threads
    that would otherwise wait for ever.
    """


class StreamError(RuntimeError):
    """Work on a stream failed; ``__cause__`` is the original error.

    Every waiter raises its own instance: one exception raised in several threads would collect all their tracebacks.
    """


class DeviceOutOfMemory(torch.OutOfMemoryError):
    """An allocation does not fit on a device. The message says what the device holds and which settings help."""


class DoesNotFit(ValueError, torch.OutOfMemoryError):
    """No plan keeps a batch of this size within the workers' memory.

    Lightning's batch-size finder recognises it by words in the first argument, and tries a smaller batch.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"CUDA out of memory: {message}")
        self._message = message

    def __str__(self) -> str:
        return self._message


STICKY = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 911})
"""CUDA error codes after which all further work of the process fails.

Illegal addresses (700), kernel timeouts (702), asserts in a kernel (710), illegal instructions and misaligned or
invalid addresses (714 to 718), other failures of a kernel (719, 721), and broken memory or links (214, 220, 226, 911).
"""

LESS_FRAGMENTED = (
    "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment before the script starts, or use smaller "
    "microbatches (batches, or parts by num_microbatches)"
)
"""Remedy where the CUDA allocator returns its whole cache to find room: enough memory is free, but fragmented."""

SMALLER = (
    "Use smaller microbatches (half the batch size, or twice num_microbatches), shorter sequences, token_tiles= or "
    "adapters: roundpipe-plan estimates what fits. After the first window, which runs layer by layer, a smaller "
    "memory_budget= makes stages smaller, too"
)
"""Remedies where a device is out of memory."""

NEW_PROCESS = (
    "this process cannot use the GPU any more: start a new process. CUDA reports such errors late: with "
    "CUDA_LAUNCH_BLOCKING=1 in the environment, the traceback shows the operation that failed."
)


def is_sticky(error: BaseException | None) -> bool:
    """Return whether ``error`` or one of its causes has made the GPU unusable for this process."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) in STICKY:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def without_frames(error: BaseException, stream: str) -> RuntimeError:
    """Return a new exception for an ``error`` of work on ``stream``, which holds no memory that its frames refer to."""
    if isinstance(error, (StreamAborted, StreamError)):  # from another stream, which the message names
        return type(error)(*error.args)
    return StreamError(f"{stream} failed: {error!r}")


def raise_kept(error: BaseException, stream: str) -> NoReturn:
    """Raise the error that work on ``stream`` failed with, as a new exception for the calling thread."""
    if isinstance(error, StreamAborted):
        raise without_frames(error, stream)
    raise without_frames(error, stream) from (error.__cause__ if isinstance(error, StreamError) else error)


def out_of_memory(
    device: str, asked: int, purpose: str, resident: Mapping[str, int], limit: int | None, *, emulated: bool
) -> DeviceOutOfMemory:
    """Return the error for ``asked`` bytes that do not fit beside the ``resident`` ones, by purpose."""
    held = ", ".join(f"{name} {gib(n)}" for name, n in sorted(resident.items(), key=lambda kv: -kv[1])) or "nothing"
    of = "" if limit is None else f" of {gib(limit)}"
    more = " Or raise memory= of emulation=." if emulated else ""
    return DeviceOutOfMemory(
        f"{device} is out of memory: {gib(asked)} for {purpose} do not fit, {gib(sum(resident.values()))}{of} "
        f"are in use ({held}). {SMALLER}.{more}"
    )
