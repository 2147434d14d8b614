"""``hardware=auto``: measures this machine in some seconds into a file like those in ``conf/hardware``.

The probes use the façade of training (`devices`), on all devices at once: a probe of one would miss what devices share,
the processor's cores, the host's memory, a switch of the links. A figure is what the slowest device reaches.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import Device, make_devices
from lightning_roundpipe.devices.host_memory import free_bytes, total_bytes
from lightning_roundpipe.devices.interpreter import unwalked_objects
from lightning_roundpipe.devices.intraop_threads import apply_num_threads
from lightning_roundpipe.estimates.meter import Counter, attention_flops
from lightning_roundpipe.estimates.nominal import EMULATED, nominal
from lightning_roundpipe.messages import first_line, plural
from lightning_roundpipe.planning.profile import Format, Hardware
from lightning_roundpipe.planning.updates import adamw_bytes

EMULATED_WORKERS = 4
"""Default number of emulated devices, as in ``conf/hardware/cpu.yaml``."""
ENGINE_S = 0.5e-3
"""Assumed seconds of the interpreter for the engine's own work, for a layer call and for a turn each;
``benchmarks/bench_engine.py`` measures them."""
SHARE = 0.25
"""Largest share of free memory that a probe takes."""

_SECONDS = 0.3
"""Approximate seconds of a measurement."""
_LONG_ENOUGH = 0.01
"""Seconds above which larger matrices reach no higher rate."""
_DTYPES: dict[Format, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MIB = 2**20

Work = Callable[[], object]

_MEASURED = (
    "flops", "memory_bandwidth", "upload", "download", "host_memory_bandwidth", "attention_efficiency", "issue_s",
    "optimizer_bandwidth",
)  # fmt: skip
_OF_THE_SYSTEM = ("memory", "host_memory")
_LEFT_OUT = ("uplink", "uplink_devices", "kinds")
"""Numbers that the file lacks: each worker's rates are measured with all others copying."""


def measure_to_file(path: Path | None, workers: int | None) -> tuple[Path, str]:
    """Measure this machine into a file, and return the file's path and text; progress goes to standard error.

    ``path`` None: a file in the current folder, named after the host.

    Raises:
        ValueError: the file exists already, its name is not allowed, or a probe failed.
    """
    path = path or Path((re.sub(r"[^\w.-]+", "-", platform.node()) or "machine") + ".yaml")
    if path.suffix not in (".yaml", ".yml") or "," in str(path):
        raise ValueError(f"hardware_file={path} must be one file whose name ends in .yaml, as hardware= reads it.")
    if not path.parent.is_dir():
        raise ValueError(f"hardware_file={path} cannot be written: there is no folder {path.parent}.")
    if path.exists():
        raise ValueError(
            f"hardware=auto would overwrite {path}. Plan with it by hardware={path}, remove it to measure again, or "
            "set hardware_file=OTHER.yaml."
        )
    text = written(_probe_aloud(workers))
    with path.open("x") as file:
        file.write(text)
    print(f"roundpipe-plan: {path} has the numbers: hardware={path} plans with them again.", file=sys.stderr)
    return path, text


