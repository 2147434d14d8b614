"""The plan: which calls run together, as data that prints, parses and is checked on its own.

The planner writes plans and the engine walks them, and neither needs the other. A plan that a user types by hand takes
the same way as one that was computed, so everything that can be wrong with one is found here, before a weight moves.

A plan's text names the calls of the trace by number::

    forward 0-3 4-7; fused 8-11; backward 4-7 0-3; round 4

    plan     = "forward" spans ";" "fused" span ";" "backward" spans ";" "round" number { ";" option }
    option   = "recompute" "ahead" | "unpack" "once" spans
    spans    = "none" | span { " " span }
    span     = number | number "-" number            (first and last call, both included; 5 is short for 5-5)

Stages stand in the order in which they run: forward stages from the first call up, then the fused stage, which always
ends with the last call, then backward stages from the deepest call down. ``none`` is a pass without stages of its own,
which happens when the fused stage holds the whole model. Semicolons are for the reader: parsing needs only white space
(and Hydra's command line takes the text unquoted without them). With ``recompute ahead`` a backward stage recomputes a
microbatch before its gradient is there, and keeps the graph of the whole stage until it is. ``unpack once`` names
stages, counted from 0 in the order in which they run: what the first microbatch unpacks of their packed weights is kept
for the round's others. With ``round 1`` and several workers, rounds run side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.costs import Phase
from lightning_roundpipe.planning.span import Span
from lightning_roundpipe.planning.validate import check_plan

_KEYWORDS = ("forward", "fused", "backward", "round")
_OPTION = "recompute"
_SINGLE = "single"
"""An option of earlier versions."""
_UNPACK = "unpack"


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
    """

    forward: tuple[Span, ...]
    fused: Span
    backward: tuple[Span, ...]
    round_microbatches: int
    recompute_ahead: bool = False
    unpack_once: tuple[int, ...] = ()

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
            f"{f'; {_UNPACK} once ' + spans(_runs(self.unpack_once)) if self.unpack_once else ''}"
        )

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that ``text`` describes; ``ValueError`` says what is not understood and what is expected."""
        parts = _split(text)
        fused = _spans("fused", parts["fused"])
        if len(fused) != 1:
            raise ValueError(f"plan: fused {_shown(parts['fused'])} must be exactly one span, like 'fused 8-11'.")
        round_ = parts["round"]
        if len(round_) != 1 or not round_[0].isdecimal():
            raise ValueError(f"plan: round {_shown(round_)} must be one number of microbatches, like 'round 4'.")
        forward, backward = _spans("forward", parts["forward"]), _spans("backward", parts["backward"])
        option = parts.get(_OPTION)
        if option not in (None, ["ahead"]):
            raise ValueError(f"plan: recompute {_shown(option)} must be 'recompute ahead', or be left out.")
        if _SINGLE in parts:
            single = " ".join([_SINGLE, *parts[_SINGLE]])
            raise ValueError(
                f"plan: leave out {single!r}: a worker has one arena for weights and gradients, as large as its memory "
                "allows."
            )
        once = parts.get(_UNPACK)
        if once is not None and once[:1] != ["once"]:
            raise ValueError(
                f"plan: unpack {_shown(once)} must be 'unpack once' and the numbers of stages, like 'unpack once 0-2', "
                "or be left out."
            )
        return cls(
            forward, fused[0], backward, int(round_[0]), recompute_ahead=option is not None,
            unpack_once=_positions(once[1:], len(forward) + 1 + len(backward)) if once else (),
        )  # fmt: skip

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
        }

    # -- what the engine asks ----------------------------------------------------------------------------------------

    def validate(self, calls: Sequence[str] | None = None) -> None:
        """``ValueError`` unless the plan runs every call of the trace once forward and once backward, in order.

        Args:
            calls: the layer's name for each call of the trace. None: the trace is not known yet, and has as many calls
                as the plan names.
        """
        check_plan(self.forward, self.fused, self.backward, calls)

    def side_by_side(self, workers: int, microbatches: int) -> bool:
        """Whether rounds run side by side, as in data parallelism: each is one microbatch.

        Larger rounds come one after another, because a sum of their sums would be rounded otherwise.
        """
        return self.round_microbatches == 1 and min(workers, microbatches) > 1

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


def _split(text: str) -> dict[str, list[str]]:
    """The words after each keyword, every keyword exactly once."""
    example = "expected text like 'forward 0-3 4-7; fused 8-11; backward 4-7 0-3; round 4'"
    parts: dict[str, list[str]] = {}
    words: list[str] | None = None
    for word in text.replace(";", " ").split():
        if word in parts:
            raise ValueError(f"plan: {text!r} says {word!r} twice: {example}.")
        if word in (*_KEYWORDS, _OPTION, _SINGLE, _UNPACK):
            words = parts[word] = []
        elif words is None:
            raise ValueError(f"plan: {text!r} starts with {word!r}: {example}.")
        else:
            words.append(word)
    if missing := [keyword for keyword in _KEYWORDS if keyword not in parts]:
        raise ValueError(f"plan: {text!r} lacks {missing[0]!r}: {example}.")
    return parts


def _spans(keyword: str, words: list[str]) -> tuple[Span, ...]:
    if words == ["none"]:
        return ()
    if not words:
        raise ValueError(f"plan: nothing follows {keyword!r}: name spans of calls, or write '{keyword} none'.")
    try:
        return tuple(Span.parse(word) for word in words)
    except ValueError as error:
        raise ValueError(f"plan: after {keyword!r}, {error}") from None


def _positions(words: list[str], stages: int) -> tuple[int, ...]:
    """Numbers of ``stages``, each once."""
    spans = _spans("unpack once", words)
    if last := max((span.last for span in spans if span.last >= stages), default=0):
        raise ValueError(
            f"plan: unpack once names stage {last}, and there are {plural(stages, 'stage')}, 0 to {stages - 1}: leave "
            "it out."
        )
    found = [position for span in spans for position in span.calls()]
    if len(set(found)) < len(found) or not found:
        raise ValueError(f"plan: unpack once {_shown(words)} must name stages, each once, like 'unpack once 0-2 5'.")
    return tuple(sorted(found))


def _runs(positions: Iterable[int]) -> tuple[Span, ...]:
    """Ascending numbers as spans."""
    spans: list[Span] = []
    for position in positions:
        if spans and spans[-1].last == position - 1:
            spans[-1] = Span(spans[-1].first, position)
        else:
            spans.append(Span(position, position))
    return tuple(spans)


def _shown(words: list[str]) -> str:
    return repr(" ".join(words))
