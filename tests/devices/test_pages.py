"""Pages of host buffers: all there before CUDA is asked to lock them, and from the memory of all processors."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices import pages, pinned
from lightning_roundpipe.devices.pages import PIECE, cores_by_node, make_pages

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


@pytest.fixture
def two_processors(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Of a core each; the first two that there are, or one twice."""
    cores = sorted(os.sched_getaffinity(0))
    nodes = [{cores[0]}, {cores[-1]}]
    monkeypatch.setattr(pages, "cores_by_node", lambda: nodes)
    return nodes


def test_all_pages_are_made(two_processors: Any) -> None:
    memory = fresh()
    assert there(memory) == 0
    make_pages(memory)
    assert there(memory) == memory.numel()
    assert memory.eq(0).all()


def test_an_older_kernel_or_a_sandbox(two_processors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda memory, advice: False)
    memory = fresh()
    make_pages(memory)
    assert there(memory) == memory.numel()


def test_small_buffers_and_small_machines_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, nbytes in (([{0}, {1}], PIECE), ([{0}], SIZE)):
        monkeypatch.setattr(pages, "cores_by_node", lambda nodes=nodes: nodes)
        memory = fresh(nbytes)
        make_pages(memory)
        assert there(memory) == 0


def test_pieces_come_from_all_processors_in_turn(
    two_processors: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each made by a thread on the processor that is to have it; the caller stays where it is."""
    made: dict[int, tuple[str, set[int]]] = {}
    memory, before = fresh(), os.sched_getaffinity(0)

    def madvise(piece: Tensor, advice: int) -> bool:
        if advice != mmap.MADV_HUGEPAGE:
            offset = piece.data_ptr() - memory.data_ptr()
            made[offset] = threading.current_thread().name, os.sched_getaffinity(0)
        return True

    monkeypatch.setattr(pages, "_madvise", madvise)
    make_pages(memory)
    assert os.sched_getaffinity(0) == before
    assert sorted(made) == list(range(0, SIZE, PIECE))
    assert [made[offset] for offset in sorted(made)] == [
        ("roundpipe-pages", two_processors[i % 2]) for i in range(len(made))
    ]


def test_no_huge_page_is_larger_than_what_is_left(two_processors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def madvise(memory: Tensor, advice: int) -> bool:
        if advice == mmap.MADV_HUGEPAGE:
            asked.append(memory.numel())
        return True

    monkeypatch.setattr(pages, "_madvise", madvise)
    make_pages(fresh())
    assert asked == [8 * PIECE]


def test_where_the_cores_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said for the process counts; memory without cores is a GPU's."""
    for number, cores in enumerate(("0-3,8", "4-7", "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores)
    (tmp_path / "has_memory").write_text("0-2\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(16)))
    assert cores_by_node(tmp_path) == [{0, 1, 2, 3, 8}, {4, 5, 6, 7}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {2, 3})
    assert cores_by_node(tmp_path) == [{2, 3}]
    assert cores_by_node(tmp_path / "elsewhere") == [{2, 3}]


class Cudart:
    """Looks at what it is to register."""

    found = -1

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        self.found = there(memory)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def test_cuda_is_given_what_has_pages(two_processors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(pinned, "_cudart", lambda: cudart)
    buffer = pinned.host_buffer(SIZE, "on")
    assert cudart.found == buffer.numel() == SIZE
