"""Whether a plan runs the trace: every call once forward and once backward, in order.

A plan that misses a call would train a different model, and one that repeats or swaps calls would hang on a turn that
never comes. So a plan is checked by itself, before there is a trace, and again when it meets the trace; the message
names the stage, the call with its layer as far as that is known, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.span import Span

_Named = tuple[str, Span]


def check_plan(forward: Sequence[Span], fused: Span, backward: Sequence[Span], calls: Sequence[str] | None) -> None:
    """``ValueError`` for the first thing that is wrong.

    Args:
        calls: the layer's name for each call of the trace; None while only the plan says how many there are.
    """
    if calls is None:
        calls = [""] * (1 + max(span.last for span in (*forward, fused, *backward)))
    if not calls:
        raise ValueError("plan: the trace has no calls, so no plan fits it: is any layer called in training_step?")
    ahead = [(f"forward stage {number} ({span})", span) for number, span in enumerate(forward, 1)]
    middle = (f"the fused stage ({fused})", fused)
    behind = [(f"backward stage {number} ({span})", span) for number, span in enumerate(backward, 1)]
    for stage in [*ahead, middle, *behind]:
        _check_range(stage, calls)
    # Read from the last stage to the first, the backward pass counts upwards just as the forward pass does.
    _check_pass("forward", [*ahead, middle], calls)
    _check_pass("backward", [*reversed(behind), middle], calls)


def _check_range(stage: _Named, calls: Sequence[str]) -> None:
    name, span = stage
    if span.last >= len(calls):
        raise ValueError(
            f"plan: {name} is out of range: the trace has {plural(len(calls), 'call')}, 0 to {len(calls) - 1}, "
            f"and ends with {_call(len(calls) - 1, calls)}. End the plan there, or leave plan= unset to have one made."
        )


def _check_pass(direction: str, ascending: Sequence[_Named], calls: Sequence[str]) -> None:
    """The stages of one direction, lowest calls first, must cover the trace without gap, overlap or exchange."""
    holder: dict[int, str] = {}
    for name, span in ascending:
        for call in span.calls():
            if call in holder:
                raise ValueError(
                    f"plan: {name} repeats {_call(call, calls)} in the {direction} pass: {holder[call]} has it "
                    "already. Take it out of one of the two."
                )
            holder[call] = name
    if missed := [call for call in range(len(calls)) if call not in holder]:
        raise ValueError(
            f"plan: {_call(missed[0], calls)} is missed by the {direction} pass: "
            f"{_beside(missed[0], direction, ascending, calls)} Add it to that stage, or give it one of its own."
        )
    for (before, lower), (after, higher) in pairwise(ascending):
        if higher.first < lower.last:
            raise ValueError(_reordered(direction, (before, lower), (after, higher), calls))


def _beside(call: int, direction: str, ascending: Sequence[_Named], calls: Sequence[str]) -> str:
    """Where the missed call belongs: the stage that begins just above it, else the one that ends the trace."""
    above = [(name, span) for name, span in ascending if span.first > call]
    if above:
        name, span = min(above, key=lambda stage: stage[1].first)
        return f"{name} has the next calls, from {_call(span.first, calls)}."
    return f"{ascending[-1][0]} must end with the trace's last call, {_call(len(calls) - 1, calls)}."


def _reordered(direction: str, lower: _Named, higher: _Named, calls: Sequence[str]) -> str:
    early, late = (lower, higher) if direction == "forward" else (higher, lower)
    rule = "forward stages ascend" if direction == "forward" else "backward stages descend, deepest calls first"
    return (
        f"plan: {late[0]}, with {_call(late[1].first, calls)}, is reordered: it runs after {early[0]}, with "
        f"{_call(early[1].first, calls)}, in the {direction} pass. Exchange them: {rule}, and the fused stage ends "
        "the trace."
    )


def _call(call: int, calls: Sequence[str]) -> str:
    return f"call {call} ({calls[call]!r})" if calls[call] else f"call {call}"
