"""What all pictures have in common: the unit of their times, words for what they show, and how large a file may become.

A browser and a document scale a picture of more than a few thousand pixels down until nothing in it can be read. So
`save` writes every picture, and lowers its resolution before a side exceeds `MOST_PIXELS`; what draws rows makes them
lower first.

matplotlib is imported inside functions: a program that draws nothing does not load it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_roundpipe.messages import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
LEAST_DPI = 80
MOST_PIXELS = 4000
"""Of the longer side."""
MOST_INCHES = MOST_PIXELS / LEAST_DPI
"""Height beyond which a figure's text could not be read any more."""


@dataclass(frozen=True)
class TimeUnit:
    """The unit of all times in a picture: in its titles, its facts and along its axes."""

    name: str
    seconds: float

    @classmethod
    def of(cls, longest_s: float, seconds_from: float = 1.0) -> TimeUnit:
        """The unit that suits a picture whose longest time is ``longest_s``: seconds from ``seconds_from`` on."""
        if longest_s >= seconds_from:
            return cls("s", 1.0)
        return cls("ms", 1e-3) if longest_s >= 1e-3 or longest_s == 0 else cls("µs", 1e-6)

    @property
    def in_words(self) -> str:
        return {"s": "seconds", "ms": "milliseconds", "µs": "microseconds"}[self.name]

    def show(self, seconds: float) -> str:
        """A time with its unit, to four significant digits and never less than whole units."""
        value = seconds / self.seconds
        digits = next((digits for digits, limit in ((3, 10), (2, 100), (1, 1000)) if abs(value) < limit), 0)
        return f"{value:,.{digits}f} {self.name}"

    def ticks(self, seconds: Sequence[float]) -> list[str]:
        """Places on an axis without the unit, all with as many decimals as the one that needs most."""
        values = [value / self.seconds for value in seconds]
        spacing = max(map(abs, values), default=0.0) / 1e3
        digits = next((d for d in range(6) if all(abs(v - round(v, d)) <= spacing for v in values)), 6)
        return [f"{value:,.{digits}f}" for value in values]


def set_time_axis(axes: Axes, unit: TimeUnit) -> None:
    """Labels the horizontal axis, along which there are seconds, in ``bucket``."""
    from matplotlib.ticker import Formatter

    class Ticks(Formatter):
        def __call__(self, value: float, position: int | None = None) -> str:
            return unit.ticks([value])[0]

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return unit.ticks(values)

    axes.xaxis.set_major_formatter(Ticks())


def setting_names(keys: Sequence[str]) -> dict[str, str]:
    """What settings are called in table and picture: as much of each one's end as tells it from the others.

    A letter alone says little, so it is ``lora r`` and not ``r``.
    """

    def endings(key: str) -> list[str]:
        parts = key.split(".")
        return [".".join(parts[start:]) for start in reversed(range(len(parts)))]

    def suits(ending: str, key: str) -> bool:
        return ending == key or (
            len(ending) > 1 and not any(ending in endings(other) for other in keys if other != key)
        )

    found = {key: next(ending for ending in endings(key) if suits(ending, key)) for key in keys}
    return {key: re.sub(r"[._]", " ", ending) for key, ending in found.items()}


def idle_note(idle: int, workers: int) -> str:
    """What a title says of rows that are left out; empty if none are."""
    if not idle:
        return ""
    return f"; {idle:,} of {plural(workers, 'worker')} {'has' if idle == 1 else 'have'} nothing to do and no row"


def save(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Writes the figure as the ending of ``path`` says (png, pdf, svg; PNG without one), no side longer than
    `MOST_PIXELS`. No backend of the user's program is involved."""
    fitting = min(dpi, MOST_PIXELS / max(figure.get_size_inches()))
    figure.savefig(path, format=None if path.suffix else "png", dpi=fitting)
