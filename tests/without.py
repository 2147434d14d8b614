"""The runtime without one of its lines: is there a test that notices?"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest

import lightning_roundpipe

PACKAGE = Path(lightning_roundpipe.__file__).parent
WAITING = {
    "wait",
    "wait_for",
    "wait_for_predecessor",
    "_wait_closed",
    "_wait_for_end",
    "_wait_for_gradients",
    "settle",
    "synchronize",
}
"""Methods whose call is a wait."""


def take_out(patch: pytest.MonkeyPatch, where: str, line: str) -> None:
    """Compile ``where`` (such as ``runtime.core.worker:Worker.prepare``) anew without ``line``.

    Raises:
        AssertionError: if the line is not there, or there twice.
    """
    module_name, _, path = where.partition(":")
    module = importlib.import_module(f"lightning_roundpipe.{module_name}")
    owner: Any = functools.reduce(getattr, path.split(".")[:-1], module)
    name = path.split(".")[-1]
    lines = textwrap.dedent(inspect.getsource(getattr(owner, name))).splitlines()
    found = [i for i, text in enumerate(lines) if text.strip() == line]
    assert len(found) == 1, f"{where} has {len(found)} lines {line!r}"
    indent = lines[found[0]][: -len(lines[found[0]].lstrip())]
    lines[found[0]] = indent + "pass"
    made: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + "\n".join(lines), f"<{where} without {line}>", "exec")
    exec(code, vars(module), made)
    patch.setattr(owner, name, made[name])


def waits(package: str) -> set[tuple[str, str]]:
    """Every line of ``package`` that waits, with the function it is in, as `take_out` takes them."""
    return {found for file in sorted((PACKAGE / package).rglob("*.py")) for found in _waits_of(package, file)}


def _waits_of(package: str, file: Path) -> set[tuple[str, str]]:
    module = ".".join((package, *file.relative_to(PACKAGE / package).with_suffix("").parts))
    source = file.read_text()
    lines = source.splitlines()
    found: set[tuple[str, str]] = set()

    def visit(node: ast.AST, path: tuple[str, ...]) -> None:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            path = (*path, node.name)
        waits = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITING
        if waits:
            found.add((f"{module}:{'.'.join(path)}", lines[node.lineno - 1].strip()))  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            visit(child, path)

    visit(ast.parse(source), ())
    return found
