"""Attributes of modules that user code sets while microbatches, or batches of an evaluation, overlap.

They take turns in user code, and each of them has a view of what any of them has set on modules:

    what it has set itself ── [1]
    else, of an attribute that one of them has left changed (counters, metrics, "is initialised"), the latest value
    of those in front of it, and of those that have ended ── persistent: it goes on from one to the next ── [2]
    else the value at the beginning ── an attribute that is put back (PEFT's ``disable_adapter``, a flag around a
    reference pass) is private to each ── [3]

The first window, and the first batch of an evaluation, run one by one and show which attributes are left changed.
Hooks between batches have a view of their own: what the batches that Lightning has come to have left, and what they
have set themselves ── [4]

`nn.Module.__setattr__` and ``__delattr__`` tell of writes meanwhile; nothing is searched or compared. A tensor that is
set again (``self.total += x``) was written in place, and so is a buffer by a method such as ``add_``: it is shared, and
its value is kept for hooks. Containers that are changed in place are shared.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_roundpipe.devices.process_context import shared_context

Holder = nn.Module | nn.Parameter
Place = tuple[int, str]
"""The id of a module and the name of an attribute, or the id of a parameter and ``"requires_grad"``."""

_ABSENT = object()
_thread = threading.local()
_PLAIN = (bool, int, float, str, type(None))


class _Held(NamedTuple):
    """What an attribute holds.

    Attributes:
        holder: the module, or the parameter whose ``requires_grad`` this is.
        registry: the dict of the module that holds it: of its submodules, parameters, buffers or other attributes.
        value: the object; `_ABSENT` if there is none. ``values``: a copy, of a tensor that was written in place.
    """

    holder: Holder
    registry: dict[str, Any]
    value: Any
    values: Tensor | None = None

    def seen(self, name: str) -> Any:
        """Return what code that reads the attribute gets: of one that the module lacks, its class's."""
        return getattr(type(self.holder), name, _ABSENT) if self.value is _ABSENT else self.value

    def copied(self) -> _Held:
        """Return the same with a copy of the tensor that it holds."""
        return self._replace(values=self.value.detach().clone())

    def put(self, name: str, *, in_place: bool = False) -> None:
        """Let the module hold the value; ``in_place``: also the values of a tensor that was written in place."""
        holder, value = self.holder, self.value
        if isinstance(holder, nn.Parameter):
            if holder.requires_grad != value:
                holder.requires_grad_(value)
            return
        now = _registry(holder, name)
        if value is _ABSENT or now is not self.registry:
            now.pop(name, None)
        if value is _ABSENT:
            return
        self.registry[name] = value
        if in_place and self.values is not None:
            value.data.copy_(self.values)  # by way of ``data``: graphs that saved it go on


def _read(holder: Holder, name: str) -> _Held:
    if isinstance(holder, nn.Parameter):
        return _Held(holder, {}, holder.requires_grad)
    registry = _registry(holder, name)
    return _Held(holder, registry, registry.get(name, _ABSENT))


def _registry(module: nn.Module, name: str) -> dict[str, Any]:
    own = module.__dict__  # without registries before ``Module.__init__``
    return next((own[key] for key in ("_buffers", "_modules", "_parameters") if name in own.get(key, ())), own)


def _alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def about_to_write(holder: Holder, name: str) -> None:
    """Tell the view whose user code runs on this thread, if any, that an attribute is about to be set."""
    if (view := getattr(_thread, "view", None)) is not None:
        view.about_to_write(holder, name)


def about_to_write_in_place(tensor: Tensor) -> bool:
    """Tell the view whose user code runs on this thread that a tensor is about to be written; return if it is held."""
    view = getattr(_thread, "view", None)
    place = None if view is None else view.holder_of(tensor)
    if view is None or place is None:
        return False
    view.about_to_write(*place, in_place=True)
    return True


def observe(view: Any) -> Any:
    """Let ``view`` be told of what this thread sets from now on; return who was told before."""
    before = getattr(_thread, "view", None)
    _thread.view = view
    return before


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Within this context, what this thread sets on modules is no view's own: all of them find it."""
    before = observe(None)
    try:
        yield
    finally:
        observe(before)


