"""Pictures and traces of simulated schedules."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from lightning_roundpipe import gantt
from lightning_roundpipe.gantt import Block, Chart, IdleBlock, draw_charts, write_charts_trace
from lightning_roundpipe.pictures import MOST_PIXELS


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
    file = tmp_path / "picture.png"
    draw_charts([chart("short", span_ms=9), chart("long", span_ms=30), chart("else", group="h", span_ms=5)], file)
    image = imread(file)
    assert image.shape[1] == 1920 and len({tuple(pixel) for pixel in image.reshape(-1, 4)[::7]}) > 5
    [figure] = figures
    tops = [axes.get_position().y1 for axes in figure.axes]
    assert tops == sorted(tops, reverse=True)
    # Charts of one group have one scale, those of others their own.
    assert [axes.get_xlim()[1] for axes in figure.axes] == [30, 30, 5]
    written = texts(figure)
    assert {"short", "long", "else", "worker 0", "worker 1", "forward", "LM head forward", "idle"} <= set(written)
    assert "LM head backward" not in written, "the legend names what does not occur"
    assert any("milliseconds" in text for text in written)
    assert {"   9.000 ms, facts", "   30.00 ms, facts"} <= set(written)


def test_one_unit_for_titles_and_axes(tmp_path: Path, figures: list[Figure]) -> None:
    """The longest chart chooses it for all."""
    draw_charts([chart(span_ms=20_000, stretch=2_000), chart("short", "h", span_ms=500)], tmp_path / "picture.png")
    written = texts(figures[0])
    assert any("time in seconds" in text for text in written)
    assert {"   20.00 s, facts", "   0.500 s, facts"} <= set(written)
    figures[0].canvas.draw()
    ticks = [[label.get_text() for label in axes.get_xticklabels()] for axes in figures[0].axes]
    assert "20" in ticks[0] and "0.50" in ticks[1]
    assert not any(" ms" in text for text in written)


def test_numbers_stand_where_they_fit(tmp_path: Path, figures: list[Figure]) -> None:
    """Blocks of 0.1 and 2.1 ms have no room for a number where 9,000 ms share the axis."""
    for span_ms, expected in ((9, 3), (9_000, 0)):
        draw_charts([chart(span_ms=span_ms)], tmp_path / "picture.png")
        [axes] = figures.pop().axes
        numbers = [item for item in axes.collections if type(item).__name__ == "PathCollection"]
        assert sum(len(item.get_offsets()) for item in numbers) == expected


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_formats(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"picture{suffix}"
    draw_charts([chart()], file)
    start = file.read_bytes()[:100]
    assert {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[suffix] in start


def busy(workers: int) -> Chart:
    """Every worker has something to do."""
    blocks = [block(worker, 0, 0, ("forward", 1 + worker)) for worker in range(workers)]
    return Chart(f"{workers} workers", float(workers), "", "g", workers, float(workers), blocks)


@pytest.mark.parametrize(("workers", "charts"), [(1, 1), (8, 25), (64, 9), (1024, 2)])
def test_no_picture_is_too_large(tmp_path: Path, figures: list[Figure], workers: int, charts: int) -> None:
    """The paper's 25 cases once were 9,610 pixels high. Rows become thinner, and charts stay apart."""
    draw_charts([busy(workers)] * charts, tmp_path / "picture.png")
    height, width = imread(tmp_path / "picture.png").shape[:2]
    assert width <= height <= MOST_PIXELS or height <= width <= 1920
    boxes = [axes.get_position() for axes in figures[0].axes]
    assert all(above.y0 > below.y1 for above, below in pairwise(boxes))
    for axes in figures[0].axes:
        labels = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert all(above.y0 >= below.y1 - 1 for above, below in pairwise(labels)), "labels of workers overlap"


