"""Decides by which rule a logged value of the batch follows from those of its parts.

One comparison of a whole with two parts fits several rules, most of them by chance: a part of which the value is zero
makes any value a sum, and one that equals a part's is the largest or the smallest of two. So a rule counts as known if

    the operations that lead to the value show it (`profile.loss_flow`) ── [1]
    it is a kind of mean: no value fits that by chance, unless it is the same in both parts ── [2]
    it is a sum, and no part's value was zero ── [3]
    it is the largest or smallest, and was so in the first part of one comparison and in the second of another: what
    the first samples or all earlier ones decide is not ── [4]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lightning_roundpipe.runtime.batch.logs import OPEN, USUAL, Key

_EXTREMES = {"largest": max, "smallest": min}


class Fitting(NamedTuple):
    """What comparisons have shown of a logged value.

    Attributes:
        rules: the rules that give the whole batch's value: `USUAL`, or keys of `logs.RULES`.
        shown: those of them that need it and were put to the test, or half of it [4], such as ``"largest 0"``.
    """

    rules: tuple[str, ...] = ()
    shown: frozenset[str] = frozenset()


def fitting_of(rules: Sequence[str], values: Sequence[float], known: Collection[str]) -> Fitting:
    """Return what one comparison shows.

    Args:
        rules: those that fit.
        values: of the parts that have logged it, as far as they are numbers.
        known: the rules of which it is one, as the operations show; empty if they do not.
    """
    if of_these := tuple(rule for rule in rules if rule in known):
        return Fitting(of_these, frozenset(of_these if len(of_these) == 1 else ()))
    shown = set()
    if len(values) > 1 and all(values):
        shown.add("sum")
    if len(set(values)) > 1:
        for rule in set(rules) & set(_EXTREMES):
            if all(values) or rule == "smallest":
                shown.add(f"{rule} {values.index(_EXTREMES[rule](values))}")
    return Fitting(tuple(rules), frozenset(shown))


def in_both(one: Mapping[Key, Fitting], other: Mapping[Key, Fitting]) -> dict[Key, Fitting]:
    """Return what fits both comparisons; that of ``other``, the later one, where nothing fits both."""
    found = dict(one)
    for key, later in other.items():
        before = one.get(key, later)
        rules = tuple(rule for rule in before.rules if rule in later.rules)
        found[key] = Fitting(rules, before.shown | later.shown) if rules else later
    return found


def chosen(fitting: Fitting) -> str:
    """Return the rule for a logged value; `OPEN` if it is unknown, as for one that was always zero and fits many."""
    if {USUAL, "sum", "mean over samples"} <= {*fitting.rules}:
        return OPEN
    return next((rule for rule in fitting.rules if _is_shown(rule, fitting.shown)), OPEN if fitting.rules else USUAL)


def is_guessed(fitting: Fitting) -> bool:
    """Return whether the value is not merged as `USUAL`, and otherwise nothing but a guess fits."""
    return USUAL not in fitting.rules and chosen(fitting) == OPEN


def _is_shown(rule: str, shown: frozenset[str]) -> bool:
    if rule in _EXTREMES:
        return rule in shown or {f"{rule} 0", f"{rule} 1"} <= shown
    return rule != "sum" or rule in shown
