"""Compares the runs of a sweep: a table, printed at the end and left as ``sweep.csv``, and a picture, ``sweep.png``.

The table is made from the files that the runs left in their folders, so it does not depend on the launcher, and failed
runs have their rows too. ``python -m lightning_roundpipe.sweep FOLDER`` makes it again.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.extras import is_installed, remedy
from lightning_roundpipe.pictures import setting_names

COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step_time_s", "step time", "{:,.3f} s".format),
    ("bubble_pct", "bubble", "{:.1f} %".format),
    ("peak_device_gib", "device peak", lambda gib: memory(gib)),
    ("peak_host_gib", "host peak", lambda gib: memory(gib)),
    ("train_loss", "train loss", "{:.4f}".format),
    ("val_loss_after", "val loss", "{:.4f}".format),
)
"""Keys of ``summary.json``, their headings (short words, to fit into 80 columns), and how they are shown."""

_SHOWN = tuple(key for key, _, _ in COLUMNS)

_current: list[Path] = []


class SweepTable(Callback):
    """Refuses a sweep with an impossible run, and records the folder of its runs. ``conf/train.yaml`` registers it.

    Args:
        check: dotted name of a function that receives the configuration of each run before the first one begins. Its
            errors refuse the whole sweep. A name, because the function's imports take seconds.
    """

    def __init__(self, check: str | None = None) -> None:
        self._check = check

    def on_multirun_start(self, config: DictConfig, config_name: str | None = None, **kwargs: Any) -> None:
        if self._check is not None:
            refuse_impossible(combinations_of(config), config_name, self._check)
        # Resolved here, before the first run, so that its time stamp is the same for all runs.
        _current.append(Path(config.hydra.sweep.dir).absolute())

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if _current:
            overrides = OmegaConf.to_container(config.hydra.overrides.task)
            assert isinstance(overrides, list)
            print(f"\nRun {config.hydra.job.num}: {' '.join(map(str, overrides))}", flush=True)


def combinations_of(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each run; empty if the sweeper chooses them as it goes, or Hydra refuses them."""
    if not str(config.hydra.sweeper.get("_target_")).endswith("BasicSweeper"):
        return []
    parameters = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        overrides = parser.parse_overrides([*parameters, *config.hydra.overrides.task])
        return [run for batch in BasicSweeper.split_arguments(overrides, None) for run in batch]
    except HydraException:
        return []


def refuse_impossible(combinations: Sequence[Sequence[str]], config_name: str | None, check: str) -> None:
    """Exit with status 2 and a message that names the run, if ``check`` refuses a combination."""
    refuse = get_method(check)
    for number, overrides in enumerate(combinations):
        try:
            config = compose(config_name, list(overrides))
        except (HydraException, OmegaConfBaseException):
            return  # Hydra composes all runs before the first one begins, and reports such errors itself
        config.run_folder = "."  # the run has no folder yet
        try:
            with silence():
                refuse(config)
        except Exception as error:
            mistake = isinstance(error, (ValueError, TypeError, OSError, ImportError))
            if not mistake and type(error).__name__ != "MisconfigurationException":
                continue  # the run itself shows this error with its traceback
            reason = " ".join(str(error).split())
            run = f"run {number} of {len(combinations)} ({' '.join(overrides)})"
            print(f"roundpipe-train: {run} cannot be, so the sweep has not begun: {reason}", file=sys.stderr)
            raise SystemExit(2) from None  # Hydra would turn an Exception in a callback into a warning


@contextmanager
def silence() -> Iterator[None]:
    """Suppress logging and warnings: each run will repeat them."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


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


def present(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write the rows as a table and a picture to ``folder``, and print the table."""
    write_table(rows, folder / "sweep.csv")
    console = Console()
    console.print(draw_table(rows, console.width))
    if not is_installed("matplotlib"):
        console.print(f"No picture of it is drawn, as {remedy('matplotlib')}", soft_wrap=True, markup=False)
        return
    from lightning_roundpipe.sweep_picture import draw_sweep

    if draw_sweep(rows, varied_settings(rows), folder / "sweep.png"):
        console.print(f"The picture of it: {folder / 'sweep.png'}", soft_wrap=True, highlight=False)


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the overrides and the summary of each run in the folders 0, 1, ... of ``folder``."""
    rows: list[dict[str, Any]] = []
    for run in sorted((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name)):
        overrides_file, summary_file = run / ".hydra" / "overrides.yaml", run / "summary.json"
        overrides = list(OmegaConf.load(overrides_file)) if overrides_file.is_file() else []
        summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {"error": "did not finish"}
        rows.append(
            {"run": run.name}
            | {key: value for key, _, value in (str(override).partition("=") for override in overrides)}
            | {key: summary.get(key) for key in (*_SHOWN, "microbatches")}
            | {"error": summary.get("error")}
        )
    return rows


def varied_settings(rows: list[dict[str, Any]]) -> list[str]:
    """Return the overrides in which the runs differ."""
    known = {"run", "error", "microbatches", *_SHOWN}
    keys = dict.fromkeys(key for row in rows for key in row if key not in known)
    return [key for key in keys if len({row.get(key) for row in rows}) > 1 or len(rows) == 1]


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the rows as CSV, with every key that any of them has."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)


def draw_table(rows: list[dict[str, Any]], width: int) -> RenderableType:
    """Return the rows for a screen of ``width`` columns, with overrides only where runs differ, and with errors.

    Settings have a column each, or one line each where the columns are too wide.
    """
    varied = varied_settings(rows)
    names = setting_names(varied)
    settings = [[str(row.get(key, "")) for key in varied] for row in rows]
    apart = _table(rows, [names[key].replace(" ", "\n") for key in varied], settings)
    if Console(width=10 * width).measure(apart).maximum > width:
        together = [["\n".join(f"{names[key]} {row.get(key, 'default')}" for key in varied)] for row in rows]
        apart = _table(rows, ["settings"], together)
    failed = [Text(f"run {row['run']} failed: {row['error']}") for row in rows if row["error"]]
    return Group(apart, *failed)


def _table(rows: list[dict[str, Any]], headings: list[str], settings: list[list[str]]) -> Table:
    """Return the table of the runs. ``settings`` has a text per run for each of the ``headings``."""
    together = headings == ["settings"]
    table = Table(title=f"Sweep: {len(rows)} runs", title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    if together:  # save columns
        table.pad_edge, table.padding = False, (0, 1, 0, 0)
    table.add_column("run", justify="right", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="left" if together else "right", no_wrap=not together, overflow="fold")
    for _, heading, _ in COLUMNS:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row, texts in zip(rows, settings, strict=True):
        missing = ["failed" if row["error"] else "–", *["–"] * (len(COLUMNS) - 1)]
        shown = zip(COLUMNS, missing, strict=True)
        values = [instead if row[key] is None else show(row[key]) for (key, _, show), instead in shown]
        table.add_row(row["run"], *map(Text, texts), *values)
    return table


def memory(gib: float) -> str:
    """Return a size in the unit that suits it."""
    mib = gib * 1024
    return f"{gib:,.2f} GiB" if gib >= 1 else f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:,.1f} MiB"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit("usage: python -m lightning_roundpipe.sweep FOLDER   (a folder that a sweep left)")
    found = read_runs(Path(sys.argv[1]))
    present(found, Path(sys.argv[1]))
