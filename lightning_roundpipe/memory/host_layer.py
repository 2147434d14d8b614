"""A layer's parameters in host memory, and their upload to a worker.

The masters are moved into flat host buffers once, so that a layer is one copy instead of one per parameter. The user's
``nn.Parameter`` objects keep their identity; only their ``.data`` moves. Where masters are computed with in their own
dtype and staleness is 0, uploads read the masters. With staleness 1 the optimizer writes to trained masters while they
are uploaded, so these have a working copy beside them. It is refreshed between the last upload of a step and the first
one of the next. Masters that are computed with in another dtype have a working copy too.

A frozen master in a memory-mapped file may stay there (`mapped_files`). Its uploads read the file, one parameter at a
time.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Stream
from lightning_roundpipe.devices.heap import give_back
from lightning_roundpipe.memory.dtypes import Formats, widen
from lightning_roundpipe.memory.flat_buffer import FlatBuffer
from lightning_roundpipe.memory.flat_params import aligned
from lightning_roundpipe.memory.module_buffers import HostBuffers
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.model.attributes import ModuleState, StateDiff
from lightning_roundpipe.model.cast_weights import Uses
from lightning_roundpipe.model.forward_hooks import Observers
from lightning_roundpipe.model.quantized import aliases, follow
from lightning_roundpipe.model.replica import parameter_places, unique_parameters
from lightning_roundpipe.model.unpacked import Key, room_for

_PORTIONS, _LEAST_PORTION = 16, 2**22
"""How often freed memory is returned to the system while weights move, at most, and the least bytes worth it."""


class HostLayer:
    """One layer: its module, its masters in flat host buffers, and what the engine has learned about its code.

    Args:
        index: position among the layers.
        name: qualified name in the LightningModule.
        module: the user's module.
        device: any device; allocates host memory that copies asynchronously.
        owned: buffer and index of the parameters of earlier layers, to which this one may be tied, by id. Updated.
        formats: dtypes in which weights travel.
        apart: whether the optimizer writes to masters while they are uploaded.
        mapped: ids of masters that stay in their files.
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
        """For error messages."""
        self.module = module
        self.launch_seconds = math.inf
        """Seconds that the layer's code occupies the thread that runs it; see `launched`."""
        self.state = ModuleState(name, module)
        self.buffers = HostBuffers()
        """Shared by all layers of a model."""
        self.mutable_buffers: dict[int, tuple[nn.Module, str]] = {}
        """Buffers that the forward was seen to change: module and name by position."""
        self.buffer_places: list[tuple[int, str]] = []
        """Index of the module and name of each buffer, in the order of positions."""
        self.caches_parametrizations = False
        self.borrows: list[nn.Parameter] | None = None
        """Parameters of other modules that the layer's code computes with; None: it has not run yet."""
        self.reads_data = False
        """Whether the layer's code was seen to read or set the ``.data`` of its parameters: it may write there."""
        self.reaches_out: bool | None = None
        """Whether gradients leave the layer other than through its arguments; None: it has not run in training yet."""
        self.sets_attributes = False
        """Whether its calls set attributes of its modules, so that each finds what the one before has set."""
        self.observers = Observers()
        """Forward hooks inside the layer that only look."""
        self._seen_states: list[StateDiff | None] = []
        self.masters = unique_parameters(module)
        self.uses = Uses(module, self.masters)
        self.rounded: frozenset[int] = frozenset()
        """Positions of masters whose uploads are rounded copies."""
        self.copies_wanted: dict[Key, int] = {}
        """Bytes of each unpacked copy of a packed master that the layer's code has asked for."""
        self.bucket: ParamBucket  # set by `make_buckets` once all layers are known
        mine = [p for p in self.masters if id(p) not in owned]
        formats = formats or Formats()
        trained = [p for p in mine if p.requires_grad]
        self.flats = [FlatBuffer(trained, device, formats, apart=apart)] if trained else []
        for in_place in (False, True):
            if held := [p for p in mine if not p.requires_grad and (id(p) in mapped) is in_place]:
                self.flats.append(FlatBuffer(held, device, formats, apart=False, in_place=in_place))
        owned.update({id(p): (flat, i) for flat in self.flats for i, p in enumerate(flat.masters)})
        self._held = {id(p): owned[id(p)] for p in self.masters}
        self._aliases = aliases(module)
        follow(self._aliases)
        self.place()

    def place(self) -> None:
        """Lay the parameters out in a worker's arena."""
        base, places = 0, {}
        for flat in self.flats:
            for master, segment in zip(flat.masters, flat.places, strict=True):
                places[id(master)] = dataclasses.replace(segment, offset=base + segment.offset)
            base += flat.nbytes
        self.tied = [p for p in self.masters if id(p) not in places]
        for master in self.tied:
            flat, index = self._held[id(master)]
            places[id(master)] = dataclasses.replace(flat.places[index], offset=base)
            base += aligned(places[id(master)].nbytes)
        self.places = [places[id(p)] for p in self.masters]
        self.nbytes = base
        self._tied_places = [places[id(p)] for p in self.tied]

    def round(self, formats: Mapping[int, torch.dtype], *, share: bool = False) -> None:
        """Upload rounded copies of some masters from now on.

        Args:
            formats: dtype to round to, by position. Masters shared with another layer, or in a file, are left as they
                are.
            share: whether masters and their copies share memory, where they can.
        """
        shared = self.bucket.shared if formats else set()
        mine = {id(self.masters[i]): dtype for i, dtype in formats.items() if id(self.masters[i]) not in shared}
        for flat in self.flats:
            here = {} if flat.in_place else {i: mine[id(p)] for i, p in enumerate(flat.masters) if id(p) in mine}
            flat.round(here, share=share)
        self.place()
        self.rounded = frozenset(
            i
            for i, (p, place) in enumerate(zip(self.masters, self.places, strict=True))
            if place.dtype is not self.read(p).dtype
        )

    @property
    def copies_nbytes(self) -> int:
        """Bytes of all of its packed masters, unpacked as the layer's code has asked for them."""
        return room_for(self.copies_wanted)

    def launched(self, seconds: float) -> None:
        """Record that the layer's code ran for ``seconds``.

        Another thread may have held up a run, so the estimate takes the shorter time and grows by a tenth at most.
        """
        self.launch_seconds = min(seconds, 1.1 * self.launch_seconds)

    def is_new_state(self, state: StateDiff | None) -> bool:
        """Return whether the layer's code has not run with these attributes yet; another mode may behave otherwise."""
        if any(known is state for known in self._seen_states):
            return False
        self._seen_states = [*self._seen_states[-15:], state]
        return True

    def reattach(self) -> None:
        """Before a step: move values that user code has put in place of masters into the flat buffers."""
        for flat in self.flats:
            flat.reattach()
        follow(self._aliases)

    def snapshot(self) -> None:
        """Save what `assert_unmodified` compares with. Call after all layers have reattached their masters."""
        self._own = [
            (inner._parameters, key, p, p._version, p.data_ptr()) for inner, key, p in parameter_places(self.module)
        ]
        self._inner = [(m._modules, tuple(m._modules.values())) for m in self.state.modules if m._modules]

    def assert_unmodified(self) -> None:
        """Check at a call that the layer still has the weights that its workers have.

        Raises:
            RoundPipeError: if user code has changed or replaced a weight or an inner module since `snapshot`.
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
                    "its way to a worker. Write to parameters between steps, for example in on_train_batch_start."
                )
        if any(len(held) != len(now) or any(map(operator.is_not, held.values(), now)) for held, now in self._inner):
            raise RoundPipeError(
                f"a module inside layer {self.name!r} was replaced within the step; workers have the old one. Change "
                "the model between steps, and choose between modules in the layer's forward."
                + self._configuration_remedy()
            )

    def _configuration_remedy(self) -> str:
        """Return which settings make the model as it is now from the beginning, as a sentence; empty if none do.

        A model that replaces its modules in a forward (BigBird, for short sequences) sets attributes that it has from
        its configuration.
        """
        now = self.state.current()
        settings = [
            f"config.{name}={value!r}"
            for index, (changed, _) in (now.changed.items() if now is not None else ())
            for name, value in changed.items()
            if isinstance(value, (str, bool, int, float))
            and getattr(getattr(self.state.modules[index], "config", None), name, value) != value
        ]
        listed = ", ".join(dict.fromkeys(settings))
        return f" Or set {listed} before training: the model has set itself so in its forward." if listed else ""

    def is_written(self) -> bool:
        """Return whether user code has written to parameters, without replacing them, since `snapshot`."""
        return any(
            held.get(key) is parameter and (parameter._version != version or parameter.data_ptr() != pointer)
            for held, key, parameter, version, pointer in self._own
        )

    def written(self) -> list[tuple[int, int]]:
        """Return a value that changes when user code writes to a master or replaces its memory."""
        return [(master._version, master.data_ptr()) for master in self.masters]

    @property
    def copied(self) -> bool:
        """Whether uploads read working copies of some masters, which must be refreshed after each write."""
        return any(flat.copied for flat in self.flats)

    def trainable(self) -> list[bool]:
        return [p.requires_grad for p in self.masters]

    def upload(self, stream: Stream, segment: Tensor) -> None:
        """Enqueue the upload of all weights into ``segment`` (uint8, ``nbytes`` long) of a worker's arena.

        Args:
            stream: the stream that copies.
            segment: the destination.
        """
        base = 0
        for flat in self.flats:
            flat.upload(stream, segment[base : base + flat.nbytes])
            base += flat.nbytes
        for master, place in zip(self.tied, self._tied_places, strict=True):
            stream.copy(place.view(segment), self.read(master))

    def read(self, master: nn.Parameter) -> Tensor:
        """Return what layers compute with for ``master``. What is uploaded may be a rounded copy of it."""
        flat, index = self._held[id(master)]
        return flat.read(index)

    def views(self, segment: Tensor) -> list[Tensor]:
        """Return the parameters' views into ``segment`` of an arena, in the order of ``masters``."""
        return [place.view(segment) for place in self.places]


