"""Benchmarks, examples and scripts of pages import from the package only what it has. Most are run by hand, seldom."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path for folder in ("benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_is_imported_is_there(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning_roundpipe":
            module = importlib.import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "lightning_roundpipe":
                    importlib.import_module(name.name)