def test_workers_without_a_stage_have_no_row(tmp_path: Path, figures: list[Figure]) -> None:
    draw_charts([chart(workers=8)], tmp_path / "picture.png")
    written = set(texts(figures[0]))
    assert {"worker 0", "worker 1"} <= written and "worker 2" not in written
    assert "   9.000 ms, facts; 6 of 8 workers have nothing to do and no row" in written


def test_titles_stay_within_the_picture(tmp_path: Path, figures: list[Figure]) -> None:
    case = "a-model-whose-name-is-as-long-as-one-can-be-of-60-letters…, interleaved-1f1b"
    facts = ", bubble 35.2 % (fill 13.4, switch 12.2, drain 10.3, intra 19.3)"
    draw_charts([replace(chart(case, span_ms=20_000), facts=facts)], tmp_path / "picture.png")
    for text in figures[0].findobj(Text):
        if text.get_text().strip() and text.get_visible():
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figures[0].bbox.width, text.get_text()


def test_nothing_that_takes_time(tmp_path: Path) -> None:
    empty = Chart("$odd title$ _{", 0.0, "facts", "g", 2, 0.0, [block(0, 0, 0)])
    draw_charts([empty], tmp_path / "picture.png")
    write_charts_trace([empty], tmp_path / "trace.json")
    assert all(record["ph"] == "M" for record in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_too_many_charts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="900 cases of up to 2 workers do not fit into one picture: draw fewer"):
        draw_charts([chart()] * 900, tmp_path / "picture.png")


def test_trace(tmp_path: Path) -> None:
    """What Perfetto needs: complete events in microseconds, nested or apart on each track, and names for the tracks."""
    file = tmp_path / "trace.json"
    thirds = Chart(
        "thirds", 4.0, "", "g", 1, 4.0, [block(0, m, m / 3, ("recompute", 0.1), ("backward", 0.2333)) for m in range(9)]
    )
    write_charts_trace([chart(), thirds], file)
    records: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert names == {(1, 1): "worker 0", (1, 2): "worker 1", (2, 1): "worker 0"}
    assert [r["args"]["name"] for r in records if r["name"] == "process_name"] == [
        *("one: 9.000 ms, facts", "thirds: 4.000 ms")
    ]
    complete = [r for r in records if r["ph"] == "X"]
    [nested] = [r for r in complete if r["name"] == "F0 m12"]
    assert (nested["ts"], nested["dur"], nested["args"]) == (5000, 4000, {"stage": "F0", "microbatch": 12})
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


def test_why_workers_wait(tmp_path: Path, figures: list[Figure]) -> None:
    waits = [IdleBlock(0, "waits for weights", 2, 4), IdleBlock(0, "waits for the optimizer", 4, 5)]
    file = tmp_path / "trace.json"
    draw_charts([replace(chart(), waits=waits)], tmp_path / "picture.png")
    written = set(texts(figures[0]))
    assert {"waits for weights", "waits for the optimizer"} <= written
    drawn = {tuple(to_rgb(gantt.WAITS[wait.why])): wait for wait in waits}
    found = {}
    for boxes in figures[0].axes[0].collections:
        if len(faces := boxes.get_facecolor()) and (wait := drawn.get(tuple(faces[0][:3]))):
            found[wait.why] = boxes.get_paths()[0].get_extents()
    assert {why: (box.x0, box.x1) for why, box in found.items()} == {w.why: (w.start_ms, w.end_ms) for w in waits}
    write_charts_trace([replace(chart(), waits=waits)], file)
    records = [r for r in json.loads(file.read_text())["traceEvents"] if r["name"].startswith("waits")]
    assert [(r["name"], r["tid"], r["ts"], r["dur"]) for r in records] == [
        ("waits for weights", 1, 2000, 2000),
        ("waits for the optimizer", 1, 4000, 1000),
    ]


def test_colours_are_those_of_the_timeline() -> None:
    """A reader who knows one of the two pictures knows the other."""
    from lightning_roundpipe import timeline

    for kind in ("forward", "recompute", "backward"):
        assert gantt.COLOURS[kind] == timeline.LEGEND[kind]
