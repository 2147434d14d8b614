"""Key-value caches of a call in parts: each part has its own, and user code sees one.

    a cache that is given to a call ── the parts get its rows, in objects of their own ── [1]
    after the call ── the object that user code holds stands for the parts' caches, which stay where they are ── [2]
    given to the next call ── the parts get theirs back ── [1]
    anything else is done with it ── it becomes an ordinary cache: keys and values are concatenated ── [3]
    first update of a layer of an ordinary one ── its tensors move to the device of the new keys ── [4]

A call in parts may be given up and repeated whole. So the parts never write to what they are given: their objects are
copies that share the tensors, and only caches that replace their tensors are cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.runtime.batch.microbatches import are_rows, rows_of, same

_PARTS, _STANDS_IN = "_roundpipe_parts", "_roundpipe_stands_in"
_ABSENT = object()
_CUTTABLE = {"DynamicCache", "EncoderDecoderCache", "DynamicLayer", "DynamicSlidingWindowLayer"}
"""Classes of transformers whose updates replace tensors and write to none."""
_OF_ALL = frozenset(
    {"get_seq_length", "get_mask_sizes", "get_max_length", "get_query_offset", "is_compileable", "is_sliding",
     "is_initialized", "is_croppable", "is_linear", "is_dummy", "offloading", "has_previous_state"}
)  # fmt: skip
"""What is the same for all parts."""


def join_later(parts: Sequence[Any], sizes: Sequence[int], settle: Callable[[], None]) -> Any:
    """Return an object that stands for the caches of parts.

    Args:
        parts: the caches of the parts.
        sizes: samples of each part.
        settle: waits until the devices have filled the caches.

    Raises:
        RoundPipeError: when the object is used, if the parts' caches do not make up one.
    """
    kind: Any = type(parts[0])
    later: Any = object.__new__(kind)
    take_place(later, parts, sizes, settle)
    return later


def take_place(cache: Any, parts: Sequence[Any], sizes: Sequence[int], settle: Callable[[], None]) -> None:
    """Let ``cache`` stand for the caches of parts [2]. See `join_later` for the arguments."""
    kind: Any = type(cache)
    known = _is_parted(cache)
    held = object.__getattribute__(cache, "__dict__")
    held.clear()
    held[_PARTS] = list(parts), list(sizes), settle
    if not known:
        object.__setattr__(cache, "__class__", _parted(kind))


def parts_of(cache: Any, sizes: Sequence[int]) -> list[Any] | None:
    """Return a cache for each part [1]; None if ``cache`` cannot be cut."""
    if _is_parted(cache):
        parts, known, _ = object.__getattribute__(cache, "__dict__")[_PARTS]
        if known == list(sizes):
            return [_rows(part, None, 0) for part in parts] if _is_cuttable(parts[0]) else None
        _become(cache)
    if not _is_cuttable(cache):
        return None
    samples = sum(sizes)
    try:
        return [_rows(cache, rows, samples) for rows in rows_of(list(sizes))]
    except ValueError:
        return None


def make_ordinary(value: Any) -> None:
    """Join the parts now if ``value`` is a cache that stands for those of parts, for code that may not wait."""
    if hasattr(type(value), _STANDS_IN) and _is_parted(value):
        _become(value)


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
    return not isinstance(value, (Tensor, type, torch.device, torch.dtype, dict)) and hasattr(value, "update")


def _attributes(cache: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(cache).items() if name != "device"}


def _is_cuttable(value: Any) -> bool:
    """Return whether a cache consists of objects of known classes alone."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_cuttable, value))
    if isinstance(value, dict):
        return all(map(_is_cuttable, value.values()))
    if not _is_opened(value):
        return True
    known = any(c.__module__ == "transformers.cache_utils" for c in type(value).__mro__)
    if not known or type(value).__name__ not in _CUTTABLE or vars(value).get("offloading"):
        return False
    return _is_cuttable(_attributes(value))


def _rows(value: Any, rows: slice | None, samples: int) -> Any:
    """Return a copy of ``value`` whose tensors are those of ``rows`` (None: all), without copying a tensor."""
    if isinstance(value, Tensor):
        if rows is None or not value.numel():
            return value
        if not value.dim() or len(value) != samples:
            raise ValueError("a cache has a tensor without a row for each sample")
        return value[rows]
    if isinstance(value, (list, tuple)):
        return type(value)(_rows(item, rows, samples) for item in value)
    if isinstance(value, dict):
        return {key: _rows(item, rows, samples) for key, item in value.items()}
    return _with(value, _rows(vars(value), rows, samples)) if _is_opened(value) else value


