"""What a layer is called with, taken apart: its tensors, and a recipe to put equal arguments together again.

A layer may write to lists, dicts and objects (caches, collectors) that it is given. It gets copies of them, and what it
has written to a copy is written to the original. A recomputation starts from the same contents again.

An object is copied if it is no more than its attributes, so that copying these copies it: its class has no memory of
its own in C, as that of a random generator or a stream has, and Python does not pickle it by name, as it does a logger.
Code (modules, and whatever can be called) and constants (enumerations) go in as they are, and so does all else.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import struct
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError

_ATOMS = frozenset({type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size, slice})
_POINTER = struct.calcsize("P")


class _Place:
    """Stands for a tensor."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Tuple:
    __slots__ = ("items", "kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind, self.items = kind, items


class _Flattened:
    """Stands for an object that takes itself apart for torch's pytree, as a `BlockMask` with what its function sees."""

    __slots__ = ("context", "items", "kind")

    def __init__(self, kind: Any, items: list[Any], context: Any) -> None:
        self.kind, self.items, self.context = kind, items, context


class _Box:
    """A container or an object."""

    __slots__ = ("attributes", "contents", "original")

    def __init__(self, original: Any) -> None:
        self.original = original
        self.contents: Any = None
        self.attributes: dict[str, Any] | None = None


def is_box(value: Any) -> bool:
    """Return whether a layer may write to ``value``."""
    kind: Any = type(value)
    return _are_boxes(kind) and not (_reduces(kind) and _is_pickled_by_name(value))


@functools.lru_cache(maxsize=4096)
def _are_boxes(kind: type) -> bool:
    """Return whether objects of type ``kind`` are no more than their attributes. A key-value cache has hundreds."""
    if issubclass(kind, (list, dict, set, deque)):
        return True
    offsets = kind.__dictoffset__, kind.__weakrefoffset__  # negative: not in the object's own memory
    own = kind.__basicsize__ - object.__basicsize__ - _POINTER * sum(offset > 0 for offset in offsets)
    return (
        kind.__dictoffset__ != 0
        and own <= 0
        and not issubclass(kind, (nn.Module, enum.Enum))
        and not any("__call__" in base.__dict__ for base in kind.__mro__)
        and not _flattens(kind)  # type: ignore[arg-type]
    )


@functools.lru_cache(maxsize=4096)
def _reduces(kind: Any) -> bool:
    """Return whether ``kind`` says itself how its objects are pickled."""
    return kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__


def _is_pickled_by_name(value: Any) -> bool:
    """Return whether Python finds ``value`` again, by its name or by a function, rather than making one like it."""
    if isinstance(value, (list, dict, set, deque)):
        return False
    try:
        found = value.__reduce_ex__(2)
    except Exception:  # it cannot be copied
        return True
    return isinstance(found, str) or (found[0] is not type(value) and all(part is None for part in found[2:]))


@functools.lru_cache(maxsize=4096)
def _flattens(kind: type) -> bool:
    """Return whether objects of type ``kind`` take themselves apart, and are put together, for torch's pytree."""
    return hasattr(kind, "_flatten") and hasattr(kind, "_unflatten")


class Built(NamedTuple):
    """Arguments put together again, and for each list, dict or object the original and the copy."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attributes: dict[tuple[int, str], Any]
    copies: list[tuple[Any, Any]]


class Arguments:
    """Arguments of one call.

    Args:
        args, kwargs: what user code passes.
        attributes: attributes of the layer's modules that go in like arguments, by place.
        own: what a parameter among all these is replaced by: the microbatch's own alias.

    Attributes:
        tensors: each once, in the order of appearance.
    """

    __slots__ = ("_boxes", "_names", "_nodes", "_own", "_places", "_where", "tensors")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], attributes: dict[tuple[int, str], Any],
        own: Callable[[nn.Parameter], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.tensors: list[Tensor] = []
        self._places: dict[int, _Place] = {}
        self._boxes: dict[int, _Box] = {}
        self._own = own
        self._names, self._where = tuple(kwargs), tuple(attributes)
        self._nodes = [self._freeze(value) for value in (*args, *kwargs.values(), *attributes.values())]

    def _freeze(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is Tensor or isinstance(value, Tensor):
            if (place := self._places.get(id(value))) is None:
                place = self._places[id(value)] = _Place(len(self.tensors))
                own = self._own if kind is not Tensor and isinstance(value, nn.Parameter) else None
                self.tensors.append(own(value) if own is not None else value)
            return place
        if isinstance(value, tuple):
            return _Tuple(kind, [self._freeze(v) for v in value])
        if not is_box(value):
            if not _flattens(kind):  # type: ignore[arg-type]
                return value
            leaves, context = value._flatten()
            return _Flattened(kind, [self._freeze(leaf) for leaf in leaves], context)
        if (box := self._boxes.get(id(value))) is None:
            box = self._boxes[id(value)] = _Box(value)
            if isinstance(value, (list, set, deque)):
                box.contents = [self._freeze(v) for v in value]
            elif isinstance(value, dict):
                box.contents = {k: self._freeze(v) for k, v in value.items()}
            if hasattr(value, "__dict__"):
                box.attributes = {k: self._freeze(v) for k, v in value.__dict__.items()}
        return box

    def build(self, tensors: Sequence[Tensor]) -> Built:
        """Return arguments with ``tensors`` in the places of the ones taken out."""
        copies: dict[int, tuple[Any, Any]] = {}
        values = [_thaw(node, tensors, copies) for node in self._nodes]
        first = len(values) - len(self._names) - len(self._where)
        last = first + len(self._names)
        kwargs = dict(zip(self._names, values[first:last], strict=True))
        attributes = dict(zip(self._where, values[last:], strict=True))
        return Built(tuple(values[:first]), kwargs, attributes, list(copies.values()))

    def forget_originals(self) -> None:
        """Keep none of the caller's tensors and boxes alive."""
        self.tensors = []
        self._places = {}
        self._own = None
        for box in self._boxes.values():
            box.original = _shell(box.original)


def _shell(original: Any) -> Any:
    """Return an object like ``original`` without contents."""
    shell = original.__class__.__new__(original.__class__)
    if isinstance(original, deque):
        shell.__init__((), original.maxlen)
    elif hasattr(shell, "default_factory"):
        shell.default_factory = original.default_factory
    return shell


def _refill(box: list[Any] | set[Any] | deque[Any], items: list[Any]) -> None:
    if isinstance(box, list):
        box[:] = items
    else:
        box.clear()
        (box.update if isinstance(box, set) else box.extend)(items)


def _thaw(node: Any, tensors: Sequence[Tensor], copies: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(node)
    if kind is _Place:
        return tensors[node.index]
    if kind is _Tuple:
        items = [_thaw(n, tensors, copies) for n in node.items]
        return tuple(items) if node.kind is tuple else node.kind(*items)
    if kind is _Flattened:
        return node.kind._unflatten(tuple(_thaw(n, tensors, copies) for n in node.items), node.context)
    if kind is not _Box:
        return node
    if id(node) not in copies:
        copy = _shell(node.original)
        copies[id(node)] = node.original, copy
        if isinstance(node.contents, list):
            _refill(copy, [_thaw(n, tensors, copies) for n in node.contents])
        elif isinstance(node.contents, dict):
            for k, n in node.contents.items():
                dict.__setitem__(copy, k, _thaw(n, tensors, copies))
        if node.attributes is not None:
            copy.__dict__.update({k: _thaw(n, tensors, copies) for k, n in node.attributes.items()})
    return copies[id(node)][1]


def collect(value: Any, seen: set[int], into: list[Tensor]) -> None:
    """Append the tensors in ``value`` that are not ``seen``, each once."""
    kind = type(value)
    if kind in _ATOMS:
        return
    if kind is Tensor or isinstance(value, Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            into.append(value)
    elif isinstance(value, tuple):
        for v in value:
            collect(v, seen, into)
    elif is_box(value) and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, (list, dict, set, deque)):
            for v in value.values() if isinstance(value, dict) else value:
                collect(v, seen, into)
        for v in getattr(value, "__dict__", {}).values():
            collect(v, seen, into)
    elif _flattens(kind):  # type: ignore[arg-type]
        for v in value._flatten()[0]:
            collect(v, seen, into)


class Substitution:
    """Gives the caller its own objects in place of the layer's, in whatever the layer returns or writes.

    ``pairs``: the caller's object, by the id of the layer's.
    """

    __slots__ = ("_pairs",)

    def __init__(self, pairs: dict[int, Any]) -> None:
        self._pairs = pairs

    def __call__(self, value: Any) -> Any:
        if type(value) in _ATOMS:
            return value
        if id(value) in self._pairs:
            return self._pairs[id(value)]
        if isinstance(value, Tensor):
            return value
        if isinstance(value, tuple):
            items = [self(v) for v in value]
            return tuple(items) if type(value) is tuple else type(value)(*items)
        if is_box(value):
            self._pairs[id(value)] = value
            self.write(value, value)
        else:
            _refuse_hidden(value)
        return value

    def write(self, original: Any, copy: Any) -> None:
        """Write to ``original`` what is different in ``copy``, or to what the layer has made what it holds itself."""
        created = original is copy
        if isinstance(original, (list, set, deque)):
            before = set() if created else {id(v) for v in original}
            new = [v if id(v) in before else self(v) for v in copy]
            if len(new) != len(original) or any(a is not b for a, b in zip(new, original, strict=True)):
                _refill(original, new)
        elif isinstance(original, dict):
            self._write_items(original, dict(copy.items()), created)
        if hasattr(original, "__dict__"):
            self._write_items(original.__dict__, dict(copy.__dict__), created)

    def _write_items(self, held: dict[Any, Any], new: dict[Any, Any], created: bool) -> None:
        for key in [k for k in held if k not in new]:
            dict.__delitem__(held, key)
        for key, value in new.items():
            before = held.get(key, self)
            if (created or before is not value) and before is not (value := self(value)):
                dict.__setitem__(held, key, value)


def _refuse_hidden(value: Any) -> None:
    """Refuse an output that nobody can look into: tensors would cross the boundary unseen."""
    function = isinstance(value, types.FunctionType) and value.__closure__
    slots = dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "__dict__")
    if function or slots or isinstance(value, (types.GeneratorType, types.MethodType)):
        raise RoundPipeError(
            f"a layer returns a {type(value).__name__}, in which tensors would pass the boundary between devices "
            "unseen. Return tensors, or containers and plain objects that hold them."
        )
