"""Decides by which rule a logged value of the batch follows from those of its parts.

One comparison of a whole with two parts fits several rules, most of them by chance: a part of which the value is zero
makes any value a sum, and one that equals a part's is the largest or the smallest of two. So a rule counts as known if

    the operations that lead to the value show it (`profile.loss_flow`) ── [1]
    it is a kind of mean, and its function is shown: exponentials, logarithms, roots and reciprocals of a mean are near
    the mean of nearly equal parts, and equal to it where the parts are equal ── [2]
    it is a sum, and no part's value was zero ── [3]
    it is the largest or smallest, and was so in the first part of one comparison and in the second of another: what
    the first samples or all earlier ones decide is not ── [4]

While it is not known, a batch for which the rules that fit give different values is compared, too ── [5]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_roundpipe.runtime.batch.logs import LINEAR, OPEN, USUAL, Key, Said, is_of_a_mean, merged_by

_EXTREMES = {"largest": max, "smallest": min}
FLOOR = 1e-2
"""Added to the size of a value before it is multiplied by a tolerance: it may be a small difference of large ones."""


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
        return Fitting(of_these, frozenset(of_these if len(of_these) == 1 or LINEAR.issuperset(of_these) else ()))
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
    return next((rule for rule in fitting.rules if _is_shown(rule, fitting)), OPEN if fitting.rules else USUAL)


def is_guessed(fitting: Fitting) -> bool:
    """Return whether the value is not merged as `USUAL`, and otherwise nothing but a guess fits."""
    return USUAL not in fitting.rules and chosen(fitting) == OPEN


def undecided(
    said: Said, fits: Mapping[Key, Fitting], sizes: Sequence[float], weights: Sequence[float], tolerance: float
) -> dict[str, int]:
    """Return values of which it matters that no rule is known [5]: the name, and the part that is least like others.

    Args:
        said, sizes, weights: those of `logs.issue`.
        fits: what comparisons have shown of each.
        tolerance: the relative difference that these see.
    """
    found: dict[str, int] = {}
    for key, parts in said.items():
        fitting = fits.get(key, Fitting())
        if len(parts) < 2 or chosen(fitting) != OPEN:
            continue
        values = [float(p.value) for p in parts if isinstance(p.value, (int, float, np.number)) or _is_one(p.value)]
        if len(values) < len(parts) or (len({*values}) == 1 and (not values[0] or "sum" not in fitting.rules)):
            continue
        merged = [float(merged_by(rule, parts, sizes, weights)) for rule in fitting.rules]
        merged = [value for value in merged if math.isfinite(value)]
        if merged and max(merged) - min(merged) > 2 * tolerance * (max(map(abs, merged)) + FLOOR):
            mean = sum(values) / len(values)
            found[key[0]] = max(parts, key=lambda p: abs(float(p.value) - mean)).part
    return found


def _is_one(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_shown(rule: str, fitting: Fitting) -> bool:
    if rule in _EXTREMES:
        return rule in fitting.shown or {f"{rule} 0", f"{rule} 1"} <= fitting.shown
    means = {"" if r in LINEAR else r.partition(" over")[0] for r in fitting.rules if r in LINEAR or is_of_a_mean(r)}
    is_mean = rule in LINEAR or is_of_a_mean(rule)
    return rule in fitting.shown or (is_mean and len(means) == 1)
