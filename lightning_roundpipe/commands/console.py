"""What every console command does, ``roundpipe-train`` too: ``--version``, and a quiet end when a pipe is closed.

Imports nothing of ours, so that a command that only says its version answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from typing import ParamSpec

P = ParamSpec("P")

CLOSED_PIPE = 141
"""What the shell reports of a program that SIGPIPE ends."""


def console_command(main: Callable[P, int | None]) -> Callable[P, int | None]:
    """A console script: answers ``--version``, and ends without a word when nobody reads on (``| head``)."""

    @wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int | None:
        try:
            try:
                if "--version" in sys.argv[1:]:
                    print(f"lightning-roundpipe {version('lightning-roundpipe')}")
                    return 0
                return main(*args, **kwargs)
            finally:
                _flush()
        except BrokenPipeError:
            _let_go()
            raise SystemExit(CLOSED_PIPE) from None

    return command


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says on a terminal's standard error what takes so long, until it is done; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield


def _flush() -> None:
    """Now, and not when Python exits, where a closed pipe can no longer be caught."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _let_go() -> None:
    """Sends what is still buffered nowhere, or Python would complain of it when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
