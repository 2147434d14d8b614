"""``hardware=auto``: measures this machine into a file like those in ``conf/hardware``, of which plans are made."""

from __future__ import annotations

import datetime
import itertools
import platform
import re
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch
from omegaconf import OmegaConf

from lightning_roundpipe.commands.hardware_probes import probe
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.profile import Hardware

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
