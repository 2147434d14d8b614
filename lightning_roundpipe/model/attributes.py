"""The Python attributes of a layer's modules, compared before and after each call.

A flag that user code changes between two calls, such as ``train()``/``eval()`` or PEFT's ``disable_adapter()``, must
hold for the next call and for its recomputation, however late that runs. So a call records how the attributes differ
from those at which the layer's replicas were made. Lists and dicts among the attributes (hooks are such dicts) are
compared by content, because user code changes them in place.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})
_UNUSED = frozenset(
    {
        "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)  # fmt: skip
"""Containers of every module that its forward does not use."""

Container = (list, dict, set, deque)
_OF_PYTHON = frozenset({*Container, OrderedDict})
"""Types that copy themselves. ``copy.copy`` takes ten times as long for an OrderedDict, and each module has several."""


def frozen(value: Any) -> Any:
    """Return ``value``; if it is a container, return a copy of it and of the containers inside."""
    if not isinstance(value, Container):
        return value
    fresh: Any = value.copy() if type(value) in _OF_PYTHON else copy.copy(value)
    if not isinstance(fresh, set):  # whose elements are no containers
        for key, inner in [*(fresh.items() if isinstance(fresh, dict) else enumerate(fresh))]:
            if isinstance(inner, Container):
                fresh[key] = frozen(inner)
    return fresh


def same(a: Any, b: Any) -> bool:
    """Return whether two values are the same object, or containers of the same objects."""
    if a is b:
        return True
    if not isinstance(a, Container) or type(a) is not type(b) or len(a) != len(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return all(map(operator.is_, a, b)) and (
            all(map(operator.is_, a.values(), b.values())) or all(map(same, a.values(), b.values()))
        )
    return a == b if isinstance(a, set) else all(map(operator.is_, a, b)) or all(map(same, a, b))


def same_objects(attributes: list[dict[str, Any]], values: list[Any]) -> bool:
    """Return whether the values of ``attributes``, in order, are the objects ``values``, in the fastest known way."""
    if sum(map(len, attributes)) != len(values):
        return False
    return all(map(operator.is_, chain.from_iterable(map(dict.values, attributes)), values))


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.device, torch.dtype})


def holds_nothing(value: Any) -> bool:
    """Return whether ``value`` is a plain value, or an empty dict as each module has for its hooks."""
    return type(value) in _PLAIN or (isinstance(value, dict) and not value)


def is_plain(value: Any) -> bool:
    """Return whether ``value`` is a number, text, device or dtype, or a container or tuple of such values."""
    if type(value) in _PLAIN:
        return True
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, (tuple, *Container)) and all(map(is_plain, value))


class Contents:
    """What containers hold that are attributes of a layer's modules, of those that hold plain values alone.

    ``places`` are the number of the module and the name of each, and ``held`` are copies of them.
    """

    def __init__(self, places: list[tuple[int, str]], modules: Sequence[nn.Module]) -> None:
        self.places = places
        self._live = [modules[i].__dict__[name] for i, name in places]
        self.held = [frozen(container) for container in self._live]

    def is_current(self, modules: Sequence[nn.Module] | None = None) -> bool:
        """Return whether the containers still hold the same, and, if given, whether ``modules`` still have them."""
        now = self._live if modules is None else [modules[i].__dict__.get(name) for i, name in self.places]
        return all(map(operator.is_, now, self._live)) and equal(self._live, self.held)


def equal(one: list[Any], other: list[Any]) -> bool:
    """Return whether containers hold equal values; False if these cannot be compared, as some tensors cannot."""
    try:
        return one == other
    except Exception:
        return False


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``value``, which may be a container."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, deque)):
        for item in value:
            yield from tensors_in(item)


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes, to compare: unlike values, they tell signed zeros apart, and NaN equals itself."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Return the indices and values of a sparse tensor, to count or compare; of others nothing."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``module``, without its parameters, buffers and submodules, and without ours."""
    everything = dict(module.__dict__)  # at once: other threads run code that sets attributes
    own = {k: v for k, v in everything.items() if k not in STRUCTURE and k not in _UNUSED}
    interceptor: Any = own.get("forward")
    if getattr(interceptor, "is_interceptor", False):
        del own["forward"]
        if (patched := interceptor.own) is not None:
            own["forward"] = patched
    return own


@dataclass(frozen=True, eq=False)
class StateDiff:
    """How a layer's attributes differed from those at which its replicas were made.

    Attributes:
        changed: by index of the module: (changed or new attributes, removed names).
        with_tensors: by (module index, name): attributes that hold tensors. They are arguments of the call, so they are
            copied to the right device and gradients flow through them.
    """

    changed: dict[int, tuple[dict[str, Any], tuple[str, ...]]]
    with_tensors: dict[tuple[int, str], Any] = field(default_factory=dict)


class ModuleState:
    """Tracks the Python attributes of one layer. :meth:`current` is cheap as long as nothing changes."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name = name
        self.modules = list(layer.modules())
        self.base = [{k: frozen(v) for k, v in own_attributes(m).items()} for m in self.modules]
        self._diff: StateDiff | None = None
        self._snapshot()
        self._compare()

    def current(self) -> StateDiff | None:
        """Return how attributes differ from those of the replicas, or None. The same object until something changes."""
        if self._moved():
            self._snapshot()
            self._compare()
        return self._diff

    def _snapshot(self) -> None:
        self._seen = [v for held in self._held() for v in list(held.values())]
        self._patched = self._forward()
        found = [v for m in self.modules for k, v in own_attributes(m).items() if isinstance(v, Container)]
        self._empty = [c for c in found if not c]
        self._filled = [(c, frozen(c)) for c in found if c]

    def _held(self) -> list[dict[str, Any]]:
        """Return the attributes of the modules, without the interceptor, which is there during steps only."""
        first, *others = (m.__dict__ for m in self.modules)
        if getattr(first.get("forward"), "is_interceptor", False):
            first = {k: v for k, v in list(first.items()) if k != "forward"}
        return [first, *others]

    def _forward(self) -> Any:
        forward: Any = self.modules[0].__dict__.get("forward")
        return forward.own if getattr(forward, "is_interceptor", False) else forward

    def _moved(self) -> bool:
        if not same_objects(self._held(), self._seen):
            return True
        if any(self._empty) or self._forward() is not self._patched:
            return True
        return any(not same(container, contents) for container, contents in self._filled)

    def _compare(self) -> None:
        changed, with_tensors = {}, {}
        for index, (module, base) in enumerate(zip(self.modules, self.base, strict=True)):
            own = own_attributes(module)
            differing = {k: frozen(v) for k, v in own.items() if k not in base or not same(base[k], v)}
            removed = tuple(k for k in base if k not in own)
            for key, value in own.items():
                if holds_nothing(value):
                    continue
                tensors = [t for t in tensors_in(value) if not isinstance(t, nn.Parameter)]
                if tensors and (key in differing or any(t.requires_grad for t in tensors)):
                    with_tensors[index, key] = differing.setdefault(key, frozen(value))
            if differing or removed:
                changed[index] = (differing, removed)
        self._diff = StateDiff(changed, with_tensors) if changed else None
