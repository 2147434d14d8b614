"""A layer's parameters in host memory, and their way to a worker and back as gradients.

Masters are moved once into flat host buffers, so that a whole layer goes up in one copy instead of one per parameter.
The user's ``nn.Parameter`` objects stay who they are; only their ``.data`` moves. With fp32 masters and staleness 0 the
master is the copy that uploads read.

Gradients are kept per call, not per layer: a layer that is used twice adds up in the same order whatever the plan is,
and so do rounds, because a later round's device buffer starts from the sum so far.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device, Event, Stream
from lightning_roundpipe.model.attributes import ModuleState, StateDiff
from lightning_roundpipe.model.replica import parameter_places, unique_parameters

ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Segment:
    """Where one parameter lies in a flat buffer."""

    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's view into ``flat`` (uint8, 1-D)."""
        typed = flat[self.offset : self.offset + self.nbytes].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset())


def _segment(tensor: Tensor, offset: int) -> Segment:
    dense = torch._debug_has_internal_overlap(tensor) == 0 and _is_dense(tensor)
    stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
    return Segment(offset, tensor.numel() * tensor.element_size(), tensor.shape, tuple(stride), tensor.dtype)


def _is_dense(tensor: Tensor) -> bool:
    return 1 + sum((s - 1) * st for s, st in zip(tensor.shape, tensor.stride(), strict=True)) == tensor.numel()


def _with_own_storage(segment: Segment, flat: Tensor) -> Tensor:
    """The parameter's view into ``flat`` as a tensor whose storage ends where the parameter does.

    Saving or copying a tensor saves or copies its whole storage; a checkpoint of one weight must not hold its layer.
    """
    if not segment.nbytes:
        return segment.view(flat)
    part = torch.frombuffer(flat.numpy(), dtype=torch.uint8, count=segment.nbytes, offset=segment.offset)
    return part.view(segment.dtype).as_strided(segment.shape, segment.stride)


class _Flat:
    """One flat host buffer and the masters that are views into it."""

    def __init__(self, masters: list[nn.Parameter], device: Device) -> None:
        self.masters = masters
        self.segments: list[Segment] = []
        offset = 0
        for master in masters:
            self.segments.append(_segment(master, offset))
            offset += aligned(self.segments[-1].nbytes)
        self.nbytes = offset
        self.buffer = device.host_buffer(offset)
        self.views = [_with_own_storage(s, self.buffer) for s in self.segments]
        self.adopt()

    def adopt(self) -> None:
        """Make every master a view into the buffer again, keeping the values it has now.

        User code may have replaced a master's storage (``load_state_dict(assign=True)``, an EMA swap); without this
        the worker would go on computing with the old values.
        """
        for index, master in enumerate(self.masters):
            if master.data_ptr() == self.views[index].data_ptr():
                continue
            if master.shape != self.segments[index].shape or master.dtype != self.segments[index].dtype:
                raise RoundPipeError(
                    f"a parameter changed from {tuple(self.segments[index].shape)} {self.segments[index].dtype} to "
                    f"{tuple(master.shape)} {master.dtype} during training; change the model before fit() instead."
                )
            self.views[index].copy_(master.data)
            master.data = self.views[index]


