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

A name may be logged on one line today and on another one tomorrow, or be computed otherwise on the same line. So a rule
belongs to a way to compute the value: the calls of user code that have led to it in a rehearsal. A batch's value is
merged by the rule of the way whose calls the batch has made, and by the count that it has found there. If no way fits,
or several do, the value is one of which nothing is known ── [6]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_roundpipe.runtime.batch.logs import (
    LINEAR,
    OPEN,
    USUAL,
    Key,
    LogRecorder,
    Said,
    Saying,
    are,
    gathered,
    is_of_a_mean,
    merged_as_known,
    merged_by,
)
from lightning_roundpipe.runtime.batch.losses import ITSELF, Site
from lightning_roundpipe.runtime.batch.microbatches import Addend

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


Calls = frozenset[int]
"""Numbers of the calls of user code that lead to a value; see `NewCode.number`."""
How = tuple[Key, Calls, Site | None]
"""A logged value, how it was computed, and where the count is found that it is a mean by; None if that of the loss is.
"""


class Way(NamedTuple):
    """A way to compute a logged value, and how that of the batch follows from those of the parts.

    Attributes:
        calls: what user code has called in each comparison that showed it.
        site: where the count is found that it is a mean by; None if that of the loss is.
        rule: see `logs.merged_by`.
        fitting: what comparisons have shown.
    """

    calls: Calls = frozenset()
    site: Site | None = None
    rule: str = OPEN
    fitting: Fitting = Fitting()


Ways = Mapping[Key, Sequence[Way]]


@dataclass(frozen=True)
class Settled:
    """How the logged values of a batch are merged.

    Attributes:
        said: the values, with their weights.
        ways: how each was computed, as far as that is known.
        astray: the values of which comparisons have shown other ways only [6].
    """

    said: Said = field(default_factory=dict)
    ways: Mapping[Key, Way] = field(default_factory=dict)
    astray: frozenset[Key] = frozenset()

    @property
    def rules(self) -> dict[Key, str]:
        """How to merge the values; `OPEN` if that is unknown."""
        return dict.fromkeys(self.astray, OPEN) | {key: way.rule for key, way in self.ways.items()}

    def knows(self, key: Key) -> bool:
        """Return whether a value is merged by a rule that is more than `USUAL`, and that of its own way."""
        return self.rules.get(key, USUAL) not in (USUAL, OPEN) and key not in self.astray

    def counted(self, ways: Mapping[Key, Way], said: Said) -> Settled:
        """Return this with ``ways`` to compute astray values, and the counts that parts have found in ``said``."""
        ways = {key: way for key, way in ways.items() if len(said.get(key, ())) == len(self.said[key])}
        weighed = {
            key: [one._replace(weight=other.weight) for one, other in zip(self.said[key], said[key], strict=True)]
            for key in ways
        }
        return Settled({**self.said, **weighed}, {**self.ways, **ways}, self.astray - ways.keys())


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


def in_both(one: Mapping[How, Fitting], other: Mapping[How, Fitting]) -> dict[How, Fitting]:
    """Return what fits both comparisons; that of ``other``, the later one, where nothing fits both."""
    found = dict(one)
    for key, later in other.items():
        before = one.get(key, later)
        rules = tuple(rule for rule in before.rules if rule in later.rules)
        found[key] = Fitting(rules, before.shown | later.shown) if rules else later
    return found


def ways_of(fits: Mapping[How, Fitting]) -> dict[Key, list[Way]]:
    """Return the ways to compute each value.

    Those with the same rule are one, which takes what all of them call. One of which comparisons have shown too little
    to tell its rule from that of another way, as it was zero, is left out.
    """
    found: dict[Key, list[Way]] = {}
    for (key, calls, site), fitting in fits.items():
        way, ways = Way(calls, site, chosen(fitting), fitting), found.setdefault(key, [])
        for at, other in enumerate(ways):
            if way.rule == other.rule != OPEN and site == other.site:
                ways[at] = Way(calls & other.calls, site, way.rule, fitting)
                break
        else:
            ways.append(way)
    for ways in found.values():
        rules = {way.rule for way in ways} - {OPEN}
        ways[:] = [way for way in ways if way.rule != OPEN or rules.isdisjoint(way.fitting.rules)]
    return found


def settled(recorders: Sequence[LogRecorder], ways: Ways, ran: Calls | None) -> Settled:
    """Collect what the microbatches logged, and decide how it is merged [6].

    Args:
        recorders: of the microbatches.
        ways: those that are known.
        ran: what the microbatches have called; None if that is unknown.
    """
    said, found, astray = gathered(recorders), dict[Key, Way](), set[Key]()
    for key, parts in said.items() if len(recorders) > 1 else ():
        counted = [way for way in ways.get(key, ()) if _is_counted(way.site, parts, recorders)]
        taken = counted if ran is None else [way for way in counted if way.calls <= ran]
        taken = [way for way in taken if not any(_says_more(other, way) for other in taken)]
        if len(taken) != 1 and (key in ways or (key[0], 0) in ways):
            astray.add(key)
            taken = counted if len(ways.get(key, ())) == 1 else []
        if taken:
            [found[key]] = taken
            said[key] = [_weighed(part, taken[0].site, recorders[part.part]) for part in parts]
    return Settled(said, found, frozenset(astray))


