"""Memory in `bench_gpu.py`: how much of the host's is taken, and a GPU that has less than it has."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_roundpipe.callbacks.peak_host_memory import forget_peak, peak_bytes

BALLAST = """
import sys, torch
free, _ = torch.cuda.mem_get_info(0)
taken = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda:0")
print("ready", flush=True)
sys.stdin.read()
"""
"""A program that leaves so many bytes of the GPU free until its input ends."""


@contextmanager
def capped(nbytes: int | None) -> Iterator[None]:
    """This process may use ``nbytes`` of the GPU, and sees no more; None: all of it.

    torch refuses what goes beyond. Libraries that ask the driver how much is free would know nothing of that and plan
    for a larger GPU, so another process holds the rest.

    Raises:
        RuntimeError: the rest is not there to be held.
    """
    if nbytes is None:
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), 0)
    command = [sys.executable, "-c", BALLAST, str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            if holder.stdout.readline().strip() != "ready":
                raise RuntimeError(f"the GPU's memory beyond {nbytes:,} bytes could not be held")
            yield
        finally:
            holder.stdin.close()
            holder.wait()


class DeviceMemory:
    """The most of the first GPU's memory that torch took while this was entered.

    Whoever is measured may begin new peaks in between, as the engine does at each step: what was before counts, too.
    """

    def __enter__(self) -> DeviceMemory:
        self._allocated = self._reserved = 0
        self._reset = torch.cuda.reset_peak_memory_stats
        torch.cuda.reset_peak_memory_stats = self._begin  # type: ignore[assignment]
        torch.cuda.reset_peak_memory_stats(0)
        self._allocated = self._reserved = 0
        return self

    def _begin(self, device: Any = None) -> None:
        self._look()
        self._reset(device)

    def _look(self) -> None:
        self._allocated = max(self._allocated, torch.cuda.max_memory_allocated(0))
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(0))

    def __exit__(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats = self._reset
        self._look()

    def found(self) -> dict[str, Any]:
        return {"device_bytes": self._allocated, "device_reserved_bytes": self._reserved}


class HostMemory:
    """The most host memory that was taken while this was entered, in two ways.

    By the process, as the system counts it; and by how much the machine's free memory fell, because memory that a
    driver pins need not be counted as the process's.
    """

    def __enter__(self) -> HostMemory:
        forget_peak()
        self._before = self._least = _available()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._least = min(self._least, _available())

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def found(self) -> dict[str, Any]:
        return {"host_bytes": peak_bytes(), "host_fell_bytes": max(0, self._before - self._least)}


def _available() -> int:
    """Bytes; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)
