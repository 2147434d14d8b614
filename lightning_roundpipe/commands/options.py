"""Command lines of the form ``name=value``, and the conventions that all commands share.

A command is a dataclass of its options and a function that answers::

    @dataclass(frozen=True, kw_only=True)
    class SumOptions:
        '''Adds two numbers.'''

        examples: ClassVar = ("left=2 right=3",)
        left: int = option("the first number", at_least=0)
        format: Literal["table", "json"] = option("how to print it", default="table")

    def answer(options: SumOptions) -> Reply:
        return Reply(as_json({"sum": options.left}))

    @console_command
    def main() -> int:  # the console script; the returned number is the exit code
        return run("roundpipe-sum", SumOptions, answer)

``--name value`` and ``--name=value`` mean the same as ``name=value``.

The conventions: standard output has the answer only, so output of libraries goes to standard error. A user's mistake is
one line on standard error that says what is allowed, and exit code 2. Mistakes are any ``OSError``, and a
``ValueError`` that this package raises. Everything else is a bug and keeps its traceback. An answer has an exit code of
its own: 1 if it is no.

An option that is declared ``many=True`` takes several values with commas between them, as Hydra's sweeps do: the
command then answers for all combinations at once.
"""

from __future__ import annotations

import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rich.console import Console, RenderableType
from rich.text import Text

from lightning_roundpipe.commands.conf_files import shipped_files
from lightning_roundpipe.messages import did_you_mean

T = TypeVar("T")
"""The dataclass of a command's options."""

_HELP = ("-h", "--help", "help")
_NOTHING = ("null", "none")
_QUOTES = "[{('\""
"""First characters of a value whose commas do not separate several values."""
_BOOLEANS = {"true": True, "false": False}
_PLACEHOLDERS: Mapping[Any, str] = {Path: "FILE", int: "NUMBER", float: "NUMBER", bool: "true|false", str: "NAME"}

Reader = Callable[[str, str], Any]
"""Function that converts the text of an option to its value, given text and name, as ``config.parse_bytes`` does. It
raises ``ValueError`` for a mistake."""

Settings = tuple[tuple[str, str], ...]
"""Type of an option with ``below``: pairs of name and text."""


@dataclass(frozen=True)
class Reply:
    """Answer of a command. Text is printed as it is, anything else by rich."""

    shown: RenderableType
    code: int = 0


@dataclass(frozen=True)
class Combination(Generic[T]):
    """One combination of values of a command line with lists.

    Args:
        given: name and text of each option with several values, in the order of the command line.
        options: options of this combination.
        arguments: command line of this combination alone.
    """

    given: Mapping[str, str]
    options: T
    arguments: tuple[str, ...] = ()


def option(
    help_text: str,
    *,
    default: Any = MISSING,
    at_least: float | None = None,
    read: Reader | None = None,
    shown: str | None = None,
    below: str | None = None,
    section: str | None = None,
    many: bool = False,
) -> Any:
    """A field of a command's dataclass; its annotation says how the text is read.

    Args:
        help_text: what ``--help`` says about it.
        default: its value when it is not given; without one it has to be.
        at_least: the lowest number allowed.
        read: makes the value of text and name, for annotations other than ``str``, ``Path``, ``int``, ``float``,
            ``bool``, ``Literal`` and those with ``| None``.
        shown: what stands for its value in ``--help``.
        below: takes all options that begin with this and a dot, as `Settings`: ``below="lora"`` takes ``lora.r=8``.
        section: a heading in ``--help`` that begins with it.
        many: whether it may have several values, with commas between them; `parse_all` reads them.
    """
    found = {"help": help_text, "at_least": at_least, "read": read, "shown": shown, "below": below, "section": section}
    return field(default=() if below else default, metadata={**found, "many": many})


def parse_all(options: type[T], arguments: Sequence[str]) -> list[Combination[T]]:
    """Return all combinations of values that ``arguments`` (``name=value`` each) set.

    The last option that has several values changes fastest.

    Raises:
        ValueError: a name is unknown, missing or given twice, a value is not of the annotated kind, or a list of values
            has an empty place.
    """
    known, groups = _names(options)
    pairs = list(_pairs(arguments, known, groups))
    _refuse_lists(options, pairs)
    ways = [_values(name, text) if name in known and known[name].metadata["many"] else [text] for name, text in pairs]
    names = [name for name, _ in pairs]
    found = []
    for texts in product(*ways):
        given = {name: text for name, text, way in zip(names, texts, ways, strict=True) if len(way) > 1}
        chosen = list(zip(names, texts, strict=True))
        found.append(Combination(given, _made(options, chosen), tuple(f"{name}={text}" for name, text in chosen)))
    return found


