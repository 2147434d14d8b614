"""What all pictures share: units, ticks, plurals, and how large a file may become."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from lightning_roundpipe.pictures import MOST_PIXELS, TimeUnit, idle_note, save, set_time_axis


@pytest.mark.parametrize(
    ("longest_s", "seconds_from", "shown"),
    [
        (0.0004, 1.0, "400.0 µs"),
        (0.0, 1.0, "0.000 ms"),
        (0.25, 1.0, "250.0 ms"),
        (0.9, 1.0, "900.0 ms"),
        (1.0, 1.0, "1.000 s"),
        (2.34567, 10.0, "2,346 ms"),
        (9.9999, 10.0, "10,000 ms"),
        (28.25, 10.0, "28.25 s"),
        (12345.6, 1.0, "12,346 s"),
    ],
)
def test_one_unit_by_magnitude(longest_s: float, seconds_from: float, shown: str) -> None:
    assert TimeUnit.of(longest_s, seconds_from).show(longest_s) == shown


def test_ticks_have_as_many_decimals_as_are_needed() -> None:
    axes = Figure().add_subplot()
    set_time_axis(axes, TimeUnit("s", 1.0))
    format_ticks = axes.xaxis.get_major_formatter().format_ticks
    assert format_ticks([0, 0.25, 0.5, 1]) == ["0.00", "0.25", "0.50", "1.00"]
    assert format_ticks([0, 1000, 2000]) == ["0", "1,000", "2,000"]
    set_time_axis(axes, TimeUnit("ms", 1e-3))
    assert axes.xaxis.get_major_formatter().format_ticks([0, 0.0005, 0.001]) == ["0.0", "0.5", "1.0"]


def test_words_for_numbers() -> None:
    assert idle_note(0, 8) == ""
    assert idle_note(1, 8) == "; 1 of 8 workers has nothing to do and no row"
    assert idle_note(3, 8) == "; 3 of 8 workers have nothing to do and no row"


@pytest.mark.parametrize(("size", "pixels"), [((4, 2), (640, 320)), ((5, 50), (400, 4000)), ((100, 10), (4000, 400))])
def test_no_side_is_longer_than_can_be_read(size: tuple[int, int], pixels: tuple[int, int], tmp_path: Path) -> None:
    save(Figure(figsize=size), tmp_path / "picture.png")
    height, width = imread(tmp_path / "picture.png").shape[:2]
    assert (width, height) == pixels
    assert max(pixels) <= MOST_PIXELS
