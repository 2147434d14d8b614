"""Counts what means that training_step computes itself are over: a mask's targets, or what a mask picks.

A rehearsal has found where training_step divides by such a count (`loss_flow`). There, each microbatch reads it, as
the targets of a cross entropy are counted:

    count = mask.sum().clamp(min=1) ── "at least": what it was before is remembered ── [1]
    n = mask.sum().item() ── "read": the number is remembered, as Python may raise it to one, too ── [2]
    (losses * mask).sum() / count ── "divisor": the count; "inverse": one over a factor ── [3]
    losses[mask].mean() ── "elements": of the first argument ── [4]
    F.cross_entropy(logits, targets) ── "targets": those that are counted anyway, for logged values that follow ── [5]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.batch.losses import Site
from lightning_roundpipe.runtime.batch.microbatches import RaisedCount
from lightning_roundpipe.runtime.user_code.new_code import Key, place_of

How = Literal["divisor", "inverse", "elements", "at least", "read", "targets"]


@dataclass(frozen=True)
class CountSite:
    """A call of a torch function in user code that shows a count, and how."""

    place: Key
    called: str
    how: How


@dataclass(frozen=True)
class CountSites:
    """What training_step counts itself.

    Attributes:
        sites: where counts are found.
        of_loss: whether the loss is a mean by such counts, and not only logged values.
        of_logs: for logged values that are, as the last comparison has shown, where their count is found, by name and
            number; see `batch.losses.Site`.
    """

    sites: frozenset[CountSite] = frozenset()
    of_loss: bool = False
    of_logs: Mapping[tuple[str, int], Site] = field(default_factory=dict)


class TargetCounts:
    """Finds the counts of one microbatch.

    Args:
        sites: where they are.
        read: returns the value of a tensor, which may be on a device.
        seen: gets the counts that each of them shows, in order.
    """

    def __init__(
        self, sites: Collection[CountSite], read: Callable[[Tensor], float], seen: MutableMapping[Any, list[float]],
    ) -> None:  # fmt: skip
        self._sites = {(site.place, site.called): site for site in sites}
        self.called = frozenset(site.called for site in sites)
        """Names of the functions to call `count` for."""
        self._seen = seen
        self._read = read
        self._before: list[tuple[Tensor, Tensor]] = []
        """Counts that are at least something, and what they were before [1]."""
        self._numbers: list[float] = []
        """Counts that Python has read [2]."""

    def count(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, frame: FrameType | None,
        targets: float | Tensor | None = None,
    ) -> float | None:  # fmt: skip
        """Return what ``result``, which the torch function ``name`` gave, is a mean over; None if it is no mean.

        Args:
            name, args, kwargs, result: the function, its arguments, and its result.
            frame: the frame that has called it.
            targets: the targets that the last cross entropy has counted.

        Raises:
            RoundPipeError: if a sum is divided by a count of 0.
        """
        place = place_of(frame)
        site = None if place is None else self._sites.get((place, name))
        if site is None:
            return None
        if site.how == "targets":
            if targets is not None:
                self._seen.setdefault(site, []).append(self._value(targets))
            return None
        if site.how == "read":
            self._numbers.append(float(result))
            return None
        first, second = _operands(args, kwargs)
        if site.how == "at least":
            self._before.append((result, first))
            return None
        with torch.no_grad():
            found = self._found(site.how, first, second, result)
            if found == 0 and self._value(result.isinf().any()):  # nothing over nothing is not a number
                raise _not_added("divides by a count of 0 what it has summed up nevertheless")
        if found is not None:
            self._seen.setdefault(site, []).append(found)
        return found

    def _found(self, how: How, first: Any, second: Any, result: Tensor) -> float | None:
        if how == "elements":
            return float(first.numel())
        if how == "inverse":
            factors = [x for x in (first, second) if not (isinstance(x, Tensor) and x.requires_grad)]
            return 1.0 / self._value(factors[0]) if len(factors) == 1 else None
        return self._counted(second, result)

    def _counted(self, divisor: Any, result: Tensor) -> float:
        """Return the count behind a divisor, which may have been raised where there are few targets, or none."""
        value = self._value(divisor)
        if isinstance(divisor, Tensor):
            before = next((before for raised, before in self._before if raised is divisor), None)
            count = value if before is None else self._value(before)
        elif self._numbers:
            count = value if value in self._numbers else min(self._numbers)
        else:  # Python has taken a number in place of the tensor
            count = 0.0
        if count == value:
            return value
        return RaisedCount.of(value, count) if count or self._value(result.any()) else count

    def _value(self, number: Any) -> float:
        return self._read(number) if isinstance(number, Tensor) else float(number)


def _not_added(what: str) -> RoundPipeError:
    return RoundPipeError(
        f"a microbatch {what}, so the losses of microbatches do not add up to that of the batch: set "
        "microbatch_scope='model' or num_microbatches=1, which compute the loss on the whole batch."
    )


def _operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the first two operands of a torch function, however they were given."""
    found = [*args, *(kwargs[key] for key in ("input", "self", "other") if key in kwargs), None, None]
    return found[0], found[1]
