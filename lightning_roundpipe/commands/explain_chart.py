"""The picture of ``explain=memory``: a worker's memory over the time of the call at its peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.commands.explain import Explained
from lightning_roundpipe.planning.census import StorageLifetime
from lightning_roundpipe.reports.pictures import TimeUnit, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GROUPS = 8
"""Most modules with a colour of their own."""
_GIB = 2**30
_BASE = ("0.55", "0.75")
"""Greys of memory that does not change during the call: what the worker holds beside it, and the call's inputs."""


def draw_explained(found: Sequence[Explained], path: Path) -> None:
    """Draw a panel for each peak, and save the picture in the format that the suffix of ``path`` names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6 * len(found)), layout="constrained")
    for axes, one in zip(figure.subplots(len(found), squeeze=False)[:, 0], found, strict=True):
        _panel(axes, one)
    save(figure, path)


def _panel(axes: Axes, one: Explained) -> None:
    call = one.call
    unit = TimeUnit.of(call.end_s)
    groups: dict[str, list[StorageLifetime]] = defaultdict(list)
    for row in call.rows:
        groups[_group(row)].append(row)
    inputs = groups.pop("inputs", [])
    by_size = sorted(groups, key=lambda name: -sum(row.nbytes for row in groups[name] if row.at_worst))
    for name in by_size[_GROUPS:]:
        groups["others"] += groups.pop(name)
    order = [name for name in by_size[:_GROUPS] if name in groups] + (["others"] if len(by_size) > _GROUPS else [])
    times = sorted({0.0, call.end_s, *(t for row in call.rows for t in (row.start_s, row.end_s))})
    base = one.needed - one.activations
    flat = [(base + one.kept) / _GIB] * len(times)
    bands = [flat, _curve(inputs, times), *(_curve(groups[name], times) for name in order)]
    label = "arenas, boundary tensors" + (", other calls' graphs" if one.kept else "")
    from matplotlib import colormaps

    colours: list[Any] = [*_BASE, *(colormaps["tab10"](number % 10) for number in range(len(order)))]
    axes.stackplot(times, bands, labels=[label, "inputs", *order], colors=colours, step="post", linewidth=0)
    if one.limit is not None:
        axes.axhline(one.limit / _GIB, color="black", linestyle="--", linewidth=1)
        axes.annotate("limit", (call.end_s, one.limit / _GIB), ha="right", va="bottom", fontsize=8)
    axes.axvline(call.worst_s, color="black", linewidth=0.8, linestyle=":")
    top = max(map(sum, zip(*bands, strict=True)))
    highest = 1.12 * max(top, (one.limit or 0) / _GIB if one.limit and one.limit < 3 * top * _GIB else top)
    for part, begin in call.parts:
        axes.axvline(begin, color="0.3", linewidth=0.5)
        axes.annotate(part, (begin, highest), xytext=(3, -3), textcoords="offset points", va="top", fontsize=8)
    axes.set_xlim(0, call.end_s)
    axes.set_ylim(0, highest)
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds / unit.seconds:g}")
    axes.set_xlabel(f"estimated time ({unit.name}) of a call of {call.layer}")
    axes.set_ylabel("GiB of a worker")
    axes.set_title(f"{one.subject}: {one.needed / _GIB:,.2f} GiB at the worst moment (dotted)", fontsize=10, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, reverse=True, frameon=False)


def _group(row: StorageLifetime) -> str:
    if row.part == "input":
        return "inputs"
    if row.part == "loss":
        return "loss"
    return row.name.module.partition(".")[0] or "the layer itself"


def _curve(rows: Sequence[StorageLifetime], times: Sequence[float]) -> list[float]:
    """Return the GiB alive from each of the times on. A storage that is released when it is made does not show."""
    changes: dict[float, int] = defaultdict(int)
    for row in rows:
        changes[row.start_s] += row.nbytes
        changes[row.end_s] -= row.nbytes
    curve, live = [], 0
    for time in times[:-1]:
        live += changes[time]
        curve.append(live / _GIB)
    return [*curve, curve[-1] if curve else 0.0]