class HostLayer:
    """One layer: its module, its masters in flat host buffers, and what is needed to place it in an arena.

    Args:
        index: position among the layers.
        name: qualified name in the LightningModule.
        module: the user's module.
        device: any device; gives host memory that copies asynchronously.
        owned: ids of parameters that an earlier layer holds already (tied ones); updated.
    """

    def __init__(self, index: int, name: str, module: nn.Module, device: Device, owned: set[int]) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.state = ModuleState(name, module)
        self.mutable_buffers: dict[int, tuple[nn.Module, str]] = {}
        """Which of the layer's buffers its forward changes, as far as it has been seen: module and name by position."""
        self.caches_parametrizations = False
        self.rewritten: set[int] = set()
        """Positions of masters whose copies the forward writes to without changing them, as far as it has been seen."""
        self._seen_states: list[StateDiff | None] = []
        self.masters = unique_parameters(module)
        for inner, key, parameter in parameter_places(module):
            if parameter.is_meta:
                raise RoundPipeError(
                    f"parameter {key!r} of {type(inner).__name__} in layer {name!r} is on the meta device: give it "
                    "values (load weights or initialise) in configure_model() or setup()."
                )
        mine = [p for p in self.masters if id(p) not in owned]
        owned.update(map(id, mine))
        self.flats = [_Flat(group, device) for group in _by_trainable(mine) if group]
        self._place_in_arena(mine)

    def _place_in_arena(self, mine: list[nn.Parameter]) -> None:
        base, places = 0, {}
        for flat in self.flats:
            for master, segment in zip(flat.masters, flat.segments, strict=True):
                places[id(master)] = _moved(segment, base)
            base += flat.nbytes
        self.tied = [p for p in self.masters if id(p) not in places]
        for master in self.tied:
            places[id(master)] = _segment(master, base)
            base += aligned(places[id(master)].nbytes)
        self.places = [places[id(p)] for p in self.masters]
        self.nbytes = base
        self._tied_places = [places[id(p)] for p in self.tied]

    def is_new_state(self, state: StateDiff | None) -> bool:
        """Whether the layer has not run with these attributes before: in another mode it may do other things."""
        if any(known is state for known in self._seen_states):
            return False
        self._seen_states = [*self._seen_states[-15:], state]
        return True

    def adopt(self) -> None:
        """Before a step: bring what user code put in place of a master's values into the flat buffers.

        Raises:
            RoundPipeError: if the layer has other parameters than when training was set up.
        """
        if [id(p) for p in self.module.parameters()] != [id(p) for p in self.masters]:
            raise RoundPipeError(
                f"layer {self.name!r} has other parameters than at the start of training (a module or parameter was "
                "replaced). Change the model before fit(), or write new values into the parameters it has."
            )
        for flat in self.flats:
            flat.adopt()

    def remember(self) -> None:
        """What :meth:`check` compares with, when all layers have adopted their masters."""
        self._own = [
            (inner._parameters, key, p, p._version, p.data_ptr()) for inner, key, p in parameter_places(self.module)
        ]
        self._inner = [(m._modules, tuple(m._modules.values())) for m in self.state.modules if m._modules]

    def check(self) -> None:
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
                    "its way to a worker. Write to parameters between steps, for example in on_train_batch_start."
                )
        if any(len(held) != len(now) or any(map(operator.is_not, held.values(), now)) for held, now in self._inner):
            raise RoundPipeError(
                f"a module inside layer {self.name!r} was replaced within the step; workers have the old one. Change "
                "the model before fit(), and choose between modules in the layer's forward."
            )

    def trainable(self) -> list[bool]:
        return [p.requires_grad for p in self.masters]

    def upload(self, stream: Stream, segment: Tensor) -> None:
        """Enqueue the copy of all weights into ``segment`` (uint8, ``nbytes`` long) of a worker's arena."""
        base = 0
        for flat in self.flats:
            stream.copy(segment[base : base + flat.nbytes], flat.buffer)
            base += flat.nbytes
        for master, place in zip(self.tied, self._tied_places, strict=True):
            stream.copy(place.view(segment), master.data)

    def views(self, segment: Tensor) -> list[Tensor]:
        """The parameters' views into ``segment`` of an arena, in the order of ``masters``."""
        return [place.view(segment) for place in self.places]


