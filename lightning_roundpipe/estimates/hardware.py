"""Machines: a choice of ``conf/hardware``, any number of a GPU that one of them has, several GPUs of one host joined by
plus signs (``rtx4090x2+rtx3090x2``), or a file of the user's own.

For another number of the same GPU, the rates of a device stay, and each GPU adds as much host memory and bandwidth as
in the file (up to `MOST_BANDWIDTH`). With ``workers=``, the host stays the same.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from lightning_roundpipe.estimates.conf_files import is_path, shipped_files
from lightning_roundpipe.messages import did_you_mean
from lightning_roundpipe.planning.profile import OF_KINDS, Hardware, read_hardware

AUTO = "auto"
"""In place of a name, the machine that the command runs on."""
MOST_WORKERS = 1024
"""Most devices of a machine."""
MOST_BANDWIDTH = 614.4e9
"""Largest bandwidth of a host's memory that is derived from a number of GPUs, in bytes a second: two server processors
with eight channels of DDR5-4800 each."""
SLOWER_LINKS = {"PCIe 3.0 x16 or 4.0 x8": 12.5e9, "PCIe 3.0 x8": 6.25e9}
"""Slower links to a GPU and the bytes a second that copies reach on them, about 80 % of what they carry."""

_COUNTED = re.compile(r"(?P<gpu>.+?)x(?P<count>\d+)")


def read_machine(text: str) -> Hardware:
    """Return the machine of a name, or of a YAML file."""
    if is_path(text):
        return read_hardware(Path(text).expanduser())
    if "+" in text:
        return _together([read_machine(part) for part in text.split("+")], text)
    name = _plain(text)
    if name in _shipped():
        return _shipped()[name]
    match = None if name in _gpus() else _COUNTED.fullmatch(name)
    gpu, count = (_known(match["gpu"]), int(match["count"])) if match else (_known(name), 1)
    if gpu is None:
        known = sorted({*_shipped(), *_gpus()})
        raise ValueError(
            f"There is no hardware={text}.{did_you_mean(name, [*known, AUTO])} Allowed are {', '.join(_shipped())}, "
            "any other number of a GPU (rtx4090x4) or several in one host (rtx4090x2+rtx3090x2), a YAML file like "
            "those in conf/hardware, and auto, which measures this machine."
        )
    if not 1 <= count <= MOST_WORKERS:
        raise ValueError(f"hardware={text} must be 1 to {MOST_WORKERS} GPUs.")
    machine = _gpus()[gpu]
    share = count / machine.workers
    return replace(
        machine,
        title=f"{count} x {machine.kind}",
        workers=count,
        host_memory=int(share * machine.host_memory),
        host_memory_bandwidth=min(share * machine.host_memory_bandwidth, MOST_BANDWIDTH),
    )


def choose_machine(
    hardware: str | None, gpu: str | None, gpus: int | None, workers: int | None, host_memory: int | None
) -> tuple[Hardware, tuple[str, ...]]:
    """Return the machine of the command line's options, and the assumptions about it in sentences.

    Raises:
        ValueError: there is no such machine, or the options contradict each other.
    """
    if hardware is None:
        hardware = _counted(gpu, gpus)
    elif gpu is not None or gpus is not None:
        name = "gpu" if gpu is not None else "gpus"
        raise ValueError(
            f"hardware= and {name}= both say which machine: leave one out. workers= uses some of its GPUs."
        )
    found = read_machine(hardware)
    assumed = [] if is_path(hardware) else [_host(found, host_memory)]
    if found.kinds:
        order = ", ".join(device.title for device in found.devices)
        assumed.append(f"of the devices: they take stages in this order, {order}; devices= of the Trainer gives it.")
        if workers is not None:
            raise ValueError(f"workers={workers} takes some of several kinds of GPU: say which, in hardware=.")
    if host_memory is not None:
        found = replace(found, host_memory=host_memory)
    if workers is not None and workers != found.workers:
        devices, others = "emulated devices" if found.emulated else "GPUs", found.workers - workers
        how = f"as many {devices} in the same host, which has {found.workers} in its file."
        if others > 0:
            how = f"the other {others} {devices} idle, and these have the whole host."
        assumed.append(f"of workers={workers}: {how}")
        found = replace(found, workers=workers, title=f"{workers} of {found.title}")
    return found, tuple(assumed)


def _counted(gpu: str | None, gpus: int | None) -> str:
    """Return ``hardware=`` for ``gpu=`` and ``gpus=``."""
    if gpu is None:
        what = f"gpus={gpus} does not say which" if gpus else "the machine is missing"
        raise ValueError(
            f"{what}: give gpu=NAME gpus=NUMBER, as in gpu=rtx4090 gpus=4. Known are {', '.join(sorted(_gpus()))}. "
            "hardware=auto measures this machine."
        )
    if (name := _known(_plain(gpu))) is None:
        match = _COUNTED.fullmatch(_plain(gpu))
        if match and (one := _known(match["gpu"])):
            count = match["count"]
            raise ValueError(f"gpu={gpu} says how many, too: write gpu={one} gpus={count}, or hardware={one}x{count}.")
        close = [known for known in _gpus() if known.startswith(_plain(gpu))]
        hint = f" Did you mean {' or '.join(close)}?" if close else did_you_mean(_plain(gpu), _gpus())
        raise ValueError(
            f"There is no gpu={gpu}.{hint} Known are {', '.join(sorted(_gpus()))}; for others, write a YAML file like "
            "conf/hardware/rtx4090x8.yaml: hardware=FILE."
        )
    return f"{name}x{gpus or 1}"


def _known(name: str) -> str | None:
    """Return the GPU of a normalised name, which may lack its beginning or end (4090) if one GPU has the rest."""
    if name in _gpus():
        return name
    for matches in (str.endswith, str.startswith):
        if len(found := [known for known in _gpus() if name and matches(known, name)]) == 1:
            return found[0]
    return None


def _host(machine: Hardware, host_memory: int | None) -> str:
    """Return the assumptions of a file about the host."""
    parts = [] if host_memory is not None else [f"{machine.host_memory / 2**30:,.0f} GiB (or set host_memory=)"]
    parts.append(f"{machine.host_memory_bandwidth / 1e9:,.0f} GB/s of memory bandwidth")
    if not machine.emulated:
        parts.append(f"{machine.upload / 1e9:,.0f} GB/s to each GPU, {machine.download / 1e9:,.0f} GB/s back")
    return f"of the host: {', '.join(parts)}; or give hardware=FILE."


def _together(parts: list[Hardware], given: str) -> Hardware:
    """Return a machine with several kinds of devices in one host."""
    kinds: dict[str, Hardware] = {}
    for part in parts:
        if part.emulated or part.kinds:
            raise ValueError(f"hardware={given} must name GPUs: emulated devices are all alike, and files have kinds:.")
        count = part.workers + (kinds[part.kind].workers if part.kind in kinds else 0)
        kinds[part.kind] = replace(part, title=part.kind, workers=count)
    count = sum(kind.workers for kind in kinds.values())
    if count > MOST_WORKERS:
        raise ValueError(f"hardware={given} must be 1 to {MOST_WORKERS} GPUs.")
    host = replace(
        parts[0],
        title=" + ".join(f"{kind.workers} x {title}" for title, kind in kinds.items()),
        workers=count,
        host_memory=sum(part.host_memory for part in parts),
        host_memory_bandwidth=min(sum(part.host_memory_bandwidth for part in parts), MOST_BANDWIDTH),
    )
    each = [replace(host, **{name: getattr(kind, name) for name in OF_KINDS}) for kind in kinds.values()]
    return replace(host, kinds=tuple(each) if len(each) > 1 else ())


@cache
def _shipped() -> dict[str, Hardware]:
    return {name: read_hardware(path) for name, path in shipped_files("hardware").items()}


@cache
def _gpus() -> dict[str, Hardware]:
    """Return the machine of each GPU, by the GPU's name: of a file of its own, or of the data sheets."""
    sheets = read_hardware(shipped_files("hardware/sheets")["gpus"]).kinds
    files = {name: machine for name, machine in _shipped().items() if not machine.emulated}
    return {_plain(kind.title): replace(kind, title=f"1 x {kind.title}") for kind in sheets} | {
        match["gpu"] if (match := _COUNTED.fullmatch(name)) else name: machine for name, machine in files.items()
    }


def _plain(text: str) -> str:
    """Return a normalised name: RTX 4090, rtx-4090 and rtx4090 are the same."""
    return re.sub(r"[\s_-]", "", text).lower()
