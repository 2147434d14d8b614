"""A layer's parameters in host memory, and their way to a worker.

Masters are moved once into flat host buffers, so that a whole layer goes up in one copy instead of one per parameter.
The user's ``nn.Parameter`` objects stay who they are; only their ``.data`` moves. Where they are computed with in their
own format and staleness is 0, the master is the copy that uploads read. With staleness 1 the optimizer writes to
masters while they are uploaded, so what is trained has a working copy beside it, which is brought up to date between
the last upload of a step and the first one of the next. So has what is computed with in another format.

What is frozen and lies in a file that is mapped into memory may stay there (`mapped_files`): its uploads read the file,
a parameter at a time.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Stream
from lightning_roundpipe.devices.heap import give_back
from lightning_roundpipe.model.attributes import ModuleState, StateDiff
from lightning_roundpipe.model.cast_weights import Uses
from lightning_roundpipe.model.forward_hooks import Observers
from lightning_roundpipe.model.reachable import changes
from lightning_roundpipe.model.replica import parameter_places, unique_parameters
from lightning_roundpipe.runtime.memory.dtypes import Formats, widen
from lightning_roundpipe.runtime.memory.flat_params import FlatBuffer, ParamSlice, aligned
from lightning_roundpipe.runtime.memory.module_buffers import HostBuffers
from lightning_roundpipe.runtime.memory.param_buckets import ParamBucket

_PORTIONS, _LEAST_PORTION = 16, 2**22
"""How often memory is given back while weights are moved, at most, and the least bytes that are worth it."""


class HostLayer:
    """One layer: its module, its masters in flat host buffers, and what is needed to place it in an arena.

    Args:
        index: position among the layers.
        name: qualified name in the LightningModule.
        module: the user's module.
        device: any device; gives host memory that copies asynchronously.
        owned: where earlier layers hold their parameters, by id (this one may be tied to them); updated.
        formats: that weights travel in.
        apart: whether the optimizer writes to masters while they are uploaded.
        mapped: ids of masters that stay where they are, in files.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        device: Device,
        owned: dict[int, tuple[FlatBuffer, int]],
        formats: Formats | None = None,
        *,
        apart: bool = False,
        mapped: Container[int] = (),
    ) -> None:
        self.index = index
        self.name = name
        self.title = f"layer {name!r}"
        """For errors."""
        self.module = module
        self.launch_seconds = math.inf
        """What a run of its code takes the thread that it runs on; see `launched`."""
        self.state = ModuleState(name, module)
        self.buffers = HostBuffers()
        """All layers' in common, where there are several."""
        self.mutable_buffers: dict[int, tuple[nn.Module, str]] = {}
        """Which of the layer's buffers its forward changes, as far as it has been seen: module and name by position."""
        self.caches_parametrizations = False
        self.rewritten: set[int] = set()
        """Positions of masters whose copies the forward writes to without changing them, as far as it has been seen."""
        self.overwrites: dict[int, frozenset[int]] = {}
        """Inputs that the forward writes to in inference mode, as it was first seen, by how many it was given."""
        self.borrows: list[nn.Parameter] | None = None
        """Parameters of other modules that its code computes with; None: it has not run yet."""
        self.reaches_out: bool | None = None
        """Whether gradients leave it by another way than its arguments; None: it has not run in training yet."""
        self.chooses: bool | None = False
        """Whether its forward makes choices that its recomputation has to make again, as far as it has been seen. None:
        its recomputation makes others."""
        self.observers = Observers()
        """Hooks inside of it that only look."""
        self.moving: list[str] = []
        """What its code may read that was seen to change from one step to another."""
        self._values: dict[str, Any] | None = None
        self._seen_states: list[StateDiff | None] = []
        self._chosen_in: list[StateDiff | None] = []
        self.masters = unique_parameters(module)
        self.uses = Uses(module, self.masters)
        self.rounded: frozenset[int] = frozenset()
        """Positions of masters of which rounded copies travel."""
        self.bucket: ParamBucket  # what is updated together; given by `make_buckets` when all layers are known
        mine = [p for p in self.masters if id(p) not in owned]
        trained, frozen = _by_trainable(mine)
        formats = formats or Formats()
        self.flats = [FlatBuffer(trained, device, formats, apart=apart)] if trained else []
        for in_place in (False, True):
            if held := [p for p in frozen if (id(p) in mapped) is in_place]:
                self.flats.append(FlatBuffer(held, device, formats, apart=False, in_place=in_place))
        owned.update({id(p): (flat, i) for flat in self.flats for i, p in enumerate(flat.masters)})
        self._held = {id(p): owned[id(p)] for p in self.masters}
        self.place()

    def place(self) -> None:
        """Decide where the parameters lie in a worker's arena."""
        base, places = 0, {}
        for flat in self.flats:
            for master, segment in zip(flat.masters, flat.places, strict=True):
                places[id(master)] = _moved(segment, base)
            base += flat.nbytes
        self.tied = [p for p in self.masters if id(p) not in places]
        for master in self.tied:
            flat, index = self._held[id(master)]
            places[id(master)] = dataclasses.replace(flat.places[index], offset=base)
            base += aligned(places[id(master)].nbytes)
        self.places = [places[id(p)] for p in self.masters]
        self.nbytes = base
        self._tied_places = [places[id(p)] for p in self.tied]

    def round(self, formats: Mapping[int, torch.dtype]) -> None:
        """From now on weights travel rounded.

        Args:
            formats: what to, by position. What another layer holds, too, and what stays in a file is left as it is.
        """
        others = [layer for layer in self.bucket.layers if layer is not self] if formats else []
        shared = {id(p) for other in others for p in other.masters}
        mine = {id(self.masters[i]): dtype for i, dtype in formats.items() if id(self.masters[i]) not in shared}
        for flat in self.flats:
            flat.round({} if flat.in_place else {i: mine[id(p)] for i, p in enumerate(flat.masters) if id(p) in mine})
        self.place()
        self.rounded = frozenset(
            i
            for i, (p, place) in enumerate(zip(self.masters, self.places, strict=True))
            if place.dtype is not self.read(p).dtype
        )

    def see_values(self, values: dict[str, Any]) -> None:
        """What its code may read (`reachable_values`), in the first part of a step."""
        if self._values is not None and not self.moving:
            new = [f"{name} was set" for name in values.keys() - self._values.keys()]
            self.moving = changes(self._values, values) + sorted(new)
        self._values = values

    def launched(self, seconds: float) -> None:
        """Its code has run for ``seconds``. One run that took longer, because another thread was in the way, says
        little: what is known grows by a tenth at most."""
        self.launch_seconds = min(seconds, 1.1 * self.launch_seconds)

    def is_new_state(self, state: StateDiff | None) -> bool:
        """Whether the layer has not run with these attributes before: in another mode it may do other things."""
        if any(known is state for known in self._seen_states):
            return False
        self._seen_states = [*self._seen_states[-15:], state]
        return True

    def may_choose(self, state: StateDiff | None, *, relearn: bool) -> bool:
        """Whether it chooses; or may, as it has not run with these attributes before, or ``relearn`` is set."""
        if self.chooses is None:
            return False
        new = not any(known is state for known in self._chosen_in)
        if new:
            self._chosen_in = [*self._chosen_in[-15:], state]
        return new or relearn or self.chooses

    def seen_to_choose(self) -> None:
        if self.chooses is not None:
            self.chooses = True

    def reattach(self) -> None:
        """Before a step: bring what user code put in place of a master's values into the flat buffers."""
        for flat in self.flats:
            flat.reattach()

    def snapshot(self) -> None:
        """What :meth:`assert_unmodified` compares with, when all layers have reattached their masters."""
        self._own = [
            (inner._parameters, key, p, p._version, p.data_ptr()) for inner, key, p in parameter_places(self.module)
        ]
        self._inner = [(m._modules, tuple(m._modules.values())) for m in self.state.modules if m._modules]

    def assert_unmodified(self) -> None:
        """At a call: the weights that a worker has are those that the layer has now.

        Raises:
            RoundPipeError: if user code has changed or replaced them since the step began.
        """
        for held, key, parameter, version, pointer in self._own:
            now = held.get(key)
            if now is not parameter:
                raise RoundPipeError(
                    f"layer {self.name!r} is called with other weights than its own: {key!r} was replaced within the "
                    "step, as torch.func.functional_call does. Only a module's own parameters are sent to a worker: "
                    "compute with the other weights in a layer's forward, or between layers with torch functions."
                )
            if parameter._version != version or parameter.data_ptr() != pointer:
                raise RoundPipeError(
                    f"parameter {key!r} of layer {self.name!r} was written to within the step, when its value was on "
                    "its way to a worker. Write to parameters between steps, for example in on_train_batch_start, or "
                    "set num_microbatches=1."
                )
        if any(len(held) != len(now) or any(map(operator.is_not, held.values(), now)) for held, now in self._inner):
            raise RoundPipeError(
                f"a module inside layer {self.name!r} was replaced within the step; workers have the old one. Change "
                "the model between steps, and choose between modules in the layer's forward."
            )

    def is_written(self) -> bool:
        """Whether user code has written to parameters since `snapshot`, which are still the same ones."""
        return any(
            held.get(key) is parameter and (parameter._version != version or parameter.data_ptr() != pointer)
            for held, key, parameter, version, pointer in self._own
        )

    def written(self) -> list[tuple[int, int]]:
        """What changes when user code writes to a master, or puts other memory in its place."""
        return [(master._version, master.data_ptr()) for master in self.masters]

    def trainable(self) -> list[bool]:
        return [p.requires_grad for p in self.masters]

    def upload(self, stream: Stream, segment: Tensor, sent: Sequence[tuple[int, int]] = ()) -> None:
        """Enqueue the copy of all weights into ``segment`` (uint8, ``nbytes`` long) of a worker's arena.

        Args:
            stream: that copies.
            segment: where to.
            sent: first and last byte of what `upload_part` has sent, in order.
        """
        base = 0
        for flat in self.flats:
            part = segment[base : base + flat.nbytes]
            for start, end in _left(base, base + flat.nbytes, sent):
                flat.upload(stream, part, start - base, end - base)
            base += flat.nbytes
        for master, place in zip(self.tied, self._tied_places, strict=True):
            if _left(place.offset, place.offset + place.nbytes, sent):
                stream.copy(place.view(segment), self.read(master))

    def upload_part(
        self, stream: Stream, segment: Tensor, master: nn.Parameter, start: int, end: int
    ) -> tuple[int, int] | None:
        """Enqueue the copy of the numbers ``start`` to ``end`` of one contiguous master, if the layer has it.

        Returns:
            First and last byte of them in ``segment``, with the gap behind the last one.
        """
        base, gap = 0, end == master.numel()
        for flat in self.flats:
            if (span := flat.span_of(master, start, end)) is not None:
                flat.upload(stream, segment[base : base + flat.nbytes], *span)
                return base + span[0], base + (aligned(span[1]) if gap else span[1])
            base += flat.nbytes
        for mine, place in zip(self.tied, self._tied_places, strict=True):
            if mine is master:
                stream.copy(place.view(segment).view(-1)[start:end], self.read(master).view(-1)[start:end])
                return place.offset + start * place.dtype.itemsize, place.offset + end * place.dtype.itemsize
        return None

    def read(self, master: nn.Parameter) -> Tensor:
        """What one of the masters is computed with; what travels may be rounded."""
        flat, index = self._held[id(master)]
        return flat.read(index)

    def views(self, segment: Tensor) -> list[Tensor]:
        """The parameters' views into ``segment`` of an arena, in the order of ``masters``."""
        return [place.view(segment) for place in self.places]