def _by_trainable(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [[p for p in parameters if p.requires_grad], [p for p in parameters if not p.requires_grad]]


def _moved(segment: Segment, base: int) -> Segment:
    return Segment(base + segment.offset, segment.nbytes, segment.shape, segment.stride, segment.dtype)


class GradientLayout:
    """Where the gradients of one layer's trainable parameters lie in a flat buffer."""

    def __init__(self, layer: HostLayer) -> None:
        self.positions = [i for i, p in enumerate(layer.masters) if p.requires_grad]
        self.segments: list[Segment] = []
        offset = 0
        for position in self.positions:
            self.segments.append(_segment(layer.masters[position], offset))
            offset += aligned(self.segments[-1].nbytes)
        self.nbytes = offset


class HostGradients:
    """The gradients of one call's layer, summed over microbatches, in host memory.

    ``present`` says per trainable parameter whether it got a gradient at all: one that did not must keep ``None``, or
    AdamW would decay it.
    """

    def __init__(self, layer: HostLayer, device: Device) -> None:
        self.layer = layer
        self.layout = GradientLayout(layer)
        self._device = device
        self.flat = device.host_buffer(self.layout.nbytes) if self.layout.nbytes else torch.empty(0, dtype=torch.uint8)
        self.present = [False] * len(self.layout.segments)
        self.arrived: Event | None = None
        """The download that must have finished before anybody reads or overwrites the sum."""

    @staticmethod
    def bytes_of(layer: HostLayer) -> int:
        """What the gradients of ``layer`` take now."""
        return GradientLayout(layer).nbytes

    def restart(self) -> None:
        """Begin a new sum, in a new buffer if a master's ``.grad`` still lies in this one."""
        self.wait()
        self.present = [False] * len(self.layout.segments)
        start = self.flat.data_ptr()
        for position in self.layout.positions:
            grad = self.layer.masters[position].grad
            if grad is not None and start <= grad.data_ptr() < start + self.layout.nbytes:
                self.flat = self._device.host_buffer(self.layout.nbytes)
                return

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.wait()
            self.arrived = None

    def take(self, factor: float) -> dict[int, Tensor]:
        """The gradients by id of the master, times ``factor``; views into the buffer."""
        self.wait()
        taken = {}
        for segment, position, present in zip(self.layout.segments, self.layout.positions, self.present, strict=True):
            if present:
                view = segment.view(self.flat)
                taken[id(self.layer.masters[position])] = view if factor == 1.0 else view.mul_(factor)
        return taken


class DeviceGradients:
    """The same sum while its slot runs on a worker.

    Autograd accumulates into ``.grad`` of the copy's parameters. A parameter's first gradient is moved into the arena,
    and later ones are added to it there, so that at most one parameter's gradient lives outside.
    """

    def __init__(self, host: HostGradients, segment: Tensor) -> None:
        self.host = host
        self.segment = segment
        self.views = [s.view(segment) for s in host.layout.segments]
        self.present = list(host.present)

    def upload(self, stream: Stream) -> None:
        """Enqueue the sum of earlier rounds, which this round goes on adding to."""
        stream.copy(self.segment[: self.host.layout.nbytes], self.host.flat)

    def attach(self, parameters: list[nn.Parameter]) -> None:
        for view, position, present in zip(self.views, self.host.layout.positions, self.present, strict=True):
            if parameters[position].grad is not None:
                raise RoundPipeError(
                    f"a gradient entered layer {self.host.layer.name!r} past its outputs: a tensor computed inside was "
                    "kept by a hook, a list or an object that the strategy does not see. Return it from the layer."
                )
            parameters[position].grad = view if present else None

    def detach(self, parameters: list[nn.Parameter]) -> None:
        for index, position in enumerate(self.host.layout.positions):
            grad = parameters[position].grad
            parameters[position].grad = None
            if grad is None:
                continue
            if grad.is_sparse:
                raise RoundPipeError(
                    f"layer {self.host.layer.name!r} produced a sparse gradient; build its embedding with sparse=False."
                )
            if grad is not self.views[index]:
                self.views[index].copy_(grad)
            self.present[index] = True

    def download(self, stream: Stream) -> None:
        """Enqueue the copy to the host and publish what is present."""
        stream.copy(self.host.flat, self.segment[: self.host.layout.nbytes])
        self.host.arrived = stream.record()
        self.host.present = self.present
