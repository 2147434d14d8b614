"""Snapshots and restores the Python objects that user code may change.

A rehearsal of ``training_step`` must leave no trace, so `LeftBehind` first records everything that it can reach and
change:

    the modules' attributes and buffers ── containers, tensors, arrays, generators, helper objects in them ── [1]
    their hooks, and the functions of the modules' classes ── what closures, defaults and globals hold ── [2]
    the trainer, callbacks, data modules and the like ── what is small in them ── [5]
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
import threading
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from lightning_roundpipe.model.attributes import (
    STRUCTURE,
    Container,
    bits,
    frozen,
    own_attributes,
    refill,
    same,
    sparse_parts,
)

_LIBRARIES = (sys.stdlib_module_names | {"builtins", "torch", "numpy", "lightning", "pytorch_lightning"}) | {
    "lightning_fabric", "lightning_utilities", "lightning_roundpipe", "torchmetrics", "_pytest", "pytest",
}  # fmt: skip
"""Packages whose objects are not walked, except for the types named in `_kind`."""
_NAMESPACES = ("SimpleNamespace", "Namespace")
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_USUAL_LEAVES = frozenset({bool, int, float, str, type(None)})
_USUAL_CONTAINERS = frozenset({dict, list, set, OrderedDict})
"""Most of what a module holds, found by a look at its type."""
_HOOKS = frozenset(name for name in nn.Module().__dict__ if "_hooks" in name)
_CURSORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), itertools.count)
"""Iterators whose shallow copy advances independently; others are copied deeply."""
_MANY = 100_000
"""A container with more items is taken for data: it is not walked, and restoring it only removes appended items."""
_TENSOR_BYTES = 1 << 30
"""Limit for the copies of tensors, parameters aside, in bytes."""
_SMALL_BYTES = 1 << 20
"""Around the module, larger tensors and arrays are taken for data."""
_FEW_OBJECTS = 2_000
"""Of an object around the module that reaches more, only numbers and lengths are taken."""

ABSENT = object()
_SAME = object()

MODULES, SETTINGS, ELSEWHERE = "on modules", "in settings", "elsewhere"
"""Where something is reached first: from modules, from schedulers, the trainer and the settings of optimizers, or from
other objects (callbacks, data sets), functions and classes."""


class LeftBehind:
    """A snapshot of what is reachable from a module and some other objects.

    Args:
        root: the module whose submodules, buffers and hooks to record.
        others: further objects that its code may change, by name; see `walk_around`.

    Attributes:
        stuck: what cannot be restored after use, mostly paths; empty if everything can.
    """

    def __init__(self, root: nn.Module, others: Iterable[tuple[str, Any]] = ()) -> None:
        self._modules = list(root.named_modules())
        self._others = list(others)
        self._code = list(code_of(root))
        self.stuck: list[str] = []
        self._put: list[Callable[[], object]] = []
        self._copies: dict[int, tuple[Any, Callable[[Any], Any], Any]] = {}
        """By id of an iterator: the iterator, the function that copies it, and an unused copy."""
        self._marks: dict[int, tuple[Any, ...]] = {}
        """By id of a tensor: the tensor (kept alive, so that the id stays its own), its address and its version."""
        self._kept: dict[int, Tensor] = {}
        """By id of a tensor: its values before. A write through ``.data`` or ``numpy()`` increments no version."""
        self._bytes = 0
        self._before: dict[str, dict[str, Any]] = {MODULES: {}, SETTINGS: {}, ELSEWHERE: {}}
        for where, path, value, kind in self._walk():
            self._take(self._before[where], path, value, kind)
        if self._bytes > _TENSOR_BYTES:
            self.stuck.append(f"{self._bytes / 2**30:.1f} GiB of tensors that are no parameters")

    def _walk(self) -> Iterator[tuple[str, str, Any, str]]:
        """Yield where something is reached, and what `walk` yields."""
        seen: dict[int, Any] = {}
        later: list[tuple[str, Any]] = []
        yield from ((MODULES, *found) for found in walk(self._modules, seen, later))
        for other in self._others:
            where = SETTINGS if isinstance(other[1], (dict, Namespace, LRScheduler)) else ELSEWHERE
            yield from ((where, *found) for found in walk_around([other], seen, later))
        alike: Counter[str] = Counter()
        for path, value, kind in walk([*later, *self._code], seen):
            alike[path] += 1  # variables of several functions may have one name
            yield ELSEWHERE, path if alike[path] == 1 else f"{path} ({alike[path]})", value, kind

    # -- before -------------------------------------------------------------------------------------------------------

    def _take(self, before: dict[str, Any], path: str, value: Any, kind: str) -> None:
        now = functools.partial(_stands_for, self._copies)  # a method would be a reference cycle with all the copies
        if kind == "leaf":
            before[path] = value
        elif kind == "tensor":
            place = value.data_ptr() if value.layout is torch.strided else 0
            self._marks[id(value)] = (value, place, version(value), [part.clone() for part in sparse_parts(value)])
            before[path] = value
            self._bytes += sum(part.nbytes for part in sparse_parts(value) or [value])
            if self._bytes <= _TENSOR_BYTES:
                self._kept[id(value)] = kept = value.detach().clone()
                self._put.append(_tensor_back(value, kept))
        elif kind == "iterator":
            self._take_iterator(before, path, value)
        else:
            if kind == "array":
                before[path] = value.copy()
            elif kind == "generator":
                [before[path]] = state_of(value, kind)
            elif kind == "many":
                before[path] = len(value)
            self._put.append(put_back_of(value, kind, now))

    def _take_iterator(self, before: dict[str, Any], path: str, value: Any) -> None:
        how = copy.copy if isinstance(value, _CURSORS) else copy.deepcopy
        try:
            self._copies[id(value)] = (value, how, how(value))
        except Exception:
            self.stuck.append(path)
            return
        before[path] = _position(value)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def changes(self) -> dict[str, dict[str, Any]]:
        """Return what differs from before [3]: on `MODULES`, in `SETTINGS`; of numbers, lengths, tensors `ELSEWHERE`.

        By path, the value now, or `ABSENT`. Tensors are returned as copies on the host, numeric arrays as tensors, and
        other state as text or a length.
        """
        found: dict[str, dict[str, Any]] = {place: {} for place in self._before}
        seen: dict[str, set[str]] = {place: set() for place in self._before}
        for place, path, value, kind in self._walk():
            seen[place].add(path)
            if place == ELSEWHERE and kind not in ("many", "tensor") and not _is_number(value):
                continue
            before = self._before[place].get(path, ABSENT)
            if (now := self._change(before, value, kind)) is not _SAME:
                found[place][path] = now
        for place, known in self._before.items():
            gone = {p for p in known.keys() - seen[place] if place != ELSEWHERE or _is_number(known[p])}
            found[place] |= dict.fromkeys(sorted(gone), ABSENT)
        return found

    def _change(self, before: Any, value: Any, kind: str) -> Any:
        """Return what stands for ``value`` if it differs from before; else `_SAME`."""
        if kind == "leaf":
            return value if before is ABSENT or type(before) is not type(value) or _differ(before, value) else _SAME
        if kind == "tensor":
            mark = self._marks.get(id(value))
            same_memory = mark is not None and (
                mark[1] == value.data_ptr()
                if value.layout is torch.strided
                else bool(mark[3]) and all(map(torch.equal, mark[3], sparse_parts(value)))
            )
            if before is not value or not same_memory or mark is None or mark[2] != version(value):
                return value.detach().cpu().clone()
            if (kept := self._kept.get(id(value))) is not None and not _same_bits(value, kept):
                return value.detach().cpu().clone()
        elif kind == "array":
            if before is ABSENT or before.shape != value.shape or not np.array_equal(before, value):
                return torch.from_numpy(value.copy()) if value.dtype.kind in "fiub" else repr(value)
        elif kind in ("generator", "iterator"):
            if (now := state_of(value, kind)[0]) != before:
                return now
        elif kind == "many" and len(value) != before:
            return len(value)
        return _SAME

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
        return _tensor_back(value, value.detach().clone())
    if kind == "array":
        kept = value.copy()
        return lambda: np.copyto(value, kept)
    if kind == "container" and not value and type(value) in _USUAL_CONTAINERS:
        return value.clear  # type: ignore[no-any-return]
    if kind == "generator":
        get, give = _STATES[type(value)]
        state = get(value)
        return lambda: give(value, state)
    if kind == "cell":
        held = value.cell_contents if _filled(value) else ABSENT
        return lambda: _fill(value, now(held))
    if kind == "many":
        return _length_back(value)
    if kind == "globals":
        return _names_back(value.held, value.space.__setitem__, value.space.__delitem__, now)
    if kind == "class":
        own = functools.partial(_class_attributes, value)
        return _names_back(own, functools.partial(setattr, value), functools.partial(delattr, value), now)
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
    """A snapshot of the attributes of some modules, without buffers and without the contents of helper objects.

    Hooks are left out: code that registers them once, as Hugging Face models do that return hidden states, notes in
    another module that it has.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held = [(m, {k: (v, frozen(v)) for k, v in _without_hooks(m).items()}) for m in modules]

    def put_back(self) -> None:
        for module, held in self._held:
            space = module.__dict__
            for name in _without_hooks(module).keys() - held.keys():
                del space[name]
            for name, (value, contents) in held.items():
                if isinstance(value, Container) and not same(value, contents):
                    refill(value, contents, nested=False)
                if name != "forward" and space.get(name, ABSENT) is not value:
                    space[name] = value


