"""How the ``batch_size`` of a logged value, its weight in the mean over an epoch, follows from those of the parts.

batch_size=len(batch) ── the sum
batch_size=max(1, targets) ── the sum over parts that have counted something; parts without targets say 1, too
batch_size=x.shape[1] ── the largest
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

_Key = TypeVar("_Key")

SUM, COUNTED, LARGEST = "sum", "sum of what is counted", "largest"


def size_by(rule: str, given: Sequence[float], counts: Sequence[float]) -> float:
    """Return the batch's size by ``rule``.

    Args:
        rule: one of those above.
        given: the size of each part.
        counts: what each part has counted.
    """
    counted = [size for size, count in zip(given, counts, strict=True) if count] if rule == COUNTED else given
    return sum(counted) if counted and rule != LARGEST else max(given)


def fitting_sizes(whole: float, given: Sequence[float], counts: Sequence[float]) -> set[str]:
    """Return the rules by which parts give the size ``whole``; see `size_by` for the other arguments."""
    return {rule for rule in (SUM, COUNTED, LARGEST) if size_by(rule, given, counts) == whole}


def merged_size(
    given: Sequence[float], counts: Sequence[float], samples: Sequence[float], rules: Collection[str]
) -> float:
    """Return the batch's size.

    Args:
        given, counts: see `size_by`.
        samples: samples of each part.
        rules: those that fit in comparisons. Parts that all have targets fit `SUM` and `COUNTED`: if both are left, the
            size decides whether it is that of the count.
    """
    if COUNTED in rules and are_counts(given, counts) and (SUM not in rules or [*given] != [*samples]):
        return size_by(COUNTED, given, counts)
    rule = next((rule for rule in (SUM, LARGEST, COUNTED) if rule in rules), SUM)
    return size_by(rule, given, counts)


def is_unsure(
    given: Sequence[float], counts: Sequence[float], samples: Sequence[float], rules: Collection[str]
) -> bool:
    """Return whether parts of one sample leave open if the size counts samples or targets, and it matters here."""
    both = {SUM, COUNTED} <= {*rules} and [*given] == [*samples] and are_counts(given, counts)
    return both and size_by(SUM, given, counts) != size_by(COUNTED, given, counts)


def are_counts(given: Sequence[float], counts: Sequence[float]) -> bool:
    """Return whether each part gives what it has counted, or one if that is nothing."""
    return all(size == max(1, count) for size, count in zip(given, counts, strict=True))


def sizes_in_both(one: Mapping[_Key, set[str]], other: Mapping[_Key, set[str]]) -> dict[_Key, set[str]]:
    """Return the rules that fit in both comparisons, or in that which has the value."""
    return {key: one.get(key, rules) & rules for key, rules in {**one, **other}.items()}
