"""The answer of a table of plans: a table for the terminal, CSV, and a list for ``format=json``."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.commands.options import pasted
from lightning_roundpipe.commands.plan_model_table import partitioner_of
from lightning_roundpipe.commands.plan_several import Cell
from lightning_roundpipe.commands.plan_shape import Wish

_NOTHING = "–"

_MEMORIES = {"worker": ("device_memory", 1), "host": ("host_memory", 0)}
"""By column: the memory's key in an answer, and the decimals of its GiB."""

_HOW = ("format", "picture", "trace", "search_seconds")
"""Options that `common` leaves out: they change no figure, except for the time of a search (see `_search`)."""

_SAID = ("model", "hardware", "gpu", "gpus", "precision", "lora", "staleness", "sequence_length")
"""Options that `common` names even if they are not set."""

_FIGURES = (
    "fits", "too_small", "tokens_per_s", "step_ms", "worker_gib", "worker_limit_gib", "host_gib", "host_limit_gib",
    "longest_sequence", "precision", "reduce_dtype", "staleness", "partitioner", "sequence_length", "microbatches",
    "microbatch_size", "workers", "forward_stages", "fused_layers", "backward_stages", "round_microbatches",
    "side_by_side", "plan",
    "error",
)  # fmt: skip
"""Columns of the CSV, after those that identify the combination."""


def as_table(cells: Sequence[Cell]) -> RenderableType:
    """Return the answer for the terminal: how many fit, a row for each cell, and what all cells have in common."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    for name in cells[0].given or ("model",):
        table.add_column(name.replace("_", " "), overflow="fold")
    limits = {name: _limits(cells, name) for name in _MEMORIES}
    memories = [_heading(name, limits[name]) for name in _MEMORIES]
    for heading in ("tokens/s", *memories, "longest\nseq.", "batch", "stages"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(*(cell.given.values() or (cell.wish.model,)), *_figures(cell, limits))
    parts: list[RenderableType] = [Text(_verdict(cells)), "", table, "", *(Text(line) for line in _legend(cells))]
    mistakes: dict[str, list[str]] = {}
    for cell in cells:
        if cell.error is not None:
            mistakes.setdefault(cell.error, []).append(cell.name)
    parts += [Text(f"{'; '.join(names)}: {error}") for error, names in mistakes.items()]
    if (refused := next((cell for cell in cells if cell.too_small), None)) is not None:
        parts += ["", Text("To see what would fit instead, plan each alone, as in"), pasted(f"  {_command(refused)}")]
    return Group(*parts)


def _limits(cells: Sequence[Cell], name: str) -> set[int | None]:
    """Return the limits of a memory in all rows in bytes; None is no limit."""
    return {cell.found[_MEMORIES[name][0]]["limit_bytes"] for cell in cells if cell.found}


def _heading(name: str, limits: set[int | None]) -> str:
    if len(limits) > 1:
        return f"{name}\nGiB\nneed/has"
    return f"{name}\nGiB" + "".join(f"\nof {_gib(limit, _MEMORIES[name][1])}" for limit in limits if limit is not None)


def _verdict(cells: Sequence[Cell]) -> str:
    fitting, wrong = (sum(map(bool, found)) for found in ([c.fits for c in cells], [c.error for c in cells]))
    if wrong == len(cells):
        return f"None of {len(cells)} can be planned: something is wrong with each, as listed below."
    unknown = f"; something is wrong with {wrong}" if wrong else ""
    if fitting in (0, len(cells)):
        return f"{'All' if fitting else 'None'} of {len(cells)} fit{'' if fitting else 's'} (estimated){unknown}."
    return f"{fitting} of {len(cells)} fit{'s' if fitting == 1 else ''} (estimated){unknown}."


def _figures(cell: Cell, limits: Mapping[str, set[int | None]]) -> list[str | Text]:
    found = cell.found
    if found is None:
        return [Text("mistake", "red"), *[_NOTHING] * 5]
    memories = []
    for name, (key, digits) in _MEMORIES.items():
        text, limit = _gib(found[key]["needed_bytes"], digits), found[key]["limit_bytes"]
        if len(limits[name]) > 1:
            text = f"{text}/{_NOTHING if limit is None else _gib(limit, digits)}"
        memories.append(Text(text, "red" if name in cell.too_small else ""))
    longest = f"{found['longest_sequence']:,}" if found["longest_sequence"] else _NOTHING
    if not cell.fits:
        return [Text("no fit", "red"), *memories, longest, _NOTHING, _NOTHING]
    stages = "beside" if found["side_by_side"] else f"{len(found['forward'])}+1+{len(found['backward'])}"
    return [
        f"{found['tokens_per_s']:,.0f}",
        *memories,
        longest,
        f"{found['microbatches']}x{found['microbatch_size']}",
        stages,
    ]


def common(cells: Sequence[Cell]) -> list[str]:
    """Return what all rows have in common, set or by default, in a few words each."""
    wish, given = cells[0].wish, cells[0].given
    same = {"model": wish.model}
    if wish.hardware is not None or not {"gpu", "gpus"} & given.keys():
        same |= {} if "hardware" in given else {"machine": cells[0].machine}
    else:
        same |= {"gpu": wish.gpu or "", "gpus": str(wish.gpus or 1)}
    same |= {"precision": wish.precision, "lora": wish.lora, "staleness": str(wish.staleness)}
    parts = [f"{name} {text}" for name, text in same.items() if name not in given]
    lengths = {cell.found["sequence_length"] for cell in cells if cell.found}
    if "sequence_length" not in given and lengths:
        parts.append(f"sequences of {' to '.join(f'{n:,}' for n in sorted({min(lengths), max(lengths)}))} tokens")
    for name, text in _set(cells).items():
        if name not in (*given, *_SAID, *_HOW):
            parts.append(f"{name}={text}" if "." in name else f"{name.replace('_', ' ')} {text}")
    return parts


def _set(cells: Sequence[Cell]) -> dict[str, str]:
    """Return name and text of each option that a row sets."""
    return {name: text for cell in cells for name, _, text in (one.partition("=") for one in cell.arguments)}


def _legend(cells: Sequence[Cell]) -> list[str]:
    """Return the lines below the table: common options, assumptions, and the meaning of the columns."""
    lines = [f"All with {', '.join(common(cells))}."]
    assumed = [cell.found["assumed"] for cell in cells if cell.found]
    if not assumed:
        return lines
    shared = [text for text in assumed[0] if all(text in others for others in assumed)]
    lines += [f"Assumed {text}" for text in shared]
    if any(len(others) > len(shared) for others in assumed):
        has = (
            "bandwidth and links"
            if "host_memory" in _set(cells)
            else "memory (or set host_memory=), bandwidth and links"
        )
        lines.append(f"Assumed of the hosts: {has}; plan each alone to see which.")
    if any(cell.too_small for cell in cells):
        lines.append("No fit: a worker or the host needs more memory than it has (red on a terminal).")
    beside = "; beside: rounds side by side, as in data parallelism"
    is_beside = any(cell.fits and cell.found and cell.found["side_by_side"] for cell in cells)
    lines.append(
        "Batch: microbatches of a step x sequences of each. Stages: forward + fused + backward"
        f"{beside if is_beside else ''}."
    )
    return [*lines, _search(cells[0].wish)]


def _search(wish: Wish) -> str:
    """Return a sentence that says how the plans were made."""
    if wish.like_paper:
        return "Predicted is the paper's library, under its plan and with its times (partitioner=paper)."
    if wish.stage_seconds is not None:
        return f"No plan was searched for: stages take {wish.stage_seconds:g} s at most (stage_seconds=)."
    return f"Each was searched for {wish.search_seconds:g} s; a longer search may find a few percent more."


def _command(cell: Cell) -> str:
    """Return the command line that plans a cell alone, quoted for a shell."""
    about_tables = ("format", "picture", "search_seconds")
    return shlex.join(["roundpipe-plan", *(text for text in cell.arguments if text.split("=")[0] not in about_tables)])


def as_list(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return what ``format=json`` prints: for each cell, its combination and the answer without remedies."""
    rows = []
    for cell in cells:
        found: Mapping[str, Any] = cell.found or {"model": cell.wish.model, "lora": cell.wish.lora, "fits": None}
        row = {"given": dict(cell.given), "machine": cell.machine, "too_small": cell.too_small, "error": cell.error}
        rows.append(row | dict(found))
    return rows