def _without_hooks(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in own_attributes(module).items() if name not in _HOOKS}


# -- walking -----------------------------------------------------------------------------------------------------------


def walk(
    roots: Iterable[tuple[str, Any]], seen: dict[int, Any], later: list[tuple[str, Any]] | None = None
) -> Iterator[tuple[str, Any, str]]:
    """Yield everything reachable that may change, as path, object and kind; each object once.

    Args:
        roots: the objects to start from, with their paths.
        seen: the objects to leave out, by id; what is yielded is added, and so kept alive: no id is used twice.
        later: takes the functions, methods and classes, with what hooks and closures keep. None: they are followed.
    """
    waiting = list(roots)
    given = {id(root) for _, root in waiting}
    waiting.reverse()
    while waiting:
        path, value = waiting.pop()
        if type(value) in _USUAL_LEAVES or isinstance(value, _IMMUTABLE):
            yield path, value, "leaf"
            continue
        # A check for nn.Parameter runs Python, so it comes after that for tensors.
        if id(value) in seen or (isinstance(value, Tensor) and isinstance(value, nn.Parameter)):
            continue
        kind = _kind(value)
        if later is not None and kind in ("function", "method", "class"):
            later.append((path, value))
            continue
        seen[id(value)] = value
        if kind == "nothing":
            continue
        if kind not in ("tuple", "function", "method"):
            yield path, value, kind
        if isinstance(value, nn.Module) and id(value) not in given:  # in a container: its own are no roots
            waiting += [(f"{path}.{name}", module) for name, module in value._modules.items() if module is not None]
        # Depth first: an object's path must not depend on the size of others.
        if kind != "container" or len(value) or not isinstance(value, dict):  # a module has a dozen empty dicts
            waiting += reversed(list(_inside(path, value, kind)))


