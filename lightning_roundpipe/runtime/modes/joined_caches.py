"""The key-value cache of a whole batch, out of those of its parts.

Most steps never look at the cache that a model returns. So the parts' caches stay on the workers that filled them, and
an object of the same type takes their place in the model's output:

    first use of the object ── the parts' keys and values are concatenated, each where it lies ── [1]
    first update of a layer of it ── its tensors move to the device of the new keys ── [2]
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.batch.microbatches import same

_LATER = "_roundpipe_joins_later"


def join_later(parts: Sequence[Any], sizes: Sequence[int], settle: Callable[[], None]) -> Any:
    """Return an object that becomes the joined cache when it is first used [1].

    Args:
        parts: the caches of the parts.
        sizes: samples of each part.
        settle: waits until the devices have filled the caches.

    Raises:
        RoundPipeError: on first use, if the parts' caches do not make up one.
    """
    kind: Any = type(parts[0])
    later: Any = object.__new__(_later(kind))
    object.__getattribute__(later, "__dict__")[_LATER] = list(parts), list(sizes), settle
    return later


def joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the cache of the whole batch.

    Raises:
        RoundPipeError: if the parts' caches do not make up one.
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return _join(list(parts), sizes)


def contents(cache: Any) -> Iterator[Any]:
    """Yield the tensors and plain values that a cache holds, in an order that its structure determines."""
    if isinstance(cache, (list, tuple)):
        for item in cache:
            yield from contents(item)
    elif isinstance(cache, dict):
        for key, item in cache.items():
            yield key
            yield from contents(item)
    elif _is_opened(cache):
        yield from contents(_attributes(cache))
    else:
        yield cache


def _is_opened(value: Any) -> bool:
    return not isinstance(value, (Tensor, type, torch.device, torch.dtype)) and hasattr(value, "update")


def _attributes(cache: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(cache).items() if name != "device"}


def _join(parts: list[Any], sizes: Sequence[int]) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _unlike(parts)
    if isinstance(first, Tensor):
        return _join_tensors(parts, sizes)
    if isinstance(first, (list, tuple)) and len({len(part) for part in parts}) == 1:
        return type(first)(_join(list(column), sizes) for column in zip(*parts, strict=True))
    if isinstance(first, dict) and all(part.keys() == first.keys() for part in parts):
        return {key: _join([part[key] for part in parts], sizes) for key in first}
    if _is_opened(first):
        fresh = copy.copy(first)
        held = _join([_attributes(part) for part in parts], sizes)
        fresh.__dict__.update(held)
        if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in held.values()):
            kind: Any = type(first)
            fresh.__class__ = _moving(kind)
        return fresh
    if not all(same(part, first) for part in parts[1:]):
        raise _unlike(parts)
    return first


def _join_tensors(parts: list[Tensor], sizes: Sequence[int]) -> Tensor:
    first = parts[0]
    rows = all(
        part.dim() and len(part) == size and part.shape[1:] == first.shape[1:] and part.dtype is first.dtype
        for part, size in zip(parts, sizes, strict=True)
    )
    if rows:
        return torch.cat([part.to(first.device) for part in parts])
    if all(part.shape == first.shape and torch.equal(part.to(first.device), first) for part in parts[1:]):
        return first.clone()
    raise _unlike(parts)


def _unlike(parts: list[Any]) -> RoundPipeError:
    shapes = ", ".join(str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in parts)
    return RoundPipeError(
        f"the key-value caches of the parts of a batch do not make up one cache ({shapes}). Set num_microbatches=1, "
        "which keeps the batch whole."
    )


@functools.cache
def _later(kind: Hashable) -> Any:
    """Return a subclass of ``kind`` whose objects become the joined cache when anything of them is used."""

    kind = cast(type, kind)

    def attribute(self: Any, name: str) -> Any:
        if name == "__class__":
            return kind
        _become(self)
        return getattr(self, name)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        _become(self)
        setattr(self, name, value)

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            _become(self)
            return getattr(self, name)(*args, **kwargs)

        return call

    special = {
        name: method(name)
        for name in ("__len__", "__getitem__", "__iter__", "__repr__", "__reduce_ex__", "__eq__")
        if hasattr(kind, name)
    }
    return type(
        kind.__name__,
        (kind,),
        {**special, "__getattribute__": attribute, "__setattr__": set_attribute, "__hash__": None},
    )


def _become(later: Any) -> None:
    held = object.__getattribute__(later, "__dict__")
    parts, sizes, settle = held[_LATER]
    settle()
    whole = joined(parts, sizes)
    object.__setattr__(later, "__class__", type(whole))
    held.clear()
    held.update(vars(whole))


@functools.cache
def _moving(kind: Hashable) -> Any:
    """Return a subclass of ``kind``, a layer of a cache, that moves to the device of what it is updated with [2]."""

    kind = cast(type, kind)

    def reduce(self: Any, protocol: Any) -> Any:
        self.__class__ = kind
        return self.__reduce_ex__(protocol)

    def update(self: Any, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.__class__ = kind
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(states.device))
        if "device" in vars(self):
            self.device = states.device
        return self.update(states, *args, **kwargs)

    return type(kind.__name__, (kind,), {"update": update, "__reduce_ex__": reduce})
