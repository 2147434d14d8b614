"""Key-value caches that hold nothing yet, as models make them that do not ask ``use_cache``.

A layer that is recomputed would fill a cache a second time. What it would put into an empty one is read by later calls
of the same layer only, of which there are none in training. So the layer gets None instead, as with
``use_cache=False``:

    first seen empty, at a layer's first call ── None ── [1]
    with contents of another origin (prefix tuning), or for a layer's second call ── stays, and is refused ── [2]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.runtime.layer_calls.arguments import is_cache


class EmptyCaches:
    """The caches that the layer calls of one microbatch were given before they held anything."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, set[int]]] = {}
        """By id of a cache: the cache, and the layers that were called with it."""

    def taken_out(self, leaves: list[Any], layer: int, *, recomputed: bool) -> list[Any]:
        """Return a call's leaves, with None in place of such caches [1] if the call may be ``recomputed``.

        Args:
            leaves: the call's arguments.
            layer: index of the layer.
            recomputed: whether the layer must not get a cache; a layer without gradients fills it once.
        """
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) or not is_cache(leaf):
                continue
            if id(leaf) not in self._seen and not any(isinstance(held, Tensor) for held in contents(leaf)):
                self._seen[id(leaf)] = leaf, set()
            _, layers = self._seen.get(id(leaf), (leaf, {layer}))
            if layer not in layers:
                layers.add(layer)
                if recomputed:
                    leaves = [*leaves[:place], None, *leaves[place + 1 :]]
        return leaves


def contents(cache: Any) -> Iterator[Any]:
    """Yield the tensors and plain values that a cache holds, in an order that its structure determines."""
    if isinstance(cache, (list, tuple)):
        for item in cache:
            yield from contents(item)
    elif isinstance(cache, dict):
        for key, item in cache.items():
            yield key
            yield from contents(item)
    elif is_part(cache):
        yield from contents(attributes(cache))
    else:
        yield cache


def is_part(value: Any) -> bool:
    """Return whether ``value`` is a cache, or an object inside one that holds the tensors of a layer."""
    return not isinstance(value, (Tensor, type, torch.device, torch.dtype, dict)) and hasattr(value, "update")


def attributes(cache: Any) -> dict[str, Any]:
    """Return the attributes of a cache, or of an object inside one, except the device."""
    return {name: value for name, value in vars(cache).items() if name != "device"}