def _refuse_lists(options: type[Any], pairs: Iterable[tuple[str, str]]) -> None:
    """Refuse several values of an option that takes one. Names and files may have commas."""
    known, _ = _names(options)
    hints = get_type_hints(options)
    if not any(item.metadata["many"] for item in known.values()):
        return
    for name, text in pairs:
        item = known.get(name)
        if "," not in text or (item is not None and (item.metadata["many"] or _bare(hints[name]) in (str, Path))):
            continue
        if item is not None or text[0] not in _QUOTES:
            hint = "" if item is not None else f" A list has brackets: {name}=[{text}]."
            raise ValueError(
                f"{name}={text}: it takes one value; several are for the options marked ,.. in --help.{hint}"
            )


def _values(name: str, text: str) -> list[str]:
    """Return the values of a list, without duplicates."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise ValueError(f"{name}={text} has an empty place: write values with a comma between each two.")
    return list(dict.fromkeys(values))


def _names(options: type[Any]) -> tuple[dict[str, Field[Any]], dict[str, str]]:
    """Return the options by name, and for each group of settings the field that takes them."""
    known = {item.name: item for item in fields(options) if not item.metadata["below"]}
    groups = {item.metadata["below"]: item.name for item in fields(options) if item.metadata["below"]}
    return known, groups


def _made(options: type[T], pairs: Iterable[tuple[str, str]]) -> T:
    known, groups = _names(options)
    hints = get_type_hints(options)
    given: dict[str, Any] = {}
    for name, text in pairs:
        group, dot, below = name.partition(".")
        if dot:
            have = dict(given.get(groups[group], ()))
            _check_new(name, below in have)
            given[groups[group]] = (*have.items(), (below, text))
        else:
            _check_new(name, name in given)
            given[name] = _read(known[name], hints[name], text)
    for name, item in known.items():
        if name not in given and item.default is MISSING:
            raise ValueError(f"{name}= is missing. It is {item.metadata['help']}: {name}={_placeholder(item, hints)}")
    return options(**given)


def run(
    program: str,
    options: type[T],
    answer: Callable[[T], Reply],
    arguments: Sequence[str] | None = None,
    answer_all: Callable[[Sequence[Combination[T]]], Reply] | None = None,
) -> int:
    """Parse the command line, print what ``answer`` returns, and return the exit code: 2 for a user's mistake.

    ``answer_all`` answers if options have several values.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if any(argument in _HELP for argument in arguments):
            _print(usage(program, options))
            return 0
        with redirect_stdout(sys.stderr):
            found = parse_all(options, arguments)
            if len(found) > 1:
                assert answer_all is not None, "options with many=True"
                reply = answer_all(found)
            else:
                reply = answer(found[0].options)
        _print(reply.shown)
    except BrokenPipeError:
        raise  # the reader has gone: `console_command` ends the program
    except (ValueError, OSError) as error:
        if not is_mistake(error):
            raise
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return reply.code


def as_json(data: object) -> str:
    """Return the JSON of ``format=json``. Infinite and undefined numbers, which JSON lacks, are a bug of the caller."""
    return json.dumps(data, indent=1, allow_nan=False)


def usage(program: str, options: type[Any]) -> str:
    """Return the text of ``--help``: the command's purpose, examples, and a line for each option."""
    hints, known = get_type_hints(options), fields(options)
    names = [f"{item.metadata['below']}.NAME" if item.metadata["below"] else item.name for item in known]
    more = [",.." if item.metadata["many"] else "" for item in known]
    shown = [f"{names[i]}={_placeholder(item, hints)}{more[i]}" for i, item in enumerate(known)]
    width = max(map(len, shown)) + 2
    lines = [f"{program} NAME=VALUE ...", ""]
    lines += [line.strip() for line in (options.__doc__ or "").strip().splitlines()]
    if examples := getattr(options, "examples", ()):
        lines += ["", "Examples:", *(f"  {program} {example}" for example in examples)]
    if not known or known[0].metadata["section"] is None:
        lines += ["", "Options:"]
    for item, text in zip(known, shown, strict=True):
        if item.metadata["section"]:
            lines += ["", f"{item.metadata['section']}:"]
        has_default = item.default is not MISSING and item.default not in (None, ())
        default = f" (default: {_text(item.default)})" if has_default else ""
        lines.append(f"  {text:{width}}{item.metadata['help']}{default}")
    return "\n".join(lines)


