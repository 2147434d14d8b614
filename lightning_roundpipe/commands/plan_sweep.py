"""``roundpipe-plan`` with several values: each combination of models, machines and settings has a plan of its own.

Each processor plans in a process of its own. A plan depends on its combination only, so the table is the same with any
number of processes.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.text import Text

from lightning_roundpipe.commands.answer import Answer, table
from lightning_roundpipe.commands.choices import read_adapters, read_config
from lightning_roundpipe.commands.command_line import is_mistake
from lightning_roundpipe.commands.console import quiet_libraries
from lightning_roundpipe.commands.machines import choose_machine
from lightning_roundpipe.commands.plan_answer import as_dict, csv_row, machine_of, too_small
from lightning_roundpipe.commands.plan_model import look
from lightning_roundpipe.commands.plan_shape import Wish
from lightning_roundpipe.devices.intraop_threads import cores

MOST_CELLS = 1000
"""Most combinations of a table."""

_MOST_PROCESSES = 16
"""Most processes; each takes about 0.5 GiB."""

_MEMORIES = {"worker": "device_memory", "host": "host_memory"}
"""By name of a memory, its key in the data."""

_ABOUT_TABLES = ("format", "picture", "search_seconds")
"""Options that concern a table, and not the plan of one row."""


@dataclass(frozen=True)
class Cell:
    """One combination of a table.

    Args:
        given: option and text of the options that have several values.
        texts: option and text of all options that are set.
        wish: what is asked.
        found: the data of the answer; None if there is none.
        error: why there is none, as one line.
    """

    given: Mapping[str, str]
    texts: Mapping[str, str]
    wish: Wish
    found: Mapping[str, Any] | None = None
    error: str = ""

    @property
    def fits(self) -> bool:
        return self.found is not None and bool(self.found["fits"])

    @property
    def name(self) -> str:
        """What distinguishes it from the other cells."""
        return ", ".join(self.given.values())

    @property
    def verdict(self) -> str:
        """The answer, in a few words."""
        if self.found is None:
            return self.error
        if self.fits:
            return f"{self.found['tokens_per_s']:,.0f} tokens/s"
        return f"does not fit: {' and '.join(too_small(self.found))} too small"


def plan_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with their answers. A terminal shows the progress.

    Raises:
        ValueError: a name is not known, or there are too many combinations. What is wrong with one of them is the error
            of its cell.
    """
    if len(cells) > MOST_CELLS:
        raise ValueError(f"These are {len(cells):,} combinations, more than the {MOST_CELLS:,} of a table.")
    wishes = [cell.wish for cell in cells]
    for wish in wishes:
        choose_machine(wish.hardware, wish.gpu, wish.gpus, wish.workers, wish.host_memory)
    for model, settings in {(wish.model, wish.model_settings): None for wish in wishes}:
        read_config(model, settings)
    for lora, settings in {(wish.lora, wish.lora_settings): None for wish in wishes}:
        read_adapters(lora, settings)
    console = Console(stderr=True)
    shown = {"description": "planning", "total": len(cells), "console": console, "disable": not console.is_terminal}
    processes = min(len(cells), cores(), _MOST_PROCESSES)
    if processes == 1:
        return [plan_cell(cell) for cell in track(cells, **shown)]  # type: ignore[arg-type]
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once for all of them
    with ProcessPoolExecutor(processes, context, initializer=_end_quietly) as pool:
        return list(track(pool.map(plan_cell, cells), **shown))  # type: ignore[arg-type]


