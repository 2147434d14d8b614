"""Pinned host memory, for asynchronous copies to and from a GPU.

torch's pinned allocator rounds every block up to a power of two, which wastes 12 GB on the working copy of a 20 GB
model. So this module registers its own mappings with CUDA: buffers in their exact size, boundary tensors in slabs. The
mappings are anonymous and *shared*: pages that a forked data loader shares copy-on-write would move away from under the
GPU at the first write after the fork. Buffers live for a whole run. Boundary tensors come and go, see `slabs`.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.devices.alike import misalignment, reach
from lightning_roundpipe.devices.host_memory import free_bytes
from lightning_roundpipe.devices.slabs import Slabs
from lightning_roundpipe.messages import PREFIX, gib, warn

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU, not only the current one
_HUGE = 2 << 20
_warned = False


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class RegistrationError(RuntimeError):
    """CUDA refused to pin memory."""


class _Registered(mmap.mmap):
    """A mapping that unregisters itself before it is unmapped. (A weak reference's callback would run too late.)"""

    _address = 0
    _owner = 0

    def register(self, address: int) -> None:
        error = _cudart().cudaHostRegister(address, len(self), _PORTABLE)
        if int(error) != 0:
            _forget_last_error()
            raise RegistrationError(f"cudaHostRegister of {len(self)} bytes failed: {error}")
        self._address, self._owner = address, os.getpid()

    def __del__(self) -> None:
        # A forked child inherits the object but not the registration, and must not call CUDA.
        if self._address and self._owner == os.getpid():
            with suppress(Exception):  # at exit, torch may be gone already, and with it the registration
                _cudart().cudaHostUnregister(self._address)


def registered(nbytes: int) -> Tensor:
    """Return pinned memory of shape ``(nbytes,)``, uint8, zeros, of as few pages as fit.

    It is unregistered with its last view.

    Raises:
        RegistrationError: CUDA cannot pin it (no memory, WSL's limit, a sandbox).
    """
    pages = -(-max(nbytes, 1) // mmap.PAGESIZE)
    mapping = _Registered(-1, pages * mmap.PAGESIZE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        huge = len(mapping) // _HUGE * _HUGE  # a last huge page would be larger than the rest of the buffer
        if huge:
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE, 0, huge)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    # All intra-op threads allocate the pages, from the memory of whichever cores they run on. Page-locking would touch
    # them in one thread, which zeroes less than the memory's bandwidth allows.
    whole.zero_()
    mapping.register(whole.data_ptr())
    return whole[:nbytes]


_slabs = Slabs(lambda nbytes: registered(nbytes))
"""For the boundary tensors of all devices."""


def host_buffer(nbytes: int, pin_memory: str) -> Tensor:
    """Return host memory of shape ``(nbytes,)``, uint8, for asynchronous copies.

    Args:
        nbytes: its size.
        pin_memory: ``"on"`` returns pinned memory or raises. ``"auto"`` returns pageable memory where pinning fails,
            and warns once per process. ``"off"`` returns pageable memory.

    Raises:
        RegistrationError: ``pin_memory`` is ``"on"`` and CUDA cannot pin the memory.
    """
    return _bytes_from(registered, nbytes, pin_memory)


def host_like(t: Tensor, pin_memory: str) -> Tensor:
    """Return a host tensor like ``t``, from memory as in `host_buffer`. Expanded dimensions take no memory."""
    before = misalignment(t) if t.numel() else 0
    flat = _bytes_from(_slabs.take, (before + reach(t)) * t.element_size(), pin_memory)
    with torch.inference_mode(False):
        return flat.view(t.dtype).as_strided(t.shape, t.stride(), before)


def reserve(nbytes: int, pin_memory: str) -> None:
    """Pin ``nbytes`` for boundary tensors now rather than during a step. Errors are left to `host_like`."""
    if pin_memory != "off":
        with suppress(RegistrationError):
            _slabs.reserve(nbytes)


def give_back() -> None:
    """Unpin the slabs of boundary tensors that are not in use."""
    _slabs.give_back()


def _bytes_from(source: Callable[[int], Tensor], nbytes: int, pin_memory: str) -> Tensor:
    with torch.inference_mode(False):  # training also uses memory that validation allocates
        if pin_memory != "off":
            try:
                return source(nbytes)
            except RegistrationError as error:
                if pin_memory == "on":
                    raise RegistrationError(f"{error}. Set pin_memory='auto' to go on with pageable memory.") from None
                _warn_pageable(error)
        return torch.empty(nbytes, dtype=torch.uint8)


def _warn_pageable(error: Exception) -> None:
    """Warn once per process that copies will not overlap."""
    global _warned
    if not _warned:
        _warned = True
        warn(
            f"{PREFIX}host memory could not be pinned ({error}). Training goes on with pageable memory, where copies "
            f"wait for each other, and is slower. {_more_memory()}, or set pin_memory='off', which takes pageable "
            "memory without this warning."
        )


def _more_memory() -> str:
    """Return what helps where CUDA cannot pin. ``ulimit -l`` does not: it does not count what CUDA pins."""
    free = f"{gib(free_bytes())} of host memory are free"
    if "microsoft" in platform.release().lower():  # Windows lets WSL pin half of its memory at most
        return f"{free}: raise memory= in the section [wsl2] of .wslconfig"
    return f"{free}: give the machine or its container more (docker run --memory, a job's memory limit)"


def _forget_last_error() -> None:
    """Clear CUDA's last error: it keeps a failed call's code, and the next kernel launch would raise it.

    torch exposes no ``cudaGetLastError``, but its check after a launch clears the code as it raises.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
