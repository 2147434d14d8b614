"""The answer of ``explain=memory`` for the terminal: sentences and tables about each `explain.Explained`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.commands.explain import Explained, InTiles, Line
from lightning_roundpipe.commands.plan_model_table import in_gib, memory_table

_LEAST = 0.002
"""Least share of all tensors' bytes for a row. Smaller tensors share one row."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def as_parts(found: Sequence[Explained], tiles: InTiles | None) -> list[RenderableType]:
    """Return what is printed below the tables of memory.

    Args:
        found: the peaks, that of the plan first.
        tiles: the estimate with tiles of tokens; None: nothing is printed about tiles.
    """
    parts: list[RenderableType] = []
    for one in found:
        parts += [
            "",
            Text(
                f"A worker's worst moment under {one.subject}: stage {one.stage} ({one.phase}) runs {one.call.layer}."
            ),
        ]
        if one is not found[0]:
            parts.append(memory_table("Each worker", one.items, one.limit, locked=False))
        else:
            parts.append("")
        parts += [Text(_room(one)), "", _table(one)]
    if tiles is not None:
        parts += ["", Text(_what_if(tiles))]
    return parts


def _what_if(tiles: InTiles) -> str:
    return (
        f"With strategy.token_tiles={tiles.tile} (planned, not measured), where MLPs, norms and experts run in tiles, "
        f"the longest sequence has {tiles.longest.tokens:,} tokens, limited by "
        f"{tiles.longest.limited_by}. A sequence of {tiles.tokens:,} tokens computes "
        f"{100 * tiles.slowdown:.0f} % longer."
    )


def _room(one: Explained) -> str:
    if one.limit is None:
        return f"Together {in_gib(one.needed)} GiB, without a limit."
    return f"Together {in_gib(one.needed)} of {in_gib(one.limit)} GiB, head room {in_gib(one.limit - one.needed)} GiB."


def _table(one: Explained) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("Tensors alive", overflow="fold", min_width=24)
    table.add_column("from", no_wrap=True)
    table.add_column("shape", overflow="fold")
    table.add_column("", no_wrap=True)
    for name in ("GiB", "B/token", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    all_bytes = one.activations
    large = [line for line in one.lines if line.nbytes >= _LEAST * all_bytes]
    for line in large:
        dtype = _DTYPES.get(line.dtype, line.dtype)
        table.add_row(title(line), line.part, _shape(line), dtype, *_sizes(line.nbytes, one))
    if small := one.lines[len(large) :]:
        count = sum(line.count for line in small)
        table.add_row(f"{count} smaller ones", "", "", "", *_sizes(sum(line.nbytes for line in small), one))
    if one.kept:
        table.add_row("kept by graphs of the stage's other calls", "", "", "", *_sizes(one.kept, one))
    table.add_section()
    table.add_row("together: activations", "", "", "", *_sizes(all_bytes, one))
    return table


def title(line: Line) -> str:
    """Return the module and the operation of a line, or the name of an input."""
    if line.part == "input":
        return f"input {line.operation}"
    return f"{line.module} {line.operation}".strip()


def _shape(line: Line) -> str:
    """Return the count and the shape of a line's tensors, without leading dimensions of size 1."""
    first = next((at for at, size in enumerate(line.shape) if size != 1), 0)
    many = f"{line.count} of " if line.count > 1 else ""
    return many + "x".join(map(str, line.shape[first:]))


def _sizes(nbytes: int, one: Explained) -> tuple[str, str, str]:
    share = 100 * nbytes / one.activations if one.activations else 0.0
    return in_gib(nbytes), f"{nbytes / one.tokens:,.0f}", f"{share:.1f}"