def refuse_missing(workers: int | None) -> None:
    """Refuse to measure more GPUs than this machine has. Plans, and emulated devices, may have any number."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and (workers or 0) > count:
        raise ValueError(
            f"workers={workers} is more than the {plural(count, 'GPU')} of this machine, and what is not there cannot "
            f"be measured: leave workers= out, or say model=NAME to plan for more of them."
        )


def _probe_aloud(workers: int | None) -> Hardware:
    """Run `probe`, and print the name of each probe on standard error as it begins, all in one line."""
    start, heads = time.perf_counter(), itertools.chain(["roundpipe-plan: measuring ", ": "], itertools.repeat(", "))
    try:
        return probe(workers, lambda what: print(next(heads), what, sep="", end="", file=sys.stderr, flush=True))
    finally:
        print(f" ({time.perf_counter() - start:.0f} s)", file=sys.stderr)


def written(machine: Hardware) -> str:
    """Return the text of the file. Comments say where its numbers come from."""
    numbers = {item.name: getattr(machine, item.name) for item in fields(Hardware) if item.name not in _LEFT_OUT}
    others = [name for name in numbers if name.endswith(("_s", "_efficiency")) and name not in _MEASURED]
    lines = [
        f"# {machine.title}, measured by roundpipe-plan hardware=auto on {platform.node()} on "
        f"{datetime.date.today().isoformat()}, with torch {torch.__version__}.",
        f"# Measured on all {machine.workers} at once, what one reaches: {', '.join(_MEASURED)}.",
        f"# What the system says: {', '.join(_OF_THE_SYSTEM)}. Assumed: {', '.join(others)}.",
    ]
    numbers = {name: dict(value) if name == "flops" else value for name, value in numbers.items() if value is not False}
    return "\n".join(lines) + "\n" + OmegaConf.to_yaml(OmegaConf.create(numbers))


def probe(workers: int | None, say: Callable[[str], None]) -> Hardware:
    """Measure this machine: its CUDA devices, or emulated devices if it has none.

    ``workers``: number of devices; None: all, or `EMULATED_WORKERS`. ``say`` gets the name of each probe.

    Raises:
        ValueError: a probe failed; the message names it.
    """
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > 0
    count = (min(workers or 1024, torch.cuda.device_count()) if cuda else workers) or EMULATED_WORKERS
    say(plural(count, "CUDA device" if cuda else "emulated device") + ("" if cuda else ", as torch sees no GPU"))
    kind: Literal["cpu", "cuda"] = "cuda" if cuda else "cpu"
    flops: dict[Format, float] = {}
    with ExitStack() as stack:
        with _naming("the devices", say):
            made = make_devices(kind, [torch.device(kind, i) if cuda else torch.device(kind) for i in range(count)],
                                Emulation())  # fmt: skip
            for device in made:
                stack.callback(_close, device)
            for context in (unwalked_objects(), made[0].process_settings()):
                stack.enter_context(context)
            devices = _Devices(made, stack)
        for form, dtype in _DTYPES.items():
            with _naming(f"{form} products", say):
                flops[form] = devices.products(dtype)
        with _naming("attention", say):
            attention = min(1.0, devices.attention() / flops["bf16"])
        with _naming("device memory", say):
            bandwidth = devices.elementwise()
        with _naming("operations", say):
            issue_s = devices.issuing()
        with _naming("links", say):
            upload, download = devices.copies(up=True), devices.copies(up=False)
        with _naming("optimizer", say), made[0].host_thread_settings():
            optimizer = _optimizer_rate()
    title, memory = f"{plural(count, 'emulated device')} on {_processor()}", None
    if cuda:
        names = {torch.cuda.get_device_name(device.torch_device).removeprefix("NVIDIA ") for device in made}
        title = f"{count} x {names.pop()}" if len(names) == 1 else f"{count} unequal GPUs"
        memory = min(torch.cuda.mem_get_info(device.torch_device)[1] for device in made)
    return replace(
        nominal(kind),
        title=title,
        workers=count,
        flops={form: _rounded(rate) for form, rate in flops.items()},
        memory=memory,
        memory_bandwidth=_rounded(bandwidth),
        upload=_rounded(upload),
        download=_rounded(download),
        host_memory=total_bytes(),
        host_memory_bandwidth=_rounded(max(optimizer, upload)),
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        attention_efficiency=_rounded(attention),
        issue_s=_rounded(issue_s),
        call_s=ENGINE_S,
        turn_s=ENGINE_S,
        optimizer_bandwidth=_rounded(optimizer),
    )


def _close(device: Device) -> None:
    with suppress(RuntimeError):  # a device that has failed fails again here, and would hide its first error
        device.close()


@contextmanager
def _naming(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Announce a probe, and name it in the error if it fails."""
    say(what)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise ValueError(
            f"hardware=auto: the probe of {what} failed: {first_line(error)}. Let nothing else run on the devices, or "
            "describe the machine in a file like those in conf/hardware: hardware=FILE."
        ) from error


def _seconds(work: Work) -> float:
    """Return the seconds of ``work`` in the fastest of several measurements: other programs only slow it down."""
    timer = Timer("work()", globals={"work": work}, timer=time.perf_counter, num_threads=torch.get_num_threads())
    return float(min(timer.blocked_autorange(min_run_time=_SECONDS).times))


