"""Common behaviour of all console commands: ``--version``, and a quiet end at Ctrl-C and when a pipe is closed.

This module imports no other module of the package, so ``--version`` answers at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import ParamSpec

P = ParamSpec("P")

CLOSED_PIPE = 141
"""Exit code of a program that SIGPIPE ends."""


def console_command(main: Callable[P, int | None]) -> Callable[P, int | None]:
    """Decorate a console script: answer ``--version``, and end quietly at Ctrl-C and closed pipes (``| head``)."""

    @wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int | None:
        quiet_libraries()
        try:
            try:
                if "--version" in sys.argv[1:]:
                    print(f"lightning-roundpipe {version('lightning-roundpipe')}")
                    return 0
                return main(*args, **kwargs)
            finally:  # when Python exits, an error of a closed pipe can no longer be caught
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
        except KeyboardInterrupt:  # before training, which has its own end
            print(f"{Path(sys.argv[0]).name}: interrupted.", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):  # Python would report what is buffered as an error
                with suppress(BrokenPipeError):
                    stream.flush()
                    continue
                os.dup2(nowhere, stream.fileno())
            raise SystemExit(CLOSED_PIPE) from None

    return command


_NOISE = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    "torch.utils._pytree": "<enum ",
    "torchao": "Failed to load ",
}
"""Beginnings of what libraries that PEFT imports log, of which no command uses anything: bitsandbytes and torchao."""


def quiet_libraries() -> None:
    """Leave out `_NOISE`."""
    for name, start in _NOISE.items():

        def is_kept(record: logging.LogRecord, start: str = start) -> bool:
            return not record.getMessage().startswith(start)

        logging.getLogger(name).addFilter(is_kept)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show ``what`` on standard error meanwhile, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield
