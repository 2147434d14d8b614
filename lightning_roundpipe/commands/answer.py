"""What a command has found, in one form that prints as text, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Form = Literal["table", "json", "csv"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a command. As text, its parts follow each other in the order of the fields.

    ``remedies`` and ``paste`` have lines for pasting into a command line, which stay whole. CSV has a column for each
    key of ``data``, those of inner objects behind a dot, without lists.
    """

    verdict: str = ""
    facts: Sequence[str] = ()
    remedies: Sequence[str] = ()
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    paste: Sequence[str] = ()
    data: Any = None
    form: Form = "table"
    code: int = 0

    def printed(self) -> str:
        """Return the answer in its form, with a newline at its end."""
        if self.form == "json":
            return json.dumps(self.data, indent=1, allow_nan=False) + "\n"
        if self.form == "csv":
            text, columns = io.StringIO(), dict(_columns(self.data))
            csv.writer(text, lineterminator="\n").writerows([columns.keys(), columns.values()])
            return text.getvalue()
        console = Console(file=sys.stdout)
        with console.capture() as capture:
            console.print(Group(*self._parts()), crop=False)
        lines = capture.get().splitlines()
        return "\n".join(line if console.is_terminal else line.rstrip() for line in lines).strip("\n") + "\n"

    def _parts(self) -> list[RenderableType]:
        parts: list[RenderableType] = [Text(line) for line in (self.verdict, *self.facts) if line]
        if self.remedies:
            parts += ["", *map(_unbroken, self.remedies)]
        if self.notes:
            parts += ["", *map(Text, self.notes)]
        for one in self.tables:
            parts += ["", one]
        return [*parts, "", *map(_unbroken, self.paste)]


def _columns(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _columns(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            yield prefix + name, value


def _unbroken(line: str) -> Text:
    """Return a line that stays one line in a narrow terminal."""
    return Text(line, no_wrap=True, overflow="ignore")


def table(words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table with columns of words and, beside them, of numbers, which a narrow terminal does not break."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for heading in words:
        made.add_column(heading, overflow="fold")
    for heading in numbers:
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made
