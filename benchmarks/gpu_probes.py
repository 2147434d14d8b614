"""What a GPU, its link and the interpreter do before any model runs: the probes of `gpu_first_run`.

Each function returns figures; units are in their names. They measure the package's own ways of pinning and copying,
because those are what a run uses.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from torch import nn

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import Device, make_devices, pages, pinned

MIB, GIB = 2**20, 2**30
Figures = dict[str, Any]


def machine() -> Figures:
    """Names, versions, and how the GPU is attached."""
    gpu = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    query = "driver_version,pcie.link.gen.max,pcie.link.width.max,pcie.link.gen.current,pcie.link.width.current"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"], capture_output=True, text=True
    )
    versions = {}
    for name in ("torch", "lightning", "pytorch-lightning", "transformers", "peft"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name.replace("-", "_")] = metadata.version(name)
    return {
        "gpu": gpu.name,
        "memory_gib": total / GIB,
        "free_gib": free / GIB,
        "multiprocessors": gpu.multi_processor_count,
        query: asked.stdout.strip() or asked.stderr.strip(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "host_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
        **versions,
    }


@contextlib.contextmanager
def one_device() -> Iterator[Device]:
    [device] = make_devices("cuda", [torch.device("cuda", 0)], Emulation(), "on")
    try:
        yield device
    finally:
        device.close()


def _seconds(function: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Launcher:
    """A thread that launches small kernels all the time, and the longest that one launch took."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._launch, daemon=True)

    def _launch(self) -> None:
        stream = torch.cuda.Stream()
        x = torch.zeros(1024, device="cuda")
        with torch.cuda.stream(stream):
            while not self._stop.is_set():
                start = time.perf_counter()
                x.add_(1)
                self.gaps.append(time.perf_counter() - start)
                if len(self.gaps) % 512 == 0:
                    stream.synchronize()

    def __enter__(self) -> Launcher:
        self._thread.start()
        time.sleep(0.2)
        self.gaps.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def longest_ms(self) -> float:
        return 1e3 * max(self.gaps, default=0.0)


def registration() -> Figures:
    """How long page-locking takes, and whether it stalls another thread's launches."""
    found: Figures = {}
    with Launcher() as launcher:
        time.sleep(1.0)
    found["longest_launch_ms_idle"] = launcher.longest_ms
    for name, nbytes in (("32MiB", 32 * MIB), ("200MiB", 200 * MIB), ("4GiB", 4 * GIB)):
        fresh = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        found[f"make_pages_{name}_s_per_gib"] = _seconds(lambda fresh=fresh: pages.make_pages(fresh)) / (nbytes / GIB)
        del fresh
        with Launcher() as launcher:
            buffer: list[torch.Tensor] = []
            took = _seconds(lambda buffer=buffer, nbytes=nbytes: buffer.append(pinned.registered(nbytes)))
            found[f"register_{name}_s_per_gib"] = took / (nbytes / GIB)
            found[f"first_touch_{name}_s_per_gib"] = _seconds(buffer[0].zero_) / (nbytes / GIB)
            found[f"second_touch_{name}_s_per_gib"] = _seconds(buffer[0].zero_) / (nbytes / GIB)
            start = time.perf_counter()
            buffer.clear()
            gc.collect()
            found[f"unregister_{name}_s_per_gib"] = (time.perf_counter() - start) / (nbytes / GIB)
        found[f"longest_launch_ms_while_{name}"] = launcher.longest_ms
        plain = torch.zeros(nbytes, dtype=torch.uint8)
        found[f"torch_pin_memory_{name}_s_per_gib"] = _seconds(plain.pin_memory) / (nbytes / GIB)
        del plain
    return found


def copies() -> Figures:
    """Bytes a second of the link, each way and both, from page-locked and from ordinary memory."""
    nbytes = GIB
    there, back = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    hosts: dict[str, Callable[[], torch.Tensor]] = {
        "pinned": lambda: pinned.registered(nbytes).fill_(1),
        "torch_pinned": lambda: torch.ones(nbytes, dtype=torch.uint8, pin_memory=True),
        "pageable": lambda: torch.ones(nbytes, dtype=torch.uint8),
    }
    found: Figures = {}
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def both(a: torch.Tensor, b: torch.Tensor) -> None:
        with torch.cuda.stream(up):
            there.copy_(a, non_blocking=True)
        with torch.cuda.stream(down):
            b.copy_(back, non_blocking=True)

    for kind, make in hosts.items():
        a, b = make(), make()
        for way, copy in {
            "up": lambda a=a: there.copy_(a, non_blocking=True),
            "down": lambda b=b: b.copy_(back, non_blocking=True),
        }.items():
            copy()
            found[f"{way}_{kind}_gb_per_s"] = nbytes / min(_seconds(copy) for _ in range(3)) / 1e9
        found[f"both_{kind}_gb_per_s"] = 2 * nbytes / min(_seconds(lambda a=a, b=b: both(a, b)) for _ in range(3)) / 1e9
        del a, b
    return found


