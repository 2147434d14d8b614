"""What all pictures share: the unit of their times, names of settings, and the largest size of a file.

Browsers and documents scale a picture of more than a few thousand pixels down until it is illegible. So `save` writes
every picture, and lowers its resolution before a side exceeds `MOST_PIXELS`. Charts with many rows make the rows lower
first.

matplotlib is imported inside functions, so programs that draw nothing do not load it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_roundpipe.messages import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
LEAST_DPI = 80
MOST_PIXELS = 4000
"""Most pixels of the longer side."""
MOST_INCHES = MOST_PIXELS / LEAST_DPI
"""Height in inches beyond which a figure's text becomes illegible."""


@dataclass(frozen=True)
class TimeUnit:
    """The unit of all times in a picture: in titles, facts and along axes."""

    name: str
    seconds: float

    @classmethod
    def of(cls, longest_s: float, seconds_from: float = 1.0) -> TimeUnit:
        """Return the unit for a picture whose longest time is ``longest_s``: seconds from ``seconds_from`` on."""
        if longest_s >= seconds_from:
            return cls("s", 1.0)
        return cls("ms", 1e-3) if longest_s >= 1e-3 or longest_s == 0 else cls("µs", 1e-6)

    @property
    def in_words(self) -> str:
        return {"s": "seconds", "ms": "milliseconds", "µs": "microseconds"}[self.name]

    def show(self, seconds: float) -> str:
        """Return a time with its unit, to four significant digits, but at least to whole units."""
        value = seconds / self.seconds
        digits = next((digits for digits, limit in ((3, 10), (2, 100), (1, 1000)) if abs(value) < limit), 0)
        return f"{value:,.{digits}f} {self.name}"

    def ticks(self, seconds: Sequence[float]) -> list[str]:
        """Return labels for places on an axis, without the unit, with as many decimals as the one that needs most."""
        values = [value / self.seconds for value in seconds]
        spacing = max(map(abs, values), default=0.0) / 1e3
        digits = next((d for d in range(6) if all(abs(v - round(v, d)) <= spacing for v in values)), 6)
        return [f"{value:,.{digits}f}" for value in values]


def set_time_axis(axes: Axes, unit: TimeUnit) -> None:
    """Label the horizontal axis, whose values are seconds, in ``unit``."""
    from matplotlib.ticker import Formatter

    class Ticks(Formatter):
        def __call__(self, value: float, position: int | None = None) -> str:
            return unit.ticks([value])[0]

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return unit.ticks(values)

    axes.xaxis.set_major_formatter(Ticks())


def setting_names(keys: Sequence[str]) -> dict[str, str]:
    """Return short names of settings for tables and pictures: the shortest end of each key that is unambiguous.

    A single letter is too little: ``lora r``, not ``r``.
    """
    found = shortest_endings(keys, lambda ending: len(ending) > 1)
    return {key: re.sub(r"[._]", " ", ending) for key, ending in found.items()}


def shortest_endings(names: Collection[str], suits: Callable[[str], bool]) -> dict[str, str]:
    """Return the shortest ending of each dotted name that ``suits`` allows and no other name has; else the name."""

    def endings(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[start:]) for start in reversed(range(len(parts)))]

    counts = Counter(ending for name in {*names} for ending in endings(name))
    return {name: next(e for e in endings(name) if e == name or (counts[e] == 1 and suits(e))) for name in names}


def idle_note(idle: int, workers: int) -> str:
    """Return the part of a title that mentions rows left out; empty if there are none."""
    if not idle:
        return ""
    return f"; {idle:,} of {plural(workers, 'worker')} {'has' if idle == 1 else 'have'} nothing to do and no row"


def trace_names(kind: Literal["process", "thread"], process: int, thread: int, name: str, place: int) -> list[Any]:
    """Return the records of a Chrome trace that name a process or thread, and say where it is shown."""
    return [
        {"name": f"{kind}_{what}", "ph": "M", "pid": process, "tid": thread, "args": {what: value}}
        for what, value in (("name", name), ("sort_index", place))
    ]


def save(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write the figure in the format of ``path``'s suffix (png, pdf, svg; PNG without one).

    No side is longer than `MOST_PIXELS`. Uses no matplotlib backend of the user's program.
    """
    fitting = min(dpi, MOST_PIXELS / max(figure.get_size_inches()))
    figure.savefig(path, format=None if path.suffix else "png", dpi=fitting)
