"""Attributes of modules that the steps of several batches set while they overlap.

Steps take turns in user code, and each of them has a view of the attributes that any of them has set:

    what it has set itself ── [1]
    else, of an attribute that a step puts back before it ends, the value of before the first step ── [2]
    else the latest value ── counters and metrics go on in the order of the batches ── [3]

The code between steps (hooks) has a view, too: what the batches that Lightning has come to have left, and what it has
set itself, which steps in flight do not see. The first batch runs alone, and shows which attributes are put back.

`nn.Module.__setattr__` and ``__delattr__`` tell of writes; nothing is searched for or compared. Containers and tensors
that are changed in place are shared.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

from torch import nn

from lightning_roundpipe.devices.process_context import shared_context

Place = tuple[int, str]
"""The id of a module and the name of an attribute."""

_ABSENT = object()
_thread = threading.local()


class Observer(Protocol):
    def wrote(self, module: nn.Module, name: str, before: Any) -> None:
        """Note that the calling thread has set or deleted an attribute that was ``before``."""


@shared_context
def observed_writes() -> Iterator[None]:
    """Within this context, observers are told of writes."""

    def telling(original: Callable[..., None]) -> Callable[..., None]:
        def write(module: nn.Module, name: str, *value: Any) -> None:
            observer: Observer | None = getattr(_thread, "observer", None)
            before = module.__dict__.get(name, _ABSENT) if observer is not None else None
            original(module, name, *value)
            if observer is not None:
                observer.wrote(module, name, before)

        return write

    before = nn.Module.__setattr__, nn.Module.__delattr__
    nn.Module.__setattr__, nn.Module.__delattr__ = telling(before[0]), telling(before[1])  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__, nn.Module.__delattr__ = before  # type: ignore[method-assign]


class PutBack:
    """Observes one step that runs alone: which attributes it changes and puts back."""

    def __init__(self) -> None:
        self._before: dict[Place, tuple[nn.Module, Any]] = {}
        self._changed: set[Place] = set()

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        with observed_writes():
            _thread.observer = self
            try:
                yield
            finally:
                _thread.observer = None

    def wrote(self, module: nn.Module, name: str, before: Any) -> None:
        place = id(module), name
        _, first = self._before.setdefault(place, (module, before))
        if _read(module, name) is not first:
            self._changed.add(place)

    def places(self) -> set[Place]:
        return {place for place in self._changed if _read(self._before[place][0], place[1]) is self._before[place][1]}


class AttributeViews:
    """The views of steps that overlap.

    Args:
        private: the attributes that a step puts back [2].
    """

    def __init__(self, private: Collection[Place] = ()) -> None:
        self._private = private
        self._start: dict[Place, tuple[nn.Module, Any]] = {}
        self._latest: dict[Place, Any] = {}
        self._present: View | None = None
        self._hooks = View(self)

    def show(self, view: View) -> None:
        """Set attributes to ``view``, and let it observe the calling thread."""
        if view is not self._present:
            for place, (module, start) in self._start.items():
                _, value = view.values.get(place, (module, self._latest.get(place, start)))
                _write(module, place[1], value)
            self._present = view
        _thread.observer = view

    def hide(self) -> None:
        """End the observation of the calling thread."""
        _thread.observer = None

    def come_to(self, step: View | None = None) -> None:
        """Let hooks, on the calling thread, see what they saw last, and what ``step`` has left."""
        self._hooks.values = {**self._start, **self._hooks.values, **(step.values if step is not None else {})}
        self._present = None
        self.show(self._hooks)

    def wrote(self, view: View, module: nn.Module, name: str, before: Any) -> None:
        value = _read(module, name)
        if value is _ABSENT and before is _ABSENT:
            return  # a parameter, a buffer or a module
        place = id(module), name
        self._start.setdefault(place, (module, before))
        view.values[place] = module, value
        if view is not self._hooks and place not in self._private:
            self._latest[place] = value


class View:
    """What one step has set. An `Observer`.

    Attributes:
        values: module and value of each attribute.
    """

    def __init__(self, views: AttributeViews) -> None:
        self._views = views
        self.values: dict[Place, tuple[nn.Module, Any]] = {}

    def wrote(self, module: nn.Module, name: str, before: Any) -> None:
        self._views.wrote(self, module, name, before)


def _read(module: nn.Module, name: str) -> Any:
    return module.__dict__.get(name, _ABSENT)


def _write(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value