def overheads() -> Figures:
    """Microseconds of what every call of a layer does on the host."""
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    x, y = torch.zeros(256, device="cuda"), torch.zeros(256).pin_memory()

    def record() -> None:
        torch.cuda.Event(blocking=True).record(stream)

    def record_timed() -> None:
        torch.cuda.Event(enable_timing=True, blocking=True).record(stream)

    def context() -> None:
        with torch.cuda.stream(stream):
            pass

    def chunk() -> None:
        with torch.cuda.stream(stream):
            x.copy_(y, non_blocking=True)
        torch.cuda.Event(enable_timing=True, blocking=True).record(stream)

    found: Figures = {}
    event.record(stream)
    measured: dict[str, Callable[[], object]] = {
        "launch": lambda: x.add_(1),
        "event_record": record,
        "event_record_timed": record_timed,
        "event_query": event.query,
        "stream_wait_event": lambda: stream.wait_event(event),
        "stream_context": context,
        "set_device": lambda: torch.cuda.set_device(0),
        "small_copy_and_event": chunk,
        "item_of_a_finished_tensor": x[0].item,
    }
    with one_device() as device:

        def activate() -> None:
            with device.activate():
                pass

        measured["device_activate"] = activate
        measured["device_record_timed"] = lambda: device.compute.record(timed=True)
        for name, function in measured.items():
            times = []
            for _ in range(20):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(100):
                    function()
                times.append((time.perf_counter() - start) / 100)
            found[f"{name}_us"] = 1e6 * statistics.median(times)
    return found


@contextlib.contextmanager
def beside(kind: str) -> Iterator[None]:
    """Threads that want the interpreter, as a run has them."""
    stop = threading.Event()

    def launches() -> None:
        x = torch.zeros(64, 64, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                for _ in range(64):
                    x = x + 1
                torch.cuda.current_stream().synchronize()

    def python() -> None:
        count = 0
        while not stop.is_set():
            for _ in range(10_000):
                count += 1

    targets = {"idle": [], "two_launching_threads": [launches] * 2, "one_python_thread": [python]}[kind]
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def feeding() -> Figures:
    """Bytes a second of the chunked weight stream, beside threads that want the interpreter, at three intervals."""
    found: Figures = {}
    nbytes = 4 * GIB
    before = sys.getswitchinterval()
    with one_device() as device:
        arena, host = device.allocate(nbytes, "weights"), device.host_buffer(nbytes)
        host.zero_()

        def upload() -> None:
            device.weights_up.copy(arena, host)
            device.weights_up.synchronize()

        upload()  # which also measures the link's rate
        try:
            for interval in (5e-3, 5e-4, 1e-4):
                sys.setswitchinterval(interval)
                for kind in ("idle", "two_launching_threads", "one_python_thread"):
                    with beside(kind):
                        took = _seconds(upload)
                    found[f"{kind}_at_{interval:.0e}_gb_per_s"] = nbytes / took / 1e9
        finally:
            sys.setswitchinterval(before)
        device.free(arena)
    return found


def interleaving() -> Figures:
    """How long 1 MiB waits for 2 GiB of weights: whole, in chunks of one stream, and as the package sends them."""
    found: Figures = {}
    nbytes, stream = 2 * GIB, torch.cuda.Stream()
    with one_device() as device:
        arena, host = device.allocate(nbytes, "weights"), device.host_buffer(nbytes).zero_()
        small, inputs = torch.empty(MIB, dtype=torch.uint8, device="cuda"), device.host_buffer(MIB).zero_()
        for _ in range(3):  # which also measures the link's rate
            device.weights_up.copy(arena, host)
            device.weights_up.synchronize()
        size = int(device.weights_up.chunk_bytes)  # type: ignore[attr-defined]

        def in_pieces(size: int) -> None:
            with torch.cuda.stream(stream):
                for there, here in zip(arena.split(size), host.split(size), strict=True):
                    there.copy_(here, non_blocking=True)

        ways: dict[str, Callable[[], None]] = {
            "whole": lambda: in_pieces(nbytes),
            "in_chunks_of_one_stream": lambda: in_pieces(size),
            "as_sent": lambda: device.weights_up.copy(arena, host),
        }
        for name, give in ways.items():
            found[f"{name}_gb_per_s"] = nbytes / min(_seconds(give) for _ in range(3)) / 1e9
            waited = []
            for delay_s in (1e-3, 4e-3, 9e-3, 16e-3, 25e-3):
                torch.cuda.synchronize()
                give()
                time.sleep(delay_s)
                start = time.perf_counter()
                device.activations_up.copy(small, inputs)
                device.activations_up.synchronize()
                waited.append(time.perf_counter() - start)
            found[f"{name}_longest_wait_ms"] = 1e3 * max(waited)
        found["chunk_mib"] = size / MIB
        device.free(arena)
    return found


def libraries() -> Figures:
    """What libraries do behind our back: random state around attention, and memory that products in threads keep."""
    q = torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    generator = torch.cuda.default_generators[0]
    before = generator.get_state()
    nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    moved = not torch.equal(before, generator.get_state())
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    allocated = []

    def multiply() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(64, 64, device="cuda")
            x @ x
            torch.cuda.current_stream().synchronize()

    for _ in range(8):
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
        allocated.append(torch.cuda.memory_allocated() - start[0])
    return {
        "attention_without_dropout_moves_the_generator": moved,
        "workspace_mib_after_one_thread": allocated[0] / MIB,
        "workspace_mib_after_eight_threads": allocated[-1] / MIB,
        "reserved_mib_after_eight_threads": (torch.cuda.memory_reserved() - start[1]) / MIB,
    }
