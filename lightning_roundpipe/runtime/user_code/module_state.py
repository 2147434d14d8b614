"""Attributes of modules that user code sets during a step.

Microbatches take turns between layers. Each of them has a view of what any of them has set on modules in this step:

    what it has set itself ── [1]
    else, of an attribute that a microbatch has left changed (counters, metrics, "is initialised"), the latest value
    ── carried on in order ── [2]
    else the value at the beginning of the step ── an attribute that is put back (PEFT's ``disable_adapter``, a flag
    around a reference pass) is private to each microbatch ── [3]

The first window runs one microbatch after another, so it shows which attributes are left changed. When all microbatches
have ended, modules are as at the beginning of the step, and `ShownState` lets hooks find, batch by batch, what that
batch has left; after the last one, modules have the last values.

`nn.Module.__setattr__` and ``__delattr__`` tell of writes while a step of several microbatches runs; nothing is
searched or compared. A tensor that is set again (``self.total += x``) was written in place, and so is a buffer by a
method such as ``add_``: it is shared, and its value is kept for hooks. Containers that are changed in place are shared.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_roundpipe.runtime.memory.module_buffers import BufferHistory

Holder = nn.Module | nn.Parameter
SegmentKey = tuple[int, int]
"""A section of user code, by the layer call before it: index of the layer, and how often it has been called."""
Place = tuple[int, str]
"""The id of a module and the name of an attribute, or the id of a parameter and ``"requires_grad"``."""

_ABSENT = object()
_thread = threading.local()
_PLAIN = (bool, int, float, str, type(None))


class _Held(NamedTuple):
    """What an attribute holds.

    Attributes:
        holder: the module, or the parameter whose ``requires_grad`` this is.
        value: the object; `_ABSENT` if there is none.
        values: of a tensor that was written in place, a copy.
    """

    holder: Holder
    value: Any
    values: Tensor | None = None

    def seen(self, name: str) -> Any:
        """Return what code that reads the attribute gets: of one that the module lacks, its class's."""
        return getattr(type(self.holder), name, _ABSENT) if self.value is _ABSENT else self.value

    def put(self, name: str) -> None:
        holder, value = self.holder, self.value
        if isinstance(holder, nn.Parameter):
            if holder.requires_grad != value:
                holder.requires_grad_(value)
            return
        held = _buffers(holder) if name in _buffers(holder) else holder.__dict__
        if value is _ABSENT:
            held.pop(name, None)
            return
        held[name] = value
        if self.values is not None:
            value.data.copy_(self.values)  # by way of ``data``: graphs that saved it go on


def _read(holder: Holder, name: str) -> Any:
    if isinstance(holder, nn.Parameter):
        return holder.requires_grad
    buffers = _buffers(holder)
    return buffers[name] if name in buffers else holder.__dict__.get(name, _ABSENT)