def _is_counted(site: Site | None, parts: Sequence[Saying], recorders: Sequence[LogRecorder]) -> bool:
    """Return whether a microbatch has found the count that a value is a mean by."""
    if site == ITSELF:
        return any(part.weight is not None for part in parts)
    seen = {len(recorders[part.part].counts.seen.get(site[0], ())) for part in parts} if site is not None else set()
    return site is None or (site[2] in seen and seen <= {0, site[2]})


def _says_more(one: Way, other: Way) -> bool:
    """Return whether ``one`` is to be taken where user code has made the calls of both ways."""
    return other.calls < one.calls or (other.calls == one.calls and other.site is None is not one.site)


def _weighed(part: Saying, site: Site | None, recorder: LogRecorder) -> Saying:
    return part if site is None or part.weight is not None else part._replace(weight=recorder.counts.at(site))


def chosen(fitting: Fitting) -> str:
    """Return the rule for a logged value; `OPEN` if it is unknown, as for one that was always zero and fits many."""
    return next((rule for rule in fitting.rules if _is_shown(rule, fitting)), OPEN if fitting.rules else USUAL)


def is_guessed(fitting: Fitting) -> bool:
    """Return whether the value is not merged as `USUAL`, and otherwise nothing but a guess fits."""
    return USUAL not in fitting.rules and chosen(fitting) == OPEN


def undecided(
    how: Settled, ways: Ways, sizes: Sequence[float], weights: Sequence[float], tolerance: float,
    losses: Sequence[float | Tensor] = (),
) -> dict[str, int]:  # fmt: skip
    """Return values of which it matters that no rule is known [5]: the name, and the part that is least like others.

    Args:
        how: how they are merged.
        ways: those that are known.
        sizes, weights: those of `logs.issue`.
        tolerance: the relative difference that comparisons see.
        losses: of the microbatches. What is the loss of each is merged as it is. Microbatches of one sample do not
            show that: the largest loss of a sample is the loss there, too.
    """
    found: dict[str, int] = {}
    for key, parts in how.said.items():
        way = how.ways.get(key)
        if len(parts) < 2 or not (key in how.astray or (way is not None and way.rule == OPEN)):
            continue
        values = [float(p.value) for p in parts if isinstance(p.value, (int, float, np.number)) or _is_one(p.value)]
        rules = {rule for known in ways.get(key, ()) for rule in known.fitting.rules if way in (None, known)}
        if len(values) < len(parts) or (len({*values}) == 1 and (not values[0] or "sum" not in rules)):
            continue
        if max(sizes) > 1 and are(parts, [*map(float, losses)]):
            continue
        if key in how.astray or _differ([merged_by(rule, parts, sizes, weights) for rule in rules], 2 * tolerance):
            mean = sum(values) / len(values)
            found[key[0]] = max(parts, key=lambda p: abs(float(p.value) - mean)).part
    return found


def merged_otherwise(
    before: Settled, after: Settled, sizes: Sequence[float], weights: Sequence[float], tolerance: float,
    losses: Sequence[float | Tensor] = (), added: Sequence[Addend] | None = None,
) -> list[Key]:  # fmt: skip
    """Return the values that ``before`` and ``after`` merge into different ones.

    Args:
        before, after: two ways to merge the same values.
        sizes, weights, tolerance, losses: those of `undecided`.
        added: the losses, if the loss is their sum.
    """
    found, numbers = [], [*map(float, losses)]
    for key in after.ways.keys() - after.astray:
        if len(before.said[key]) > 1:
            both = [
                merged_as_known(
                    x.rules.get(key, USUAL), x.said[key], sizes, weights, added, numbers, is_known=x.knows(key)
                )
                for x in (before, after)
            ]
            if _differ(both, tolerance):
                found.append(key)
    return found


def _differ(merged: Sequence[Any], tolerance: float) -> bool:
    """Return whether values differ by more than rounding."""
    values = [float(value) for value in merged if _is_one(value)]
    values = [value for value in values if math.isfinite(value)]
    return bool(values) and max(values) - min(values) > tolerance * (max(map(abs, values)) + FLOOR)


def _is_one(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_shown(rule: str, fitting: Fitting) -> bool:
    if rule in _EXTREMES:
        return rule in fitting.shown or {f"{rule} 0", f"{rule} 1"} <= fitting.shown
    means = {"" if r in LINEAR else r.partition(" over")[0] for r in fitting.rules if r in LINEAR or is_of_a_mean(r)}
    is_mean = rule in LINEAR or is_of_a_mean(rule)
    return rule in fitting.shown or (is_mean and len(means) == 1)
