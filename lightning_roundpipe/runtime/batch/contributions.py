"""How much the batch of each machine counts in the loss of all machines' batches together.

One machine that had all these batches in one would weigh its microbatches against each other (`loss_weights`). Several
machines weigh their batches in the same way: each says what its losses are weighed by, and the sum.

    counted targets, the user's weights, or samples ── the gradient of a batch times its share of the total ── [1]
    a sum ── the gradients add up ── [2]
    different kinds, or losses that no single weight combines ── refused ── [3]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_roundpipe.config import RoundPipeError

SAMPLES, TARGETS, GIVEN, SUM, NOTHING, UNKNOWN = range(6)
"""What the losses of a batch are weighed by."""
KINDS = (
    "its samples",
    "its targets",
    "what loss_weight returns",
    "nothing, as they are sums",
    "nothing, as it gave no gradients",
    "a sum-reduced cross entropy with further operations on it, or a count that it has raised",
)
MOST = 8
"""Means whose targets are compared."""


@dataclass(frozen=True)
class Contribution:
    """What one batch of one machine contributes.

    Attributes:
        kind: what the losses of its microbatches are weighed by.
        weight: their total weight.
        samples: number of samples.
        counts: targets of each mean over targets.
        mixed: whether the loss has other parts beside these.
    """

    kind: int = NOTHING
    weight: float = 0.0
    samples: float = 0.0
    counts: tuple[float, ...] = ()
    mixed: bool = False

    def encoded(self) -> list[float]:
        """Return it as numbers, whose count does not depend on the batch."""
        counts = [*self.counts[:MOST], *[0.0] * (MOST - len(self.counts))]
        return [float(self.kind), self.weight, self.samples, float(len(self.counts)), float(self.mixed), *counts]

    @classmethod
    def decoded(cls, numbers: Sequence[float]) -> Contribution:
        kind, weight, samples, several, mixed, *counts = numbers
        return cls(int(kind), weight, samples, tuple(counts[: int(several)]), bool(mixed))


LENGTH = len(Contribution().encoded())


def share(rank: int, everyones: Sequence[Contribution], names: Sequence[str]) -> float:
    """Return the factor of the gradients of machine ``rank`` [1] [2].

    Args:
        rank: the number of the machine.
        everyones: the contribution of each machine's batch.
        names: the machines as messages call them.

    Raises:
        RoundPipeError: it is unknown how the losses combine [3].
    """
    giving = [(each, name) for each, name in zip(everyones, names, strict=True) if each.kind != NOTHING]
    if everyones[rank].kind == NOTHING:
        return 0.0
    first, who = giving[0]
    for other, name in giving:
        if UNKNOWN in (first.kind, other.kind) or other.kind != first.kind or len(other.counts) != len(first.counts):
            raise RoundPipeError(
                f"it is unknown how the losses of the machines combine: {who} weighs its batch by {KINDS[first.kind]}, "
                f"and {name} by {KINDS[other.kind]}. Set RoundPipeStrategy(loss_weight=...) to a function that returns "
                "the weight of a batch, or to 'sum' if losses add up."
            )
    if first.kind == SUM:
        return 1.0
    _refuse_spread([each for each, _ in giving])
    total = sum(each.weight for each, _ in giving)
    if not total:
        samples = sum(each.samples for each, _ in giving)
        return everyones[rank].samples / samples if samples else 1 / len(giving)
    return everyones[rank].weight / total


def _refuse_spread(giving: Sequence[Contribution]) -> None:
    """Raise if no single weight per machine gives the loss of all batches, as `losses.check_counts` does."""
    if giving[0].kind != TARGETS:
        return
    rows = [each.counts for each in giving]
    totals = [sum(column) for column in zip(*rows, strict=True)]
    shares = [[c / t if t else 0.0 for c, t in zip(row, totals, strict=True)] for row in rows]
    samples = sum(each.samples for each in giving)
    if any(max(row) - min(row) > 1e-6 for row in shares):
        reason = "computes several means over targets, which are"
    elif any(each.mixed for each in giving) and any(
        abs(row[0] - each.samples / samples) > 1e-6 for row, each in zip(shares, giving, strict=True) if samples
    ):
        reason = "adds something else to a mean over targets, which are, unlike samples,"
    else:
        return
    raise RoundPipeError(
        f"training_step {reason} spread unevenly over the machines ({[list(row) for row in rows]}), so no single "
        "weight per machine gives the loss of all their batches: set RoundPipeStrategy(loss_weight=...) to a function "
        "that says how much a batch counts."
    )
