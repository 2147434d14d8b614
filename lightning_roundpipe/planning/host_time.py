"""The time that the engine itself takes, beside that of the layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostTime:
    """Seconds of the engine itself.

    Args:
        call_s: seconds of each call of a turn; a recomputed call and its backward count as one.
        turn_s: seconds of each turn.
        hop_s: seconds from one worker to another, for a microbatch that changes workers between two stages.
        shared: whether calls and turns take time of the host's interpreter, which runs ahead of the workers, instead of
            time in which the worker computes nothing.

    Raises:
        ValueError: a time is negative or not a number.
    """

    call_s: float = 0.0
    turn_s: float = 0.0
    hop_s: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        for name in ("call_s", "turn_s", "hop_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 or more seconds.")
