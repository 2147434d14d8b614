"""What a machine can do: the numbers that times are estimated from.

``conf/hardware/*.yaml`` holds some machines; each says which of its numbers are a data sheet's and which are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_roundpipe.config import is_number, is_whole, parse_bytes
from lightning_roundpipe.planning.host_time import HostTime
from lightning_roundpipe.planning.links import Links
from lightning_roundpipe.planning.network import Network
from lightning_roundpipe.planning.pipeline import Rules, Staleness
from lightning_roundpipe.planning.updates import ADAMW_BYTES, PIECE_BYTES, UpdateModel

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]

Format = Literal["fp32", "bf16", "fp16"]

_SIZES = ("memory", "host_memory")
_OPTIONAL = ("attention_efficiency", "optimizer_bandwidth", "uplink")
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
        flops: floating point operations a second of dense matrix products, by number format.
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
        self,
        staleness: Staleness,
        copy_bytes: int = 0,
        reduced_bytes: int | None = None,
        *,
        blocking: bool = False,
        network: Network | None = None,
    ) -> Rules:
        """Return the rules of a simulation: the times of copies, of AdamW on the host, and of the interpreter.

        `roundpipe-plan` and the engine judge plans by these.

        Args:
            staleness: 0 or 1.
            copy_bytes: bytes of a trained weight's working copy, which the optimizer writes; 0: there is none.
            reduced_bytes: bytes of a gradient as it travels, if it is added up on the host; None: it travels as it is.
            blocking: whether the optimizer begins when backward is over.
            network: to other machines; None: there is one machine.
        """
        traffic = ADAMW_BYTES + copy_bytes
        if reduced_bytes is not None:  # read where they have landed, and written as the sum
            traffic += reduced_bytes + 4
        updates = UpdateModel(self.optimizer_rate(traffic), blocking=blocking, piece_bytes=PIECE_BYTES)
        host = HostTime(self.call_s, self.turn_s, self.hop_s, shared=True)
        return Rules(
            staleness=staleness, host=host, links=self.links(), updates=updates, sums_per_s=self.sum_rate,
            network=network,
        )  # fmt: skip

    @property
    def sum_rate(self) -> float:
        """Bytes of fp32 gradients a second that the host adds: they and the sum are read, the sum is written."""
        return self.optimizer_rate(12)


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
    names = [item.name for item in fields(Hardware)]
    needed = [item.name for item in fields(Hardware) if item.default is MISSING]
    if not isinstance(data, Mapping):
        raise ValueError(f"hardware: {path} must hold the keys {', '.join(names)}.")
    for key in data:
        if key not in names:
            close = get_close_matches(str(key), names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"hardware: {path} has an unknown key {key!r}.{hint} It takes {', '.join(names)}.")
    for name in needed:
        if name not in data:
            raise ValueError(f"hardware: {path} lacks {name!r}; it needs {', '.join(needed)}.")
    try:
        read = {str(name): _read(str(name), value) for name, value in data.items() if name != "kinds"}
        machine = Hardware(**read)
        return replace(machine, kinds=_read_kinds(data.get("kinds"), machine))
    except ValueError as error:
        raise ValueError(f"hardware: {path}: {error}") from None


def _read_kinds(value: Any, machine: Hardware) -> tuple[Hardware, ...]:
    """Kinds of devices; what one does not say is as the machine says."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value) or not value:
        raise ValueError("kinds must be a list, with the keys of each kind of device that differ.")
    kinds = []
    for entry in value:
        for key in entry:
            if key not in OF_KINDS:
                raise ValueError(f"kinds has a key {key!r} that is not a device's; it takes {', '.join(OF_KINDS)}.")
        if not {"title", "workers"} <= entry.keys():
            raise ValueError("kinds: each needs a title, and workers, the number of such devices.")
        kinds.append(replace(machine, **{str(name): _read(str(name), part) for name, part in entry.items()}))
    if (count := sum(kind.workers for kind in kinds)) != machine.workers:
        raise ValueError(f"workers={machine.workers} must be the number of devices of all kinds, which is {count}.")
    return tuple(kinds)


def _read(name: str, value: Any) -> Any:
    if name == "title":
        return str(value)
    if name == "emulated":
        if not isinstance(value, bool):
            raise ValueError(f"emulated={value!r} must be true or false.")
        return value
    if name == "flops":
        formats = get_args(Format)
        if not isinstance(value, Mapping) or set(value) != set(formats):
            raise ValueError(f"flops={value!r} must have a number for each of {', '.join(formats)}.")
        return {form: _number(f"flops.{form}", value[form]) for form in formats}
    if name in _OPTIONAL and value is None:
        return None
    if name in _SIZES:
        return None if value is None and name == "memory" else parse_bytes(value, name)
    if name in _COUNTS:
        if not is_whole(value) or not 1 <= value <= 1024:
            raise ValueError(f"{name}={value!r} must be a whole number of 1 to 1024.")
        return value
    number = _number(name, value, may_be_zero=name.endswith("_s"))
    if name.endswith("_efficiency") and number > 1:
        raise ValueError(f"{name}={value!r} is a share, 1 at most.")
    return number


def _number(name: str, value: Any, may_be_zero: bool = False) -> float:
    if not (is_number(value) and math.isfinite(value)) or value < 0 or (value == 0 and not may_be_zero):
        raise ValueError(f"{name}={value!r} must be a number of {'0 or more' if may_be_zero else 'more than 0'}.")
    return float(value)
