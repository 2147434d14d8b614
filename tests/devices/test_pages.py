"""Pages of host buffers: all there before CUDA is asked to lock them."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices import pinned
from lightning_roundpipe.devices.pages import PIECE, make_pages

SIZE = 8 * PIECE + 3 * mmap.PAGESIZE


def fresh(nbytes: int = SIZE) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def there(memory: Tensor) -> int:
    """Bytes of it that have pages. It may be a few mappings, as advice was given for parts."""
    start, end, total = memory.data_ptr(), memory.data_ptr() + memory.numel(), 0
    for entry in Path("/proc/self/smaps").read_text().split("VmFlags")[:-1]:
        found = re.search(r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+) kB", entry, re.MULTILINE | re.DOTALL)
        if found is not None and start <= int(found[1], 16) and int(found[2], 16) <= end:
            total += 1024 * int(found[3])
    return total


def test_all_pages_are_made() -> None:
    memory = fresh()
    assert there(memory) == 0
    make_pages(memory)
    assert there(memory) == memory.numel()
    assert memory.eq(0).all()


def test_small_buffers_are_left_alone() -> None:
    memory = fresh(PIECE)
    make_pages(memory)
    assert there(memory) == 0


class Cudart:
    """Looks at what it is to register."""

    found = -1

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        self.found = there(memory)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def test_cuda_is_given_what_has_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(pinned, "_cudart", lambda: cudart)
    buffer = pinned.host_buffer(SIZE, "on")
    assert cudart.found == buffer.numel() == SIZE
