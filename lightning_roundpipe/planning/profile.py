"""What a machine can do: the numbers that times are estimated from.

``conf/hardware/*.yaml`` holds some machines; each says which of its numbers are a data sheet's and which are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_roundpipe.config import is_number, is_whole, parse_bytes
from lightning_roundpipe.messages import did_you_mean
from lightning_roundpipe.planning.links import HostTime, Links
from lightning_roundpipe.planning.network import Network
from lightning_roundpipe.planning.pipeline import Rules, Staleness
from lightning_roundpipe.planning.updates import UpdateModel

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "fp8"]
"""Lightning's flags, and ``fp8``: ``bf16-true`` with the linear layers of ``torchao.float8``."""

Format = Literal["fp32", "bf16", "fp16", "fp8"]

_NEEDED_FORMATS = ("fp32", "bf16", "fp16")

_OPTIONAL = ("memory", "attention_efficiency", "optimizer_bandwidth", "uplink")
_COUNTS = ("workers", "uplink_devices")
OF_KINDS = (
    "title", "workers", "flops", "memory", "memory_bandwidth", "upload", "download", "matmul_efficiency",
    "memory_efficiency", "kernel_s", "attention_efficiency", "uplink", "uplink_devices",
)  # fmt: skip
"""Numbers that devices of one host may differ in."""


@dataclass(frozen=True)
class Hardware:
    """One host and its devices. Rates are for one device where nothing else is said, and for the first kind of device
    where there are several.

    Args:
        title: what people call it.
        workers: how many devices there are.
        flops: floating point operations a second of dense matrix products, by number format. Devices without products
            of fp8 lack that one.
        memory: bytes of a device; None: no limit.
        memory_bandwidth: bytes a second that a device reads and writes.
        upload: bytes a second from the host to a device.
        download: bytes a second back.
        host_memory: bytes of the host.
        host_memory_bandwidth: bytes a second that the host reads and writes.
        matmul_efficiency: share of ``flops`` that matrix products reach.
        memory_efficiency: share of the bandwidths that element-wise operations and the optimizer reach.
        kernel_s: seconds that every operation takes at least.
        hop_s: seconds from one device to another, beside the copies.
        attention_efficiency: share of ``flops`` with fp32 accumulation that a fused attention kernel reaches; None: as
            ``matmul_efficiency``.
        issue_s: seconds of the host's interpreter that every operation takes to be issued; all devices share it.
        call_s: seconds of the interpreter that the engine itself takes for a layer call.
        turn_s: seconds of the interpreter that the engine itself takes for a turn.
        optimizer_bandwidth: bytes of the host's memory that the optimizer's threads read and write a second; None: the
            share ``memory_efficiency`` of ``host_memory_bandwidth``.
        network_efficiency: share of a network's rate that several machines reach between them.
        uplink: bytes a second, each way, of what ``uplink_devices`` devices share on their way to the host's memory: a
            PCIe switch, a root complex, or the link between two processors. None: they share nothing but that memory.
        uplink_devices: how many devices share an uplink.
        kinds: of devices, where they are not all alike: each with its number of ``workers``, and the host's numbers.
        emulated: whether devices are emulated. Their memory holds what crosses calls and what graphs keep; what is in
            between an operation and the next is the host's.
    """

    title: str
    workers: int
    flops: Mapping[Format, float]
    memory: int | None
    memory_bandwidth: float
    upload: float
    download: float
    host_memory: int
    host_memory_bandwidth: float
    matmul_efficiency: float
    memory_efficiency: float
    kernel_s: float
    hop_s: float
    attention_efficiency: float | None = None
    issue_s: float = 0.0
    call_s: float = 0.0
    turn_s: float = 0.0
    optimizer_bandwidth: float | None = None
    network_efficiency: float = 0.7
    uplink: float | None = None
    uplink_devices: int = 1
    emulated: bool = False
    kinds: tuple[Hardware, ...] = ()

    @property
    def kind(self) -> str:
        """The device's name, of the title of several."""
        return self.title.removeprefix(f"{self.workers} x ")

    @property
    def devices(self) -> tuple[Hardware, ...]:
        """What each worker is. Workers of a kind are spread evenly among the others: fast, slow, fast, slow."""
        kinds = self.kinds or (self,)
        places = [((2 * n + 1) / kind.workers, order) for order, kind in enumerate(kinds) for n in range(kind.workers)]
        return tuple(kinds[order] for _, order in sorted(places))

    def of_each(self, number: Callable[[Hardware], int | None]) -> int | tuple[int, ...] | None:
        """A size of every worker, or of each where they are not alike; None: no limit."""
        sizes = [number(device) for device in self.devices]
        if len(set(sizes)) == 1:
            return sizes[0]
        return tuple(2**62 if size is None else size for size in sizes)

    def product_s(self, flops: float, nbytes: float, form: Format, efficiency: float | None = None) -> float:
        """Seconds of one operation on a device, which is held up by its arithmetic or by its memory traffic.

        ``efficiency``: share of ``flops`` that it reaches; None: ``matmul_efficiency``.
        """
        computing = flops / (self.flops[form] * (efficiency or self.matmul_efficiency))
        return self.kernel_s + max(computing, nbytes / (self.memory_bandwidth * self.memory_efficiency))

    def link(self, device: Hardware) -> Links:
        """The share of ``device`` in what the links carry, while all copy.

        Together they are no faster than the host's memory, and those behind one uplink no faster than that.
        """
        share = self.host_memory_bandwidth * self.memory_efficiency / self.workers
        if device.uplink is not None:
            share = min(share, device.uplink / min(device.uplink_devices, device.workers))
        return Links(min(device.upload, share), min(device.download, share))

    def links(self) -> Links | tuple[Links, ...]:
        """The `link` of each device, once if all are alike."""
        each = tuple(map(self.link, self.devices))
        return each[0] if len(set(each)) == 1 else each

    def optimizer_rate(self, traffic: float) -> float:
        """Bytes of fp32 gradients a second that the optimizer takes; ``traffic``: bytes of memory for each weight."""
        bandwidth = self.host_memory_bandwidth * self.memory_efficiency
        return min(bandwidth, self.optimizer_bandwidth or bandwidth) * 4 / traffic

    def rules(
        self, staleness: Staleness, update_bytes: float, *, at_once: bool = False, blocking: bool = False,
        network: Network | None = None,
    ) -> Rules:  # fmt: skip
        """Return the rules of a simulation: the times of copies, of AdamW on the host, and of the interpreter.

        `roundpipe-plan` and the engine judge plans by these.

        Args:
            staleness: 0 or 1.
            update_bytes: memory traffic of an update for a weight; see `updates.adamw_bytes`.
            at_once, blocking: see `UpdateModel`.
            network: to other machines; None: there is one machine.
        """
        updates = UpdateModel(self.optimizer_rate(update_bytes), at_once, blocking)
        host = HostTime(self.call_s, self.turn_s, self.hop_s, ahead=True)
        return Rules(
            staleness=staleness, host=host, links=self.links(), updates=updates, network=network,
            sums_per_s=self.optimizer_rate(12),  # gradients and their sum are read, and the sum is written
        )  # fmt: skip


