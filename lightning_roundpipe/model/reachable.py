"""The plain values that a layer's code can read beside its arguments, parameters, buffers and the default generators.

A recomputation that differs from its forward depends on one that has changed. Comparing two snapshots shows which.
"""

from __future__ import annotations

import itertools
import random
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_roundpipe.model.attributes import Container, own_attributes

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH = 3
_ITEMS = 64
"""Most items of a container that are visited."""
_BYTES = 1 << 20
"""Larger arrays are not read."""
_VALUES = 5000
"""Most values of a snapshot. It only serves an error message."""


@dataclass(frozen=True)
class _StatefulValue:
    """Something that has a state rather than a value, such as a generator."""

    kind: str
    state: Any


def reachable_values(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Return values by the name under which a reader knows them, such as ``Block.config.scale``.

    Attributes of the modules themselves are left out, because a call records them. Reads ``__dict__`` only, so no
    property runs except ``global_step``. Another thread may change what is read meanwhile.
    """
    found: dict[str, Any] = {}
    walked: set[int] = set()
    code: set[int] = set()
    for module in modules:
        name = type(module).__name__
        forward = getattr(type(module), "forward", None)
        objects = dict(_objects_in(own_attributes(module), _DEPTH))
        looks = [_walk(name, objects, _DEPTH + 1, walked), _class_values(type(module))]
        if isinstance(forward, types.FunctionType) and id(forward.__code__) not in code:
            code.add(id(forward.__code__))
            looks.append(_around(forward, walked))
        try:
            found.update(itertools.islice(itertools.chain(*looks), _VALUES - len(found)))
        except RuntimeError:  # another thread changed a container's size during the walk
            continue
    return found


def _objects_in(values: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the objects among ``values`` and in their containers, which a call does not record, by name."""
    for name, value in list(values.items()):
        if isinstance(value, Container):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            inside = {f"{name}[{key!r}]": item for key, item in itertools.islice(items, _ITEMS)}
            yield from _objects_in(inside, depth - 1) if depth else ()
        elif not isinstance(value, (*_PLAIN, Tensor)):
            yield name, value


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the differences between two snapshots, as clauses of a sentence."""
    said = []
    for name, old in before.items():
        new = after.get(name, old)
        if old is new or _equal(old, new):
            continue
        if isinstance(new, _StatefulValue):
            said.append(f"{new.kind} {name} has another state")
        else:
            said.append(f"{name} changed from {_short(old)} to {_short(new)}")
    return said


def _walk(name: str, value: Any, depth: int, walked: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, _GENERATORS):
        yield name, _StatefulValue("generator", _state_of(value))
    elif isinstance(value, np.ndarray):
        if value.nbytes <= _BYTES and value.dtype != object:
            yield name, _StatefulValue("array", (value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes())))
    elif isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and not value.is_inference():
            yield name, _StatefulValue("tensor", (id(value), value._version))
    elif isinstance(value, itertools.count):
        yield name, _StatefulValue("counter", repr(value))
    elif depth and id(value) not in walked and hasattr(type(value), "global_step"):  # a LightningModule or a Trainer
        walked.add(id(value))
        yield f"{name}.global_step", value.global_step
        for key, item in list(vars(value).items()):
            if isinstance(item, _PLAIN) and not key.startswith("_"):
                yield f"{name}.{key}", item
    elif depth and id(value) not in walked and not isinstance(value, (nn.Module, type, types.ModuleType)):
        walked.add(id(value))
        if isinstance(value, Mapping):
            for key, item in itertools.islice(list(value.items()), _ITEMS):
                part = f"{name}.{key}" if isinstance(key, str) and depth > _DEPTH else f"{name}[{key!r}]"
                yield from _walk(part, item, depth - 1, walked)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for index, item in enumerate(itertools.islice(list(value), _ITEMS)):
                yield from _walk(f"{name}[{index}]", item, depth - 1, walked)
        elif isinstance(held := getattr(value, "__dict__", None), dict):
            for key, item in itertools.islice(list(held.items()), _ITEMS):
                yield from _walk(f"{name}.{key}", item, depth - 1, walked)


def _class_values(kind: type) -> Iterator[tuple[str, Any]]:
    for parent in kind.__mro__:
        if parent is nn.Module:
            return
        for key, value in vars(parent).items():
            if isinstance(value, _PLAIN) and not key.startswith("__"):
                yield f"class attribute {parent.__name__}.{key}", value


def _around(function: types.FunctionType, walked: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the globals that the function names, and the content of its closure."""
    names = function.__code__.co_names
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in ("torch", "numpy", "math"):
                held = vars(value)
                for inner in names:
                    if inner in held and isinstance(held[inner], _PLAIN):
                        yield f"{value.__name__}.{inner}", held[inner]
        elif name in function.__globals__ and not callable(value):
            yield from _walk(f"global {name}", value, _DEPTH - 1, walked)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        yield from _walk(f"enclosing variable {name}", value, _DEPTH - 1, walked)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return zlib.crc32(generator.get_state().numpy().tobytes())
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate())


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _short(value: Any) -> str:
    if isinstance(value, _StatefulValue):
        return f"another {value.kind}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def listed(said: Sequence[str]) -> str:
    """Return the first three clauses, and how many more there are."""
    more = len(said) - 3
    return "; ".join(said[:3]) + (f"; and {more} more" if more > 0 else "")
