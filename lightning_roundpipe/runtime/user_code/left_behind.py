"""Snapshots and restores the Python objects that user code may change.

A rehearsal of ``training_step`` must leave no trace, so `LeftBehind` first records everything that it can reach and
change:

    the modules' attributes and buffers ── containers, tensors, arrays, generators, helper objects in them ── [1]
    their hooks, and the functions of the modules' classes ── what closures and globals hold ── [2]
    afterwards ── report what differs from before, by path ── [3]   and restore everything in place ── [4]

Objects keep their identity, so other references to them find the old state as well. Parameters are never copied here;
`rehearsal.Written` copies those that user code writes to. `LeftBehind.stuck` names what cannot be restored: iterators
that cannot be copied, such as generators, and more than 1 GiB of tensors. Open files are ignored.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import os
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_roundpipe.model.attributes import STRUCTURE, Container, frozen, own_attributes, refill, same

_LIBRARIES = (sys.stdlib_module_names | {"builtins", "torch", "numpy", "lightning", "pytorch_lightning"}) | {
    "lightning_fabric", "lightning_utilities", "lightning_roundpipe", "torchmetrics", "_pytest", "pytest",
}  # fmt: skip
"""Packages whose objects are not walked, except for the types named in `_kind`."""
_NAMESPACES = ("SimpleNamespace", "Namespace")
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CURSORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), itertools.count)
"""Iterators whose shallow copy advances independently; others are copied deeply."""
_MANY = 100_000
"""A container with more items is taken for data: it is not walked, and restoring it only removes appended items."""
_TENSOR_BYTES = 1 << 30
"""Limit for the copies of tensors, parameters aside, in bytes."""

ABSENT = object()


class LeftBehind:
    """A snapshot of what is reachable from a module and some other objects.

    Args:
        root: the module whose submodules, buffers and hooks to record.
        others: further objects that its code may change, by name.

    Attributes:
        stuck: what cannot be restored after use, mostly paths; empty if everything can.
    """

    def __init__(self, root: nn.Module, others: Iterable[tuple[str, Any]] = ()) -> None:
        self._modules = list(root.named_modules())
        self._others = [*others, *code_of(root)]
        self.stuck: list[str] = []
        self._put: list[Callable[[], object]] = []
        self._copies: dict[int, tuple[Any, Callable[[Any], Any], Any]] = {}
        """By id of an iterator: the iterator, the function that copies it, and an unused copy."""
        self._marks: dict[int, tuple[Any, ...]] = {}
        """By id of a tensor: the tensor (kept alive, so that the id stays its own), its address and its version."""
        self._bytes = 0
        self._before: dict[str, Any] = {}
        mine = {path for path, _, _ in walk(self._modules, hooks=False)}
        for path, value, kind in walk([*self._modules, *self._others]):
            self._take(path, value, kind)
        self._outside = self._before.keys() - mine
        """Paths that are restored and not compared: hooks, closures and globals."""
        if self._bytes > _TENSOR_BYTES:
            self.stuck.append(f"{self._bytes / 2**30:.1f} GiB of tensors that are no parameters")

    # -- before -------------------------------------------------------------------------------------------------------

    def _take(self, path: str, value: Any, kind: str) -> None:
        now = functools.partial(_stands_for, self._copies)  # a method would be a reference cycle with all the copies
        if kind == "leaf":
            self._before[path] = value
        elif kind == "tensor":
            self._marks[id(value)] = (value, value.data_ptr() if value.layout is torch.strided else 0, _version(value))
            self._before[path] = value
            self._bytes += value.nbytes
            if self._bytes <= _TENSOR_BYTES:
                self._put.append(put_back_of(value, kind))
        elif kind == "iterator":
            self._take_iterator(path, value)
        else:
            if kind == "array":
                self._before[path] = value.copy()
            elif kind == "generator":
                self._before[path] = repr(_STATES[type(value)][0](value))
            elif kind == "many":
                self._before[path] = len(value)
            self._put.append(put_back_of(value, kind, now))

    def _take_iterator(self, path: str, value: Any) -> None:
        how = copy.copy if isinstance(value, _CURSORS) else copy.deepcopy
        try:
            self._copies[id(value)] = (value, how, how(value))
        except Exception:
            self.stuck.append(path)
            return
        self._before[path] = _position(value)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def changes(self) -> dict[str, Any]:
        """Return what differs from before on the modules [3]: by path, the value now, or `ABSENT`.

        Tensors are returned as copies on the host, numeric arrays as tensors, and other state as text or a length.
        """
        found: dict[str, Any] = {}
        seen = set()
        for path, value, kind in walk(self._modules, hooks=False):
            seen.add(path)
            before = self._before.get(path, ABSENT)
            if kind == "leaf":
                if before is ABSENT or type(before) is not type(value) or _differ(before, value):
                    found[path] = value
            elif kind == "tensor":
                mark = self._marks.get(id(value))
                same_memory = mark is not None and value.layout is torch.strided and mark[1] == value.data_ptr()
                if before is not value or not same_memory or mark is None or mark[2] != _version(value):
                    found[path] = value.detach().cpu().clone()
            elif kind == "array":
                if before is ABSENT or before.shape != value.shape or not np.array_equal(before, value):
                    found[path] = torch.from_numpy(value.copy()) if value.dtype.kind in "fiub" else repr(value)
            elif kind == "generator":
                now = repr(_STATES[type(value)][0](value))
                if now != before:
                    found[path] = now
            elif kind == "iterator":
                if (position := _position(value)) != before:
                    found[path] = position
            elif kind == "many" and len(value) != before:
                found[path] = len(value)
        gone = (path for path in self._before if path not in seen and path not in self._outside)
        return found | dict.fromkeys(gone, ABSENT)

    def put_back(self) -> None:
        """Restore everything [4]."""
        for put in self._put:
            put()


def put_back_of(value: Any, kind: str, now: Callable[[Any], Any] = lambda item: item) -> Callable[[], object]:
    """Return a function that restores the present state of ``value``.

    Args:
        value: an object that `walk` yields.
        kind: its kind, as `walk` names it.
        now: maps an item of ``value`` to what to put in its place when it is restored.
    """
    if kind == "tensor":
        return _tensor_back(value)
    if kind == "array":
        kept = value.copy()
        return lambda: np.copyto(value, kept)
    if kind == "generator":
        get, give = _STATES[type(value)]
        state = get(value)
        return lambda: give(value, state)
    if kind == "cell":
        held = value.cell_contents if _filled(value) else ABSENT
        return lambda: _fill(value, now(held))
    if kind == "many":
        length = len(value)
        return lambda: value.__delitem__(slice(length, None)) if isinstance(value, list) else None
    if kind == "globals":
        return _globals_back(value, now)
    if kind == "class":
        return _class_back(value, now)
    return _attributes_back(value, now) if kind == "object" else _container_back(value, now)


def names_in(value: Any, kind: str) -> dict[str, Any] | None:
    """Return what an object, a class or a namespace holds, by name; None for other kinds of `walk`."""
    if kind == "globals":
        return value.held()  # type: ignore[no-any-return]
    return _attributes(value) if kind == "object" else _class_attributes(value) if kind == "class" else None


def state_of(value: Any, kind: str) -> list[Any]:
    """Return what a cell holds, or the state of a generator or iterator."""
    if kind == "cell":
        return [value.cell_contents] if _filled(value) else []
    return [repr(_STATES[type(value)][0](value)) if kind == "generator" else _position(value)]


class SavedAttributes:
    """A snapshot of the attributes of some modules, without buffers and without the contents of helper objects."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held = [(m, {k: (v, frozen(v)) for k, v in own_attributes(m).items()}) for m in modules]

    def put_back(self) -> None:
        for module, held in self._held:
            space = module.__dict__
            for name in own_attributes(module).keys() - held.keys():
                del space[name]
            for name, (value, contents) in held.items():
                if isinstance(value, Container) and not same(value, contents):
                    refill(value, contents, nested=False)
                if name != "forward" and space.get(name, ABSENT) is not value:
                    space[name] = value


