"""A call's arguments and outputs as flat lists of leaves, and what may not stand among them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_roundpipe.config import RoundPipeError

_Shape = tuple[bool, int, tuple[Any, ...]]
"""Of (arguments, dict): whether there is one that stands for itself, how many there are, the keys of the dict."""

_specs: dict[_Shape, TreeSpec] = {}
_shapes: dict[int, _Shape] = {}
"""The same the other way round, by id of the structure."""


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of builtin containers (and subclasses).

    Other registered classes stay whole: taking a key-value cache apart would hand the layer a new one, and what it
    stores there would be lost. So do shapes, which torch puts together again as ordinary tuples.
    """
    return _flatten_flat(value) or tree_flatten(value, is_leaf=_is_leaf)


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """The inverse of `flatten`."""
    shape = _shapes.get(id(spec))
    if shape is None:
        return tree_unflatten(leaves, spec)
    single, count, keys = shape
    return leaves[0] if single else tuple(leaves[:count]), dict(zip(keys, leaves[count:], strict=True))


def _flatten_flat(value: Any) -> tuple[list[Any], TreeSpec] | None:
    """What most calls are: (arguments, keywords) or (output, what was collected), with no container among them.

    Torch's functions look at every level in Python, which was a fifth of what a call cost.
    """
    if type(value) is not tuple or len(value) != 2 or type(value[1]) is not dict:
        return None
    first, named = value
    single = _is_leaf(first)
    if not single and type(first) is not tuple:
        return None
    given = (first,) if single else first
    leaves = [*given, *named.values()]
    if not all(map(_is_leaf, leaves)):
        return None
    shape = (single, len(given), tuple(named))
    spec = _specs.get(shape)
    if spec is None:
        spec = _specs.setdefault(shape, tree_flatten(value, is_leaf=_is_leaf)[1])
        _shapes[id(spec)] = shape
    return leaves, spec


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, (dict, list, tuple)) or isinstance(value, torch.Size)


def refuse_caches(leaves: list[Any], layer: str) -> None:
    """A cache among the arguments of a layer that will be recomputed would be filled twice."""
    for leaf in leaves:
        if hasattr(leaf, "get_seq_length") and hasattr(leaf, "update"):
            raise RoundPipeError(
                f"layer {layer!r} is called with a {type(leaf).__name__} in training: recomputing the layer would fill "
                "it a second time. Call the model with use_cache=False."
            )


def refuse_changed(before: tuple[list[Any], TreeSpec], value: Any, layer: str) -> None:
    """A layer that adds to a list or dict that it was given hands tensors on past the boundary."""
    leaves, spec = flatten(value)
    same = spec is before[1] or spec == before[1]
    if not same or len(leaves) != len(before[0]) or not all(map(operator.is_, leaves, before[0])):
        raise RoundPipeError(
            f"layer {layer!r} changes a list or dict among its arguments, which cannot be carried to a worker and "
            "back: return what it adds instead."
        )