def host_layers(
    modules: Mapping[str, nn.Module], device: Device, formats: Formats, *, apart: bool, mapped: Container[int]
) -> list[HostLayer]:
    """A layer of each of ``modules``, by name; see `HostLayer`.

    What weights leave is given back now and then, or the C library would keep all of it and they be there twice.
    """
    owned: dict[int, tuple[FlatBuffer, int]] = {}
    portion = max(_LEAST_PORTION, sum(p.nbytes for m in modules.values() for p in m.parameters()) // _PORTIONS)
    layers: list[HostLayer] = []
    left, buffers = 0, HostBuffers()
    for name, module in modules.items():
        layers.append(HostLayer(len(layers), name, module, device, owned, formats, apart=apart, mapped=mapped))
        layers[-1].buffers = buffers
        left += layers[-1].nbytes
        if left >= portion:
            give_back()
            left = 0
    return layers


def make_buckets(
    layers: Sequence[HostLayer], masters: Iterable[nn.Parameter], formats: Formats | None = None, *, apart: bool = False
) -> list[ParamBucket]:
    """The buckets of a module, in forward order; every layer gets to know its own.

    Args:
        layers: all of them, in order.
        masters: all parameters of the module. Those of no layer make the first bucket,
            as user code may read them anywhere.
        formats, apart: see `ParamBucket`.
    """
    groups: list[list[HostLayer]] = []
    for layer in layers:
        mine = {id(p) for p in layer.masters}
        shared = [g for g in groups if any(id(p) in mine for other in g for p in other.masters)]
        groups = [g for g in groups if g not in shared]
        groups.append([*(other for g in shared for other in g), layer])
    groups.sort(key=lambda group: min(layer.index for layer in group))
    inside = {id(p) for layer in layers for p in layer.masters}
    buckets = [ParamBucket(0, _unique(p for p in masters if id(p) not in inside), (), formats, apart=apart)]
    for group in groups:
        bucket = ParamBucket(
            len(buckets), _unique(p for layer in group for p in layer.masters), group, formats, apart=apart
        )
        for layer in group:
            layer.bucket = bucket
        buckets.append(bucket)
    return buckets


def begin_to_train(
    layers: Iterable[HostLayer], others: Iterable[nn.Parameter], formats: Formats, *, apart: bool
) -> None:
    """Other parameters are trained than before: they get a format to be trained in, and working copies if ``apart``.

    Args:
        layers: all of them.
        others: masters that belong to no layer.
    """
    layers = list(layers)
    for layer in layers:
        layer.round({})
    for flat in (flat for layer in layers for flat in layer.flats):
        flat.widen()
        if apart and flat.trained:
            flat.set_apart()
    for master in formats.too_narrow(others):
        widen(master)
    for layer in layers:
        layer.place()  # what it holds of others may have moved, too


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(p): p for p in parameters}.values())


def _by_trainable(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return [p for p in parameters if p.requires_grad], [p for p in parameters if not p.requires_grad]


def _moved(segment: ParamSlice, base: int) -> ParamSlice:
    return dataclasses.replace(segment, offset=base + segment.offset)


def _left(start: int, end: int, sent: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of the bytes ``start`` to ``end`` is not in ``sent``."""
    left = []
    for first, last in sorted(sent):
        if first > start and start < end:
            left.append((start, min(first, end)))
        start = max(start, last)
    return [*left, (start, end)] if start < end else left