def as_csv(cells: Sequence[Cell]) -> str:
    """Return the CSV: a header with the names of the columns, and a line for each cell. Sizes are in GiB."""
    given = [name for name in cells[0].given if name not in ("hardware", "gpu", "gpus")]
    names = dict.fromkeys(("model", "machine", "lora", *given, *_FIGURES))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: value for name, value in _csv_row(cell).items() if name in names} for cell in cells)
    return text.getvalue()


def _csv_row(cell: Cell) -> dict[str, object]:
    wish, found = cell.wish, cell.found
    row: dict[str, object] = {**cell.given, "model": wish.model, "machine": cell.machine, "lora": wish.lora}
    row |= {"precision": wish.precision, "reduce_dtype": wish.reduce_dtype, "staleness": wish.staleness}
    row |= {"partitioner": partitioner_of(wish), "too_small": " ".join(cell.too_small)}
    if found is None:
        return row | {"error": cell.error}
    device, host = found["device_memory"], found["host_memory"]
    row |= {
        "fits": cell.fits,
        "tokens_per_s": _rounded(found["tokens_per_s"], 1),
        "step_ms": _rounded(found["period_ms"], 1),
        "worker_gib": _rounded(device["needed_bytes"], 4, 2**30),
        "worker_limit_gib": _rounded(device["limit_bytes"], 4, 2**30),
        "host_gib": _rounded(host["needed_bytes"], 4, 2**30),
        "host_limit_gib": _rounded(host["limit_bytes"], 4, 2**30),
    }
    names = ("longest_sequence", "sequence_length", "microbatches", "microbatch_size", "workers")
    row |= {name: found[name] for name in names}
    if not cell.fits:
        return row
    return row | {
        "forward_stages": len(found["forward"]),
        "fused_layers": found["fused"],
        "backward_stages": len(found["backward"]),
        "round_microbatches": found["round_microbatches"],
        "side_by_side": found["side_by_side"],
        "plan": found["plan"],
    }


def _rounded(value: float | None, digits: int, unit: int = 1) -> float | str:
    return "" if value is None else round(value / unit, digits)


def _gib(nbytes: int, digits: int) -> str:
    """Return bytes in GiB with ``digits`` decimals, or with two below 10 GiB."""
    gib = nbytes / 2**30
    return f"{gib:.{digits if gib >= 10 else 2}f}"
