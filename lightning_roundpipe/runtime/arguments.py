"""A call's arguments and outputs as flat lists of leaves, and what may not stand among them."""

from __future__ import annotations

import operator
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten

from lightning_roundpipe.config import RoundPipeError


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of builtin containers (and subclasses).

    Other registered classes stay whole: taking a key-value cache apart would hand the layer a new one, and what it
    stores there would be lost.
    """
    return tree_flatten(value, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, (dict, list, tuple))


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
    if len(leaves) != len(before[0]) or spec != before[1] or not all(map(operator.is_, leaves, before[0])):
        raise RoundPipeError(
            f"layer {layer!r} changes a list or dict among its arguments, which cannot be carried to a worker and "
            "back: return what it adds instead."
        )
