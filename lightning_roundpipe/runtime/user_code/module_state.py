"""Isolates what user code keeps on modules between its sections, so that each microbatch finds its own.

``self.skip = h`` before a layer and ``h + self.skip`` behind it, a list that collects hidden states, adapters or
``requires_grad`` switched off around a reference pass: in plain training all of this lasts for one batch. Microbatches
take turns within a batch, so one would find what another has set. The first batch shows which attributes change, and
after which call. From then on they are restored whenever a microbatch goes on:

    at first                        the value at the beginning of the step
    afterwards                      the microbatch's own value
    changed in one place only       what the microbatch before left there: counters and sums go on counting

The next batch, and hooks in between, find the last microbatch's values. Of an attribute that keeps something of each
sample, such as ``self.predictions = logits``, they find the rows of all microbatches. If user code computes with such a
value and replaces it, as with a recurrent network's hidden state, each sample needs its own, and the step is refused.

Metrics are left alone: they see one microbatch after another.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.attributes import (
    Container,
    StateDiff,
    differing,
    frozen,
    own_attributes,
    refill,
    same,
    tensors_in,
)
from lightning_roundpipe.runtime.batch.microbatches import are_rows
from lightning_roundpipe.runtime.memory.host_layer import HostLayer

_ABSENT = object()

SegmentKey = tuple[int, int]
"""A section of user code, by the layer call before it: index of the layer, and how often it has been called."""


class StatePlace:
    """An attribute of a module, or ``requires_grad`` of a parameter.

    Attributes:
        segment_keys: the sections of user code that change it.
        start: value at the beginning of the step.
        latest: value left by the last microbatch that has run the section, if only one section changes it.
        grows: whether it is a container that a step has added to.
    """

    def __init__(self, owner: nn.Module | nn.Parameter, name: str) -> None:
        self._owner = owner
        self._name = name
        self._joined: tuple[Any, Any] | None = None
        self._last: tuple[Any, Any] = (_ABSENT, None)
        """The last microbatch's value, in whose place hooks find the joined one."""
        self.segment_keys: set[SegmentKey] = set()
        self.grows = False
        self.start: Any = _ABSENT
        self.latest: Any = _ABSENT

    def read(self) -> tuple[Any, Any]:
        """Return the value, and a copy of its contents if it is a list or dict."""
        if isinstance(self._owner, nn.Parameter):
            return self._owner.requires_grad, None
        value = self._owner.__dict__.get(self._name, _ABSENT)
        return value, frozen(value)

    def write(self, kept: tuple[Any, Any]) -> None:
        value, contents = kept
        if isinstance(self._owner, nn.Parameter):
            if self._owner.requires_grad != value:
                self._owner.requires_grad_(value)
            return
        if isinstance(value, Container) and not same(value, contents):
            refill(value, contents, nested=False)
        if value is _ABSENT:
            self._owner.__dict__.pop(self._name, None)
        else:
            self._owner.__dict__[self._name] = value

    def show(self, joined: tuple[Any, Any], last: tuple[Any, Any]) -> None:
        """Let hooks find the ``joined`` value in place of the ``last`` microbatch's."""
        self._joined, self._last = joined, last
        self.write(joined)

    def hide(self) -> None:
        """Put the last microbatch's value back, whose rows the next step's code can compute with, unless it is new."""
        joined, self._joined = self._joined, None
        if joined is not None and _unchanged(self.read(), joined):
            self.write(self._last)
        self._last = (_ABSENT, None)

    def inherited(self, samples: int) -> list[Tensor]:
        """Return tensors from the previous batch that may hold something of each of its samples.

        Args:
            samples: size of the microbatch that left them. If only one section changes the attribute, tensors without a
                dimension of that size are left out: they may be sums that continue over batches.
        """
        value = self.start[0] if isinstance(self.start, tuple) else None
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        tensors = [t for t in held if isinstance(t, Tensor) and t.dim()]
        return [t for t in tensors if len(self.segment_keys) > 1 or samples in t.shape]

    def refuse_inheritance(self) -> None:
        owner = type(self._owner).__name__
        raise RoundPipeError(
            f"attribute {self._name!r} of {owner} goes from batch to batch: training_step reads what the previous "
            "batch left there and replaces it. With several microbatches it would read what another microbatch left: "
            "set num_microbatches=1, or keep it out of the step."
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the attribute holds now."""
        return list(tensors_in(self.read()[0]))

    def refuse_reading(self) -> None:
        owner = type(self._owner).__name__
        raise RoundPipeError(
            f"training_step computes with attribute {self._name!r} of {owner}, which the model's forward has set: with "
            "microbatch_scope='model' it is the last microbatch's alone. Return it from the model."
        )

    def counts_at(self, segment_key: SegmentKey | None) -> bool:
        """Return whether ``segment_key`` is the only section that changes it."""
        return len(self.segment_keys) == 1 and segment_key in self.segment_keys


class ModuleStateIsolation:
    """The attributes of one LightningModule that user code changes; lives as long as the trace.

    Args:
        root: the LightningModule.
        layers: the layers. Their inner modules are compared at each call anyway.
    """

    def __init__(self, root: nn.Module, layers: Sequence[HostLayer]) -> None:
        modules = [m for m in root.modules() if not isinstance(m, Metric)]
        self._watch = StateWatch(modules, list(root.parameters()))
        inside = {id(m) for layer in layers for m in layer.state.modules}
        self._user_code = [m for m in modules if id(m) not in inside]
        self._layers = layers
        self._names = {id(module): f"{name}." if name else "" for name, module in root.named_modules()}
        self.places: dict[tuple[int, str], StatePlace] = {}
        self.inherited: dict[int, StatePlace] = {}
        """By the ids of tensors that the previous step has left; see `StatePlace.inherited`."""
        self._samples = -1
        self._rows = RowsOfSteps()

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Save the state at the beginning of a step."""
        for place in self.places.values():
            place.hide()
            place.start = place.latest = place.read()
        self.inherited.clear()
        for place in self.places.values():
            self.inherited.update((id(tensor), place) for tensor in place.inherited(self._samples))
        self._seen = [dict(m.__dict__) for m in self._user_code]
        self._states = [layer.state.current() for layer in self._layers]
        self._trainable = [layer.trainable() for layer in self._layers]

    def end(
        self, kept: Sequence[MicrobatchModuleState], sizes: Sequence[int], rows: Collection[str] = (), *,
        read: bool = True,
    ) -> None:  # fmt: skip
        """Leave on the modules what the last microbatch would have left.

        Args:
            kept: the values of each microbatch.
            sizes: their numbers of samples.
            rows: paths of attributes with rows of all microbatches.
            read: whether user code may read them before the next step. Else only what grows gets the rows of all.
        """
        self._samples = sizes[-1]
        self._rows.begin(sizes)
        for (owner, name), place in self.places.items():
            last = place.latest if len(place.segment_keys) == 1 else kept[-1].values.get(place, place.start)
            path = f"{self._names.get(owner, '')}{name}"
            place.grows |= _grows(last[1], place.start[1])
            has_rows = any(row == path or row.startswith((f"{path}[", f"{path}.")) for row in rows)
            if has_rows and (read or place.grows):
                place.show(self._rows.of_all([state.values.get(place, place.start) for state in kept]), last)
            else:
                place.write(last)

    # -- the first batch ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Before a microbatch's first section: forget changes so far, which are not user code's."""
        self._watch.changes()

    def learn(self, segment_key: SegmentKey) -> None:
        """After a section of user code: add the attributes that it changed."""
        for owner, old, new in self._watch.changes():
            for name in differing(old, new):
                self._place_of(owner, name, old.get(name, _ABSENT)).segment_keys.add(segment_key)

    def _place_of(self, owner: nn.Module | nn.Parameter, name: str, value: Any) -> StatePlace:
        """Return the attribute's place; a new one starts from ``value``, a copy of what the attribute held."""
        place = self.places.get((id(owner), name))
        if place is None:
            place = self.places[id(owner), name] = StatePlace(owner, name)
            place.start = place.latest = (_live(owner, name, value), value)
        return place

    # -- later --------------------------------------------------------------------------------------------------------

    def refuse_new(self, layer: HostLayer, state: StateDiff | None, trainable: list[bool]) -> None:
        """Refuse changes by user code, found at a call of ``layer``, that the first batch did not show.

        Microbatches take turns, so such a change may be another microbatch's.

        Raises:
            RoundPipeError: if there is such a change.
        """
        if trainable != self._trainable[layer.index]:
            known = self._trainable[layer.index]
            for master, now, before in zip(layer.masters, trainable, known, strict=True):
                if now != before and (id(master), "requires_grad") not in self.places:
                    _refuse("requires_grad of a parameter", layer.name)
        begun = self._states[layer.index]
        if state is not begun:
            for index, module in enumerate(layer.state.modules):
                old, new = _changed(begun, index), _changed(state, index)
                for name in old.keys() | new.keys():
                    if old.get(name, _ABSENT) is not new.get(name, _ABSENT) and not same(old.get(name), new.get(name)):
                        self._refuse_unless_known(module, name, f"in layer {layer.name!r}")
        for index, module in enumerate(self._user_code):
            held, seen = module.__dict__, self._seen[index]
            if len(held) != len(seen) or not all(map(operator.is_, held.values(), seen.values())):
                self._check(index, module)

    def _check(self, index: int, module: nn.Module) -> None:
        seen = self._seen[index]
        known = set(map(id, seen.values()))
        for name, value in module.__dict__.items():
            if id(value) not in known:
                self._refuse_unless_known(module, name, "outside the layers")
        self._seen[index] = dict(module.__dict__)

    def _refuse_unless_known(self, module: nn.Module, name: str, where: str) -> None:
        if (id(module), name) not in self.places:
            _refuse(f"attribute {name!r} of {type(module).__name__}", where)

    def isolate(self, layer: HostLayer, attributes: Iterable[tuple[int, str]], segment_key: SegmentKey) -> None:
        """Isolate attributes that ``layer`` itself is about to set, which no batch before has shown.

        No microbatch has set them yet in this step, so each starts from what they hold.

        Args:
            layer: the layer.
            attributes: number of the module in the layer, and name.
            segment_key: the section of user code that finds what the layer has set.
        """
        for number, name in attributes:
            owner = layer.state.modules[number]
            if (id(owner), name) not in self.places:
                value = frozen(owner.__dict__.get(name, _ABSENT))
                self._place_of(owner, name, value).segment_keys.add(segment_key)

    def wrote(self, layer: HostLayer) -> None:
        """Accept attributes that ``layer`` itself has set as its current state."""
        self._states[layer.index] = layer.state.current()

    def finished(self) -> list[str]:
        """Accept what a microbatch has set outside the layers, once it has run its last section of user code.

        Returns:
            The paths of attributes that it has set or removed and that are not in ``places``.
        """
        new = []
        for index, module in enumerate(self._user_code):
            held, seen = module.__dict__, self._seen[index]
            if len(held) != len(seen) or not all(map(operator.is_, held.values(), seen.values())):
                names = {**seen, **held}
                changed = [name for name in names if held.get(name, _ABSENT) is not seen.get(name, _ABSENT)]
                prefix = self._names.get(id(module), "")
                new += [f"{prefix}{name}" for name in changed if (id(module), name) not in self.places]
                self._seen[index] = dict(held)
        return new


class MicrobatchModuleState:
    """One microbatch's values of the attributes in ``module_state``."""

    def __init__(self, module_state: ModuleStateIsolation) -> None:
        self.module_state = module_state
        self.values: dict[StatePlace, tuple[Any, Any]] = {}
        self.inherited = module_state.inherited
        self._used: set[StatePlace] = set()
        self._begun = False

    def notice(self, value: Any) -> None:
        """Record that user code computes with ``value``."""
        if (place := self.inherited.get(id(value))) is not None:
            self._used.add(place)

    def enter(self, segment_key: SegmentKey | None, *, learning: bool) -> None:
        """Restore the microbatch's values before user code of ``segment_key``, None: before its backward."""
        places = self.module_state.places
        for place in places.values():
            own = self.values.get(place, place.start)
            counting = place.counts_at(segment_key) and _unchanged(own, place.start)
            place.write(place.latest if counting else own)
        if learning and (places or not self._begun):  # otherwise nothing has touched the modules since `leave`
            self.module_state.look()
        self._begun = True

    def leave(self, segment_key: SegmentKey, *, learning: bool) -> None:
        """Save the microbatch's values when it calls a layer or ends."""
        if learning:
            self.module_state.learn(segment_key)
        for place in self.module_state.places.values():
            self.values[place] = place.read()
            if place in self._used and not _unchanged(self.values[place], place.start):
                place.refuse_inheritance()
            if place.counts_at(segment_key):
                place.latest = self.values[place]


class StateWatch:
    """Finds changes on many modules and parameters; cheap if there are few.

    Like `ModuleState`, but for a whole model, and from one look to the next.
    """

    def __init__(self, modules: list[nn.Module], parameters: list[nn.Parameter]) -> None:
        self._modules, self._parameters = modules, parameters
        self._seen = [_Attributes(module) for module in modules]
        self._all_empty = [c for seen in self._seen for c in seen.empty]  # mostly hook dicts, checked in one pass
        self._trainable = [p.requires_grad for p in parameters]

    def changes(self) -> list[tuple[nn.Module | nn.Parameter, dict[str, Any], dict[str, Any]]]:
        """Return owners whose attributes may have changed since the last call, with the attributes before and now."""
        found: list[tuple[nn.Module | nn.Parameter, dict[str, Any], dict[str, Any]]] = []
        some_filled = any(self._all_empty)
        for index, (module, seen) in enumerate(zip(self._modules, self._seen, strict=True)):
            if seen.differ(module) or (some_filled and any(seen.empty)):
                now = self._seen[index] = _Attributes(module)
                found.append((module, seen.values, now.values))
        if found:
            self._all_empty = [c for seen in self._seen for c in seen.empty]
        trainable = [p.requires_grad for p in self._parameters]
        if trainable != self._trainable:
            for parameter, old, new in zip(self._parameters, self._trainable, trainable, strict=True):
                if old != new:
                    found.append((parameter, {"requires_grad": old}, {"requires_grad": new}))
            self._trainable = trainable
        return found


class _Attributes:
    """The attributes of a module, with copies of its containers.

    Attributes:
        values: by name.
        empty: the containers that hold nothing. Whether they still do is not seen by `differ`.
    """

    def __init__(self, module: nn.Module) -> None:
        own = own_attributes(module)
        self.values = {k: frozen(v) for k, v in own.items()}
        self._held = list(module.__dict__.values())
        containers = [(v, self.values[k]) for k, v in own.items() if isinstance(v, Container)]
        self.empty = [v for v, _ in containers if not v]
        self._filled = [(v, contents) for v, contents in containers if v]

    def differ(self, module: nn.Module) -> bool:
        """Return whether those of ``module`` are others now."""
        held = module.__dict__
        if len(held) != len(self._held) or not all(map(operator.is_, held.values(), self._held)):
            return True
        return any(not same(container, contents) for container, contents in self._filled)


class RowsOfSteps:
    """Joins what microbatches leave in attributes that keep a row for each sample.

    A list that grows over steps holds the last microbatch's rows of the steps before, too, as these are what user code
    may compute with. So it is remembered which rows of all samples they stand for.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a microbatch's tensor: the tensor, and the rows of all microbatches of that step."""
        self._before = self._known
        self._sizes: Sequence[int] = ()

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin with a step whose microbatches have as many samples as ``sizes`` says."""
        self._before, self._known, self._sizes = self._known, {}, sizes

    def of_all(self, values: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Join what each microbatch has left in an attribute, as `StatePlace.read` returns it."""
        value, _ = values[-1]
        filled = isinstance(value, Container)
        joined = self._joined([contents if filled else own for own, contents in values])
        return (value if filled and all(own is value for own, _ in values) else joined), joined

    def _joined(self, values: Sequence[Any]) -> Any:
        """Concatenate tensors with a row for each sample, in containers too. Of other values, return the last one."""
        last = values[-1]
        if any(type(value) is not type(last) for value in values):
            return last
        if isinstance(last, Tensor):
            return self._joined_tensor(values)
        if isinstance(last, dict) and all(value.keys() == last.keys() for value in values):
            joined = copy.copy(last)
            for key in last:
                joined[key] = self._joined([value[key] for value in values])
            return joined
        if isinstance(last, (list, tuple, deque)) and all(len(value) == len(last) for value in values):
            parts = [self._joined(column) for column in zip(*values, strict=True)]
            if isinstance(last, deque):
                return deque(parts, last.maxlen)
            return type(last)(*parts) if hasattr(last, "_fields") else type(last)(parts)
        return last

    def _joined_tensor(self, values: Sequence[Tensor]) -> Tensor:
        last = values[-1]
        if all(value is last for value in values):  # of a step before
            rows = self._before.get(id(last), (last, last))[1]
        else:
            rows = torch.cat([v.detach().cpu() for v in values]) if are_rows(values, self._sizes) else last
        self._known[id(last)] = last, rows
        return rows


def _grows(now: Any, before: Any) -> bool:
    """Return whether a container, or one in it, has more items than before."""
    if isinstance(now, dict) and isinstance(before, dict):
        return len(now) > len(before) or any(_grows(value, before.get(key)) for key, value in now.items())
    return isinstance(now, Container) and isinstance(before, Container) and len(now) > len(before)


def _unchanged(now: tuple[Any, Any], before: tuple[Any, Any]) -> bool:
    return now[0] is before[0] and same(now[1], before[1])


def _live(owner: nn.Module | nn.Parameter, name: str, value: Any) -> Any:
    """Return the original of the copy ``value``, if the owner still holds it."""
    now = owner.__dict__.get(name, value) if isinstance(owner, nn.Module) else value
    return now if isinstance(value, Container) and type(now) is type(value) else value


def _changed(state: StateDiff | None, index: int) -> dict[str, Any]:
    changed, removed = state.changed.get(index, ({}, ())) if state is not None else ({}, ())
    return {**changed, **dict.fromkeys(removed, _ABSENT)}


_CHANGED_BY = {
    "requires_grad": ", as PEFT does in disable_adapter() and set_adapter()",
    "_forward_hooks": ", as Hugging Face models do when output_hidden_states or output_attentions is first set",
}
"""Who changes an attribute, by a word in its description: libraries do so behind a setting that errors have to name."""


def _refuse(what: str, where: str) -> None:
    by = next((by for word, by in _CHANGED_BY.items() if word in what), "")
    raise RoundPipeError(
        f"{what} ({where}) was changed by code between layers{by}, which did not happen in the first batch. "
        "Microbatches take turns there, so it may be another one's: change it between batches, from the first batch "
        "on, or set num_microbatches=1."
    )
