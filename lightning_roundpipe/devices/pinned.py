"""Host memory that a GPU can copy from and to while the host goes on.

Torch's own pinned allocator rounds every block up to a power of two, which for the working copy of a 20 GB model is 12
GB lost. So all of it is our own mapping, registered with CUDA: buffers exactly, boundary tensors in slabs. It is a
*shared* anonymous mapping, because pages that a forked data loader shares copy-on-write would be copied away from under
the GPU by the first write after the fork. Buffers are kept for a whole run; boundary tensors come and go, see `slabs`.
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

from lightning_roundpipe.devices.alike import apart, reach
from lightning_roundpipe.devices.host_memory import free_bytes
from lightning_roundpipe.devices.pages import make_pages
from lightning_roundpipe.devices.slabs import Slabs
from lightning_roundpipe.messages import PREFIX, gib, warn

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU, not only for the current one
_warned = False


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class RegistrationError(RuntimeError):
    """CUDA refused to pin memory."""


class _Registered(mmap.mmap):
    """A mapping that unregisters itself before it is unmapped. (A weak reference's callback would come too late.)"""

    _address = 0
    _owner = 0

    def register(self, address: int) -> None:
        error = _cudart().cudaHostRegister(address, len(self), _PORTABLE)
        if int(error) != 0:
            _forget_last_error()
            raise RegistrationError(f"cudaHostRegister of {len(self)} bytes failed: {error}")
        self._address, self._owner = address, os.getpid()

    def __del__(self) -> None:
        # A forked child inherits the object but not the registration, and must not call CUDA at all.
        if self._address and self._owner == os.getpid():
            with suppress(Exception):  # at exit, torch may be gone already, and the registration with it
                _cudart().cudaHostUnregister(self._address)


def registered(nbytes: int) -> Tensor:
    """Pinned memory of exactly the pages it needs: shape ``(nbytes,)``, uint8, zeros, unregistered with its last view.

    Raises:
        RegistrationError: CUDA does not pin it (no memory, WSL's share of it, a sandbox).
    """
    pages = -(-max(nbytes, 1) // mmap.PAGESIZE)
    mapping = _Registered(-1, pages * mmap.PAGESIZE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    make_pages(whole)
    mapping.register(whole.data_ptr())
    return whole[:nbytes]


_slabs = Slabs(lambda nbytes: registered(nbytes))
"""For boundary tensors, whichever device they come from."""


def host_buffer(nbytes: int, pin_memory: str) -> Tensor:
    """Host memory for asynchronous copies: shape ``(nbytes,)``, uint8.

    Args:
        nbytes: its size.
        pin_memory: ``"on"``: pinned or an error; ``"auto"``: pageable, with one warning per process, if pinning fails;
            ``"off"``: pageable.

    Raises:
        RegistrationError: it cannot be pinned, and ``pin_memory`` is ``"on"``.
    """
    return _bytes_from(registered, nbytes, pin_memory)


def host_like(t: Tensor, pin_memory: str) -> Tensor:
    """A host tensor of ``t``'s shape, dtype and strides, which takes no memory for expanded dimensions.

    Raises:
        RegistrationError: as in `host_buffer`.
    """
    before = apart(t) if t.numel() else 0
    flat = _bytes_from(_slabs.take, (before + reach(t)) * t.element_size(), pin_memory)
    with torch.inference_mode(False):
        return flat.view(t.dtype).as_strided(t.shape, t.stride(), before)


def reserve(nbytes: int, pin_memory: str) -> None:
    """Pin ``nbytes`` for boundary tensors now rather than within a step. Where that fails, `host_like` says so."""
    if pin_memory != "off":
        with suppress(RegistrationError):
            _slabs.reserve(nbytes)


def give_back() -> None:
    """Unpin what is kept for boundary tensors."""
    _slabs.give_back()


def _bytes_from(source: Callable[[int], Tensor], nbytes: int, pin_memory: str) -> Tensor:
    with torch.inference_mode(False):  # memory that is made during validation must serve training too
        if pin_memory != "off":
            try:
                return source(nbytes)
            except RegistrationError as error:
                if pin_memory == "on":
                    raise RegistrationError(f"{error}. Set pin_memory='auto' to go on with pageable memory.") from None
                warn_pageable(error)
        return torch.empty(nbytes, dtype=torch.uint8)


def warn_pageable(error: Exception) -> None:
    """Say once in a process that copies will not overlap."""
    global _warned
    if not _warned:
        _warned = True
        warn(
            f"{PREFIX}host memory could not be pinned ({error}). Training goes on with pageable memory, where copies "
            f"wait for each other, and is slower. {_more_memory()}, or set pin_memory='off', which takes pageable "
            "memory without this warning."
        )


def _more_memory() -> str:
    """What helps where CUDA refuses to pin. The limit of locked memory (``ulimit -l``) does not count what it pins."""
    free = f"{gib(free_bytes())} of host memory are free"
    if "microsoft" in platform.release().lower():  # of which Windows lets half be pinned, or less
        return f"{free}: raise memory= in the section [wsl2] of .wslconfig"
    return f"{free}: give the machine or its container more (docker run --memory, a job's memory limit)"


def _forget_last_error() -> None:
    """CUDA keeps a failed call's code as the thread's last error, and the next kernel launch would be blamed for it.

    Torch exposes no ``cudaGetLastError``, but its check after a launch clears the code as it raises.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
