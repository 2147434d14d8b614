"""What would fit, where a wish does not: other settings, each of them tried by the same planner, with its own figures.

From the least change to the largest: what leaves the step as it is, what changes how it is computed, what is trained,
what the model sees. Where no setting alone is enough, several are tried together. Only what fits is named. All together
it takes `SECONDS` of the processor at most, and what was not tried for lack of time is named as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from lightning_roundpipe.commands.plan_model import Outlook, find_longest, look_at, memory_of, shape_of
from lightning_roundpipe.commands.plan_shape import ModelShape, Wish
from lightning_roundpipe.planning.profile import Precision

SECONDS = 15.0
"""Of the processor, for all tries together, so that other programs change no answer. A try that has begun may end
later."""

_SEARCH_SECONDS = 1.0
"""For the plan of each try."""

_SHORTEST = 128
"""Tokens; and a sequence is not cut to less than a 16th. Less would be no remedy."""

_LEAST_PART = 16

_NARROWER: Mapping[Precision, tuple[Precision, ...]] = {
    "32-true": ("bf16-true",),
}
"""Mixed precision is estimated as if all of it were in 16 bits, so ``*-true`` would change no figure of it."""


Changes = Mapping[str, Any]
"""Options and their values; None: the option is left out."""


@dataclass(frozen=True)
class Remedy:
    """Changed options with which it fits, and what to expect of it."""

    changes: Changes
    outlook: Outlook

    @property
    def settings(self) -> str:
        """As they are added to the command line."""
        return " ".join(f"{name}={value}" for name, value in self.changes.items() if value is not None)

    @property
    def left_out(self) -> list[str]:
        """Options that are to be taken away."""
        return [name for name, value in self.changes.items() if value is None]


@dataclass(frozen=True)
class Remedies:
    """All that fits, the least change first; what was tried and does not, and what there was no time for."""

    found: tuple[Remedy, ...]
    hopeless: tuple[str, ...]
    untried: tuple[str, ...]


def find_remedies(outlook: Outlook, seconds: float = SECONDS) -> Remedies:
    """For an outlook that does not fit."""
    return _Tries(outlook, time.process_time() + seconds).run()


class _Tries:
    def __init__(self, outlook: Outlook, deadline: float) -> None:
        self._outlook, self._wish, self._deadline = outlook, outlook.wish, deadline
        self._shapes: dict[tuple[str, str, int], ModelShape] = {}
        self._found: list[Remedy] = []
        self._hopeless: list[str] = []
        self._untried: list[str] = []

    def run(self) -> Remedies:
        alone = [self._first_that_fits(ways) for ways in self._ways()]
        if not any(alone):
            self._together()
        return Remedies(tuple(self._found), tuple(self._hopeless), tuple(self._untried))

    def _ways(self) -> Iterator[list[Changes]]:
        """Kinds of changes, each with its own from the least one on; of each the first that fits is named."""
        wish, found = self._wish, self._outlook
        own = [name for name in ("plan", "stage_seconds", "min_round", "max_fused") if getattr(wish, name) is not None]
        if own:
            yield [dict.fromkeys(own)]
        fewer = found.weights_fit
        if fewer and (size := wish.microbatch_size) is not None and size > 1:
            smaller = [s for s in (8, 4, 2, 1) if s < size and size * found.microbatches % s == 0]
            yield [{"microbatch_size": s, "microbatches": found.microbatches * size // s} for s in smaller]
        if wish.staleness:
            yield [{"staleness": 0}]
        if fewer:
            counts = [found.microbatches >> n for n in range(1, 6) if found.microbatches >> n]
            yield [{"microbatches": count} for count in counts if count < found.workers]
        if narrower := _NARROWER.get(wish.precision):
            yield [{"precision": precision} for precision in narrower]
        if wish.lora == "none":
            yield [{"lora": lora} for lora in self._adapters()]
        if fewer and (shorter := self._shorter({})):
            yield [shorter]

    def _together(self) -> None:
        """Precision, adapters and shorter sequences, two of them and then all."""
        wish = self._wish
        ways: list[Changes] = []
        if narrower := _NARROWER.get(wish.precision):
            ways.append({"precision": narrower[-1]})
        if wish.lora == "none":
            ways.append({"lora": self._adapters()[-1]})
        small: Changes = {} if wish.microbatch_size in (None, 1) else {"microbatch_size": 1}
        merged = [
            {name: value for way in (small, *chosen) for name, value in way.items()}
            for count in range(1, len(ways) + 1)
            for chosen in combinations(ways, count)
        ]
        if any(self._first_that_fits([changes]) for changes in merged if len(changes) > 1):
            return
        for changes in merged:
            if (shorter := self._shorter(changes)) and self._first_that_fits([{**changes, **shorter}]):
                return

    def _adapters(self) -> tuple[str, ...]:
        """From the most to the fewest; those of every expert are no small change."""
        return ("attention",) if self._shape(self._wish).has_experts else ("all_linear", "attention")

    def _first_that_fits(self, ways: list[Changes]) -> bool:
        for changes in ways:
            text = Remedy(changes, self._outlook).settings or f"without {', '.join(changes)}"
            if time.process_time() > self._deadline:
                self._untried.append(text)
                return False
            if (found := self._try(changes)) is not None:
                self._found.append(found)
                return True
            self._hopeless.append(text)
        return False

    def _try(self, changes: Changes) -> Remedy | None:
        wish = self._wish
        wish = replace(wish, search_seconds=min(wish.search_seconds, _SEARCH_SECONDS), **changes)
        try:
            outlook = look_at(self._shape(wish), wish, longest=False)
        except ValueError:  # adapters that the model has no place for
            return None
        return Remedy(changes, outlook) if outlook.fits else None

    def _shorter(self, changes: Changes) -> Changes | None:
        """The longest sequence that fits with ``changes``, where it is worth naming."""
        wish, found = replace(self._wish, **changes), self._outlook
        longest = found.longest
        if changes or longest is None:
            if time.process_time() > self._deadline:
                return None
            try:
                shape = self._shape(wish)
            except ValueError:
                return None
            memory = memory_of(wish, shape.hardware)
            longest = find_longest(shape, found.workers, found.microbatches, memory, wish.min_round)
        wanted = found.sequence_length
        if not max(_SHORTEST, wanted // _LEAST_PART) <= longest.tokens < wanted:
            return None
        return {"sequence_length": longest.tokens, "microbatch_size": 1}

    def _shape(self, wish: Wish) -> ModelShape:
        key = wish.lora, wish.precision, wish.staleness
        if key not in self._shapes:
            self._shapes[key] = shape_of(wish, self._outlook.hardware)
        return self._shapes[key]
