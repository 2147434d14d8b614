"""Finds state that user code changes within a step and that the engine cannot isolate for each microbatch.

Microbatches take turns within a step, so one would find what another has left in a global, in a helper object or in the
target of a hook. Attributes of modules are isolated (`module_state`, `side_outputs`), unless a layer changes those of
other modules. A rehearsal shows whether there is anything else:

    training_step on the whole batch ── which objects does it change at all? ── [1]   most often none
    training_step on parts of it ── which of them while a layer runs ── [2]   or between two layer calls ── [3]
    one part again, with another part's state put in at every call ── is its result another? ── [4]

Changes behind the last layer call are not looked for: microbatches run the code there one after another, in order.
State that no result depends on, such as a counter or a list of records, does no harm; [4] tells.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_roundpipe.model.attributes import Container, own_attributes
from lightning_roundpipe.runtime.user_code.left_behind import (
    names_in,
    put_back_of,
    state_of,
    version,
    walk,
    walk_around,
)

_MOST_BYTES = 1 << 26
"""Of a larger array, only the first bytes are compared."""


BETWEEN = "between layers"
"""Stands for the code between layers where other places are named by their layer."""


@dataclass
class _WatchedObject:
    """One object under observation.

    Attributes:
        path: the path that `walk` found it by.
        kind: its kind in `walk`.
        apart: whether `ModuleStateIsolation` isolates changes by the code between layers.
        before: its state at the last `look`; see `_mark`.
    """

    path: str
    value: Any
    kind: str
    apart: bool
    before: dict[str, Any] | list[Any]

    def change(self) -> str | None:
        """Return the path of something in it that has changed since the last `look`; None if nothing has."""
        now = _mark(self.value, self.kind)
        if isinstance(now, dict) and isinstance(self.before, dict):
            for name in {**now, **self.before}:
                if not _is(self.before.get(name, _mark), now.get(name, _mark)):
                    return f"{self.path}.{name}" if self.path else name
            return None
        return None if len(self.before) == len(now) and all(map(_is, self.before, now)) else self.path

    def look(self) -> None:
        self.before = _mark(self.value, self.kind)


class OutsideWrites:
    """Observes everything that is reachable from the modules and other objects, during rehearsals.

    Args:
        modules: all modules, by name.
        others: further objects that user code may change, by name.
        code: the modules' classes, by name.
        inside: ids of the modules inside layers.

    Attributes:
        found: path of a change, by the name of the layer whose code makes it, or `BETWEEN`.
        clashes: the same for changes by layers to what is isolated only between layers.
    """

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], others: Iterable[tuple[str, Any]],
        code: Iterable[tuple[str, Any]], inside: set[int],
    ) -> None:  # fmt: skip
        modules = list(modules)
        ignored = inside | {i for _, module in modules if id(module) in inside for i in _own(module, tensors=True)}
        apart = {id(module) for _, module in modules}
        for _, module in modules:
            apart.update(_own(module, tensors=isinstance(module, Metric)))
        seen: dict[int, Any] = {}
        later: list[tuple[str, Any]] = []
        around = [*walk(modules, seen, later), *walk_around(others, seen, later)]
        self._watched = [
            _WatchedObject(path, value, kind, id(value) in apart, _mark(value, kind))
            for path, value, kind in (*around, *walk([*later, *code], seen))
            if kind != "leaf" and id(value) not in ignored and not isinstance(value, torch.jit.ScriptModule)
        ]
        self._narrow = False
        self.found: dict[str, str] = {}
        self.clashes: dict[str, str] = {}
        self._record: list[list[Callable[[], object]]] | None = None
        self._recorded: list[list[Callable[[], object]]] = []
        self._replay: Iterator[list[Callable[[], object]]] | None = None

    def narrow(self) -> None:
        """After the first run: from now on observe only what that run has changed [1]."""
        if not self._narrow:
            self._watched = [watched for watched in self._watched if watched.change() is not None]
            self._narrow = True

    def begin(self) -> None:
        """Note the state at the start of a microbatch."""
        self._look()

    def enter(self) -> None:
        """Find what the code in front of a layer call has changed [3]."""
        self._see(BETWEEN, (watched for watched in self._watched if not watched.apart))

    def leave(self, layer: str) -> None:
        """Find what the layer has changed [2]."""
        self._see(layer, self._watched)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the state at each layer call of a part, for `replaying`."""
        self._record = self._recorded = []
        try:
            yield
        finally:
            self._record = None

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Put the recorded state in at each layer call of another part [4]."""
        self._replay, self._recorded = iter(self._recorded), []
        try:
            yield
        finally:
            self._replay = None

    def _see(self, place: str, those: Iterable[_WatchedObject]) -> None:
        if not (self._narrow and self._watched):
            return
        if self._record is not None:
            shared = (watched for watched in self._watched if not watched.apart and watched.kind != "iterator")
            self._record.append([put_back_of(watched.value, watched.kind) for watched in shared])
        elif self._replay is not None:
            for put in next(self._replay, ()):
                put()
        else:
            for watched in those:
                if (path := watched.change()) is not None:
                    (self.clashes if watched.apart else self.found).setdefault(place, path)
            self._look()

    def _look(self) -> None:
        for watched in self._watched if self._narrow else ():
            watched.look()


def _own(module: nn.Module, *, tensors: bool) -> Iterable[int]:
    """Yield the ids of the containers that the attributes of ``module`` hold, and with ``tensors`` those of tensors."""
    yield from map(id, module._buffers.values() if tensors else ())
    waiting = list(own_attributes(module).values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, Container) or (tensors and isinstance(value, Tensor)):
            yield id(value)
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value


def _mark(value: Any, kind: str) -> dict[str, Any] | list[Any]:
    """Return something that differs once ``value`` has changed.

    It refers to the items themselves. That keeps them alive, so no new object can have the identity of an old one.
    """
    if (named := names_in(value, kind)) is not None:
        return named
    if kind == "tensor":
        return [version(value)]
    if kind == "array":
        return [zlib.crc32(memoryview(value).cast("B")[:_MOST_BYTES]) if value.flags.c_contiguous else repr(value)]
    if kind == "many":
        return [len(value)]
    if kind == "container":
        return [x for item in value.items() for x in item] if isinstance(value, dict) else list(value)
    return state_of(value, kind)


def _is(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str, MethodType)) and a == b)
