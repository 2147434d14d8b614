"""A table of many plans: for people, as CSV, and as a list for JSON."""

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
from lightning_roundpipe.commands.plan_several import Cell

_NOTHING = "–"


_MEMORIES = {"worker": ("device_memory", 1), "host": ("host_memory", 0)}
"""Their names in an answer, and the digits that tell one amount from another."""


def as_table(cells: Sequence[Cell]) -> RenderableType:
    """How many fit; a row for each; then what all of them have in common."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    for name in cells[0].given or ("model",):
        table.add_column(name.replace("_", " "), overflow="fold")
    limits = {name: _common_limit(cells, name) for name in _MEMORIES}
    memories = [f"{name}\nGiB\n{f'of {limit}' if limit else 'of all'}" for name, limit in limits.items()]
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
        parts += ["", Text("What would fit instead is said for each alone, as in"), pasted(f"  {_command(refused)}")]
    return Group(*parts)


def _common_limit(cells: Sequence[Cell], name: str) -> str | None:
    """What all rows have of that memory; None: not all have the same."""
    key, digits = _MEMORIES[name]
    limits = {cell.found[key]["limit_bytes"] for cell in cells if cell.found}
    limit = limits.pop() if len(limits) == 1 else None
    return None if limit is None else _gib(limit, digits)


def _verdict(cells: Sequence[Cell]) -> str:
    fitting = sum(cell.fits for cell in cells)
    if fitting in (0, len(cells)):
        return f"{'All' if fitting else 'None'} of {len(cells)} fit{'' if fitting else 's'} (estimated)."
    return f"{fitting} of {len(cells)} fit{'s' if fitting == 1 else ''} (estimated)."


def _figures(cell: Cell, limits: Mapping[str, str | None]) -> list[str | Text]:
    found = cell.found
    if found is None:
        return [Text("mistake", "red"), *[_NOTHING] * 5]
    memories = []
    for name, (key, digits) in _MEMORIES.items():
        text, limit = _gib(found[key]["needed_bytes"], digits), found[key]["limit_bytes"]
        if limits[name] is None and limit is not None:
            text = f"{text}/{_gib(limit, digits)}"
        memories.append(Text(text, "red" if name in cell.too_small else ""))
    longest = f"{found['longest_sequence']:,}" if found["longest_sequence"] else _NOTHING
    if not cell.fits:
        return [Text("no fit", "red"), *memories, longest, _NOTHING, _NOTHING]
    stages = f"{len(found['forward'])}+1+{len(found['backward'])}"
    return [
        f"{found['tokens_per_s']:,.0f}",
        *memories,
        longest,
        f"{found['microbatches']}x{found['microbatch_size']}",
        stages,
    ]


def _legend(cells: Sequence[Cell]) -> list[str]:
    """What is the same in all rows, and what the columns mean."""
    wish, given = cells[0].wish, cells[0].given
    same = {} if "model" in given else {"model": wish.model}
    if not {"hardware", "gpu", "gpus"} & given.keys():
        same["machine"] = cells[0].machine
    same |= {"precision": wish.precision, "lora": wish.lora, "staleness": str(wish.staleness)}
    common = [f"{name} {text}" for name, text in same.items() if name not in given]
    lengths = {cell.found["sequence_length"] for cell in cells if cell.found}
    if "sequence_length" not in given and len(lengths) == 1:
        common.append(f"sequences of {lengths.pop():,} tokens")
    lines = [f"All with {', '.join(common)}."] if common else []
    if any(cell.too_small for cell in cells):
        lines.append("No fit: a worker or the host needs more memory than it has (red on a terminal).")
    return [
        *lines,
        "Batch: microbatches of a step x sequences of each. Stages: forward + fused + backward.",
        f"Each was searched for {wish.search_seconds:g} s; a longer search may find a few percent more.",
    ]


def _command(cell: Cell) -> str:
    """That asks for this one alone, as text."""
    about_tables = ("format", "picture", "search_seconds")
    return shlex.join(["roundpipe-plan", *(text for text in cell.arguments if text.split("=")[0] not in about_tables)])


def as_list(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What ``format=json`` prints: of each what it prints of one, but for what would fit."""
    rows = []
    for cell in cells:
        found: Mapping[str, Any] = cell.found or {"model": cell.wish.model, "lora": cell.wish.lora, "fits": None}
        row = {"given": dict(cell.given), "machine": cell.machine, "too_small": cell.too_small, "error": cell.error}
        rows.append(row | dict(found))
    return rows


def as_csv(cells: Sequence[Cell]) -> str:
    """A line for each, with the names of the columns above; sizes in GiB."""
    rows = [_csv_row(cell) for cell in cells]
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(name for row in rows for name in row)), restval="", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(cell: Cell) -> dict[str, object]:
    wish, found = cell.wish, cell.found
    row: dict[str, object] = {"model": wish.model, "machine": cell.machine, "lora": wish.lora}
    row |= {name: text for name, text in cell.given.items() if name not in ("hardware", "gpu", "gpus")}
    row |= {"fits": "" if found is None else cell.fits, "too_small": " ".join(cell.too_small)}
    if found is None:
        return row | {"error": cell.error}
    device, host = found["device_memory"], found["host_memory"]
    row |= {
        "tokens_per_s": _rounded(found["tokens_per_s"], 1),
        "step_ms": _rounded(found["period_ms"], 1),
        "worker_gib": _rounded(device["needed_bytes"], 4, 2**30),
        "worker_limit_gib": _rounded(device["limit_bytes"], 4, 2**30),
        "host_gib": _rounded(host["needed_bytes"], 4, 2**30),
        "host_limit_gib": _rounded(host["limit_bytes"], 4, 2**30),
        "longest_sequence": found["longest_sequence"],
    }
    names = ("precision", "staleness", "sequence_length", "microbatches", "microbatch_size", "workers")
    row |= {name: found[name] for name in names}
    plan = {
        "forward_stages": len(found["forward"]),
        "fused_layers": found["fused"],
        "backward_stages": len(found["backward"]),
        "round_microbatches": found["round_microbatches"],
        "plan": found["plan"],
    }
    return row | (plan if cell.fits else dict.fromkeys(plan, "")) | {"error": ""}


def _rounded(value: float | None, digits: int, unit: int = 1) -> float | str:
    return "" if value is None else round(value / unit, digits)


def _gib(nbytes: int, digits: int) -> str:
    """In GiB; what is little keeps two digits."""
    gib = nbytes / 2**30
    return f"{gib:.{digits if gib >= 10 else 2}f}"