# -- one argument ----------------------------------------------------------------------------------------------------


def _pairs(
    arguments: Sequence[str], known: Mapping[str, object], groups: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield name and text of each option; ``--name value`` takes two arguments."""
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, text = argument.partition("=")
        if dashed := name.startswith("-"):
            name = name.lstrip("-").replace("-", "_")
        if name not in known and name.partition(".")[0] not in (groups if "." in name else ()):
            raise ValueError(_unknown(argument, name, bool(equals) or dashed, known, groups))
        if dashed and not equals and left and not _is_option(left[0], known):
            equals, text = "=", left.pop(0)
        if not equals or not text:
            raise ValueError(f"{name}= has no value: write {name}=VALUE.")
        yield name, text


def _is_option(argument: str, known: Mapping[str, object]) -> bool:
    return argument.startswith("--") or ("=" in argument and argument.partition("=")[0] in known)


def _unknown(argument: str, name: str, named: bool, known: Iterable[str], groups: Iterable[str]) -> str:
    names = [*known, *(f"{group}.NAME" for group in groups)]
    inside = [f"{group}.{name}" for group in groups if name in _settings_of(group)]
    close = inside or get_close_matches(name, names, n=1)
    hint = f"Did you mean {close[0]}=? All are in --help." if close else f"Allowed are {', '.join(names)}; see --help."
    what = f"There is no option {name!r}" if named else f"{argument!r} is no option of the form name=value"
    return f"{what}. {hint}"


def _settings_of(group: str) -> set[str]:
    """Return the names of settings in the choices of a group."""
    lines = [line for file in shipped_files(group).values() for line in file.read_text(encoding="utf-8").splitlines()]
    return {found[1] for line in lines if (found := re.match(r"([a-z]\w*):", line))}


def _check_new(name: str, known: bool) -> None:
    if known:
        raise ValueError(f"{name}= is given twice: keep one of them.")


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
            raise ValueError(f"{name}={text!r} must be one of {', '.join(choices)}.{did_you_mean(text, choices)}")
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
    """Return ``int`` for ``int | None``."""
    return next(kind for kind in get_args(hint) if kind is not types.NoneType) if _is_optional(hint) else hint


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and types.NoneType in get_args(hint)


def _placeholder(item: Field[Any], hints: Mapping[str, Any]) -> str:
    if item.metadata["shown"]:
        return str(item.metadata["shown"])
    if item.metadata["below"]:
        return "VALUE"
    kind = _bare(hints[item.name])
    if get_origin(kind) is Literal:
        return "|".join(map(_text, get_args(kind)))
    return "VALUE" if item.metadata["read"] else _PLACEHOLDERS[kind]


def _text(value: object) -> str:
    """Return a value as the command line writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- output ----------------------------------------------------------------------------------------------------------


def pasted(text: str) -> RenderableType:
    """Return text for pasting into a command line: rich does not break it into lines."""
    return Text(text, no_wrap=True, overflow="ignore")


def _print(result: RenderableType) -> None:
    """Print to standard output at once: rich itself handles a closed pipe differently."""
    if not isinstance(result, str):
        console = Console(file=sys.stdout)
        with console.capture() as capture:
            console.print(result, crop=False)
        result = "\n".join(line.rstrip() if not console.is_terminal else line for line in capture.get().splitlines())
    sys.stdout.write(result.rstrip("\n") + "\n")
    sys.stdout.flush()


def is_mistake(error: BaseException) -> bool:
    """Return whether an error is a user's mistake, and not a fault of this package or a library."""
    if isinstance(error, OSError):
        return True
    trace = error.__traceback__
    module = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return module.startswith("lightning_roundpipe.")