def walk_around(
    roots: Iterable[tuple[str, Any]], seen: dict[int, Any], later: list[tuple[str, Any]]
) -> Iterator[tuple[str, Any, str]]:
    """Yield what `walk` does, of objects around the module that may hold data sets and the like: what is small [5].

    The arguments are those of `walk`; only schedulers' functions are followed later.
    """
    for path, root in roots:
        known, functions = dict(seen), later if isinstance(root, LRScheduler) else []
        found = list(itertools.islice(walk([(path, root)], known, functions), _FEW_OBJECTS))
        if len(found) < _FEW_OBJECTS:
            seen.update(known)
            yield from (item for item in found if _is_small(*item[1:]))
        elif id(root) not in seen:
            seen[id(root)] = root
            yield path, root, _kind(root)
            for inner, value in _inside(path, root, _kind(root)):
                if isinstance(value, _IMMUTABLE):
                    yield inner, value, "leaf"
                elif isinstance(value, (list, dict, set, deque)) and id(value) not in seen:
                    yield inner, value, "many"


def _is_small(value: Any, kind: str) -> bool:
    if kind in ("tensor", "array"):
        return bool(value.nbytes <= _SMALL_BYTES)
    return kind != "iterator" or isinstance(value, _CURSORS)


def _kind(value: Any) -> str:
    if type(value) in _USUAL_CONTAINERS:  # most of what a module holds
        return "many" if len(value) > _MANY else "container"
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
    if isinstance(value, Namespace):
        return "globals"
    if isinstance(value, types.GeneratorType) or (isinstance(value, Iterator) and not isinstance(value, io.IOBase)):
        return "iterator"
    if isinstance(value, type):
        return "nothing" if _is_library(value.__module__) else "class"
    if isinstance(value, (types.ModuleType, io.IOBase, threading.Thread)):
        return "nothing"  # a thread changes its attributes itself
    if hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        kind = type(value)
        known = not _is_library(kind.__module__) or kind.__name__ in _NAMESPACES
        return "object" if known or isinstance(value, LRScheduler) else "nothing"
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
    for name in _slots(type(value)):  # type: ignore[arg-type]
        if hasattr(value, name):
            found[name] = getattr(value, name)
    return found


