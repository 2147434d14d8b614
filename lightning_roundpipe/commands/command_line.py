"""Command lines of ``name=value``, as those of ``roundpipe-train``, read by argparse, with settings of groups
(``lora.r=8``) and messages of one line; and what a command does with its answer and with a mistake.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import Any, NoReturn

from lightning_roundpipe.commands.answer import Answer
from lightning_roundpipe.estimates.conf_files import Settings
from lightning_roundpipe.messages import did_you_mean, raised_here

Reader = Callable[[str, str], Any]
"""Function that converts the text of an option, given text and name. It raises ``ValueError`` for a mistake."""


class Parser(argparse.ArgumentParser):
    """Parser of a command's options. ``groups``: those whose settings can be changed: ``group.NAME=VALUE``."""

    def __init__(self, program: str, purpose: str, examples: Iterable[str], groups: Sequence[str] = ()) -> None:
        lines = ["NAME=VALUE and --NAME VALUE mean the same. Examples:", *(f"  {program} {line}" for line in examples)]
        super().__init__(
            program,
            usage=f"{program} NAME=VALUE ...",
            description=purpose,
            epilog="\n".join(lines),
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.groups = groups

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}.")

    def read(self, arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Settings]]:
        """Return the values of the options that are set, and the settings of each group. Raises ``ValueError``."""
        groups: dict[str, dict[str, str]] = {group: {} for group in self.groups}
        plain = []
        for argument in arguments:
            name, equals, text = argument.partition("=")
            name = name.lstrip("-")
            group, _, setting = name.partition(".")
            if group in groups and setting:
                if not text:
                    raise ValueError(f"{name}= has no value: write {name}=VALUE.")
                groups[group][setting] = text
            else:
                name = f"--{name.replace('-', '_')}"
                plain.append(f"{name}={text}" if equals else name if argument.startswith("--") else argument)
        try:
            found, unknown = self.parse_known_args(plain)
        except argparse.ArgumentError as error:  # its message names the option if a reader has written it
            raise ValueError(error.message if "=" in error.message else f"{error}.") from None
        if unknown:
            name = unknown[0].partition("=")[0].lstrip("-")
            known = re.findall(r"^ +--(\w+)", self.format_help(), flags=re.MULTILINE)
            if name in known:
                raise ValueError(f"{name} has no value: write {name}=VALUE.")
            hint = did_you_mean(name, known).replace("?", "=?") or f" There are {'=, '.join(known)}=."
            raise ValueError(f"There is no option {name!r}.{hint} All are in {self.prog} --help.")
        return vars(found), {group: tuple(pairs.items()) for group, pairs in groups.items()}


def add_option(group: Any, name: str, help_text: str, read: Reader | None = None, metavar: str = "NAME") -> None:
    """Add an option to a parser, or to a group of its options. ``read`` converts its text."""

    def value(text: str) -> Any:
        try:
            return text if read is None else read(text, name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    group.add_argument(f"--{name}", type=value, help=help_text, metavar=metavar)


def whole(least: int = 1, most: int = 2**31) -> Reader:
    """Return a reader of whole numbers from ``least`` to ``most``."""

    def read(text: str, name: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"{name}={text} must be a whole number of {least} to {most:,}.")
        return int(text)

    return read


def seconds(text: str, name: str) -> float:
    """Return a number of seconds, at least 0."""
    with suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise ValueError(f"{name}={text} must be a number of seconds, at least 0.")


def positive(text: str, name: str) -> float:
    """Return a number of more than 0."""
    if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text) or not float(text):
        raise ValueError(f"{name}={text} must be a number of more than 0.")
    return float(text)


def yes_or_no(text: str, name: str) -> bool:
    """Read ``true`` or ``false``."""
    chosen: str = one_of("true", "false")(text, name)
    return chosen == "true"


def one_of(*choices: str) -> Reader:
    """Return a reader of one of ``choices``."""

    def read(text: str, name: str) -> str:
        if text not in choices:
            raise ValueError(f"{name}={text} must be one of {', '.join(choices)}.{did_you_mean(text, choices)}")
        return text

    return read


def run(program: str, answer: Callable[[Sequence[str]], Answer]) -> int:
    """Print what ``answer`` returns for the command line, and return the exit code: 2 for a user's mistake.

    What libraries print meanwhile goes to standard error: standard output is for the answer.
    """
    arguments = sys.argv[1:]
    asked_for_help = {"-h", "--help"} & {*arguments}  # argparse prints it itself, and ends the program
    try:
        with redirect_stdout(sys.stdout if asked_for_help else sys.stderr):
            found = answer(arguments)
        text = found.printed()
    except BrokenPipeError:
        raise  # the reader has gone: `console_command` ends the program
    except (ValueError, OSError) as error:
        if not (isinstance(error, OSError) or raised_here(error)):  # a fault of ours or of a library
            raise
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    sys.stdout.write(text)
    sys.stdout.flush()
    return found.code