def _join(parts: list[Any], sizes: Sequence[int]) -> Any:
    first = parts[0]
    if any(type(part).__name__ != type(first).__name__ for part in parts):
        raise _unlike(parts)
    if isinstance(first, Tensor):
        return _join_tensors(parts, sizes)
    if isinstance(first, (list, tuple)) and len({len(part) for part in parts}) == 1:
        return type(first)(_join(list(column), sizes) for column in zip(*parts, strict=True))
    if isinstance(first, dict) and all(part.keys() == first.keys() for part in parts):
        return {key: _join([part[key] for part in parts], sizes) for key in first}
    if _is_opened(first):
        return _with(first, _join([_attributes(part) for part in parts], sizes))
    if not all(same(part, first) for part in parts[1:]):
        raise _unlike(parts)
    return first


def _with(value: Any, held: dict[str, Any]) -> Any:
    """Return a copy of an object of a cache that has the attributes ``held``."""
    kind: Any = type(value)
    kind = kind.__mro__[1] if _MOVES in vars(kind) else kind
    moves = any(isinstance(item, Tensor) and item.device.type != "cpu" for item in held.values())
    fresh: Any = object.__new__(_moving(kind) if moves else kind)
    fresh.__dict__.update({**vars(value), **held})
    return fresh


def _join_tensors(parts: list[Tensor], sizes: Sequence[int]) -> Tensor:
    first = parts[0]
    if are_rows(parts, sizes):
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


# ------------------------------------------------------------------------------------------------ classes of stand-ins


def _is_parted(cache: Any) -> bool:
    return _PARTS in object.__getattribute__(cache, "__dict__")


@functools.cache
def _parted(kind: Hashable) -> Any:
    """Return a subclass of ``kind`` whose objects stand for the caches of parts, and become ordinary ones on use."""
    kind = cast(type, kind)

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            _become(self)
            return getattr(self, name)(*args, **kwargs)

        return call

    def attribute(self: Any, name: str) -> Any:
        if name == "__class__":
            return kind
        parts, *_ = object.__getattribute__(self, "__dict__")[_PARTS]
        held = vars(parts[0])
        if name in _OF_ALL or isinstance(held.get(name, _ABSENT), (bool, int, str, type(None))):
            return getattr(parts[0], name)
        if name not in held and not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        if callable(getattr(kind, name, None)):  # whoever asks whether there is such a method does not use the cache
            return functools.partial(method(name), self)
        _become(self)
        return getattr(self, name)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        _become(self)
        setattr(self, name, value)

    special = {
        name: method(name)
        for name in ("__len__", "__getitem__", "__iter__", "__repr__", "__reduce_ex__", "__eq__")
        if hasattr(kind, name)
    }
    attributes = {
        "__getattribute__": attribute,
        "__setattr__": set_attribute,
        "__hash__": kind.__hash__,
        _STANDS_IN: True,
    }
    return type(kind.__name__, (kind,), {**special, **attributes})


def _become(cache: Any) -> None:
    """Make ``cache`` an ordinary one [3]."""
    held = object.__getattribute__(cache, "__dict__")
    parts, sizes, settle = held[_PARTS]
    settle()
    whole = joined(parts, sizes)
    object.__setattr__(cache, "__class__", type(whole))
    held.clear()
    held.update(vars(whole))


_MOVES = "_roundpipe_moves"


@functools.cache
def _moving(kind: Hashable) -> Any:
    """Return a subclass of ``kind``, a layer of a cache, that moves to the device of what it is updated with [4]."""
    kind = cast(type, kind)

    def reduce(self: Any, protocol: Any) -> Any:
        self.__class__ = kind
        return self.__reduce_ex__(protocol)

    def update(self: Any, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.__class__ = kind
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.device != states.device:
                if value.device.type != "cpu":
                    torch.accelerator.synchronize(value.device)  # another stream than this thread's has filled it
                setattr(self, name, value.to(states.device))
        if "device" in vars(self):
            self.device = states.device
        return self.update(states, *args, **kwargs)

    return type(kind.__name__, (kind,), {"update": update, "__reduce_ex__": reduce, _MOVES: True})