def _end_quietly() -> None:
    """Set up a process of the pool: the terminal interrupts all of them at once, and one traceback is enough."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quiet_libraries()


def plan_cell(cell: Cell) -> Cell:
    """Return the cell with its answer, or with the mistake in it."""
    with redirect_stdout(sys.stderr):  # libraries may print; standard output is for the table
        try:
            found = as_dict(look(cell.wish))
        except (ValueError, OSError) as error:
            if not is_mistake(error):
                raise
            return replace(cell, error=" ".join(str(error).split()))
    del found["would_fit"]  # was not looked for
    return replace(cell, found=found)


# -- the answer --------------------------------------------------------------------------------------------------------


def answer(cells: Sequence[Cell]) -> Answer:
    """Return the answer: how many fit, a row for each cell, and what all cells have in common.

    The exit code is 0 if all fit, 1 if one does not, and 2 if something is wrong with one.
    """
    mistakes: dict[str, list[str]] = {}
    for cell in (cell for cell in cells if cell.error):
        mistakes.setdefault(cell.error, []).append(cell.name)
    fitting = sum(cell.fits for cell in cells)
    wrong = f"; something is wrong with {sum(bool(cell.error) for cell in cells)}" if mistakes else ""
    refused = next((cell for cell in cells if cell.found and not cell.fits), None)
    alone = ["To see what would fit instead, plan each alone, as in", f"  {_command(refused)}"] if refused else []
    limits = {name: {cell.found[key]["limit_bytes"] for cell in cells if cell.found} for name, key in _MEMORIES.items()}
    ofs = {name: f"\nof {_gib(*same)}" if len(same) == 1 else "" for name, same in limits.items()}
    shown = table(
        [name.replace("_", " ") for name in cells[0].given],
        ["tokens/s", *(f"{name}\nGiB{of}" for name, of in ofs.items()), "longest\nseq.", "batch", "stages"],
        (_row(cell, ofs) for cell in cells),
    )
    shown.padding = 0
    return Answer(
        verdict=f"{fitting} of {len(cells)} fit{'s' if fitting == 1 else ''} (estimated){wrong}.",
        facts=[f"{'; '.join(names)}: {error}" for error, names in mistakes.items()],
        notes=_notes(cells),
        tables=[shown],
        paste=alone,
        data=[
            {"given": dict(cell.given), "machine": machine_of(cell.wish), "too_small": too_small(cell.found or {})}
            | {"error": cell.error or None, "model": cell.wish.model, "lora": cell.wish.lora, "fits": None}
            | dict(cell.found or {})
            for cell in cells
        ],
        rows=[csv_row(cell.given, cell.wish, cell.found, cell.error) for cell in cells],
        code=2 if mistakes else 0 if fitting == len(cells) else 1,
    )


def _row(cell: Cell, ofs: Mapping[str, str]) -> list[str | Text]:
    """Return the cells of a row, with the limits of memories for which ``ofs`` (the limit in the heading) is empty."""
    found = cell.found
    if found is None:
        return [*cell.given.values(), Text("mistake", "red"), *[""] * 5]
    memories = []
    for name, key in _MEMORIES.items():
        sizes = [found[key]["needed_bytes"], *([] if ofs[name] else [found[key]["limit_bytes"]])]
        memories.append(Text("/".join(map(_gib, sizes)), "red" if name in too_small(found) else ""))
    longest = f"{found['longest_sequence']:,}" if found["longest_sequence"] else "none"
    if not cell.fits:
        return [*cell.given.values(), Text("no fit", "red"), *memories, longest, "", ""]
    stages = "beside" if found["side_by_side"] else f"{len(found['forward'])}+1+{len(found['backward'])}"
    batch = f"{found['microbatches']}x{found['microbatch_size']}"
    return [*cell.given.values(), f"{found['tokens_per_s']:,.0f}", *memories, longest, batch, stages]


def _gib(nbytes: int | None) -> str:
    """Return bytes in GiB with three significant digits, or all before the point; a dash without a limit."""
    gib = (nbytes or 0) / 2**30
    return "–" if nbytes is None else f"{gib:.{2 if gib < 10 else 1 if gib < 100 else 0}f}"


def common(cells: Sequence[Cell]) -> str:
    """Return what all rows have in common, set or by default."""
    wish, given, texts = cells[0].wish, cells[0].given, {n: t for cell in cells for n, t in cell.texts.items()}
    usual = {"precision": wish.precision, "lora": wish.lora, "staleness": str(wish.staleness)}
    if lengths := {cell.found["sequence_length"] for cell in cells if cell.found}:
        usual["sequence_length"] = "-".join(str(length) for length in sorted({min(lengths), max(lengths)}))
    same = {**texts, **{name: text for name, text in usual.items() if name not in texts}}
    return ", ".join(f"{name}={text}" for name, text in same.items() if name not in (*given, *_ABOUT_TABLES))


def _notes(cells: Sequence[Cell]) -> list[str]:
    """Return sentences about what all cells have in common, and what the columns mean."""
    lines = [f"All with {common(cells)}."]
    assumed = [cell.found["assumed"] for cell in cells if cell.found]
    shared = [text for text in assumed[0] if all(text in others for others in assumed)] if assumed else []
    lines += [f"Assumed {text}" for text in shared]
    if any(len(others) > len(shared) for others in assumed):
        lines.append("Assumed of the hosts: memory (or set host_memory=), bandwidth and links; plan each alone to see.")
    beside = any(cell.fits and cell.found and cell.found["side_by_side"] for cell in cells)
    lines.append(
        "Batch: microbatches of a step x sequences of each. Stages: forward + fused + backward"
        f"{'; beside: rounds side by side, as in data parallelism' if beside else ''}."
    )
    if cells[0].wish.like_paper:
        return [*lines, "Predicted is the paper's library, under its plan and with its times (partitioner=paper)."]
    seconds = cells[0].wish.search_seconds
    return [*lines, f"Each was searched for {seconds:g} s; a longer search may find a few percent more."]


def _command(cell: Cell) -> str:
    """Return the command line that plans a cell alone, quoted for a shell."""
    texts = (f"{name}={text}" for name, text in cell.texts.items() if name not in _ABOUT_TABLES)
    return shlex.join(["roundpipe-plan", *texts])
