"""The plan: which calls run together, as data that prints, parses and is checked on its own.

The planner writes plans and the engine walks them, and neither needs the other. A plan that a user types by hand takes
the same way as one that was computed, so everything that can be wrong with one is found here, before a weight moves.

A plan's text names the calls of the trace by number::

    forward 0-3 4-7; fused 8-11; backward 4-7 0-3; round 4

    plan     = "forward" spans ";" "fused" span ";" "backward" spans ";" "round" number { ";" option }
    option   = "recompute" "ahead" | "unpack" "once" spans | "carry" spans [ "from" number ]
    spans    = "none" | span { " " span }
    span     = number | number "-" number            (first and last call, both included; 5 is short for 5-5)

Stages stand in the order in which they run: forward stages from the first call up, then the fused stage, which always
ends with the last call, then backward stages from the deepest call down. ``none`` is a pass without stages of its own,
which happens when the fused stage holds the whole model. Semicolons are for the reader: parsing needs only white space
(and Hydra's command line takes the text unquoted without them). With ``recompute ahead`` a backward stage recomputes a
microbatch before its gradient is there, and keeps the graph of the whole stage until it is. ``unpack once`` names
stages, counted from 0 in the order in which they run: what the first microbatch unpacks of their packed weights is kept
for the round's others. ``carry`` names calls of backward stages whose products go to the host and come back, instead of
being computed again: those with at least as many FLOPs for each byte of their outputs as stands behind ``from``, or
all. With ``round 1`` and several workers, rounds run side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.costs import Costs, Phase

_TEXT = re.compile(
    r"forward (?P<forward>[^a-z]+|none) fused (?P<fused>[^a-z ]+) backward (?P<backward>[^a-z]+|none) "
    r"round (?P<round>[0-9]{1,6})(?P<ahead> recompute ahead)?(?: unpack once (?P<once>[^a-z]+))?"
    r"(?: carry (?P<carry>[^a-z]+)(?: from (?P<least>[0-9]{1,9}))?)?"
)
_EXAMPLE = "'forward 0-3 4-7; fused 8-11; backward 4-7 0-3; round 4'"


@dataclass(frozen=True)
class Span:
    """Calls ``first`` to ``last``, both included. Prints as ``4-7``, or ``5`` for a single call."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < self.first:
            raise ValueError(
                f"{self.first}-{self.last} is not a span of calls: write the lower call first, counting from 0. "
                "(A backward stage, too, names its calls in ascending order; only the stages stand deepest first.)"
            )

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def calls(self) -> range:
        """The numbers of its calls, ascending."""
        return range(self.first, self.last + 1)

    @classmethod
    def parse(cls, text: str) -> Span:
        """The span that ``text`` prints; ``ValueError`` shows how one is written."""
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
        if not match:
            raise ValueError(f"{text!r} is not a span of calls: write a call's number, like 5, or a range, like 4-7.")
        return cls(int(match[1]), int(match[2] or match[1]))


@dataclass(frozen=True)
class Stage:
    """One slot's work: calls ``first`` to ``last`` in one phase; ``position`` counts the slots of a round from 0.

    ``unpacks_once``: whether packed weights are unpacked once for all microbatches of the slot.
    """

    position: int
    phase: Phase
    first: int
    last: int
    unpacks_once: bool = False


