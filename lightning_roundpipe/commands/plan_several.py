"""Tables of plans: each combination of models, machines and settings has a plan of its own.

Each processor plans in a process of its own. A plan depends on its combination only, so the table is the same with any
number of processes, unless the clock ends a search.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods, get_context
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_roundpipe.commands.choices import read_adapters, read_config
from lightning_roundpipe.commands.console import quiet_libraries
from lightning_roundpipe.commands.machines import choose_machine
from lightning_roundpipe.commands.options import is_mistake
from lightning_roundpipe.commands.plan_model import look
from lightning_roundpipe.commands.plan_model_table import as_dict
from lightning_roundpipe.commands.plan_shape import Wish
from lightning_roundpipe.devices.intraop_threads import cores

MOST_CELLS = 1000
"""Most combinations of a table."""

_MOST_PROCESSES = 16
"""Most processes; each takes about 0.5 GiB."""


@dataclass(frozen=True)
class Cell:
    """One combination of a table.

    Args:
        given: name and text of the options that have several values.
        wish: what is asked.
        arguments: the command line that asks for it alone.
        found: the answer, as ``format=json`` says it of one; None where there is none.
        error: why there is none, as one line.
    """

    given: Mapping[str, str]
    wish: Wish
    arguments: tuple[str, ...] = ()
    found: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def fits(self) -> bool:
        return self.found is not None and bool(self.found["fits"])

    @property
    def too_small(self) -> list[str]:
        """``worker``, ``host``, both or none."""
        if self.found is None:
            return []
        sizes = {"worker": self.found["device_memory"], "host": self.found["host_memory"]}
        return [
            name
            for name, memory in sizes.items()
            if memory["limit_bytes"] is not None and memory["needed_bytes"] > memory["limit_bytes"]
        ]

    @property
    def machine(self) -> str:
        """As it could be given with ``hardware=``."""
        return self.wish.hardware or f"{self.wish.gpu}x{self.wish.gpus or 1}"

    @property
    def name(self) -> str:
        """What distinguishes it from the other cells."""
        return ", ".join(self.given.values()) or f"{self.wish.model}, {self.machine}"

    @property
    def verdict(self) -> str:
        """The answer, in a few words."""
        if self.error is not None:
            return self.error
        assert self.found is not None
        if self.fits:
            return f"{self.found['tokens_per_s']:,.0f} tokens/s"
        return f"does not fit: {' and '.join(self.too_small)} too small"


def plan_cells(asked: Sequence[Cell]) -> list[Cell]:
    """The cells with their answers, in their order. Says on standard error how far it is.

    Raises:
        ValueError: a name is not known, or there are too many combinations. What is wrong with one of them is the error
            of its cell.
    """
    if len(asked) > MOST_CELLS:
        raise ValueError(
            f"These are {len(asked):,} combinations, more than the {MOST_CELLS:,} of a table: ask for fewer."
        )
    wishes = [cell.wish for cell in asked]
    for wish in wishes:
        choose_machine(wish.hardware, wish.gpu, wish.gpus, wish.workers, wish.host_memory)
    for model, settings in {(wish.model, wish.model_settings): None for wish in wishes}:
        read_config(model, settings)
    for lora, settings in {(wish.lora, wish.lora_settings): None for wish in wishes}:
        read_adapters(lora, settings)
    with _progress(len(asked)) as tell:
        cells = _plan_all(asked, min(len(asked), cores(), _MOST_PROCESSES), tell)
    return cells


def _plan_all(cells: Sequence[Cell], processes: int, tell: Callable[[Cell], None]) -> list[Cell]:
    if processes == 1:
        found = []
        for cell in cells:
            found.append(plan_cell(cell))
            tell(found[-1])
        return found
    methods = get_all_start_methods()
    context = get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([__name__])  # torch is imported once for all of them
    with ProcessPoolExecutor(processes, context, initializer=_end_quietly) as pool:
        futures = [pool.submit(plan_cell, cell) for cell in cells]
        for future in as_completed(futures):
            tell(future.result())
        return [future.result() for future in futures]


def _end_quietly() -> None:
    """In a process of the pool: the terminal interrupts all of them at once, and one traceback is enough."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quiet_libraries()


def plan_cell(cell: Cell) -> Cell:
    """The cell with its answer, or with the mistake in it."""
    with redirect_stdout(sys.stderr):  # where libraries talk: standard output is for the table
        try:
            found = as_dict(look(cell.wish))
        except (ValueError, OSError) as error:
            if not is_mistake(error):
                raise
            return replace(cell, error=" ".join(str(error).split()))
    del found["would_fit"]  # was not looked for
    return replace(cell, found=found)


@contextmanager
def _progress(count: int) -> Iterator[Callable[[Cell], None]]:
    """A bar on a terminal, which vanishes, and elsewhere a line for each cell that is done."""
    if sys.stderr.isatty():
        columns = (
            MofNCompleteColumn(),
            BarColumn(20),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("planning", total=count)
            yield lambda cell: bar.update(task, advance=1, description=f"{cell.name}: {cell.verdict}")
        return
    done = 0

    def tell(cell: Cell) -> None:
        nonlocal done
        done += 1
        print(f"roundpipe-plan: {done} of {count}: {cell.name}: {cell.verdict}", file=sys.stderr, flush=True)

    yield tell
