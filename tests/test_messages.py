"""Everything that the package says, found in its source: mechanical rules that reading alone would miss."""

import ast
import gc
import sys
import threading
import warnings
from pathlib import Path

from lightning_roundpipe import RoundPipeWarning
from lightning_roundpipe.messages import PREFIX, frames_of_threads, gib, plural, seconds, warn

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_roundpipe"
FILES = [f for f in sorted(PACKAGE.rglob("*.py")) if f.relative_to(PACKAGE).parts[0] not in ("commands", "tasks")]
"""All but the tables of the commands, whose headings count in columns."""

SAID = {"warn", "rank_zero_warn", "rank_zero_info", "rank_zero_deprecation", "inform", "_inform"}
"""Functions and methods whose first argument a user reads as it is."""
PREFIXED = {"hints"}
"""Objects whose methods of these names put the prefix in front themselves; see `engine.hints`."""


def calls():
    for file in FILES:
        yield from ((file, node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))


def test_what_is_said_begins_with_our_name():
    found = []
    for file, node in calls():
        if not (node.args and _name(node.func) in SAID):
            continue
        holder = node.func.value if isinstance(node.func, ast.Attribute) else None
        if holder is not None and (_name(holder) in PREFIXED or (_name(holder) == "self" and "hints" in file.name)):
            continue
        if not _is_prefixed(node.args[0], file):
            found.append(f"{file.name}:{node.lineno}: {ast.unparse(node.args[0])[:80]}")
    assert not found, "\n".join(found)


def _name(node):
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_prefixed(text, file):
    if isinstance(text, ast.BinOp):
        return _is_prefixed(text.left, file)
    if isinstance(text, ast.JoinedStr):
        first = text.values[0]
        return _is_prefixed(first.value if isinstance(first, ast.FormattedValue) else first, file)
    if isinstance(text, ast.Constant):
        return str(text.value).startswith(PREFIX)
    return _name(text) == "PREFIX" or (file.name == "messages.py" and _name(text) == "text")  # which asserts it


def test_warnings_are_of_our_category():
    """Only `messages.warn` warns, so that one filter silences all that the package warns of."""
    direct = [
        f"{file.name}:{call.lineno}"
        for file, call in calls()
        if file.name != "messages.py" and ast.unparse(call.func) in ("warnings.warn", "rank_zero_warn")
    ]
    assert not direct


def test_a_warning_names_the_users_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("roundpipe: this is tried.")
    [warning] = caught
    assert warning.category is RoundPipeWarning and issubclass(RoundPipeWarning, UserWarning)
    assert warning.filename == __file__
    assert str(warning.message) == "roundpipe: this is tried."


def test_words_for_numbers():
    assert [plural(n, "worker") for n in (0, 1, 2, 12345)] == ["0 workers", "1 worker", "2 workers", "12,345 workers"]
    assert plural(1, "microbatch") == "1 microbatch"
    assert plural(3, "microbatch") == "3 microbatches"
    assert [gib(n) for n in (0, 1023, 1536, 5 << 20, 3 << 29)] == ["0 bytes", "1023 bytes", "2 KiB", "5 MiB", "1.5 GiB"]
    assert [seconds(s) for s in (0.0123, 0.9999, 2.44, 125.0)] == ["12 ms", "1.0 s", "2.4 s", "2.1 min"]


def test_nothing_is_collected_while_frames_of_threads_are_read(monkeypatch):
    """Python 3.11 deadlocks there with a thread that starts, as a machine did that looked what its main thread does."""
    own, within, thresholds = sys._current_frames, [], gc.get_threshold()

    def allocating():
        before = len(collections)
        kept = [[] for _ in range(100)]
        within.append(len(collections) - before)
        return own() if kept else {}

    collections = []
    monkeypatch.setattr(sys, "_current_frames", allocating)
    gc.callbacks.append(noted := lambda phase, info: collections.append(phase))
    gc.set_threshold(1)
    try:
        sys._current_frames()
        assert within[-1] > 0
        frames = frames_of_threads()
        assert within[-1] == 0
        assert threading.get_ident() in frames
        assert gc.isenabled()
        gc.disable()
        frames_of_threads()
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(noted)
