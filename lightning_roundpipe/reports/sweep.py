"""Compares the runs of a sweep: a table, printed at the end and left as ``sweep.csv``.

The table is made from the files that the runs left in their folders, so it does not depend on the launcher, and failed
runs have their rows too.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.messages import gib, seconds

Row = dict[str, Any]

COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_time_s": ("step time", seconds),
    "bubble_pct": ("bubble", "{:.1f} %".format),
    "peak_device_gib": ("device peak", lambda size: gib(size * 2**30)),
    "peak_host_gib": ("host peak", lambda size: gib(size * 2**30)),
    "train_loss": ("train loss", "{:.4f}".format),
    "val_loss_after": ("val loss", "{:.4f}".format),
}
"""Keys of ``summary.json`` with their headings (short words, to fit into 80 columns), and how they are shown."""

_MICROBATCHES = "microbatches"

_current: list[Path] = []


class SweepTable(Callback):
    """Records the folder of a sweep, and prints the settings of each run. ``conf/train.yaml`` registers it."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Resolved here, before the first run, so that its time stamp is the same for all runs.
        _current.append(Path(config.hydra.sweep.dir).absolute())

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if _current:
            print(f"\nRun {config.hydra.job.num}: {' '.join(map(str, config.hydra.overrides.task))}", flush=True)


def forget_sweep() -> None:
    """Clear the record of earlier sweeps of this process, before a command."""
    _current.clear()


def make_plans_static(config: DictConfig) -> None:
    """Set the static plan for a run of a sweep, so that runs differ by their settings alone.

    A plan that the user has set stays, and so does a partition by measured seconds.
    """
    partition: Any = config.get("partition") or {}
    if "plan" in partition and partition.plan is None and partition.get("stage_seconds") is None:
        partition.plan = "static"


def finished_sweep() -> Path | None:
    """If the command was a sweep whose runs began, print its table and return its folder; else return None."""
    if not _current or not (rows := read_runs(_current[-1])):
        return None
    present(rows, _current[-1])
    return _current[-1]


def present(rows: Sequence[Row], folder: Path) -> None:
    """Write the rows to ``folder``, and print them as a table, with the errors of failed runs."""
    with (folder / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
    console = Console()
    console.print(draw_table(rows))
    for row in rows:
        if row["error"]:
            console.print(Text(f"run {row['run']} failed: {row['error']}"))


def read_runs(folder: Path) -> list[Row]:
    """Return the overrides and the summary of each run in the folders 0, 1, ... of ``folder``."""
    rows: list[Row] = []
    for run in sorted((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name)):
        overrides_file, summary_file = run / ".hydra" / "overrides.yaml", run / "summary.json"
        overrides = list(OmegaConf.load(overrides_file)) if overrides_file.is_file() else []
        summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {"error": "did not finish"}
        rows.append(
            {"run": run.name}
            | {key: value for key, _, value in (str(override).partition("=") for override in overrides)}
            | {key: summary.get(key) for key in (*COLUMNS, _MICROBATCHES, "error")}
        )
    return rows


def varied_settings(rows: Sequence[Row]) -> list[str]:
    """Return the overrides in which the runs differ."""
    known = {"run", "error", _MICROBATCHES, *COLUMNS}
    keys = dict.fromkeys(key for row in rows for key in row if key not in known)
    return [key for key in keys if len({row.get(key) for row in rows}) > 1 or len(rows) == 1]


def draw_table(rows: Sequence[Row]) -> Table:
    """Return the runs as a table: the settings in which they differ, a line each, and `COLUMNS`."""
    names = setting_names(varied_settings(rows))
    table = Table(
        title=f"Sweep: {len(rows)} runs", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("run", justify="right", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for heading, _ in COLUMNS.values():
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        settings = "\n".join(f"{name} {row.get(key, 'default')}" for key, name in names.items())
        values = ["–" if row[key] is None else show(row[key]) for key, (_, show) in COLUMNS.items()]
        if row["error"]:
            values[0] = "failed"
        table.add_row(row["run"], Text(settings), *values)
    return table


def setting_names(keys: Sequence[str]) -> dict[str, str]:
    """Return short names of settings: the last part of each, where no other setting has it; else the whole name."""
    last = Counter(key.rpartition(".")[2] for key in keys)
    short = {key: key.rpartition(".")[2] for key in keys}
    return {key: (name if last[name] == 1 and len(name) > 1 else key).replace("_", " ") for key, name in short.items()}
