"""How much each microbatch counts in the loss of the whole batch.

The total is known only when the last of them has its loss, and by then the first is on its way back. So losses are
divided by a guess that depends on nothing but the batch, not on what runs when; one factor corrects all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.run import MicrobatchRun


class Weighing:
    """Of one batch.

    Args:
        sizes: samples per microbatch.
        given: weights that the user said; None: they are counted.
    """

    def __init__(self, sizes: Sequence[int], given: Sequence[float] | None) -> None:
        self.given = given
        self._sizes = sizes
        self._guess: float | None = sum(given) if given else None

    def of(self, run: MicrobatchRun) -> float:
        """What the microbatch counts, known when its loss is."""
        if len(self._sizes) == 1:
            return 1.0  # whatever it holds, even nothing
        if self.given is not None:
            return self.given[run.index]
        return run.mode.counts[0] if run.mode.counts else float(self._sizes[run.index])

    def share(self, run: MicrobatchRun) -> float:
        """Its weight over a total that is guessed from the first one."""
        if self._guess is None:
            samples = sum(self._sizes)
            known = run.weight / self._sizes[run.index] * samples if samples else run.weight
            self._guess = known or float(samples)
        return run.weight / self._guess

    def factor(self, runs: Iterable[MicrobatchRun]) -> float:
        """What corrects the guess, when all are known."""
        total = sum(run.weight for run in runs)
        return (self._guess or total) / total if total else 1.0
