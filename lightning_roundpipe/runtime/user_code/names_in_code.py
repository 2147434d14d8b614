"""Finds the names that user code reads, without running it.

Microbatches set a layer's attribute one after another, and hooks find the last one's value. That matters only where a
hook reads the attribute, and nothing shows a read of an attribute when it happens. So the code of the hooks tells which
names it reads, with the code of all functions that it may call: those that have one of these names in what the code can
reach. Names that code only sets do not count.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ANY = "*"
"""Stands for all names: the code computes those that it reads."""

_COMPUTED = {"getattr", "attrgetter", "vars", "__dict__", "__getstate__", "dir", "eval", "exec", "deepcopy", "dumps"}
_LIBRARIES = frozenset(sys.stdlib_module_names - {"__main__"})


def names_read(functions: Iterable[Any], objects: Iterable[Any]) -> frozenset[str]:
    """Return the names that ``functions`` read, and those that the functions they may call do.

    Installed packages are left out, unless one of ``functions`` is theirs.

    Args:
        functions: functions or methods.
        objects: what these are given or belong to, and classes of it, where functions may be found by name.
    """
    waiting = [*map(_function_of, functions)]
    own = {_package_of(function) for function in waiting}
    waiting += objects
    names, spaces, seen = {"__init__", "__call__"}, dict[int, Mapping[str, Any]](), dict[int, Any]()
    while waiting:
        for value in waiting:
            seen[id(value)] = value
            if isinstance(value, types.FunctionType):
                names.update(_read_by(value.__code__))
            spaces.update((id(owner), space) for owner, space in _spaces_of(value))
        held = (_function_of(space[name]) for space in spaces.values() for name in names & space.keys())
        found = {id(value): value for value in held if id(value) not in seen}
        waiting = [v for v in found.values() if _package_of(v) in own or not _is_installed(_package_of(v))]
    return frozenset(names | {ANY} if names & _COMPUTED else names)


def _function_of(value: Any) -> Any:
    """Return the function of a method, a property or a partial function, else ``value``."""
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value.func if isinstance(value, functools.partial) else value


def _package_of(value: Any) -> str:
    """Return the package that the code of ``value`` belongs to."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    has_code = isinstance(value, (type, types.FunctionType))
    return str((value if has_code else type(value)).__module__).partition(".")[0]


def _is_installed(package: str) -> bool:
    return package in _LIBRARIES or "-packages" in (getattr(sys.modules.get(package), "__file__", None) or "")


def _spaces_of(value: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield what holds the names that the function ``value`` reads, or that code reads of ``value``, and its items."""
    if isinstance(value, types.FunctionType):
        yield value.__globals__, value.__globals__
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield value, {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    else:
        for kind in (value if isinstance(value, type) else type(value)).__mro__:
            yield kind, vars(kind)
        yield value, getattr(value, "__dict__", {})


def _read_by(code: types.CodeType) -> Iterator[str]:
    """Yield the names that ``code``, or a function in it, reads."""
    for each in dis.get_instructions(code):
        if each.opname.startswith("LOAD_") and each.opname != "LOAD_CONST" and isinstance(each.argval, str):
            yield each.argval
        elif each.opname == "IMPORT_NAME" and not _is_installed(each.argval.partition(".")[0]):
            yield ANY  # of what is imported there, nothing else tells
    for held in code.co_consts:
        if isinstance(held, types.CodeType):
            yield from _read_by(held)
