"""How much each microbatch counts in the loss of the whole batch.

The losses of microbatches are averaged by their weights, or added if the loss is a sum.

The total weight is known only once the last microbatch has its loss; by then the first is in its backward. So losses
are divided by a guess that depends on the batch alone, not on timing, and one factor corrects all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from lightning_roundpipe.runtime.batch.contributions import GIVEN, NOTHING, SAMPLES, SUM, TARGETS, UNKNOWN, Contribution
from lightning_roundpipe.runtime.batch.losses import Counted
from lightning_roundpipe.runtime.batch.microbatches import RaisedCount, total_of

Weights = Sequence[float] | Literal["sum"] | None
"""How losses of microbatches combine according to the user: their weights, or ``"sum"``. None: not given."""


class Weighed(Protocol):
    """A microbatch as far as its weight is concerned.

    Attributes:
        index: number of the microbatch.
        mode: what its loss has shown.
        weight: weight of its loss, once known.
    """

    index: int
    weight: float

    @property
    def mode(self) -> Counted: ...


class Weighing:
    """The weights of the microbatches of one batch.

    Args:
        sizes: samples per microbatch.
        given: the user's weights. None: targets are counted and sums recognised.
    """

    def __init__(self, sizes: Sequence[int], given: Weights) -> None:
        self.given = given
        self._sizes = sizes
        self._guess: float | None = None if given is None or given == "sum" else sum(given)

    def adds(self, run: Weighed) -> bool:
        """Return whether losses are added rather than averaged, as far as this microbatch shows."""
        return len(self._sizes) > 1 and (self.given == "sum" or (self.given is None and run.mode.sums.whole))

    def of(self, run: Weighed) -> float:
        """Return the weight of a microbatch, once it has its loss."""
        if len(self._sizes) == 1 and (self.given is None or self.given == "sum"):
            return 1.0  # also without targets
        if self.given is not None and self.given != "sum":
            return self.given[run.index]
        counts = run.mode.counts.of
        if run.mode.counts.lacking:
            return 0.0
        raised = [count for count in counts if isinstance(count, RaisedCount)]
        return (raised or counts)[0] if counts else float(self._sizes[run.index])

    def share(self, run: Weighed) -> float:
        """Return the factor of a microbatch's loss: its weight over the guessed total, or 1 in a sum.

        The first microbatch determines the guess.
        """
        if self.adds(run):
            return 1.0
        if self._guess is None:
            samples = sum(self._sizes)
            known = run.weight / self._sizes[run.index] * samples if samples else run.weight
            self._guess = known or float(samples)
        return run.weight / self._guess

    def contribution(self, runs: Sequence[Weighed], samples: int) -> Contribution:
        """Return how much the batch, of ``samples`` samples, counts beside the batches of other machines."""
        modes = [run.mode for run in runs if not run.mode.counts.lacking]
        if not modes:
            return Contribution(NOTHING, 0.0, samples)
        if self.given == "sum" or (self.given is None and all(mode.sums.whole for mode in modes)):
            return Contribution(SUM, 1.0, samples)
        if self.given is not None:
            return Contribution(GIVEN, sum(run.weight for run in runs), samples)
        if any(mode.sums.whole or (mode.sums.name and not mode.counts.of) for mode in modes):
            return Contribution(UNKNOWN, 0.0, samples)
        if any(isinstance(count, RaisedCount) for mode in modes for count in mode.counts.of):
            return Contribution(UNKNOWN, 0.0, samples)
        counts = tuple(sum(column) for column in zip(*(mode.counts.of for mode in modes), strict=True))
        mixed = any(mode.counts.mixed for mode in modes)
        return Contribution(TARGETS if counts else SAMPLES, counts[0] if counts else samples, samples, counts, mixed)

    def factor(self, runs: Iterable[Weighed]) -> float:
        """Return the factor that corrects the guess, once all weights are known."""
        if self._guess is None:
            return 1.0
        total = total_of([run.weight for run in runs])
        return self._guess / total if total else 1.0
