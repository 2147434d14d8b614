"""Attributes of layers' modules: how they reach the copies on workers, and how a layer's own writes come back.

`nn.Module.__setattr__` tells of writes while a step runs (`module_state`). What user code sets on a module of a layer
makes the layer's copies apply it at the next call. What a layer's code sets on a copy is set on the user's module, in
user code, when the call has returned. Containers that are attributes go in and out as arguments do; those that hold
numbers and texts alone, of which adapters have many, are copied only when they change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.model.attributes import Contents, StateDiff, frozen, is_plain
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.user_code.module_state import Holder, observe

_CONTAINERS = (list, dict, set, deque)
_MODULE = frozenset(nn.Module().__dict__)


class LayerAttributes:
    """How the attributes of each layer's modules differ from those of its copies."""

    def __init__(self, layers: Sequence[HostLayer]) -> None:
        self._layers = layers
        self._owners: dict[int, list[int]] = {}
        for layer in layers:
            for module in layer.state.modules:
                self._owners.setdefault(id(module), []).append(layer.index)
        self._stale: set[int] = set()
        self._found: dict[int, StateDiff | None] = {}
        self._containers: dict[int, list[tuple[int, str]]] = {}
        self._contents: dict[int, Contents] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a step: code between steps may have set anything."""
        self._stale = {layer.index for layer in self._layers}

    def touched(self, holder: Holder) -> None:
        """Note that an attribute of a module changes."""
        self._stale.update(self._owners.get(id(holder), ()))

    def about_to_write(self, holder: Holder, name: str) -> None:
        """Be told of what the only microbatch of a step sets."""
        self.touched(holder)

    def holder_of(self, tensor: Tensor) -> None:
        """Return None: one microbatch needs no view of buffers."""

    def of(self, layer: HostLayer) -> tuple[StateDiff | None, Contents, dict[tuple[int, str], Any]]:
        """Return the difference, what containers of plain values hold, and the other containers, by place.

        The first two are the same objects until something changes.
        """
        index, modules = layer.index, layer.state.modules
        known = self._contents.get(index)
        if index in self._stale or known is None or not known.is_current():
            self._stale.discard(index)
            before, now = self._found.get(index), layer.state.current()
            if known is None or now is not before or not known.is_current(modules):
                self._found[index] = now
                known = self._contents[index] = self._look(index, modules)
        return self._found[index], known, {(i, name): modules[i].__dict__[name] for i, name in self._containers[index]}

    def _look(self, index: int, modules: Sequence[nn.Module]) -> Contents:
        """Find the containers that are attributes of a layer's modules; return what those of plain values hold."""
        places = [
            (i, name)
            for i, module in enumerate(modules)
            for name, value in module.__dict__.items()
            if type(value) in _CONTAINERS and name not in _MODULE
        ]
        plain = {(i, name) for i, name in places if is_plain(modules[i].__dict__[name])}
        self._containers[index] = [
            (i, name) for i, name in places if (i, name) not in plain and _is_self_contained(modules[i].__dict__[name])
        ]
        return Contents([place for place in places if place in plain], modules)


def _is_self_contained(value: Any) -> bool:
    """Return whether a container refers to no module and no parameter, which copies have their own of."""
    items = value.values() if isinstance(value, dict) else value
    return not any(
        isinstance(v, (nn.Module, nn.Parameter)) or (isinstance(v, (tuple, *_CONTAINERS)) and not _is_self_contained(v))
        for v in items
    )


class LayerWrites:
    """A context in which a layer's code runs on a copy; knows what it sets there."""

    __slots__ = ("_before", "_places", "_replica")

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._places: dict[tuple[int, str], Holder] = {}

    def __enter__(self) -> None:
        self._before = observe(self)

    def __exit__(self, *error: object) -> None:
        observe(self._before)

    def about_to_write(self, holder: Holder, name: str, *, in_place: bool = False) -> None:
        self._places[id(holder), name] = holder

    def found(self) -> list[tuple[int, str, Any]]:
        """Return the attributes that were set: number of the module, name and value, as the user's module has it."""
        written = []
        for (_, name), holder in self._places.items():
            number = next((i for i, m in enumerate(self._replica.modules) if m is holder), None)
            if number is None or not isinstance(holder, nn.Module) or name in holder._buffers:
                continue
            value = holder.__dict__.get(name, self)
            if value is self:
                continue
            # Parameters of the copy are translated in the containers themselves, which are therefore the caller's own.
            written.append((number, name, frozen(self._replica.original(value))))
        return written
