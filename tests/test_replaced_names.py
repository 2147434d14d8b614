"""The names that the package replaces in other libraries are those that the page on the engine lists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def imported(tree):
    """Return what each name stands for that a file imports from elsewhere."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name.partition(".")[0]): a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    return {name: full for name, full in found.items() if not full.startswith("lightning_roundpipe")}


def names(target, known):
    """Yield the attributes of imported objects in a target of an assignment."""
    if isinstance(target, ast.Tuple):
        for part in target.elts:
            yield from names(part, known)
    elif isinstance(target, ast.Attribute):
        root, _, rest = ast.unparse(target).partition(".")
        if root in known and "(" not in rest:
            yield f"{known[root]}.{rest}"


def test_replaced_names_are_documented():
    found = set()
    for file in (ROOT / "lightning_roundpipe").rglob("*.py"):
        tree = ast.parse(file.read_text())
        known = imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    found.update(names(target, known))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "replaced":
                owner = ast.unparse(node.args[0])
                found.update(f"{known.get(owner, owner)}.{keyword.arg}" for keyword in node.keywords if keyword.arg)
    page = (ROOT / "docs" / "engine.md").read_text().partition("## What is replaced in other libraries")[2]
    assert found == set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