# -- walking -----------------------------------------------------------------------------------------------------------


def walk(roots: Iterable[tuple[str, Any]], *, hooks: bool = True) -> Iterator[tuple[str, Any, str]]:
    """Yield everything reachable that may change, as path, object and kind; each object once.

    Args:
        roots: the objects to start from, with their paths.
        hooks: whether to follow functions, methods and classes, and so what hooks and closures keep.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used twice
    waiting = deque(roots)
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, _IMMUTABLE):
            yield path, value, "leaf"
            continue
        # A check for nn.Parameter runs Python, so it comes after that for tensors.
        if id(value) in seen or (isinstance(value, Tensor) and isinstance(value, nn.Parameter)):
            continue
        seen[id(value)] = value
        kind = _kind(value)
        if kind == "nothing" or (not hooks and kind in ("function", "method", "class")):
            continue
        if kind not in ("tuple", "function", "method"):
            yield path, value, kind
        # Depth first: an object's path must not depend on the size of others.
        waiting.extendleft(reversed(list(_inside(path, value, kind))))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, np.ndarray):
        return "array" if value.dtype.kind != "O" and value.flags.writeable else "nothing"
    if type(value) in _STATES:
        return "generator"
    if isinstance(value, nn.Module):
        return "object"
    if isinstance(value, tuple):
        return "tuple"
    if isinstance(value, (list, dict, set, deque)):
        return "many" if len(value) > _MANY else "container"
    if isinstance(value, types.CellType):
        return "cell"
    if isinstance(value, types.FunctionType):
        return "function" if not _is_library(value.__module__) else "nothing"
    if isinstance(value, types.MethodType):
        return "method"
    if isinstance(value, _Globals):
        return "globals"
    if isinstance(value, types.GeneratorType) or (isinstance(value, Iterator) and not isinstance(value, io.IOBase)):
        return "iterator"
    if isinstance(value, type):
        return "nothing" if _is_library(value.__module__) else "class"
    if isinstance(value, (types.ModuleType, io.IOBase)):
        return "nothing"
    if hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        kind = type(value)
        known = not _is_library(kind.__module__) or kind.__name__ in _NAMESPACES
        return "object" if known or isinstance(value, torch.optim.lr_scheduler.LRScheduler) else "nothing"
    return "nothing"


def _inside(path: str, value: Any, kind: str) -> Iterator[tuple[str, Any]]:
    if kind == "object":
        lightning = isinstance(value, nn.Module)
        for name, item in _attributes(value).items():
            if lightning and name in ("_parameters", "_modules"):
                continue
            inner = item.items() if lightning and name == "_buffers" else ((name, item),)
            for key, held in inner:
                yield f"{path}.{key}" if path else key, held
        yield type(value).__name__, type(value)
    elif kind == "class":
        for name, held in _class_attributes(value).items():
            yield f"{path}.{name}", held.__func__ if isinstance(held, (staticmethod, classmethod)) else held
        yield from ((base.__name__, base) for base in value.__bases__)
    elif kind == "container" and isinstance(value, dict):
        for key, item in list(value.items()):
            yield f"{path}[{key!r}]", item
    elif kind == "tuple" or (kind == "container" and isinstance(value, (list, deque))):
        if kind == "container":
            yield f"len({path})", len(value)
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
    elif kind == "container":
        yield f"{path}", repr(sorted(map(repr, value)))
    elif kind == "cell" and _filled(value):
        yield path, value.cell_contents
    elif kind == "globals":
        yield from ((f"{path}{name}", held) for name, held in value.held().items())
    elif kind == "function":
        yield from _of_function(path, value)
    elif kind == "method":
        yield path, value.__self__
        yield path, value.__func__


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for owner in type(value).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


class _Globals:
    """The names in a module's namespace that a function refers to."""

    def __init__(self, names: list[str], space: dict[str, Any]) -> None:
        self.names, self.space = names, space

    def held(self) -> dict[str, Any]:
        """Return those that are bound to possible state, by name."""
        return {name: self.space[name] for name in self.names if _is_state(self.space.get(name, os))}


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function keeps: closure cells, attributes and globals [2]."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        if name != "__class__":
            yield name, cell
    yield path, function.__dict__
    names = [n for n in code.co_names if _is_state(function.__globals__.get(n))]
    if names:
        yield "", _Globals(names, function.__globals__)