@shared_context
def observed_writes() -> Iterator[None]:
    """Within this context, views are told of writes to modules."""

    def noticed(original: Callable[..., None]) -> Callable[..., None]:
        def write(module: nn.Module, name: str, *value: Any) -> None:
            about_to_write(module, name)
            original(module, name, *value)

        return write

    before = nn.Module.__setattr__, nn.Module.__delattr__
    nn.Module.__setattr__, nn.Module.__delattr__ = noticed(before[0]), noticed(before[1])  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__, nn.Module.__delattr__ = before  # type: ignore[method-assign]


class SharedAttributes:
    """The attributes of a model that several views set.

    ``touched``: told of each module and parameter whose attributes change.

    Attributes:
        persistent: those that views have set, unless they put them back [2].
        restored: those that a view has changed, so that others could see it, and no view has left changed [3].
        hooks: the view of hooks [4].
    """

    def __init__(self, root: nn.Module, touched: Callable[[Holder], object] = lambda holder: None) -> None:
        self._root, self.touched = root, touched
        self.persistent: set[Place] = set()
        self.restored: set[Place] = set()
        self._left: set[Place] = set()
        """Those that a view has left changed."""
        self.begin()

    def make_persistent(self, place: Place) -> None:
        """Note that a view leaves an attribute changed."""
        self._left.add(place)
        self.persistent.add(place)
        self.restored.discard(place)

    def see_end(self, place: Place, *, left: bool, differed: bool) -> None:
        """Note whether a view has left an attribute changed, and whether others could have seen it changed."""
        if left:
            self.make_persistent(place)
        elif differed and place not in self._left:
            self.restored.add(place)
            self.persistent.discard(place)
        elif place not in self.restored:
            self.persistent.add(place)

    def begin(self) -> None:
        """Begin a window."""
        self.start: dict[Place, _Held] = {}
        self._latest: dict[Place, dict[AttributeView, _Held]] = {}
        """What views have set, by place, the latest one last."""
        self.numbers = itertools.count()
        """Places of views in their order."""
        self.present: AttributeView | None = None
        self.hooks = AttributeView(self)
        self._copied: dict[Place, _Held] = {}
        """Tensors that views have written in place, of which hooks find copies."""
        self._tensors: dict[int, tuple[nn.Module, str]] | None = None
        """Found when user code writes for the first time: few windows need the walk through all modules."""

    def tensors(self) -> dict[int, tuple[nn.Module, str]]:
        """Return modules and names, by id, of the buffers at the beginning of the window and what views have set."""
        if self._tensors is None:
            self._tensors = {id(b): (m, name) for m in self._root.modules() for name, b in m._buffers.items()}
        return self._tensors

    def keep(self, place: Place, writer: AttributeView) -> None:
        """Keep the values of the tensor at ``place`` for the views that have set it, as ``writer`` writes to it."""
        for view, held in self._latest.get(place, {}).items():
            if view is not writer and isinstance(held.value, Tensor) and held.values is None:
                self._latest[place][view] = view.values[place] = held.copied()

    def note(self, place: Place, view: AttributeView, held: _Held) -> None:
        """Note what a view has set."""
        of_views = self._latest.setdefault(place, {})
        of_views.pop(view, None)
        of_views[view] = held

    def latest(self, place: Place, to: AttributeView | None = None) -> _Held | None:
        """Return the latest value that ``to`` finds of an attribute [2], or that there is; None if there is none."""
        for view, held in reversed(self._latest.get(place, {}).items()):
            if to is None or view.number <= to.number or view.ended:
                return held
        return None

    def drop_hidden(self, place: Place) -> None:
        """Drop values that no view finds any more: those from before one of a view that has ended."""
        of_views = self._latest.get(place, {})
        newest = next((view for view in reversed(of_views) if view.ended), None)
        for view in [*of_views] if newest is not None else ():
            if view is newest:
                return
            del of_views[view]

    def show(self, to: AttributeView | None) -> None:
        """Set attributes to a view; None: to that of the code behind the window."""
        if to is self.present is not None:
            return
        for place, held in self.start.items():
            if place in self.persistent and to is not self.hooks:
                held = self.latest(place, to) or held
            held = to.values.get(place, held) if to is not None else held
            if not _alike(_read(held.holder, place[1]).value, held.value):
                held.put(place[1])
                self.touched(held.holder)
        self.present = to

    def enter_hooks(self, view: AttributeView | None = None) -> None:
        """Let hooks, on this thread, find what they saw last, and what ``view`` has left, while others run.

        Of a tensor that ``view`` has written in place they find a copy: the others go on writing to the tensor.
        """
        for place, held in view.values.items() if view is not None else ():
            self._copied.pop(place, None)
            if held.values is not None:
                self._copied[place], held = held, held._replace(value=held.values, values=None)
            self.hooks.values[place] = held
        self.present = None
        self.hooks.enter()

    def leave_to_hooks(self) -> None:
        """Let modules hold what hooks find. No view runs any more."""
        self.enter_hooks()
        self.hooks.exit()
        for place, held in self._copied.items():
            if self.hooks.values[place].value is held.values:
                held.put(place[1], in_place=True)

    def rewind(self) -> None:
        """Let modules hold what they held at the beginning. No view runs any more."""
        for place, held in self.start.items():
            held.put(place[1], in_place=True)

    def store_latest(self, views: Sequence[AttributeView]) -> None:
        """Let the last one of ``views`` to have set an attribute leave there what all of them have.

        One that calls fewer layers may end before the one in front of it.
        """
        for place, last in {place: view for view in views for place in view.values}.items():
            if place in self.persistent:
                last.values[place] = self.latest(place) or last.values[place]


