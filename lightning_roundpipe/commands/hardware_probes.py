"""The probes of ``roundpipe-plan hardware=auto``, which measure this machine in some seconds.

Probes use the same façade as training (`devices`), on all devices at once. A probe of a single device would miss what
devices share: the processor's cores, the host's memory, a switch of the links. A figure is what one device reaches; if
devices are unequal, what the slowest one reaches.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe.config import Emulation
from lightning_roundpipe.devices import Device, make_devices
from lightning_roundpipe.devices.host_memory import free_bytes, total_bytes
from lightning_roundpipe.devices.intraop_threads import apply_num_threads
from lightning_roundpipe.messages import first_line, plural
from lightning_roundpipe.planning.meter import Counter, attention_flops
from lightning_roundpipe.planning.nominal import EMULATED
from lightning_roundpipe.planning.profile import OF_KINDS, Format, Hardware
from lightning_roundpipe.planning.updates import ADAMW_BYTES

EMULATED_WORKERS = 4
"""Default number of emulated devices, as in ``conf/hardware/cpu.yaml``."""
ENGINE_S = 0.5e-3
"""Assumed seconds of the interpreter for the engine's own work, for a layer call and for a turn each;
``benchmarks/bench_engine.py`` measures them."""
SHARE = 0.25
"""Largest share of free memory that a probe takes."""

_SECONDS = 0.15
"""Approximate seconds of a measurement."""
_REPEATS = 3
"""Number of measurements. The fastest counts."""
_LONG_ENOUGH = 0.01
"""Seconds of a repetition above which larger matrices reach no higher rate."""
_DTYPES: dict[Format, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MIB = 2**20

clock = time.perf_counter

T = TypeVar("T")
Work = Callable[[], object]


def probe(workers: int | None, say: Callable[[str], None]) -> Hardware:
    """Measure this machine: its CUDA devices, or emulated devices if it has none.

    Args:
        workers: number of devices; None: all CUDA devices, or `EMULATED_WORKERS` emulated ones. If there are fewer CUDA
            devices, all of them are measured.
        say: called with the name of each probe when it begins.

    Raises:
        ValueError: a probe failed; the message names it.
    """
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > 0
    count = (min(workers or 1024, torch.cuda.device_count()) if cuda else workers) or EMULATED_WORKERS
    say(plural(count, "CUDA device" if cuda else "emulated device") + ("" if cuda else ", as torch sees no GPU"))
    bandwidth = _host_bandwidth(say)
    with ExitStack() as stack:
        with _naming("the devices", say):
            torch_devices = [torch.device("cuda", index) if cuda else torch.device("cpu") for index in range(count)]
            made = make_devices("cuda" if cuda else "cpu", torch_devices, Emulation())
            for device in made:
                stack.callback(_close, device)
            for context in (made[0].process_settings(), made[0].step_settings()):
                stack.enter_context(context)
            devices = DeviceProbe(made, emulated=not cuda, say=say, stack=stack)
        found = devices.measured(bandwidth)
        kinds: dict[str, list[Device]] = {}
        for device in made:
            kinds.setdefault(device.kind.removeprefix("NVIDIA "), []).append(device)
        if len(kinds) == 1:
            return found
        each = []
        for name, same in kinds.items():
            say(f"{name} alone")
            part = DeviceProbe(same, emulated=not cuda, say=say, stack=stack).measured(bandwidth)
            each.append(replace(found, **{key: getattr(part, key) for key in OF_KINDS} | {"title": name}))
        return replace(found, title=" + ".join(f"{one.workers} x {one.title}" for one in each), kinds=tuple(each))


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


def _best(work: Work, repeats: int = _REPEATS) -> float:
    """Return the seconds of the fastest of ``repeats`` runs, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def _host_bandwidth(say: Callable[[str], None]) -> float:
    """Return the bytes a second that an addition in place reads and writes, with all of torch's threads.

    It runs before any device exists.
    """
    with _naming("the host's memory", say):
        elements = min(32 * _MIB, int(SHARE * free_bytes()) // 8)
        total, more = torch.zeros(elements), torch.ones(elements)
        # In place, an element takes two reads and a write of 4 bytes. A write elsewhere would read there, too.
        return 12 * elements / _best(lambda: total.add_(more))


def optimizer_rate() -> float:
    """Return the bytes a second that AdamW reads and writes on the calling thread, all of them in fp32."""
    elements = min(32 * _MIB, int(SHARE * free_bytes()) // 16)
    weights = [nn.Parameter(part.clone()) for part in torch.ones(elements).chunk(4)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return ADAMW_BYTES * elements / _best(torch.optim.AdamW(weights, fused=True).step)


def processor() -> str:
    """Return the name of the processor."""
    names = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class DeviceProbe:
    """Probes of devices that work at once, each with a thread as in training.

    Args:
        devices: the devices.
        emulated: whether they are emulated, and share the processor.
        say: called with the name of each probe when it begins.
        stack: stack of contexts that ends the threads.
    """

    def __init__(self, devices: list[Device], *, emulated: bool, say: Callable[[str], None], stack: ExitStack) -> None:
        self.devices, self.emulated, self._say = devices, emulated, say
        self._threads = [stack.enter_context(ThreadPoolExecutor(1, "probe", apply_num_threads)) for _ in devices]
        limits = [device.capacity() for device in devices]
        free = min([free_bytes() // len(devices), *(limit for limit in limits if limit is not None)])
        self._room = int(SHARE * free)
        """Bytes that a probe may take on each device."""

    def measured(self, host_bandwidth: float) -> Hardware:
        """Run all probes and return their results in three digits, with those of the host."""
        flops: dict[Format, float] = {}
        for form, dtype in _DTYPES.items():
            with _naming(f"{form} products", self._say):
                flops[form] = self._products(dtype)
        with _naming("attention", self._say):
            share = min(1.0, self._attention() / flops["bf16"])
        with _naming("device memory", self._say):
            bandwidth = self._elementwise()
        with _naming("operations", self._say):
            issue_s = self._issuing()
            kernel_s = self._tiny() if self.emulated else self._queued(flops["bf16"])
        with _naming("links", self._say):
            upload, download = self._links()
            hop_s = self._hop()
        with _naming("optimizer", self._say), self.devices[0].host_thread_settings():
            optimizer = optimizer_rate()
        title, memory = f"{plural(len(self.devices), 'emulated device')} on {processor()}", None
        if not self.emulated:
            gpus = [device.torch_device for device in self.devices]
            names = {torch.cuda.get_device_name(gpu).removeprefix("NVIDIA ") for gpu in gpus}
            title = f"{len(gpus)} x {names.pop()}" if len(names) == 1 else f"{len(gpus)} unequal GPUs"
            memory = min(torch.cuda.mem_get_info(gpu)[1] for gpu in gpus)
        return Hardware(
            title=title,
            workers=len(self.devices),
            flops={form: _rounded(rate) for form, rate in flops.items()},
            memory=memory,
            memory_bandwidth=_rounded(bandwidth),
            upload=_rounded(upload),
            download=_rounded(download),
            host_memory=total_bytes(),
            host_memory_bandwidth=_rounded(max(host_bandwidth, optimizer)),  # other programs may slow down one of them
            matmul_efficiency=1.0,
            memory_efficiency=1.0,
            kernel_s=_rounded(kernel_s),
            hop_s=_rounded(hop_s),
            attention_efficiency=_rounded(share),
            issue_s=_rounded(issue_s),
            call_s=ENGINE_S,
            turn_s=ENGINE_S,
            optimizer_bandwidth=_rounded(optimizer),
            emulated=self.emulated,
        )

    # -- computing

    def together(self, make: Callable[[torch.device], Work]) -> float:
        """Return the seconds of one run of the work that ``make`` returns for a device, while all devices run theirs.

        A measurement repeats the work for about `_SECONDS`. Emulated devices take turns at the processor.
        """
        works = self._made(make)
        self._repeat(works, 1)
        repetitions = max(1, min(1000, int(_SECONDS / max(self._repeat(works, 1), 1e-9))))
        return min(self._repeat(works, repetitions) for _ in range(_REPEATS)) / repetitions

    def _made(self, make: Callable[[torch.device], Work]) -> list[Work]:
        return self._on_each(lambda device: make(device.torch_device))

    def _repeat(self, works: list[Work], times: int) -> float:
        def run(device: Device) -> None:
            for _ in range(times):
                with device.acquire_core():
                    works[self.devices.index(device)]()
            device.compute.synchronize()

        start = clock()
        self._on_each(run)
        return clock() - start

    def _on_each(self, function: Callable[[Device], T]) -> list[T]:
        """Call ``function`` for all devices at once, on each device's thread, and return the results."""

        def run(device: Device) -> T:
            with device.activate():
                return function(device)

        calls = [thread.submit(run, device) for thread, device in zip(self._threads, self.devices, strict=True)]
        return [call.result() for call in calls]

    def _products(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s of a linear layer's three products: forward, both gradients."""
        size, most = 128, self._size_within(8192)
        while size < most:
            works = self._made(partial(_linear, dtype=dtype, size=size))
            self._repeat(works, 1)
            if self._repeat(works, 1) >= _LONG_ENOUGH:
                break
            size *= 2
        return 6 * size**3 / self.together(partial(_linear, dtype=dtype, size=size))

    def _size_within(self, most: int) -> int:
        """Return the largest size of `_linear` for which there is room: ``most``, or a half, a quarter, ... of it."""
        while most > 128 and 6 * most**2 * 4 > self._room:
            most //= 2
        return most

    def _attention(self) -> float:
        """Return the FLOP/s of causal attention in bf16, forward and backward, for one sequence."""
        heads, length, width = (4, 512, 64) if self.emulated else (16, 4096, 128)
        length = max(1, min(length, self._room // (64 * heads * width)))

        def make(device: torch.device) -> Work:
            shape = (1, heads, length, width)
            q, k, v = (torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3))
            grad = torch.randn(shape, device=device).bfloat16()
            return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

        return attention_flops(1, heads, length, width) / self.together(make)

    def _elementwise(self) -> float:
        """Return the bytes a second of operations between a layer's products. Estimates count the bytes likewise."""
        rows, width = (256 if self.emulated else 16384), 4096
        rows = max(1, min(rows, self._room // (width * 64)))
        with Counter(EMULATED) as counter:
            _between_products(torch.device("meta"), rows, width)()
        nbytes: float = counter.work.nbytes
        return nbytes / self.together(partial(_between_products, rows=rows, width=width))

    def _issuing(self) -> float:
        """Return the interpreter's seconds for an operation of a layer, views included, while all devices issue."""
        with Counter(EMULATED) as counter:
            _narrow_layer(torch.device("meta"), 1)()
        times = 10
        operations: int = counter.work.operations
        return self.together(partial(_narrow_layer, times=times)) / (times * operations * len(self.devices))

    def _tiny(self, times: int = 200) -> float:
        """Return the seconds of an operation on 16 numbers, on an emulated device."""

        def make(device: torch.device) -> Work:
            x = torch.zeros(16, device=device)
            return lambda: [x.add_(1) for _ in range(times)]

        return self.together(make) / times

    def _queued(self, flops: float, times: int = 200) -> float:
        """Return the seconds of an operation on 16 numbers, on the slowest GPU.

        The operations wait behind products, so that all are issued before the first one runs. Otherwise issuing would
        limit them. Devices take turns, because they share the interpreter.

        Args:
            flops: FLOP/s of bf16 products.
            times: number of operations.
        """
        size = self._size_within(4096)
        products = math.ceil(0.03 * flops / (6 * size**3))

        def measure(device: Device) -> float:
            with device.activate():
                x = torch.zeros(16, device=device.torch_device)
                work, found = _linear(device.torch_device, torch.bfloat16, size), []
                for _ in range(1 + _REPEATS):
                    for _ in range(products):
                        work()
                    begin = device.compute.record(timed=True)
                    for _ in range(times):
                        x.add_(1)
                    end = device.compute.record(timed=True)
                    end.wait()
                    found.append((end.time() - begin.time()) / times)
                return min(found[1:])

        pairs = zip(self._threads, self.devices, strict=True)
        return max(thread.submit(measure, device).result() for thread, device in pairs)

    # -- copies

    def _links(self) -> tuple[float, float]:
        """Return the bytes a second to each device and back, while all copy in that direction.

        Copies use the engine's streams and host buffers.
        """
        nbytes = min((64 if self.emulated else 256) * _MIB, self._room // 4)
        there = {device: device.allocate(nbytes, "a probe of the link") for device in self.devices}
        here = {device: device.host_buffer(nbytes).zero_() for device in self.devices}

        def copy(*, up: bool) -> None:
            streams = [device.weights_up if up else device.gradients_down for device in self.devices]
            for device, stream in zip(self.devices, streams, strict=True):
                stream.copy(*((there[device], here[device]) if up else (here[device], there[device])))
            for stream in streams:
                stream.synchronize()

        rates = nbytes / _best(partial(copy, up=True)), nbytes / _best(partial(copy, up=False))
        for device, arena in there.items():
            device.free(arena)
        return rates

    def _hop(self) -> float:
        """Return the seconds of 1 KiB from the first worker to the last one, with the hand-over between threads."""
        first, last = self.devices[0], self.devices[-1]
        there, back = first.allocate(1024, "a probe"), last.allocate(1024, "a probe")
        here = first.host_buffer(1024).zero_()

        def send() -> Any:
            with first.activate():
                first.activations_down.wait(first.compute.record())
                first.activations_down.copy(here, there)
                return first.activations_down.record()

        def receive(sent: Any) -> None:
            with last.activate():
                last.activations_up.wait(sent)
                last.activations_up.copy(back, here)
                last.activations_up.synchronize()

        def hop() -> None:
            sent = self._threads[0].submit(send).result()
            self._threads[-1].submit(receive, sent).result()

        found = _best(hop, repeats=20)
        first.free(there)
        last.free(back)
        return found


def _rounded(value: float) -> float:
    """Return a number in three significant digits. Further digits would not repeat."""
    return float(f"{value:.3g}")


# -- what is measured ------------------------------------------------------------------------------------------------


def _linear(device: torch.device, dtype: torch.dtype, size: int) -> Work:
    """Return the three products of a linear layer: its output, and the gradients of its input and of its weights.

    The layer has as many inputs and outputs as there are tokens.
    """
    tokens, weights, grad = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    return lambda: (tokens @ weights.t(), grad @ weights, grad.t() @ tokens)


def _norm(x: Tensor, weights: Tensor) -> Tensor:
    """Return RMSNorm, computed as Hugging Face's layers do."""
    wide = x.float()
    normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return weights * normal


def _between_products(device: torch.device, rows: int, width: int) -> Work:
    """Return forward and backward of normalisation, SiLU, gate and residual sum, in bf16."""
    x, weights, grad = (
        torch.ones(shape, device=device, dtype=torch.bfloat16) for shape in ((rows, width), (width,), (rows, width))
    )
    x.requires_grad_()
    weights.requires_grad_()

    def work() -> None:
        normal = _norm(x, weights)
        torch.autograd.grad(x + F.silu(normal) * normal, (x, weights), grad)

    return work


class _Narrow(nn.Module):
    """A decoder layer with as many operations as a wide one, whose computing takes almost no time."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        normal = _norm(x, self.norms[0])
        split = (*x.shape[:-1], self.heads, -1)
        query, key, value = (f(normal).view(split).transpose(1, 2) for f in (self.queries, self.keys, self.values))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        normal = _norm(x, self.norms[1])
        out: Tensor = x + self.down(F.silu(self.gate(normal)) * self.up(normal))
        return out


def _narrow_layer(device: torch.device, times: int) -> Work:
    """Return ``times`` forwards of a narrow decoder layer, each with a graph."""
    layer, x = _Narrow().to(device), torch.ones(1, 4, 16, device=device)
    return lambda: [layer(x) for _ in range(times)]
