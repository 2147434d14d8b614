"""The modules and parameters of a model, to notice when they are replaced.

Workers have replicas of layers, and the optimizer's thread knows parameters by their ids. User code may replace them
between batches: pruning and parametrizations register new ones, a head is exchanged, blocks are added.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_roundpipe.model.quantized import holdings


class Structure:
    """The modules and parameters of a model at the time of creation. Workers have replicas of the ``layers``."""

    def __init__(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        inside = list({id(m): m for layer in layers for m in layer.modules()}.values())
        known = set(map(id, inside))
        self._inside = [(m, _contents(m)) for m in inside]
        self._outside = [(m, _beside_layers(m)) for m in root.modules() if id(m) not in known]
        self._holdings = holdings(root)

    def has_changed(self) -> bool:
        """Return whether modules, parameters or scales were replaced; values and ``requires_grad`` do not count."""
        return (
            any(_differ(_contents(m), seen) for m, seen in self._inside)
            or any(_differ(_beside_layers(m), seen) for m, seen in self._outside)
            or any(attributes.get(name) is not value for attributes, name, value in self._holdings)
        )


_Contents = tuple[list[Any], list[Any]]
"""Objects, which are compared by identity because ``==`` of parameters is a tensor; and names, dtypes and shapes."""


def _contents(module: nn.Module) -> _Contents:
    """Return what a replica of ``module`` is made of, except values."""
    parameters, formats = _parameters(module)
    names = [*module._buffers, *module._modules, *module._parameters]
    return [type(module), *module._modules.values(), *parameters], [*names, *formats]


def _beside_layers(module: nn.Module) -> _Contents:
    """Return the parameters of a module without replica, and its children that have parameters."""
    parameters, formats = _parameters(module)
    return [m for m in module._modules.values() if m is not None and _has_parameters(m)] + parameters, formats


def _parameters(module: nn.Module) -> _Contents:
    parameters = list(module._parameters.values())
    return parameters, [(p.dtype, p.shape) for p in parameters if p is not None]


def _has_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values()) or any(
        _has_parameters(m) for m in module._modules.values() if m is not None
    )


def _differ(now: _Contents, seen: _Contents) -> bool:
    objects, others = now
    return len(objects) != len(seen[0]) or any(map(operator.is_not, objects, seen[0])) or others != seen[1]
