"""The package's architecture: imports go downwards only, none form a circle, and every package is shipped.

`LAYERS` is the architecture, lowest first; CONTRIBUTING.md says what each layer is for. Imports count wherever they
stand, also inside functions and under `TYPE_CHECKING`: one that only hides a circle is still an import upwards.
"""

import ast
import functools
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_roundpipe"

LAYERS = [
    {"config", "messages", "extras", "heap"},
    {"devices", "planning", "model", "optim", "machines"},
    {"estimates"},
    {"batches", "threads"},
    {"faults", "memory"},
    {"user_code"},
    {"updates"},
    {"engine"},
    {"precision"},
    {"reports", "trainer"},
    {"strategy"},
    {"pytorch_lightning"},
    {"callbacks", "tasks", "data", "overrides", "export"},
    {"train", "commands"},
]
STRANGERS = {"devices", "planning", "model", "optim", "machines"}
"""Packages of one layer that know nothing of each other."""

FACADE = {"__init__", "registration"}
"""Public names, resolved on first use: above everything, used by nothing."""

FILES = sorted(PACKAGE.rglob("*.py"))


def layer_of(unit):
    for number, units in enumerate(LAYERS):
        if unit in units:
            return number
    if unit in FACADE:
        return len(LAYERS)
    raise AssertionError(f"lightning_roundpipe.{unit} has no layer: add it to LAYERS here and to CONTRIBUTING.md")


def unit_of(file):
    """The part of the package that ``file`` belongs to: ``lightning_roundpipe/model/trace.py`` -> ``model``."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(tree, package):
    """Line and dotted name, split, of each import in ``tree``, a module of the package ``package`` (split as well)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*origin, alias.name] for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names)


def imported_units(tree, package):
    """Line and unit of each import of ours in ``tree``; arguments as for `imported_names`."""
    for line, name in imported_names(tree, package):
        if name[0] == PACKAGE.name:
            unit = name[1] if len(name) > 1 else "__init__"
            is_unit = (PACKAGE / unit).is_dir() or (PACKAGE / f"{unit}.py").is_file()
            yield line, unit if is_unit else "__init__"


def breaches(unit, tree, package):
    """What is wrong with the imports of ``tree``, a module that belongs to ``unit``."""
    found = []
    for line, target in imported_units(tree, package):
        upwards = layer_of(target) > layer_of(unit)
        stranger = target != unit and {target, unit} <= STRANGERS
        if upwards or stranger:
            found.append(f"line {line}: {unit} imports {target}, {'above' if upwards else 'beside'} it")
    return found


def test_imports_go_downwards():
    for file in FILES:
        found = breaches(unit_of(file), ast.parse(file.read_text()), list(file.parent.relative_to(ROOT).parts))
        assert not found, file


def test_planning_knows_no_modules():
    for file in (PACKAGE / "planning").glob("*.py"):
        assert not any(name[0] == "torch" for _, name in imported_names(ast.parse(file.read_text()), [])), file


@functools.cache
def imports_of_modules():
    """The modules of ours that each module imports, by dotted names without that of the package."""
    modules = {name_of(file): file for file in FILES}
    found = {}
    for module, file in modules.items():
        package = list(file.parent.relative_to(ROOT).parts)
        names = (
            name[1:] for _, name in imported_names(ast.parse(file.read_text()), package) if name[0] == PACKAGE.name
        )
        found[module] = {target for name in names if (target := longest(name, modules)) is not None} - {module}
    return found


def name_of(file):
    """Of a module: ``lightning_roundpipe/model/trace.py`` -> ``model.trace``; empty for the package's own."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def longest(name, modules):
    """The module that an imported ``name`` is, or is of."""
    return next((".".join(name[:n]) for n in range(len(name), -1, -1) if ".".join(name[:n]) in modules), None)


def circle(uses):
    """Names that use each other in a circle, the first one again at the end; none if there is no circle."""
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_imports_form_a_circle():
    assert not circle(imports_of_modules())


def test_both_flavours_have_the_same_parts():
    """What is made of Lightning's classes, and what imports that, is executed for each flavour; in order."""
    tree = ast.parse((PACKAGE / "pytorch_lightning.py").read_text())
    [parts] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_PARTS"
    ]
    imports = imports_of_modules()
    for number, part in enumerate(parts):
        assert not imports[part] & set(parts[number:]), f"{part} comes before what it imports"
    for file in FILES:
        names = {name.split(".")[0] for name in modules_imported(ast.parse(file.read_text()))}
        if layer_of(unit_of(file)) < layer_of("pytorch_lightning") and "lightning" in names:
            assert name_of(file) in parts, f"{file.name} imports Lightning: add it to _PARTS in pytorch_lightning.py"


def modules_imported(tree):
    found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return found | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_every_package_is_shipped():
    """pyproject.toml lists the packages by hand, so that conf/ can be one of them."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {".".join(file.parent.relative_to(ROOT).parts) for file in FILES} | {"lightning_roundpipe.conf"}
    assert sorted(listed) == sorted(on_disk)
