"""What can go wrong on a device, apart from what torch itself raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch


class StreamAborted(RuntimeError):
    """A wait was given up because its device was aborted or closed.

    It is never the first error: some thread failed, called ``Device.abort()`` so that nobody hangs, and everybody else
    gets this.
    """


class StreamError(RuntimeError):
    """Work on a stream failed; ``__cause__`` is the error itself.

    Every waiter gets its own, because one exception raised in several threads would collect all of their tracebacks.
    """


class DeviceOutOfMemory(torch.OutOfMemoryError):
    """A device cannot hold what was asked of it. The message says what it holds, and which settings help."""


class DoesNotFit(ValueError, torch.OutOfMemoryError):
    """No plan keeps a batch of this size within the workers' memory.

    Lightning's batch-size finder then tries a smaller one: it looks for certain words in the first argument.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"CUDA out of memory: {message}")
        self._message = message

    def __str__(self) -> str:
        return self._message


STICKY = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 911})
"""CUDA's numbers of errors after which all further work of the process fails: illegal addresses (700), timeouts of a
kernel (702), asserts in a kernel (710), illegal instructions and misaligned or invalid addresses (714 to 718), other
failures of a kernel (719, 721), and memory or links that are broken (214, 220, 226, 911)."""

NEW_PROCESS = (
    "this process cannot use the GPU any more: start a new process. CUDA reports such errors late: with "
    "CUDA_LAUNCH_BLOCKING=1 in the environment, the traceback shows the operation that failed."
)


def is_sticky(error: BaseException | None) -> bool:
    """Whether ``error``, or what caused it, has made the GPU unusable for the process."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) in STICKY:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def raise_kept(error: BaseException, stream: str) -> NoReturn:
    """Raise what was kept when work on ``stream`` failed, as a new exception for this thread."""
    if isinstance(error, StreamAborted):
        raise StreamAborted(*error.args)
    if isinstance(error, StreamError):  # it came here from another stream, whose name it has
        raise StreamError(*error.args) from error.__cause__
    raise StreamError(f"{stream} failed: {error!r}") from error


def sizeof(nbytes: int) -> str:
    """Bytes for people: ``1536`` is ``1.5 KiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def out_of_memory(
    device: str, asked: int, purpose: str, resident: Mapping[str, int], limit: int | None, *, emulated: bool
) -> DeviceOutOfMemory:
    """The error to raise when ``asked`` bytes for ``purpose`` do not fit beside ``resident`` (bytes by purpose).

    Args:
        device: how to call the device in the message.
        asked: bytes that were wanted.
        purpose: what they were wanted for.
        resident: bytes that are there already, by purpose.
        limit: bytes that the device may use, if that is known.
        emulated: whether ``emulation.memory`` is a setting that would help.
    """
    held = ", ".join(f"{name} {sizeof(n)}" for name, n in sorted(resident.items(), key=lambda kv: -kv[1])) or "nothing"
    of = "" if limit is None else f" of {sizeof(limit)}"
    more = ", or raise emulation.memory" if emulated else ""
    return DeviceOutOfMemory(
        f"{device} is out of memory: {sizeof(asked)} for {purpose} do not fit, {sizeof(sum(resident.values()))}{of} "
        f"are in use ({held}). Set a smaller microbatch_size (or more num_microbatches), or a smaller memory_budget, "
        f"so that stages get smaller{more}."
    )