def _optimizer_rate() -> float:
    """Return the bytes a second that AdamW reads and writes on the calling thread, all of them in fp32."""
    elements = min(32 * _MIB, int(SHARE * free_bytes()) // 16)
    weights = [nn.Parameter(part.clone()) for part in torch.ones(elements).chunk(4)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return adamw_bytes() * elements / _seconds(torch.optim.AdamW(weights, fused=True).step)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "this processor"


class _Devices:
    """Probes of devices that work at once, each with a thread as in training, which ``stack`` ends."""

    def __init__(self, devices: list[Device], stack: ExitStack) -> None:
        self.devices, self._emulated = devices, devices[0].torch_device.type == "cpu"
        self._threads = [stack.enter_context(ThreadPoolExecutor(1, "probe", apply_num_threads)) for _ in devices]
        limits = [device.capacity() for device in devices]
        self._room = int(SHARE * min([free_bytes() // len(devices), *(n for n in limits if n is not None)]))
        """Bytes that a probe may take on each device."""

    def seconds(self, make: Callable[[torch.device], Work]) -> float:
        """Return the seconds of the work that ``make`` returns for a device, while all devices do theirs."""
        works: dict[Device, Work] = {}

        def prepare(device: Device) -> None:
            with device.activate():
                works[device] = make(device.torch_device)

        def run(device: Device) -> None:
            with device.activate(), device.acquire_core():
                works[device]()
            device.compute.synchronize()

        def on_each(function: Callable[[Device], None]) -> None:
            pairs = zip(self._threads, self.devices, strict=True)
            for call in [thread.submit(function, device) for thread, device in pairs]:
                call.result()

        on_each(prepare)
        return _seconds(lambda: on_each(run))

    def products(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s of a linear layer's three products: forward, both gradients."""
        size = 128
        while True:
            took = self.seconds(partial(_linear, dtype=dtype, size=size))
            if took >= _LONG_ENOUGH or size == 8192 or 6 * (2 * size) ** 2 * 4 > self._room:
                return 6 * size**3 / took
            size *= 2

    def attention(self) -> float:
        """Return the FLOP/s of causal attention in bf16, forward and backward, for one sequence."""
        heads, length, width = (4, 512, 64) if self._emulated else (16, 4096, 128)
        length = max(1, min(length, self._room // (64 * heads * width)))

        def make(device: torch.device) -> Work:
            shape = (1, heads, length, width)
            q, k, v = (torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3))
            grad = torch.randn(shape, device=device).bfloat16()
            return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

        return attention_flops(1, heads, length, width) / self.seconds(make)

    def elementwise(self) -> float:
        """Return the bytes a second of operations between a layer's products. Estimates count the bytes likewise."""
        width = 4096
        rows = max(1, min(256 if self._emulated else 16384, self._room // (width * 64)))
        with Counter(EMULATED) as counter:
            _between_products(torch.device("meta"), rows, width)()
        return float(counter.work.nbytes / self.seconds(partial(_between_products, rows=rows, width=width)))

    def issuing(self) -> float:
        """Return the interpreter's seconds for an operation of a layer, views included, while all devices issue."""
        with Counter(EMULATED) as counter:
            _narrow_layers(torch.device("meta"), 1)()
        times = 20
        took = self.seconds(partial(_narrow_layers, times=times))
        return float(took / (times * counter.work.operations * len(self.devices)))

    def copies(self, *, up: bool) -> float:
        """Return the bytes a second to each device, or back, while all copy. Uses the engine's streams and buffers."""
        nbytes = min((64 if self._emulated else 256) * _MIB, self._room // 4)
        there = {device: device.allocate(nbytes, "a probe of the link") for device in self.devices}
        here = {device: device.host_buffer(nbytes).zero_() for device in self.devices}

        def copy() -> None:
            streams = [device.weights_up if up else device.gradients_down for device in self.devices]
            for device, stream in zip(self.devices, streams, strict=True):
                stream.copy(*((there[device], here[device]) if up else (here[device], there[device])))
            for stream in streams:
                stream.synchronize()

        rate = nbytes / _seconds(copy)
        for device, arena in there.items():
            device.free(arena)
        return rate


def _rounded(value: float) -> float:
    """Return a number in three significant digits. Further digits would not repeat."""
    return float(f"{value:.3g}")


def _linear(device: torch.device, dtype: torch.dtype, size: int) -> Work:
    """Return the three products of a linear layer, which has as many inputs and outputs as there are tokens."""
    tokens, weights, grad = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    return lambda: (tokens @ weights.t(), grad @ weights, grad.t() @ tokens)


def _between_products(device: torch.device, rows: int, width: int) -> Work:
    """Return forward and backward of normalisation, SiLU, gate and residual sum, in bf16."""
    x, grad = (torch.ones(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    norm = nn.LayerNorm(width, device=device, dtype=torch.bfloat16)
    x.requires_grad_()

    def work() -> None:
        normal = norm(x)
        torch.autograd.grad(x + F.silu(normal) * normal, x, grad)

    return work


def _narrow_layers(device: torch.device, times: int) -> Work:
    """Return ``times`` forwards of a layer with a graph. It is so narrow that its computing takes almost no time."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device=device)
    x = torch.ones(1, 4, 16, device=device)
    return lambda: [layer(x) for _ in range(times)]
