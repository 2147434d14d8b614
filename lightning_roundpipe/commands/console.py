"""Common behaviour of all console commands: ``--version``, a quiet end when a pipe is closed, and no line of a library
about a kernel that no command uses.

This module imports no other module of the package, so ``--version`` answers at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from typing import ParamSpec

P = ParamSpec("P")

CLOSED_PIPE = 141
"""Exit code of a program that SIGPIPE ends."""


def console_command(main: Callable[P, int | None]) -> Callable[P, int | None]:
    """Decorate a console script: answer ``--version``, and end quietly when a pipe is closed (``| head``)."""

    @wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int | None:
        quiet_libraries()
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


def quiet_libraries() -> None:
    """Leave out a line of a library about a kernel that no command uses; also in processes that a command starts."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_of_use)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show ``what`` on standard error meanwhile, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield


def _is_of_use(record: logging.LogRecord) -> bool:
    """Return whether ``record`` says anything to users.

    On some processors bitsandbytes, which PEFT imports, says that it lacks a kernel for inference.
    """
    return not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward from kernels-community")


def _flush() -> None:
    """Flush now: when Python exits, an error of a closed pipe can no longer be caught."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _let_go() -> None:
    """Redirect buffered output to the null device. Otherwise Python reports it as an error on exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
