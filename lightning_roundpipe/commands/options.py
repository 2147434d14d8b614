"""Command lines of the form ``name=value``, and the manners that all commands share.

A command is a dataclass of its options and a function that answers::

    @dataclass(frozen=True, kw_only=True)
    class SumOptions:
        '''Adds two numbers.'''

        left: int = option("the first number", at_least=0)
        format: Literal["table", "json"] = option("how to print it", default="table")

    def answer(options: SumOptions) -> RenderableType:  # text goes out as it is, anything else through rich
        return as_json({"sum": options.left})

    def main() -> int:  # the console script; the returned number is the exit code
        return run("roundpipe-sum", SumOptions, answer)

The manners: standard output holds the answer only, so whatever is printed meanwhile goes to standard error (libraries
do print). A user's mistake is one line on standard error that says what is allowed, and exit code 2. Mistakes are any
``OSError`` and the ``ValueError`` that this package raises; everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import json
import math
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rich.console import Console, RenderableType

T = TypeVar("T")
"""The dataclass of a command's options."""

_HELP = ("-h", "--help", "help")
_NOTHING = ("null", "none")
_BOOLEANS = {"true": True, "false": False}
_PLACEHOLDERS: Mapping[Any, str] = {Path: "FILE", int: "NUMBER", float: "NUMBER", bool: "true|false", str: "NAME"}

Reader = Callable[[str, str], Any]
"""Makes an option's value of its text and its name; raises ``ValueError``. ``config.parse_bytes`` is one."""


def option(help_text: str, *, default: Any = MISSING, at_least: float | None = None, read: Reader | None = None) -> Any:
    """A field of a command's dataclass; its annotation says how the text is read.

    Args:
        help_text: what ``--help`` says about it.
        default: its value when it is not given; without one it has to be.
        at_least: the lowest number allowed.
        read: makes the value of text and name, for annotations other than ``str``, ``Path``, ``int``, ``float``,
            ``bool``, ``Literal`` and those with ``| None``.
    """
    return field(default=default, metadata={"help": help_text, "at_least": at_least, "read": read})


def parse(options: type[T], arguments: Sequence[str]) -> T:
    """The options that ``arguments`` (``name=value`` each) set.

    Raises:
        ValueError: a name is unknown, missing or given twice, or a value is not of the annotated kind.
    """
    known: dict[str, Field[Any]] = {item.name: item for item in fields(options)}  # type: ignore[arg-type]
    hints = get_type_hints(options)
    given: dict[str, Any] = {}
    for argument in arguments:
        name, text = _split(argument, known)
        if name in given:
            raise ValueError(f"{name}= is given twice: keep one of them.")
        given[name] = _read(known[name], hints[name], text)
    for name, item in known.items():
        if name not in given and item.default is MISSING:
            raise ValueError(f"{name}= is missing. It is {item.metadata['help']}: {name}={_placeholder(item, hints)}")
    return options(**given)


def run(
    program: str, options: type[T], answer: Callable[[T], RenderableType], arguments: Sequence[str] | None = None
) -> int:
    """Parses the command line and prints what ``answer`` returns; gives the exit code, 2 for a user's mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if any(argument in _HELP for argument in arguments):
            _print(usage(program, options))
            return 0
        with redirect_stdout(sys.stderr):
            result = answer(parse(options, arguments))
        _print(result)
    except BrokenPipeError:
        # The reader has seen enough (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what the shell reports of a program that SIGPIPE ends
    except (ValueError, OSError) as error:
        if not _is_mistake(error):
            raise
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def as_json(data: object) -> str:
    """JSON as ``format=json`` prints it; infinite and undefined numbers, which JSON lacks, are a bug of the caller."""
    return json.dumps(data, indent=1, allow_nan=False)


def usage(program: str, options: type[Any]) -> str:
    """What ``--help`` prints."""
    hints, known = get_type_hints(options), fields(options)
    shown = {item.name: f"{item.name}={_placeholder(item, hints)}" for item in known}
    line = " ".join(shown[i.name] if i.default is MISSING else f"[{shown[i.name]}]" for i in known)
    width = max(map(len, shown.values())) + 2
    rows = []
    for item in known:
        has_default = item.default is not MISSING and item.default is not None
        default = f" (default: {_text(item.default)})" if has_default else ""
        rows.append(f"  {shown[item.name]:{width}}{item.metadata['help']}{default}")
    return "\n".join([f"{program} {line}", "", *(options.__doc__ or "").strip().splitlines(), "", *rows])


# -- one argument ----------------------------------------------------------------------------------------------------


def _split(argument: str, known: Mapping[str, object]) -> tuple[str, str]:
    name, equals, text = argument.partition("=")
    if name.startswith("-") and name.lstrip("-") in known:
        raise ValueError(f"{argument!r}: write {name.lstrip('-')}=VALUE, without dashes.")
    if name not in known:
        [*close] = get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]}=?" if close else ""
        what = f"There is no option {name!r}" if equals else f"{argument!r} is no option of the form name=value"
        raise ValueError(f"{what}.{hint} Allowed are {', '.join(known)}; --help explains them.")
    if not equals or not text:
        raise ValueError(f"{name}= has no value: write {name}=VALUE.")
    return name, text


def _read(item: Field[Any], hint: Any, text: str) -> Any:
    if text in _NOTHING and _is_optional(hint):
        return None
    read: Reader | None = item.metadata["read"]
    if read is not None:
        return read(text, item.name)
    value = _value(_bare(hint), item.name, text)
    lowest = item.metadata["at_least"]
    if lowest is not None and value < lowest:
        raise ValueError(f"{item.name}={text} must be a {_noun(_bare(hint))} of at least {lowest:g}.")
    return value


def _value(kind: Any, name: str, text: str) -> Any:
    if get_origin(kind) is Literal:
        choices = {_text(choice): choice for choice in get_args(kind)}
        if text not in choices:
            raise ValueError(f"{name}={text!r} must be one of {', '.join(choices)}.")
        return choices[text]
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"{name}={text!r} must be true or false.")
        return _BOOLEANS[text.lower()]
    if kind is Path:
        return Path(text).expanduser()
    if kind not in (int, float):
        return text
    try:
        value: int | float = kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name}={text!r} must be a {_noun(kind)}.")
    return value


def _noun(kind: Any) -> str:
    return "whole number" if kind is int else "number"


def _bare(hint: Any) -> Any:
    """``int`` of ``int | None``."""
    return next(kind for kind in get_args(hint) if kind is not types.NoneType) if _is_optional(hint) else hint


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and types.NoneType in get_args(hint)


def _placeholder(item: Field[Any], hints: Mapping[str, Any]) -> str:
    kind = _bare(hints[item.name])
    if get_origin(kind) is Literal:
        return "|".join(map(_text, get_args(kind)))
    return "VALUE" if item.metadata["read"] else _PLACEHOLDERS[kind]


def _text(value: object) -> str:
    """As one would write it on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- output ----------------------------------------------------------------------------------------------------------


def _print(result: RenderableType) -> None:
    if isinstance(result, str):
        sys.stdout.write(result.rstrip("\n") + "\n")
    else:
        Console(file=sys.stdout).print(result)
    sys.stdout.flush()


def _is_mistake(error: BaseException) -> bool:
    """Whether the error is about what the user gave, and not about a fault in here or in a library."""
    if isinstance(error, OSError):
        return True
    trace = error.__traceback__
    module = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return module.startswith("lightning_roundpipe.")