class AttributeView:
    """What one microbatch, one batch of an evaluation, or hooks have set on modules: ``values``, by place.

    ``number`` is its place in the order of views, and it has ``ended`` when its user code is over.
    """

    def __init__(self, state: SharedAttributes) -> None:
        self.state = state
        self.number, self.ended = next(state.numbers), False
        self.values: dict[Place, _Held] = {}
        self._found: dict[Place, Any] = {}
        """What places held before it wrote to them for the first time."""
        self._section: dict[Place, _Held] = {}
        """What the running section has written to, as it was before."""
        self._differed: set[Place] = set()
        """What others could have seen changed."""
        self._new: set[Place] = set()
        """What it has set before anything has shown that it is persistent."""

    def put(self) -> None:
        """Let modules hold what it has set. No view runs any more."""
        for place, held in self.values.items():
            held.put(place[1], in_place=True)

    def enter(self) -> None:
        """Enter a section of user code on this thread."""
        self.state.show(self)
        _thread.view = self

    def holder_of(self, tensor: Tensor) -> tuple[nn.Module, str] | None:
        """Return the module and the name by which ``tensor`` is a buffer, or what a view has set; None if neither."""
        held = self.state.tensors().get(id(tensor))
        return held if held is not None and _read(*held).value is tensor else None

    def about_to_write(self, holder: Holder, name: str, *, in_place: bool = False) -> None:
        """Note that the running section writes to an attribute, or in place to the tensor that it holds."""
        self.state.touched(holder)
        self.state.tensors()
        place = id(holder), name
        if in_place:
            self.state.keep(place, self)
        if place not in self._section:
            held = _read(holder, name)
            self._section[place] = held.copied() if in_place else held

    def exit(self) -> None:
        """Leave the section. What it has set is its own from here on, also where it was the same before."""
        _thread.view = None
        state, section, self._section = self.state, self._section, {}
        for place, before in section.items():
            held = _read(before.holder, place[1])
            in_place = isinstance(held.value, Tensor) and held.value is before.value
            in_place = in_place and not isinstance(held.value, nn.Parameter)  # an optimizer writes to those
            if not in_place and isinstance(held.value, Tensor) and isinstance(held.holder, nn.Module):
                state.tensors()[id(held.value)] = held.holder, place[1]
            self.values[place] = held = held.copied() if in_place else held
            self._found.setdefault(place, before.seen(place[1]))
            state.start.setdefault(place, before)
            if in_place or self._found[place] is _ABSENT:  # what a module has lacked cannot be put back
                state.make_persistent(place)
            if not _alike(held.seen(place[1]), self._found[place]):
                self._differed.add(place)
            if place not in state.persistent:
                self._new.add(place)
            elif self is not state.hooks:
                state.note(place, self, held)

    def end(self) -> None:
        """Leave the last section, and find out which attributes are left changed."""
        self.exit()
        state = self.state
        for place, held in self.values.items():
            left = not _alike(held.seen(place[1]), self._found[place])
            state.see_end(place, left=left, differed=place in self._differed)
            if place in self._new and place in state.persistent:  # of others, later ones have left the latest by now
                state.note(place, self, held)
        self.ended = True
        for place in self.values:
            state.drop_hidden(place)
