"""Consecutive calls of the trace: the unit in which plans are written."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Calls ``first`` to ``last``, both included. Prints as ``4-7``, or ``5`` for a single call."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < self.first:
            raise ValueError(
                f"{self.first}-{self.last} is not a span of calls: write the lower call first, counting from 0. "
                "(A backward stage, too, names its calls in ascending order; only the stages stand deepest first.)"
            )

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def calls(self) -> range:
        """The numbers of its calls, ascending."""
        return range(self.first, self.last + 1)

    @classmethod
    def parse(cls, text: str) -> Span:
        """The span that ``text`` prints; ``ValueError`` shows how one is written."""
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
        if not match:
            raise ValueError(f"{text!r} is not a span of calls: write a call's number, like 5, or a range, like 4-7.")
        return cls(int(match[1]), int(match[2] or match[1]))
