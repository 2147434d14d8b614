"""The package's architecture: imports go downwards only, files stay short, and every package is shipped.

`LAYERS` is the architecture, lowest first; CONTRIBUTING.md says what each layer is for. Imports count wherever they
stand, also inside functions and under `TYPE_CHECKING`: one that only hides a cycle is still an import upwards.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_roundpipe"

LAYERS: list[set[str]] = [
    {"config", "messages", "extras"},
    {"devices", "planning", "model", "optim"},
    {"runtime"},
    {
        "precision",
        "checkpoint_io",
        "one_process",
        "refusals",
        "hook_audit",
        "monitors",
        "accumulation_checkpoint",
        "resuming",
    },
    {"stepping", "announcements"},
    {"strategy"},
    {"pytorch_lightning"},
    {"callbacks", "pictures", "replay", "timeline", "gantt", "tasks", "data", "sweep", "sweep_picture", "overrides"},
    {"train", "commands"},
]
STRANGERS = {"devices", "planning", "model", "optim"}
"""Packages of one layer that know nothing of each other."""

FACADE = {"__init__", "registration"}
"""Public names, resolved on first use: above everything, used by nothing."""

FILES = sorted(PACKAGE.rglob("*.py"))


def layer_of(unit: str) -> int:
    for number, units in enumerate(LAYERS):
        if unit in units:
            return number
    if unit in FACADE:
        return len(LAYERS)
    raise AssertionError(f"lightning_roundpipe.{unit} has no layer: add it to LAYERS here and to CONTRIBUTING.md")


def unit_of(file: Path) -> str:
    """The part of the package that ``file`` belongs to: ``lightning_roundpipe/model/trace.py`` -> ``model``."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Line and unit of each import of ours in ``tree``, a module of the package ``package`` (dotted name, split)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*origin, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == PACKAGE.name:
                unit = name[1] if len(name) > 1 else "__init__"
                is_unit = (PACKAGE / unit).is_dir() or (PACKAGE / f"{unit}.py").is_file()
                yield node.lineno, unit if is_unit else "__init__"


def breaches(unit: str, tree: ast.AST, package: list[str]) -> list[str]:
    """What is wrong with the imports of ``tree``, a module that belongs to ``bucket``."""
    found = []
    for line, target in imported_units(tree, package):
        upwards = layer_of(target) > layer_of(unit)
        stranger = target != unit and {target, unit} <= STRANGERS
        if upwards or stranger:
            found.append(f"line {line}: {unit} imports {target}, {'above' if upwards else 'beside'} it")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_downwards(file: Path) -> None:
    unit = unit_of(file)
    layer_of(unit)
    assert not breaches(unit, ast.parse(file.read_text()), list(file.parent.relative_to(ROOT).parts))


@pytest.mark.parametrize(
    ("unit", "code", "expected"),
    [
        ("planning", "from lightning_roundpipe.runtime.engine import Engine", "above"),
        ("planning", "def f():\n    import lightning_roundpipe.runtime", "above"),
        ("runtime", "if TYPE_CHECKING:\n    from ..strategy import RoundPipeStrategy", "above"),
        ("runtime", "from lightning_roundpipe import RoundPipeStrategy", "above"),
        ("model", "from ..devices import Device", "beside"),
        ("planning", "from .. import model", "beside"),
        ("runtime", "from ..planning import schedule\nfrom . import tape\nimport torch", None),
        ("devices", "from lightning_roundpipe import config", None),
    ],
)
def test_the_check_sees_breaches(unit: str, code: str, expected: str | None) -> None:
    found = breaches(unit, ast.parse(code), ["lightning_roundpipe", unit])
    assert expected in found[0] if expected else not found


def test_one_layer_has_no_cycles() -> None:
    """Layers of several files, such as the strategy's: what imports what must still be an order."""
    uses: dict[str, set[str]] = {}
    for file in FILES:
        targets = imported_units(ast.parse(file.read_text()), list(file.parent.relative_to(ROOT).parts))
        uses.setdefault(unit_of(file), set()).update(target for _, target in targets)
    for units in LAYERS:
        remaining = {unit: (uses.get(unit, set()) & units) - {unit} for unit in units}
        while free := {unit for unit, needs in remaining.items() if not needs & remaining.keys()}:
            remaining = {unit: needs for unit, needs in remaining.items() if unit not in free}
        assert not remaining, f"these import each other: {remaining}"


def test_both_flavours_have_the_same_parts() -> None:
    """What is made of Lightning's classes, and what imports that, is executed for each flavour; in order."""
    tree = ast.parse((PACKAGE / "pytorch_lightning.py").read_text())
    [parts] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_PARTS"
    ]
    known: set[str] = set()
    for part in parts:
        uses = {unit for _, unit in imported_units(ast.parse((PACKAGE / f"{part}.py").read_text()), [PACKAGE.name])}
        assert not (uses & set(parts)) - known, f"{part} comes before what it imports"
        known.add(part)
    below = {unit for units in LAYERS[: layer_of("pytorch_lightning")] for unit in units}
    for file in FILES:
        names = {name.split(".")[0] for name in modules_imported(ast.parse(file.read_text()))}
        if unit_of(file) in below and "lightning" in names:
            assert unit_of(file) in known, f"{file.name} imports Lightning: add it to _PARTS in pytorch_lightning.py"


def modules_imported(tree: ast.AST) -> set[str]:
    found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return found | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_every_package_is_shipped() -> None:
    """pyproject.toml lists the packages by hand, so that conf/ can be one of them."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {".".join(file.parent.relative_to(ROOT).parts) for file in FILES} | {"lightning_roundpipe.conf"}
    assert sorted(listed) == sorted(on_disk)


def test_every_package_has_an_init() -> None:
    folders = {file.parent for file in FILES}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]