def read_hardware(path: Path) -> Hardware:
    """The machine that a YAML file describes.

    Raises:
        ValueError: the file is no YAML, or something in it is missing, unknown or makes no sense.
    """
    from omegaconf import OmegaConf  # training needs the class alone, and not what reads its files

    try:
        data: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except OSError as error:
        raise ValueError(f"hardware: {path} cannot be read: {error.strerror or error}.") from None
    except Exception as error:  # yaml's, OmegaConf's and Unicode's have nothing in common
        raise ValueError(f"hardware: {path} is not YAML: {error}.") from None
    needed = [item.name for item in fields(Hardware) if item.default is MISSING]
    try:
        if not isinstance(data, dict):
            raise ValueError(f"it must have the keys {', '.join(needed)}.")
        kinds = data.pop("kinds", None) or []
        read = _read(data, [item.name for item in fields(Hardware)])
        if missing := [name for name in needed if name not in read]:
            raise ValueError(f"it lacks {missing[0]!r}; it needs {', '.join(needed)}.")
        machine = Hardware(**read)
        if not isinstance(kinds, list) or not all(isinstance(kind, dict) for kind in kinds):
            raise ValueError("kinds must be a list, with the keys of each kind of device that differ.")
        if any(not {"title", "workers"} <= kind.keys() for kind in kinds):
            raise ValueError("kinds: each needs a title, and workers, the number of such devices.")
        each = tuple(replace(machine, **_read(kind, OF_KINDS)) for kind in kinds)
        if kinds and (count := sum(kind.workers for kind in each)) != machine.workers:
            raise ValueError(f"workers={machine.workers} must be the number of devices of all kinds, which is {count}.")
    except ValueError as error:
        raise ValueError(f"hardware: {path}: {error}") from None
    return replace(machine, kinds=each)


def _read(data: Mapping[Any, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return checked values of the fields of `Hardware`."""
    for name in data:
        if name not in known:
            raise ValueError(f"unknown key {name!r}.{did_you_mean(str(name), known)} It takes {', '.join(known)}.")
    return {str(name): _value(str(name), value) for name, value in data.items()}


def _value(name: str, value: Any) -> Any:
    if name == "title":
        return str(value)
    if value is None and name in _OPTIONAL:
        return None
    if name == "flops":
        if not isinstance(value, Mapping) or not set(_NEEDED_FORMATS) <= set(value) <= set(get_args(Format)):
            raise ValueError(
                f"flops={value!r} must have a number for each of {', '.join(_NEEDED_FORMATS)}, and may have fp8."
            )
        return {form: _value(f"flops.{form}", rate) for form, rate in value.items()}
    if name in ("memory", "host_memory"):
        return parse_bytes(value, name)
    if name == "emulated" or name in _COUNTS:
        if not (isinstance(value, bool) if name == "emulated" else is_whole(value) and 1 <= value <= 1024):
            raise ValueError(f"{name}={value!r} must be {'true or false' if name == 'emulated' else '1 to 1024'}.")
        return value
    least = "0 or more" if name.endswith("_s") else "more than 0"
    if not is_number(value) or not 0 <= value < math.inf or (value == 0 and not name.endswith("_s")):
        raise ValueError(f"{name}={value!r} must be a number of {least}.")
    if name.endswith("_efficiency") and value > 1:
        raise ValueError(f"{name}={value!r} is a share, 1 at most.")
    return float(value)