def host_layers(
    modules: Mapping[str, nn.Module], device: Device, formats: Formats, *, apart: bool, mapped: Container[int]
) -> list[HostLayer]:
    """Make a `HostLayer` of each module.

    The memory that weights leave is returned to the system now and then. Otherwise the C library would keep it, and the
    weights would take their memory twice.
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
    """Return the buckets of a module in forward order and set each layer's ``bucket``.

    Layers that share masters share a bucket.

    Args:
        layers: all layers, in order.
        masters: all parameters of the module. Those of no layer make the first bucket, because user code may read them
            anywhere.
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
        held = [p for layer in group for p in layer.masters]
        flats = [flat for layer in group for flat in layer.flats]
        bucket = ParamBucket(len(buckets), _unique(held), flats, formats, apart=apart)
        bucket.shared = {key for key, holders in Counter(map(id, held)).items() if holders > 1}
        for layer in group:
            layer.bucket = bucket
        buckets.append(bucket)
    return buckets


def begin_to_train(
    layers: Iterable[HostLayer], others: Iterable[nn.Parameter], formats: Formats, *, apart: bool
) -> None:
    """Adapt to a change of ``requires_grad``: widen newly trained masters, and copy them if ``apart``.

    Args:
        layers: all layers.
        others: masters that belong to no layer.
        formats: dtypes of the run.
        apart: whether the optimizer writes to masters while they are uploaded.
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
        layer.place()  # tied masters of other layers may have moved


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(p): p for p in parameters}.values())