@dataclass(frozen=True)
class Plan:
    """Forward stages, the fused stage, backward stages (deepest first), the microbatches of a round.

    Attributes:
        recompute_ahead: whether a worker recomputes for the microbatch whose turn it is before its gradient is there.
        unpack_once: positions of the stages that unpack packed weights once, ascending.
        carry: calls of backward stages whose products travel instead of being computed again, ascending.
        carry_least: least FLOPs for each byte of outputs of products that do; 0: all do.
    """

    forward: tuple[Span, ...]
    fused: Span
    backward: tuple[Span, ...]
    round_microbatches: int
    recompute_ahead: bool = False
    unpack_once: tuple[int, ...] = ()
    carry: tuple[int, ...] = ()
    carry_least: int = 0

    def __post_init__(self) -> None:
        if self.round_microbatches < 1:
            raise ValueError(f"plan: round {self.round_microbatches} would run no microbatch: use 1 or more.")

    # -- text --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        def spans(stages: tuple[Span, ...]) -> str:
            return " ".join(map(str, stages)) or "none"

        return (
            f"forward {spans(self.forward)}; fused {self.fused}; backward {spans(self.backward)}; "
            f"round {self.round_microbatches}{'; recompute ahead' if self.recompute_ahead else ''}"
            f"{'; unpack once ' + spans(_runs(self.unpack_once)) if self.unpack_once else ''}"
            f"{'; carry ' + spans(_runs(self.carry)) if self.carry else ''}"
            f"{f' from {self.carry_least}' if self.carry and self.carry_least else ''}"
        )

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that ``text`` describes.

        Raises:
            ValueError: it describes none; the message has an example.
        """
        found = _TEXT.fullmatch(" ".join(text.replace(";", " ").split()))
        if found is None:
            raise ValueError(
                f"plan: {text!r} is no plan: expected text like {_EXAMPLE}, where a pass without stages is 'none', and "
                "which may end in '; recompute ahead', '; unpack once 0-2' and '; carry 0-5'."
            )
        forward, backward = _spans(found["forward"]), _spans(found["backward"])
        once = [position for span in _spans(found["once"] or "none") for position in span.calls()]
        if len(set(once)) < len(once) or max(once, default=0) > len(forward) + len(backward):
            raise ValueError(
                f"plan: unpack once {found['once'].strip()} must name stages, each once, from 0 to "
                f"{len(forward) + len(backward)}."
            )
        ahead, [fused] = found["ahead"] is not None, _spans(found["fused"])
        carry = sorted({call for span in _spans(found["carry"] or "none") for call in span.calls()})
        least = int(found["least"] or 0)
        return cls(forward, fused, backward, int(found["round"]), ahead, tuple(sorted(once)), tuple(carry), least)

    # -- made by rule ------------------------------------------------------------------------------------------------

    @classmethod
    def per_call(cls, n: int, round_microbatches: int = 1) -> Plan:
        """A cut at every call of a trace of ``n``; the last call alone is fused."""
        forward = tuple(Span(call, call) for call in range(n - 1))
        return cls(forward, Span(n - 1, n - 1), forward[::-1], round_microbatches)

    @classmethod
    def single(cls, n: int, round_microbatches: int = 1) -> Plan:
        """Everything in the fused stage: nothing is recomputed, and the whole model is resident."""
        return cls((), Span(0, n - 1), (), round_microbatches)

    def to_dict(self) -> dict[str, Any]:
        """Return the text, and the numbers of calls of the stages, as the commands' JSON has them."""
        return {
            "plan": str(self),
            "forward": [len(span) for span in self.forward],
            "fused": len(self.fused) - 1,
            "backward": [len(span) for span in self.backward],
            "round_microbatches": self.round_microbatches,
            "carry": list(self.carry),
        }

    # -- what the engine asks ----------------------------------------------------------------------------------------

    def validate(self, calls: Sequence[str] | None = None) -> None:
        """Check that the plan runs every call of the trace once forward and once backward, in order.

        A plan that misses a call would train a different model, and one that repeats or swaps calls would hang on a
        turn that never comes.

        Args:
            calls: the layer's name for each call of the trace. None: the trace is not known yet, and has as many calls
                as the plan names.

        Raises:
            ValueError: it does not, or it carries a call that is not recomputed.
        """
        if calls is None:
            calls = [""] * (1 + max(span.last for span in (*self.forward, self.fused, *self.backward)))
        if not calls:
            raise ValueError("plan: the trace has no calls, so no plan fits it: is any layer called in training_step?")
        for direction, spans in (("forward", self.forward), ("backward", self.backward[::-1])):
            runs = [call for span in (*spans, self.fused) for call in span.calls()]
            pairs = enumerate(zip_longest(runs, range(len(calls))))
            if (wrong := next((at for at, (call, due) in pairs if call != due), None)) is not None:
                name = f" ({calls[wrong]!r})" if wrong < len(calls) and calls[wrong] else ""
                raise ValueError(
                    f"plan: the {direction} pass must run each of the {plural(len(calls), 'call')} of the trace once, "
                    f"in order, and does not where call {wrong}{name} is due. Forward stages ascend, backward stages "
                    f"stand deepest calls first, and the fused stage ends the trace, as in {_EXAMPLE}; or leave plan= "
                    "unset to have one made."
                )
        again = {call for span in self.backward for call in span.calls()}
        if strange := [call for call in self.carry if call not in again]:
            raise ValueError(
                f"plan: carry {' '.join(map(str, _runs(self.carry)))} names call {strange[0]}, which no backward stage "
                "runs: only calls of backward stages are recomputed. Leave it out."
            )

    def side_by_side(self, workers: int, microbatches: int) -> bool:
        """Whether rounds run side by side, as in data parallelism: each is one microbatch.

        Larger rounds come one after another, because a sum of their sums would be rounded otherwise.
        """
        return self.round_microbatches == 1 and min(workers, microbatches) > 1

    def costs_in(self, stage: Stage, costs: Costs, microbatches: int) -> Costs:
        """Return the costs of calls in ``stage``: a microbatch bears its share of what is unpacked once for the round.

        In a backward stage, a recomputation lacks carried products.
        """
        found = costs.unpacked_once(min(self.round_microbatches, microbatches)) if stage.unpacks_once else costs
        return found.carrying(self.carry, self.carry_least) if stage.phase == "backward" else found

    def stages(self) -> tuple[Stage, ...]:
        """The slots of a round in their order: forward stages, the fused stage, backward stages."""
        return self._stages

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        phases: list[tuple[Phase, Span]] = [("forward", span) for span in self.forward]
        phases.append(("fused", self.fused))
        phases.extend(("backward", span) for span in self.backward)
        return tuple(
            Stage(position, phase, s.first, s.last, position in self.unpack_once)
            for position, (phase, s) in enumerate(phases)
        )

    @cached_property
    def stage_of_forward(self) -> tuple[int, ...]:
        """Per call, the position of the stage that runs its forward. Only for a plan that was validated."""
        held = {
            call: stage.position
            for stage in self._stages
            if stage.phase != "backward"
            for call in range(stage.first, stage.last + 1)
        }
        return tuple(held[call] for call in range(self.fused.last + 1))


def _spans(text: str) -> tuple[Span, ...]:
    try:
        return () if text == "none" else tuple(map(Span.parse, text.split()))
    except ValueError as error:
        raise ValueError(f"plan: {error}") from None


def _runs(positions: Iterable[int]) -> tuple[Span, ...]:
    """Ascending numbers as spans."""
    spans: list[Span] = []
    for position in positions:
        if spans and spans[-1].last == position - 1:
            spans[-1] = Span(spans[-1].first, position)
        else:
            spans.append(Span(position, position))
    return tuple(spans)
