"""Rebinds values that refer to a layer's modules and parameters to those of its replica.

A layer reaches its parts not only through submodules, but also through bound methods, closures, partials, hooks and
containers. If these were left as they are, a worker would compute with the masters, and their gradients would be lost.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

_SHARED = (str, int, float, type(None), type, types.ModuleType, types.BuiltinFunctionType)


class Rebinder:
    """Translates values by a memo of ids. Values that hold nothing of the layer are returned as they are."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._functions: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()

    def __call__(self, value: Any) -> Any:
        """Return ``value`` with the layer's modules and parameters replaced, also inside methods and containers."""
        if isinstance(value, _SHARED) or id(value) in self._open:
            return value
        if isinstance(value, nn.Module) or (isinstance(value, Tensor) and isinstance(value, nn.Parameter)):
            return self._memo.get(id(value), value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        self._open.add(id(value))
        try:
            return self._inside(value)
        finally:
            self._open.discard(id(value))

    def _inside(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            owner, method = self(value.__self__), self(value.__func__)
            changed = owner is not value.__self__ or method is not value.__func__
            return types.MethodType(method, owner) if changed else value
        if isinstance(value, functools.partial):
            args, keywords = self._all(value.args), self(value.keywords)
            function = self(value.func)
            if function is value.func and args is None and keywords is value.keywords:
                return value
            return functools.partial(function, *(value.args if args is None else args), **keywords)
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return self._sequence(value)
        if type(value) is weakref.ref:
            target = value()
            return value if self._memo.get(id(target), target) is target else weakref.ref(self._memo[id(target)])
        return self._object(value)

    def _all(self, values: Iterable[Any]) -> list[Any] | None:
        """Return ``values`` translated; None if none of them changed."""
        old = list(values)
        new = [self(v) for v in old]
        return new if any(map(operator.is_not, new, old)) else None

    def _dict(self, value: dict[Any, Any]) -> Any:
        keys, values = self._all(value), self._all(value.values())
        if keys is None and values is None:
            return value
        fresh = copy.copy(value)
        fresh.clear()
        fresh.update(zip(keys or value, values or value.values(), strict=True))
        return fresh

    def _sequence(self, value: Any) -> Any:
        if (items := self._all(value)) is None:
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)  # of a named tuple

    def _function(self, function: Any) -> Any:
        """Translate a function whose closure or defaults hold parts of the layer. A compiled one is unwrapped."""
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None and (eager := self(original)) is not original:
            return eager
        known = self._functions.get(id(function))
        if known is not None:
            return known[1]
        self._functions[id(function)] = (function, function)  # a closure may hold its own function
        cells = [_Cell(cell) for cell in function.__closure__ or ()]
        contents = self._all(c.contents for c in cells)
        defaults = self._all(function.__defaults__ or ())
        keywords = self(function.__kwdefaults__)
        if contents is None and defaults is None and keywords is function.__kwdefaults__:
            return function
        closure = tuple(c.holding(new) for c, new in zip(cells, contents or [c.contents for c in cells], strict=True))
        fresh = types.FunctionType(
            function.__code__, function.__globals__, function.__name__,
            function.__defaults__ if defaults is None else tuple(defaults), closure,
        )  # fmt: skip
        fresh.__kwdefaults__ = keywords
        fresh.__dict__.update(self(function.__dict__))
        self._functions[id(function)] = (function, fresh)
        return fresh

    def _object(self, value: Any) -> Any:
        """Copy a helper object if an attribute is a part of the layer. Others stay shared, whatever else they hold."""
        attributes = getattr(value, "__dict__", None)
        if not attributes or not any(id(v) in self._memo for v in attributes.values()):
            return value
        fresh = copy.copy(value)
        fresh.__dict__.update({k: self(v) for k, v in attributes.items()})
        return fresh


class _Cell:
    """A cell of a closure. It stays the same cell, so that it can be rebound, unless its content is translated."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell
        try:
            self.contents = cell.cell_contents
        except ValueError:
            self.contents = self  # empty

    def holding(self, value: Any) -> types.CellType:
        return self._cell if value is self.contents else types.CellType(value)
