"""Each job of `bench_gpu.py` in a process of its own: its memory is its own, and whatever happens there stays there.

What became of a job is a record, a dict that is written to the output folder as soon as it is known: what `measure`
found, or the ``reason`` why there is nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpu_task import Job

Record = dict[str, Any]
Key = tuple[str, int | None, str, int]
"""Model, cap, row and length of sequences."""

LONGEST_REASON = 200
"""Characters."""


class Records:
    """What is known so far, in a folder; a folder of an earlier call is gone on with.

    Args:
        folder: made when there is something to keep.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "results.json"
        rows: list[Record] = json.loads(self._path.read_text()) if self._path.exists() else []
        self.rows: dict[Key, Record] = {_key(row["job"]): row for row in rows}

    def add(self, job: Job, found: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        row = {"job": dataclasses.asdict(job), **found}
        self.rows[_key(row["job"])] = row
        beside = self._path.with_suffix(".new")  # a run that is cut off leaves a whole file
        beside.write_text(json.dumps(list(self.rows.values()), indent=1) + "\n")
        beside.replace(self._path)

    def of(self, model: str, cap: int | None, row: str) -> dict[int, Record]:
        """By the length of sequences, the shortest first."""
        found = {key[3]: record for key, record in self.rows.items() if key[:3] == (model, cap, row)}
        return dict(sorted(found.items()))


def _key(job: Record) -> Key:
    return job["model"], job["cap"], job["row"], job["sequence"]


def run_apart(job: Job, script: Path, folder: Path, seconds: float) -> Record:
    """The record of a job, which ``script --one`` measures; its output goes to a log in ``folder``.

    Args:
        seconds: after which the process is ended.
    """
    cap = "all" if job.cap is None else str(job.cap)
    stem = folder / f"{job.model}-{cap}-{job.row}-{job.sequence}"
    return run_one(json.dumps(dataclasses.asdict(job)), script, stem, seconds)


def run_one(what: str, script: Path, stem: Path, seconds: float, settings: Mapping[str, str] | None = None) -> Record:
    """The record that ``script --one what`` leaves, from a process of its own.

    Args:
        stem: of the log's path.
        seconds: after which the process is ended.
        settings: environment variables that it has besides ours.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    answer = stem.with_suffix(".json")
    answer.unlink(missing_ok=True)
    with stem.with_suffix(".log").open("w") as log:
        command = [sys.executable, str(script), "--one", what, "--into", str(answer)]
        # A group of its own, to end what it starts as well; no session, in which it would outlive this one's end.
        child = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0,
            env={**os.environ, **(settings or {})},
        )  # fmt: skip
        with _ended_with_us(child):
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                return {"reason": f"not done after {seconds:.0f} s", "timed_out": True}
    if answer.exists():
        found: Record = json.loads(answer.read_text())
        answer.unlink()
        return found
    if code == -signal.SIGKILL:
        return {"reason": "killed, as systems do where the host's memory is used up"}
    return {"reason": f"ended with code {code}; see {stem.name}.log"}


@contextmanager
def _ended_with_us(child: subprocess.Popen[bytes]) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def answer(job: Any, into: Path, measure: Callable[[Any], Record]) -> None:
    """What the process of a job, or of a piece of `gpu_first_run`, does: measure it and write down what, or why not."""
    with suppress(OSError):  # should the host's memory run out, this process is to go, and not the one that waits
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        found = measure(job)
    except BaseException as error:
        traceback.print_exc()
        found = {"reason": in_short(error), "out_of_memory": out_of_memory(error)}
    beside = into.with_suffix(".new")
    beside.write_text(json.dumps(found))
    beside.replace(into)


def in_short(error: BaseException) -> str:
    """The first line of an error."""
    line = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def out_of_memory(error: BaseException) -> bool:
    """Whether more memory, or a shorter sequence, would have helped."""
    import torch

    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        text = str(at).lower()
        if isinstance(at, torch.OutOfMemoryError) or "out of memory" in text or "workers may use" in text:
            return True
        at = at.__cause__ or at.__context__
    return False