@functools.lru_cache(1024)
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of a type's slots."""
    found: list[str] = []
    for owner in kind.__mro__:
        slots = owner.__dict__.get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in found if not name.startswith("__"))


class Namespace:
    """Names in a dict that holds variables.

    Args:
        space: the dict.
        names: those that a function refers to; None for all.
        without: those of all to leave out.
    """

    def __init__(self, space: dict[str, Any], names: list[str] | None = None, without: Sequence[str] = ()) -> None:
        self.space, self.names, self.without = space, names, without

    def held(self) -> dict[str, Any]:
        """Return those that are bound to possible state, by name."""
        names = [name for name in self.space if name not in self.without] if self.names is None else self.names
        return {name: self.space[name] for name in names if _is_state(self.space.get(name, os))}


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function keeps: closure cells, defaults, attributes and globals [2]."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        if name != "__class__":
            yield name, cell
    kept: dict[Any, Any] = {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {})}
    for key, held in kept.items():
        if not isinstance(held, _IMMUTABLE):
            yield f"{path}.__defaults__[{key!r}]", held
    yield path, function.__dict__
    names = [n for n in code.co_names if _is_state(function.__globals__.get(n))]
    if names:
        yield "", Namespace(function.__globals__, names)


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


def version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same_bits(tensor: Tensor, kept: Tensor) -> bool:
    """Return whether a tensor holds the values ``kept``, as far as they can be compared without their version."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return True
    return tensor.shape == kept.shape and tensor.dtype is kept.dtype and torch.equal(bits(tensor.detach()), bits(kept))


def _tensor_back(tensor: Tensor, kept: Tensor) -> Callable[[], None]:
    before = version(tensor)
    where = tensor.data_ptr() if tensor.layout is torch.strided else 0

    def put() -> None:
        moved = tensor.layout is torch.strided and tensor.data_ptr() != where
        if before >= 0 and not moved and version(tensor) == before and _same_bits(tensor, kept):
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


def _names_back(
    read: Callable[[], dict[str, Any]], put: Callable[[str, Any], object], remove: Callable[[str], object],
    now: Callable[[Any], Any],
) -> Callable[[], None]:  # fmt: skip
    held = read()

    def put_back() -> None:
        there = read()
        for name in there.keys() - held.keys():
            remove(name)
        for name, item in held.items():
            if there.get(name, ABSENT) is not (item := now(item)):
                put(name, item)

    return put_back


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


def _length_back(value: Any) -> Callable[[], None]:
    length, members = len(value), set(value) if isinstance(value, set) else ()

    def put() -> None:
        if isinstance(value, list):
            del value[length:]
        elif isinstance(value, set):
            value.intersection_update(members)
        else:
            while len(value) > length:
                value.popitem() if isinstance(value, dict) else value.pop()

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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _differ(a: Any, b: Any) -> bool:
    return bool(a != b) and not (a != a and b != b)