def _buffers(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = module.__dict__.get("_buffers", {})  # none yet before ``Module.__init__``
    return found


def _alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def about_to_write(holder: Holder, name: str) -> None:
    """Note that user code of a microbatch, if it runs on this thread, is about to write to an attribute."""
    observer: MicrobatchModuleState | None = getattr(_thread, "observer", None)
    if observer is not None:
        observer.about_to_write(holder, name)


def about_to_write_in_place(tensor: Tensor) -> None:
    """Note that user code of a microbatch, if it runs on this thread, is about to write to a tensor."""
    observer: MicrobatchModuleState | None = getattr(_thread, "observer", None)
    if observer is not None and (place := observer.module_state.buffers.get(id(tensor))) is not None:
        observer.about_to_write(*place, in_place=True)


class ModuleStateIsolation:
    """The attributes of a model that microbatches set.

    Args:
        root: the model. The layers' own buffers are not written by user code.

    Attributes:
        buffers: modules and names of the model's buffers, by their ids, at the beginning of the step.
        places: all that were seen; a later step begins with what earlier ones have shown.
        carried: those that a microbatch has left changed [2].
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.places: set[Place] = set()
        self.carried: set[Place] = set()
        self.begin()

    @property
    def private(self) -> bool:
        """Whether microbatches put attributes back that others must not see [3]."""
        return not self.places <= self.carried

    def begin(self) -> None:
        """Begin a step."""
        self.start: dict[Place, _Held] = {}
        self.latest: dict[Place, _Held] = {}
        self.present: MicrobatchModuleState | None = None
        self.buffers = {id(b): (m, name) for m in self._root.modules() for name, b in m._buffers.items()}

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Within this context, writes to modules on threads of microbatches are seen."""

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

    def show(self, to: MicrobatchModuleState | None) -> None:
        """Set what was written in this step to the view of a microbatch; None: of the code after the step."""
        if to is None or to is not self.present:
            own = to.values if to is not None else {}
            for place, start in self.start.items():
                held = own.get(place) or (self.latest.get(place) if place in self.carried else None) or start
                if not _alike(_read(held.holder, place[1]), held.value):
                    held._replace(values=None).put(place[1])
            self.present = to


class MicrobatchModuleState:
    """What one microbatch has set on modules.

    Attributes:
        values: what its sections of user code have left, by place.
    """

    def __init__(self, module_state: ModuleStateIsolation) -> None:
        self.module_state = module_state
        self.values: dict[Place, _Held] = {}
        self._found: dict[Place, Any] = {}
        """What places held before it wrote to them for the first time."""
        self._section: dict[Place, _Held] = {}
        """What the running section has written to, as it was before."""

    def enter(self) -> None:
        """Enter a section of user code."""
        self.module_state.show(self)
        _thread.observer = self

    def about_to_write(self, holder: Holder, name: str, *, in_place: bool = False) -> None:
        """Note that the running section writes to an attribute, or in place to the tensor that it holds."""
        place = id(holder), name
        if place not in self._section:
            value = _read(holder, name)
            values = value.detach().clone() if in_place else None
            self._section[place] = _Held(holder, value, values)

    def leave(self) -> None:
        """Leave the section. Attributes that it has put back itself are nobody else's business."""
        _thread.observer = None
        state, section, self._section = self.module_state, self._section, {}
        for place, before in section.items():
            holder, now = before.holder, _read(before.holder, place[1])
            in_place = isinstance(now, Tensor) and now is before.value
            if _alike(now, before.value) and not in_place:
                continue
            values = now.detach().clone() if in_place else None
            self.values[place] = held = _Held(holder, now, values)
            self._found.setdefault(place, before.seen(place[1]))
            state.start.setdefault(place, before)
            state.places.add(place)
            if in_place:
                state.carried.add(place)
            if place in state.carried:
                state.latest[place] = held

    def end(self) -> None:
        """After ``training_step``: find out which attributes are left changed."""
        self.leave()
        state = self.module_state
        for place, held in self.values.items():
            if place not in state.carried and not _alike(held.seen(place[1]), self._found[place]):
                state.carried.add(place)
                state.latest[place] = held


class ShownState:
    """Lets hooks find what the microbatches of a batch have left, batch by batch.

    Args:
        state: the state at the end of the step.
        microbatches: what each microbatch has set.
        buffers: the layers' buffers as each microbatch has left them.
        batches: the microbatches of each batch.
        in_order: whether microbatches have ended one after another. One that calls fewer layers may end before the one
            in front of it; then the last one to have set an attribute leaves there what all of them have.
    """

    def __init__(
        self,
        state: ModuleStateIsolation,
        microbatches: Sequence[MicrobatchModuleState],
        buffers: BufferHistory,
        batches: Sequence[Sequence[int]],
        in_order: bool,
    ) -> None:
        self._values, self._buffers, self._batches = [dict(one.values) for one in microbatches], buffers, batches
        last = {} if in_order else {place: values for values in self._values for place in values}
        for place, values in last.items():
            values[place] = state.latest.get(place, values[place]) if place in state.carried else values[place]
        buffers.show(-1)
        for place, held in state.start.items():
            held.put(place[1])

    def show(self, batch: int) -> None:
        """Set what the microbatches of ``batch`` have set; everything else stays as it is."""
        for microbatch in self._batches[batch]:
            self._buffers.show(microbatch)
            for place, held in self._values[microbatch].items():
                held.put(place[1])
