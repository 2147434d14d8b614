"""Counts what means that training_step computes itself are over: a mask's targets, or what a mask picks.

A rehearsal has found where training_step divides by such a count (`loss_flow`). There, each microbatch reads it, as
the targets of a cross entropy are counted:

    count = mask.sum().clamp(min=1) ── "at least": what it was before is remembered ── [1]
    (losses * mask).sum() / count ── "divisor": the count; "inverse": one over a factor ── [2]
    losses[mask].mean() ── "elements": of the first argument ── [3]
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.user_code.new_code import Key, calling_place

MAY_COUNT = frozenset({
    "div", "div_", "divide", "divide_", "true_divide", "true_divide_", "__truediv__", "__itruediv__", "mul", "mul_",
    "multiply", "__mul__", "__rmul__", "__imul__", "mean", "clamp", "clamp_min", "clip",
})  # fmt: skip
"""Names of the torch functions that may be a `Counting`, except for losses."""


How = Literal["divisor", "inverse", "elements", "at least"]


@dataclass(frozen=True)
class Counting:
    """A call of a torch function in user code that shows a count, and how."""

    place: Key
    called: str
    how: How


class OwnMeans:
    """Finds the counts of one microbatch.

    Args:
        countings: where they are.
        read: returns the value of a tensor, which may be on a device.
    """

    def __init__(self, countings: Collection[Counting], read: Callable[[Tensor], float]) -> None:
        self._how = {(counting.place, counting.called): counting.how for counting in countings}
        self._read = read
        self._before: list[tuple[Tensor, Tensor]] = []
        """Counts that are at least something, and what they were before."""

    def count(self, name: str, args: tuple[Any, ...], result: Any, frame: FrameType | None) -> float | None:
        """Return what ``result``, which the torch function ``name`` gave, is a mean over; None if it is no mean.

        Raises:
            RoundPipeError: if a count has been raised to another one than that of the whole batch.
        """
        place = calling_place(frame)[0]
        how = None if place is None else self._how.get((place, name))
        if how is None or not isinstance(result, Tensor):
            return None
        with torch.no_grad():
            if how == "at least":
                self._before.append((result, args[0]))
                return None
            if how == "elements":
                return float(args[0].numel())
            if how == "inverse":
                factors = [x for x in args[:2] if not (isinstance(x, Tensor) and x.requires_grad)]
                return 1.0 / self._value(factors[0]) if len(factors) == 1 else None
            return self._counted(args[1])

    def _counted(self, divisor: Any) -> float:
        value = self._value(divisor)
        before = next((before for raised, before in self._before if raised is divisor), None)
        if before is None:
            return value
        count = self._value(before)
        if count and count != value:
            raise RoundPipeError(
                f"a microbatch divides its loss by {value:g}, although the number that it counts is {count:g}; in the "
                "whole batch it may be larger: set microbatch_scope='model' or num_microbatches=1, which compute the "
                "loss on the whole batch."
            )
        return count

    def _value(self, number: Any) -> float:
        return self._read(number) if isinstance(number, Tensor) else float(number)
