"""Cuts layers that are too large for a worker into the modules inside them.

A block is a good layer: few tensors cross its border, and what is inside is recomputed. Where blocks do not fit on a
worker, the block's forward becomes user code and its children become layers, which are cut in turn if necessary:

    decoder block ──► attention, mlp, norms
    mlp ──► router, experts

The block's own parameters must be small, because user code reads them: they are uploaded outside the arenas, for each
microbatch. So a module whose own parameters are the bulk cannot be cut, such as a mixture of experts with all experts
in one tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict)
_OWN_SHARE = 8
"""A module can be cut if its own parameters are at most all its parameters' bytes divided by this."""


class Size(NamedTuple):
    """The bytes of a layer on a worker."""

    weights: int
    gradients: int


class Stuck(NamedTuple):
    """A layer that is too large and cannot be cut, with the remedy."""

    name: str
    why: str
    remedy: str


@dataclass(frozen=True)
class Refined:
    """The layers after cutting, by qualified name, in registration order.

    ``cuts`` are the names of the modules that were cut, each with those of its parts; ``stuck`` is a layer that is
    still too large.
    """

    layers: dict[str, nn.Module]
    cuts: dict[str, list[str]] = field(default_factory=dict)
    stuck: Stuck | None = None

    def summary(self) -> list[str]:
        """Return each kind of cut once, with a list's blocks as one: ``model.layers.* into self_attn, mlp``."""
        kinds = {
            re.sub(r"\.\d+(?=\.|$)", ".*", name): ", ".join(part.removeprefix(f"{name}.") for part in parts)
            for name, parts in self.cuts.items()
        }
        return [f"{name} into {parts}" for name, parts in kinds.items()]


def arenas_of(sizes: Mapping[str, Size]) -> int:
    """Return the bytes of the largest weights plus those of the largest gradients, perhaps of different layers."""
    return max(size.weights for size in sizes.values()) + max(size.gradients for size in sizes.values())


def cut_to_fit(
    found: Mapping[str, nn.Module], size_of: Callable[[nn.Module], Size], room: int, whole: Container[nn.Module] = ()
) -> Refined:
    """Return ``found`` with the largest layers replaced by the modules inside them, until all fit.

    Args:
        size_of: returns the size of a module as a layer.
        room: bytes for the largest weights and the largest gradients together.
        whole: modules that must not be cut.
    """
    layers, cuts = dict(found), dict[str, list[str]]()
    sizes = {name: size_of(module) for name, module in layers.items()}
    holders = Counter(id(inner) for layer in found.values() for inner in set(layer.modules()))
    while arenas_of(sizes) > room:
        largest = max(layers, key=lambda name: sum(sizes[name]))
        module = layers[largest]
        parts = dict(_parts(largest, module))
        if module in whole:
            named = Stuck(largest, "layers= names it as a whole", "name smaller modules in layers=")
            return Refined(layers, cuts, named)
        if why := _why_whole(module, parts, holders):
            adapters = "train adapters instead of it, so that it has no gradients"
            narrow = "compute in a narrower format, such as precision='bf16-true'"
            return Refined(layers, cuts, Stuck(largest, why, adapters if sizes[largest].gradients else narrow))
        cuts[largest] = list(parts)
        pairs = ((parts if name == largest else {name: layer}).items() for name, layer in layers.items())
        layers = dict(chain.from_iterable(pairs))
        sizes = {name: sizes.get(name) or size_of(layers[name]) for name in layers}
    return Refined(layers, cuts)


def _parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules inside that can be called and have parameters."""
    for child_name, child in module.named_children():
        inner = f"{name}.{child_name}"
        if isinstance(child, _LISTS):
            yield from _parts(inner, child)
        elif any(True for _ in child.parameters()) and not isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield inner, child


def _why_whole(module: nn.Module, parts: Mapping[str, nn.Module], holders: Mapping[int, int]) -> str | None:
    if any(holders[id(inner)] > 1 for inner in module.modules() if any(True for _ in inner.parameters())):
        return "it shares a module with another layer"
    inside = {id(p) for part in parts.values() for p in part.parameters()}
    own = {name: p for name, p in module.named_parameters() if id(p) not in inside}
    if _OWN_SHARE * sum(p.nbytes for p in own.values()) <= sum(p.nbytes for p in module.parameters()):
        return None
    name, largest = max(own.items(), key=lambda item: item[1].nbytes)
    shape = " x ".join(map(str, largest.shape))
    experts = ", all experts in one tensor" if largest.dim() > 2 and "expert" in type(module).__name__.lower() else ""
    return f"its weights are its own parameters and no module's inside it, such as {name!r} ({shape}{experts})"
