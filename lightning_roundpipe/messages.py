"""Messages to users: a warning category, words for numbers, the first line of an error, and what threads are at.

Every warning and every line of information begins with ``roundpipe:``, so that users see where it comes from.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from types import FrameType

PREFIX = "roundpipe: "
_reads_frames = threading.RLock()


class RoundPipeWarning(UserWarning):
    """Something that works, but is probably not what the user wants, and that a setting changes."""


def warn(text: str) -> None:
    """Issue a `RoundPipeWarning`. ``text`` must begin with ``roundpipe:``."""
    assert text.startswith(PREFIX)
    warnings.warn(text, RoundPipeWarning, stacklevel=2)


def plural(number: int, noun: str) -> str:
    """Return the number with its noun: ``"1 worker"``, ``"4 microbatches"``."""
    return f"{number:,} {noun if number == 1 else noun + ('es' if noun.endswith('ch') else 's')}"


def gib(nbytes: float) -> str:
    """Return bytes in the unit that suits their size, such as ``"1.1 GiB"``."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


def seconds(value: float) -> str:
    """Return a duration in words, such as ``"120 ms"``, ``"2.4 s"`` or ``"3.5 min"``."""
    if value < 0.995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def count(number: int) -> str:
    """Return a number in words: ``"950"``, ``"13.4 k"``, ``"134.5 M"``, ``"7.2 B"``."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return str(number)


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return a sentence that names the closest match of ``text``; empty if there is none."""
    close = get_close_matches(text.lower(), list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, if it has one, without a full stop."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def raised_here(error: BaseException) -> bool:
    """Return whether this package has raised the error itself, and not a library that it calls."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("lightning_roundpipe.")


def frames_of_threads() -> dict[int, FrameType]:
    """Return the frame that each thread runs, by the thread's id. No garbage is collected meanwhile.

    ``sys._current_frames`` of Python 3.11 holds a lock that a starting thread needs. Where a collection within it frees
    a tensor, such a thread runs, waits for that lock, and keeps the interpreter: a deadlock (python/cpython#106883).
    """
    with _reads_frames:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
