"""``hardware=auto``: measures this machine, and writes a file like those in ``conf/hardware``.

The plan is made from the file, so a later command with ``hardware=FILE`` has the same numbers.
"""

from __future__ import annotations

import datetime
import itertools
import json
import platform
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

import torch

from lightning_roundpipe.commands.hardware_probes import Probed, probe
from lightning_roundpipe.commands.machines import MOST_WORKERS
from lightning_roundpipe.commands.targets import check_targets
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.profile import OF_KINDS, Hardware

_WIDTH, _NOTE = 80, 32
"""Columns of the file, and the column in which comments begin."""

_MARKS = {"call_s": "A", "turn_s": "A", "network_efficiency": "A", "memory": "S", "host_memory": "S"}
"""Marks of numbers that are not measured: A is assumed, S is what the system says."""

_NOTES = {
    "flops": "of one worker: what products reach; matmul_efficiency is 1",
    "memory": "bytes",
    "upload": "bytes/s of each worker, while all copy",
    "download": "bytes/s of each worker, while all copy",
    "memory_bandwidth": "bytes/s that RMSNorm, SiLU and sums reach; memory_efficiency is 1",
    "host_memory": "bytes",
    "host_memory_bandwidth": "bytes/s of an addition in place with all threads, or of AdamW",
    "matmul_efficiency": "share of flops",
    "memory_efficiency": "share of both bandwidths",
    "kernel_s": "seconds that any operation takes at least",
    "hop_s": "seconds from one worker to another, beside the copies",
    "issue_s": "seconds of the host's interpreter an operation, views included",
    "call_s": "seconds of the interpreter a layer call; benchmarks/bench_engine.py elsewhere",
    "turn_s": "seconds of the interpreter a turn, likewise",
    "optimizer_bandwidth": "bytes/s of fused AdamW with the threads that training leaves it",
    "network_efficiency": "share of a network's rate that several machines reach",
}
"""Comments on numbers, by key of the file."""

_OWN_LINKS = ("uplink", "uplink_devices")
"""Numbers that the file lacks: each worker's rates are measured with all others copying."""


def default_path() -> Path:
    """Return the path of a file in the current folder, named after the host."""
    name = re.sub(r"[^\w.-]+", "-", platform.node()) or "machine"
    return Path(f"{name}.yaml")


def measure_to_file(path: Path | None, workers: int | None) -> tuple[Path, str]:
    """Measure this machine into a file, and return the file's path and text.

    Standard error has one line of progress, and one that names the file.

    Args:
        path: the file; None: `default_path`.
        workers: number of devices; see `probe`.

    Raises:
        ValueError: the file exists already, its name is not allowed, ``workers`` is out of range, or a probe failed.
        OSError: the file cannot be written.
    """
    path = default_path() if path is None else path
    again = f"Plan with it by hardware={path}, remove it to measure again, or set hardware_file=OTHER.yaml."
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"hardware_file={path} must be the name of a file that ends in .yaml, as hardware= reads it.")
    if "," in str(path):
        raise ValueError(f"hardware_file={path} must be one file: in hardware=, a comma stands between two of them.")
    check_targets({"hardware_file": path})
    if (workers or 1) > MOST_WORKERS:
        raise ValueError(f"workers={workers} must be 1 to {MOST_WORKERS}.")
    if path.exists():
        raise ValueError(f"hardware=auto would overwrite {path}. {again}")
    probed = _probe_aloud(workers)
    text = written(probed)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"hardware=auto would overwrite {path}, which has just been written. {again}") from None
    print(f"roundpipe-plan: {path} has the numbers: hardware={path} plans with them again.", file=sys.stderr)
    return path, text


def refuse_missing(workers: int | None) -> None:
    """Refuse to measure more GPUs than this machine has. Plans, and emulated devices, may have any number.

    Raises:
        ValueError: there are fewer GPUs than ``workers``.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and (workers or 0) > count:
        raise ValueError(
            f"workers={workers} is more than the {plural(count, 'GPU')} of this machine, and what is not there cannot "
            f"be measured: leave workers= out, or say model=NAME to plan for more of them."
        )


def _probe_aloud(workers: int | None) -> Probed:
    """Run `probe`, and print the name of each probe on standard error as it begins, all in one line."""
    start, heads = time.perf_counter(), itertools.chain(["roundpipe-plan: measuring ", ": "], itertools.repeat(", "))

    def say(what: str) -> None:
        print(next(heads), what, sep="", end="", file=sys.stderr, flush=True)

    try:
        probed = probe(workers, say)
    except BaseException:
        print(file=sys.stderr)
        raise
    print(f" ({time.perf_counter() - start:.0f} s)", file=sys.stderr)
    return probed


def written(probed: Probed) -> str:
    """Return the text of the file. A mark beside each number says where it comes from."""
    machine = probed.hardware
    kind = "an emulated device" if machine.emulated else "a GPU"
    head = [
        f"{machine.title}: what roundpipe-plan hardware=auto measured on {platform.node()} on "
        f"{datetime.date.today().isoformat()}, with torch {torch.__version__}.",
        f"[M]: measured there and then, on all {machine.workers} at once; it is what {kind} reaches while the others "
        "work, too. [S]: what the system says. [A]: assumed, change it to what your machine has.",
        *probed.remarks,
    ]
    text = [f"# {line}" for paragraph in head for line in textwrap.wrap(paragraph, _WIDTH - 2)]
    names = [item.name for item in fields(Hardware) if item.name not in (*_OWN_LINKS, "kinds")]
    text += _entries(machine, names, _NOTES | probed.notes)
    text += ["kinds:"] if machine.kinds else []
    for one in machine.kinds:
        first, *others = _entries(one, [name for name in OF_KINDS if name not in _OWN_LINKS], {})
        text += [f"  - {first}", *(f"    {line}" for line in others)]
    return "\n".join(text) + "\n"


def _entries(machine: Hardware, names: Iterable[str], notes: Mapping[str, str]) -> list[str]:
    """Return the lines of some numbers, with their marks and notes."""
    rows = []
    for name in names:
        value, mark = getattr(machine, name), f"[{_MARKS.get(name, 'M')}]"
        if name == "flops":
            rows.append(("flops:", notes.get(name, "")))
            rows += [
                (f"  {form}: {_number(rate)}", f"[M] {notes.get(f'flops.{form}', '')}") for form, rate in value.items()
            ]
        elif name == "emulated":
            rows += [("emulated: true", "what a worker may hold is counted as emulated devices do")] if value else []
        elif name in ("title", "workers"):
            rows.append((f"{name}: {json.dumps(value)}", ""))
        elif value is None:
            rows.append((f"{name}: null", "without a limit, unless RoundPipeStrategy(emulation=...) sets one"))
        else:
            rows.append((f"{name}: {_number(value)}", f"{mark} {notes.get(name, '')}"))
    lines = []
    for left, right in rows:
        first, *more = textwrap.wrap(right, _WIDTH - _NOTE - 2) or [""]
        lines.append(f"{left + ' ':{_NOTE}}# {first}" if first else left)
        lines += [f"{'':{_NOTE}}# {line}" for line in more]
    return lines


def _number(value: float) -> str:
    """Return a number without rounding, in three digits if these are enough."""
    text = str(value) if isinstance(value, int) else f"{value:.3g}"
    return text if float(text) == value else repr(value)