def _is_state(value: Any) -> bool:
    """Return whether a global may be or hold state of user code: modules and built-in functions do not."""
    return not isinstance(value, (types.ModuleType, types.BuiltinFunctionType))


def _class_attributes(owner: type) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if not name.startswith("__")}


def code_of(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the class of each submodule, by name; `walk` follows the functions in them."""
    yield from ((kind.__name__, kind) for kind in {type(module): None for module in root.modules()})


def _is_library(name: str | None) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES or str(name).startswith("transformers.")


# -- kinds -------------------------------------------------------------------------------------------------------------

_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    np.random.Generator: (
        lambda g: copy.deepcopy(g.bit_generator.state),
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
    random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
}


def _stands_for(copies: dict[int, tuple[Any, Callable[[Any], Any], Any]], value: Any) -> Any:
    """Return what to restore in place of ``value``: for an iterator a fresh copy, else ``value`` itself."""
    if (known := copies.get(id(value))) is None:
        return value
    return known[1](known[2])


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _tensor_back(tensor: Tensor) -> Callable[[], None]:
    kept, version = tensor.detach().clone(), _version(tensor)
    where = tensor.data_ptr() if tensor.layout is torch.strided else 0

    def put() -> None:
        moved = tensor.layout is torch.strided and tensor.data_ptr() != where
        if version >= 0 and not moved and _version(tensor) == version:
            return
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if tensor.shape == kept.shape:
                tensor.detach().copy_(kept)
            else:
                tensor.data = kept.clone()

    return put


def _attributes_back(value: Any, now: Callable[[Any], Any]) -> Callable[[], None]:
    held = _attributes(value)
    parts = {name: dict(held[name]) for name in STRUCTURE if isinstance(value, nn.Module) and name in held}

    def put() -> None:
        space = getattr(value, "__dict__", {})
        for name in space.keys() - held.keys():
            del space[name]
        for name, item in held.items():
            item = now(item)
            if name in space or name not in _attributes(value):
                if space.get(name, ABSENT) is not item:
                    space[name] = item
            elif getattr(value, name) is not item:
                object.__setattr__(value, name, item)
        for name, items in parts.items():
            if [*map(id, space[name].values())] != [*map(id, items.values())]:
                space[name].clear()
                space[name].update(items)

    return put


def _globals_back(value: _Globals, now: Callable[[Any], Any]) -> Callable[[], None]:
    held = value.held()

    def put() -> None:
        for name in value.held().keys() - held.keys():
            del value.space[name]
        value.space.update({name: now(item) for name, item in held.items()})

    return put


def _class_back(value: type, now: Callable[[Any], Any]) -> Callable[[], None]:
    held = _class_attributes(value)

    def put() -> None:
        there = _class_attributes(value)
        for name in there.keys() - held.keys():
            delattr(value, name)
        for name, item in held.items():
            if there.get(name, ABSENT) is not (item := now(item)):
                setattr(value, name, item)

    return put


def _container_back(value: Any, now: Callable[[Any], Any]) -> Callable[[], None]:
    held = list(value.items()) if isinstance(value, dict) else list(value)

    def put() -> None:
        current = list(value.items()) if isinstance(value, dict) else list(value)
        wanted = [(k, now(v)) for k, v in held] if isinstance(value, dict) else [now(v) for v in held]
        if len(current) == len(wanted) and all(_is_item(a, b) for a, b in zip(current, wanted, strict=True)):
            return
        value.clear()
        if isinstance(value, (dict, set)):
            value.update(wanted)
        else:
            value.extend(wanted)

    return put


def _is_item(a: Any, b: Any) -> bool:
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _fill(cell: types.CellType, value: Any) -> None:
    if value is ABSENT:
        if _filled(cell):
            del cell.cell_contents
    else:
        cell.cell_contents = value


def _position(iterator: Any) -> str:
    """Return text for the position of an iterator; empty if it does not tell."""
    try:
        return repr(iterator) if isinstance(iterator, itertools.count) else repr(copy.copy(iterator).__reduce__()[2:])
    except Exception:
        return ""


def _differ(a: Any, b: Any) -> bool:
    return bool(a != b) and not (a != a and b != b)
