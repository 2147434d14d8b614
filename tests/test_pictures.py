"""Pictures and traces of schedules, and how large a picture may become."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from lightning_roundpipe.reports.pictures import (
    COPIES,
    WAITS,
    Block,
    Chart,
    CopySpan,
    IdleBlock,
    draw_charts,
)
from lightning_roundpipe.reports.traces import write_charts


def block(worker: int, microbatch: int, start_ms: float, *parts: tuple[str, float], turn: int = 0) -> Block:
    return Block(worker, microbatch, f"F{worker}", turn, start_ms, parts)


def chart(title: str = "one", group: str = "g", workers: int = 2, span_ms: float = 9.0, stretch: float = 1.0) -> Chart:
    blocks = [
        block(0, 0, 0, ("forward", 2 * stretch)),
        block(1, 0, 2 * stretch, ("forward", 2 * stretch), ("head forward", 0.1 * stretch)),
        block(0, 12, 5 * stretch, ("recompute", stretch), ("backward", 3 * stretch), turn=1),
        block(0, 13, 9 * stretch),
    ]
    return Chart(title, span_ms, ", facts", group, workers, span_ms, blocks)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    saved: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kw: (saved.append(self), save(self, path, **kw)))
    return saved


def texts(figure: Figure) -> list[str]:
    return [item.get_text() for item in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_charts_lie_below_each_other(tmp_path: Path, figures: list[Figure]) -> None:
    """Those of one group have one scale. The longest chart chooses the unit of all."""
    charts = [chart("short", span_ms=900), chart("long", span_ms=3000), chart("else", group="h", span_ms=500)]
    draw_charts(charts, tmp_path / "picture.png")
    assert imread(tmp_path / "picture.png").shape[1] == 1920
    [figure] = figures
    tops = [axes.get_position().y1 for axes in figure.axes]
    assert tops == sorted(tops, reverse=True)
    assert [axes.get_xlim()[1] for axes in figure.axes] == [3, 3, 0.5]
    written = texts(figure)
    assert {"short", "long", "else", "worker 0", "worker 1", "forward", "head forward", "idle"} <= set(written)
    assert "head backward" not in written, "the legend names what does not occur"
    assert {"  0.900 s, facts", "  3.000 s, facts"} <= set(written)
    assert any("time (s)" in text for text in written)


def test_trace(tmp_path: Path) -> None:
    """What Perfetto needs: complete events in microseconds, nested or apart on each track, and names for the tracks."""
    file = tmp_path / "trace.json"
    thirds = Chart(
        "thirds", 4.0, "", "g", 1, 4.0, [block(0, m, m / 3, ("recompute", 0.1), ("backward", 0.2333)) for m in range(9)]
    )
    write_charts([chart(), thirds], None, file)
    records: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert names == {(1, 1): "worker 0", (1, 2): "worker 1", (2, 3): "worker 0"}
    assert [r["args"]["name"] for r in records if r["name"] == "process_name"] == [
        *("one: 9.000 ms, facts", "thirds: 4.000 ms")
    ]
    complete = [r for r in records if r["ph"] == "X"]
    [nested] = [r for r in complete if r["name"] == "F0 m12"]
    assert (nested["ts"], nested["dur"], nested["args"]) == (5000, 4000, {"microbatch": 12})
    parts = [(r["name"], r["ts"], r["dur"]) for r in complete if r["args"] == nested["args"] and r is not nested]
    assert parts == [("recompute", 5000, 1000), ("backward", 6000, 3000)]
    tracks = defaultdict(list)
    for record in complete:
        assert (record["pid"], record["tid"]) in names
        tracks[record["pid"], record["tid"]].append(record)
    for found in tracks.values():
        open_until: list[int] = []  # nanoseconds
        for record in sorted(found, key=lambda r: (r["ts"], -r["dur"])):
            begin, end = round(1e3 * record["ts"]), round(1e3 * (record["ts"] + record["dur"]))
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "overlaps without being inside"
            open_until.append(end)


def test_waits_and_copies_have_colours(tmp_path: Path, figures: list[Figure]) -> None:
    waits = [IdleBlock(0, "waits for weights", 2, 4), IdleBlock(0, "waits for the optimizer", 4, 5)]
    copies = [CopySpan(0, "gradients", "down", 6, 7)]
    write_charts([replace(chart(), waits=waits, copies=copies)], tmp_path / "picture.png", tmp_path / "trace.json")
    assert {"waits for weights", "waits for the optimizer", "copies of gradients"} <= set(texts(figures[0]))
    drawn = {tuple(to_rgb(colour)): what for what, colour in (WAITS | COPIES).items()}
    found = {}
    for boxes in figures[0].axes[0].collections:
        if len(faces := boxes.get_facecolor()) and (what := drawn.get(tuple(faces[0][:3]))):
            extents = boxes.get_paths()[0].get_extents()
            found[what] = extents.x0, extents.x1
    assert found == {"waits for weights": (2, 4), "waits for the optimizer": (4, 5), "gradients": (6, 7)}
    records = [r for r in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if r["name"] in WAITS]
    assert [(r["name"], r["ts"], r["dur"]) for r in records] == [
        ("waits for weights", 2000, 2000),
        ("waits for the optimizer", 4000, 1000),
    ]
