"""Everything that the package says, found in its source: mechanical rules that reading alone would miss."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.messages import PREFIX, gib, plural, seconds, warn

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_roundpipe"
FILES = [f for f in sorted(PACKAGE.rglob("*.py")) if f.relative_to(PACKAGE).parts[0] not in ("commands", "tasks")]
"""All but the tables of the commands, whose headings count in columns."""
files = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))

SAID = {"warn", "rank_zero_warn", "rank_zero_info", "rank_zero_deprecation", "inform", "_inform"}
"""Functions and methods whose first argument a user reads as it is."""
PREFIXED = {"hints"}
"""Objects whose methods of these names put the prefix in front themselves; see `engine.hints`."""

NOUNS = (
    "batches|calls|cases|devices|epochs|files|layers|lines|microbatches|optimizers|parameters|records|rounds|rows|samples|"
    "sequences|slots|stages|steps|targets|tensors|texts|threads|tokens|weights|workers"
)
COUNTED = re.compile(rf"^ (?:(?:different|emulated|equal|other|trained|training|waiting) )?(?:{NOUNS})\b(?!/)")
WORDS = re.compile(
    r"\b(somebody|nobody|whoever|everybody|anybody)\b|\bbut an? (int|str|list|dict|float)\b"
    r"|\bis no (text|list|number)\b"
)


def literals(file: Path) -> Iterator[tuple[int, str, ast.expr]]:
    """Line, text and node of each string that is no docstring; what is filled in stands as ``{}``."""
    tree = ast.parse(file.read_text())
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            inside.update(id(part) for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(_text(part) for part in node.values), node
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value, node


def _text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{}"


@files
def test_words(file: Path) -> None:
    found = [f"{file.name}:{line}: {text!r}" for line, text, _ in literals(file) if WORDS.search(text)]
    assert not found, "\n".join(found)


@files
def test_what_is_counted_is_counted_in_the_right_number(file: Path) -> None:
    """``f"{n} workers"`` says "1 workers"; `plural` does not."""
    found = []
    for line, _, node in literals(file):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for number, then in pairwise(parts):
            counts = isinstance(number, ast.FormattedValue) and isinstance(then, ast.Constant)
            if counts and COUNTED.search(str(then.value)):
                found.append(f"{file.name}:{line}: {ast.unparse(number.value)}{then.value!r}")
    assert not found, "\n".join(found)


@files
def test_what_is_said_begins_with_our_name(file: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(node, ast.Call) and node.args and _name(node.func) in SAID):
            continue
        holder = node.func.value if isinstance(node.func, ast.Attribute) else None
        if holder is not None and (_name(holder) in PREFIXED or (_name(holder) == "self" and "hints" in file.name)):
            continue
        if not _is_prefixed(node.args[0], file):
            found.append(f"{file.name}:{node.lineno}: {ast.unparse(node.args[0])[:80]}")
    assert not found, "\n".join(found)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_prefixed(text: ast.expr, file: Path) -> bool:
    if isinstance(text, ast.BinOp):
        return _is_prefixed(text.left, file)
    if isinstance(text, ast.JoinedStr):
        first = text.values[0]
        return _is_prefixed(first.value if isinstance(first, ast.FormattedValue) else first, file)
    if isinstance(text, ast.Constant):
        return str(text.value).startswith(PREFIX)
    return _name(text) == "PREFIX" or (file.name == "messages.py" and _name(text) == "text")  # which asserts it


@files
def test_warnings_are_of_our_category(file: Path) -> None:
    """Only `messages.warn` warns, so that one filter silences all that the package warns of."""
    if file.name != "messages.py":
        calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
        direct = [c.lineno for c in calls if ast.unparse(c.func) in ("warnings.warn", "rank_zero_warn")]
        assert not direct, f"{file.name}: lines {direct}"


def test_a_warning_names_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("roundpipe: this is tried.")
    [warning] = caught
    assert warning.category is RoundPipeWarning and issubclass(RoundPipeWarning, UserWarning)
    assert warning.filename == __file__
    assert str(warning.message) == "roundpipe: this is tried."


def test_words_for_numbers() -> None:
    assert [plural(n, "worker") for n in (0, 1, 2, 12345)] == ["0 workers", "1 worker", "2 workers", "12,345 workers"]
    assert plural(1, "microbatch") == "1 microbatch"
    assert plural(3, "microbatch") == "3 microbatches"
    assert [gib(n) for n in (0, 1023, 1536, 5 << 20, 3 << 29)] == ["0 bytes", "1023 bytes", "2 KiB", "5 MiB", "1.5 GiB"]
    assert [seconds(s) for s in (0.0123, 0.9999, 2.44, 125.0)] == ["12 ms", "1.0 s", "2.4 s", "2.1 min"]
