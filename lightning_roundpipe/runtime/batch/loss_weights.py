"""How much each microbatch counts in the loss of the whole batch.

The losses of microbatches are averaged by their weights, or added if the loss is a sum.

The total is known only when the last of them has its loss, and by then the first is in its backward. So losses are
divided by a guess that depends on nothing but the batch, not on what runs when; one factor corrects all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from lightning_roundpipe.runtime.batch.losses import Counted

Weights = Sequence[float] | Literal["sum"] | None
"""What the user says of how losses of microbatches make up that of the batch: their weights, or that they are added."""


class Weighed(Protocol):
    """A microbatch, as far as its weight is concerned.

    Attributes:
        index: its number.
        mode: what its loss has shown.
        weight: of its loss, once that is known.
    """

    index: int
    weight: float

    @property
    def mode(self) -> Counted: ...


class Weighing:
    """Of one batch.

    Args:
        sizes: samples per microbatch.
        given: what the user says; None: targets are counted, and sums recognised.
    """

    def __init__(self, sizes: Sequence[int], given: Weights) -> None:
        self.given = given
        self._sizes = sizes
        self._guess: float | None = None if given is None or given == "sum" else sum(given)

    def adds(self, run: Weighed) -> bool:
        """Whether the losses of microbatches add up to that of the batch, as far as this one shows."""
        return len(self._sizes) > 1 and (self.given == "sum" or (self.given is None and run.mode.sums.whole))

    def of(self, run: Weighed) -> float:
        """What the microbatch counts, known when its loss is."""
        if len(self._sizes) == 1:
            return 1.0  # whatever it holds, even nothing
        if self.given is not None and self.given != "sum":
            return self.given[run.index]
        counts = run.mode.counts.of
        return counts[0] if counts else float(self._sizes[run.index])

    def share(self, run: Weighed) -> float:
        """By what its loss is multiplied: its weight over a total that is guessed from the first one; 1 in a sum."""
        if self.adds(run):
            return 1.0
        if self._guess is None:
            samples = sum(self._sizes)
            known = run.weight / self._sizes[run.index] * samples if samples else run.weight
            self._guess = known or float(samples)
        return run.weight / self._guess

    def factor(self, runs: Iterable[Weighed]) -> float:
        """What corrects the guess, when all are known."""
        if self._guess is None:
            return 1.0
        total = sum(run.weight for run in runs)
        return self._guess / total if total else 1.0
