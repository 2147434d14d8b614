"""The pieces of `gpu_first_run`, in the order in which they are worth knowing."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import gpu_probes
import gpu_semantics
from gpu_systems import SYSTEMS, System, measure, ours
from gpu_task import Job

from lightning_roundpipe.devices import interpreter

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """Something to find out, in a process of its own.

    Attributes:
        name: of its row, its log and its record.
        group: pieces that ``--only`` takes together.
        summary: a line for ``--list``.
        about_s: seconds that it takes; it is not begun with less left.
        measure: finds the figures, given the device's kind and the output folder.
        cuda: it needs a GPU.
        environment: variables of its process.
        limit_s: seconds after which it is ended.
    """

    name: str
    group: str
    summary: str
    about_s: float
    measure: Callable[[str, Path], Figures]
    cuda: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 500


def _probe(function: Callable[[], Figures], about_s: float) -> Piece:
    summary = (function.__doc__ or "").splitlines()[0]
    return Piece(f"probe-{function.__name__}", "probe", summary, about_s, lambda device, folder: function())


def _semantics(name: str, summary: str, function: Callable[[str], Figures]) -> Piece:
    return Piece(
        f"semantics-{name}", "semantics", summary, 45, lambda device, folder: function(device), cuda=False, limit_s=180
    )


def gpu_tests(device: str, folder: Path) -> Figures:
    """``pytest -m gpu``.

    Raises:
        RuntimeError: pytest is not installed, or was ended.
    """
    if find_spec("pytest") is None:
        raise RuntimeError("pytest is not installed: pip install pytest pytest-timeout hypothesis")
    report = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, check=False)
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**counts, "failed": failed, "first_failure": failed[0] if failed else "none"}


def sanitizer(device: str, folder: Path) -> Figures:
    """compute-sanitizer's memcheck on one tiny test.

    Raises:
        RuntimeError: it is not installed.
    """
    if which("compute-sanitizer") is None:
        raise RuntimeError("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    test = "tests/test_gpu.py::test_workers_change_nothing"
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-m", "pytest", "-q", "-x", "-k", "0", test]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    last = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    return {"exit_code": done.returncode, "summary": last[-1] if last else done.stdout[-300:]}


BASE = Job("ours", "qwen3_1_7b", None, 2048, 8, 4, steps=3, warmup=4)
"""65,536 tokens a step in microbatches of 8,192."""


def _speed(
    name: str, summary: str, job: Job, system: System | None = None, environment: Mapping[str, str] | None = None
) -> Piece:
    def run(device: str, folder: Path) -> Figures:
        given = job if device == "cuda" else _tiny(job)
        if interval := os.environ.get("ROUNDPIPE_SWITCH_INTERVAL"):
            interpreter.SWITCH_INTERVAL_S = float(interval)
        found = measure(given, system)
        return {**found, "losses": found["losses"], "seconds_per_step": found["seconds"] / given.steps}

    return Piece(f"speed-{name}", "speed", summary, 130, run, cuda=False, environment=environment or {}, limit_s=400)


def _tiny(job: Job) -> Job:
    """The same on the CPU: other numbers, the same code."""
    size = {"sequence": 32, "microbatches": 4, "microbatch_size": 2, "precision": "32-true"}
    return replace(job, device="cpu", tiny=True, **size)  # type: ignore[arg-type]


def _cores(share: float) -> str:
    return str(max(1, int(share * len(os.sched_getaffinity(0)))))


def _variations() -> list[Piece]:
    """One thing at a time, against ``speed-ours``."""
    no_prefetch = System("ours, prefetch=0", functools.partial(ours, prefetch=0))
    return [
        _speed("2048-tokens", "a microbatch of 2,048 tokens", replace(BASE, microbatches=32, microbatch_size=1)),
        _speed("16384-tokens", "a microbatch of 16,384 tokens", replace(BASE, microbatches=4, microbatch_size=8)),
        _speed("no-logging", "training_step logs nothing", replace(BASE, logs=False)),
        _speed("two-workers", "two workers on the GPU", replace(BASE, workers=2)),
        _speed("no-prefetch", "prefetch=0", BASE, no_prefetch),
        _speed("switch-5e-3", "switch interval 5 ms, Python's own", BASE, None, {"ROUNDPIPE_SWITCH_INTERVAL": "5e-3"}),
        _speed("switch-5e-4", "switch interval 0.5 ms", BASE, None, {"ROUNDPIPE_SWITCH_INTERVAL": "5e-4"}),
        _speed("half-the-cores", "the optimizer on half the cores", BASE, None, {"OMP_NUM_THREADS": _cores(0.5)}),
        _speed("a-quarter-of-the-cores", "on a quarter", BASE, None, {"OMP_NUM_THREADS": _cores(0.25)}),
        _speed("32-connections", "32 connections to the GPU", BASE, None, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
        _speed(
            "expandable-segments", "torch's expandable segments", BASE, None,
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        ),
    ]  # fmt: skip


_compare = gpu_semantics.compare
_PIECES = [
    _probe(gpu_probes.machine, 15),
    _semantics("one-worker", "losses, a metric and validation, one worker", lambda device: _compare(device)),
    _semantics("two-workers", "the same with two", lambda device: _compare(device, workers=2)),
    Piece("tests", "tests", "pytest -m gpu", 240, gpu_tests),
    _semantics("masks", "padded batches with masks", lambda device: _compare(device, "masks", workers=2)),
    _semantics("lengths", "a new length in every batch", lambda device: _compare(device, "lengths", workers=2)),
    _semantics("bf16-mixed", "precision bf16-mixed", lambda device: _compare(device, precision="bf16-mixed")),
    _semantics("dropout", "one and two workers draw alike", gpu_semantics.dropout),
    _semantics("failure", "a layer that raises, and a run after it", gpu_semantics.failure),
    _semantics("two-fits", "what runs leave on the GPU", gpu_semantics.two_fits),
    _speed("ours", "Qwen3-1.7B, staleness 0, 65,536 tokens a step", BASE),
    _speed("plain", "plain Lightning", replace(BASE, row="plain")),
    _speed("ours-stale", "staleness 1", replace(BASE, row="ours_stale")),
    _probe(gpu_probes.copies, 30),
    _probe(gpu_probes.registration, 60),
    _probe(gpu_probes.overheads, 15),
    _probe(gpu_probes.feeding, 60),
    _probe(gpu_probes.interleaving, 20),
    _probe(gpu_probes.libraries, 20),
    Piece("sanitizer", "tests", "compute-sanitizer on one tiny test", 120, sanitizer),
    *_variations(),
]
PIECES: dict[str, Piece] = {piece.name: piece for piece in _PIECES}

assert len(PIECES) == len(_PIECES), "two pieces of one name"
assert BASE.row in SYSTEMS
