"""The layers of a model as the engine holds them, and the buckets that their parameters are updated in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from torch import nn

from lightning_roundpipe.devices import Device
from lightning_roundpipe.faults.interrupts import deliver_interrupts
from lightning_roundpipe.heap import give_back
from lightning_roundpipe.memory.dtypes import Formats, widen
from lightning_roundpipe.memory.layer_weights import LayerWeights, Owned
from lightning_roundpipe.memory.module_buffers import HostBuffers, LayerBuffers
from lightning_roundpipe.memory.param_buckets import ParamBucket
from lightning_roundpipe.memory.seen_code import SeenCode
from lightning_roundpipe.memory.write_check import WriteCheck
from lightning_roundpipe.model.attributes import ModuleState
from lightning_roundpipe.model.forward_hooks import Observers

_PORTIONS, _LEAST_PORTION = 16, 2**22
"""How often freed memory is returned to the system while weights move, at most, and the least bytes worth it."""


class HostLayer:
    """One layer of the user's model.

    Args:
        name: qualified name in the LightningModule.
        buffers: the newest values of all layers' buffers.

    Attributes:
        title: names it in error messages.
        bucket: the masters that are updated together with its own. `make_buckets` sets it once all layers are known.
        check: whether user code has written to its masters.
        observers: forward hooks inside it that only look.
    """

    bucket: ParamBucket

    def __init__(self, index: int, name: str, module: nn.Module, weights: LayerWeights, buffers: HostBuffers) -> None:
        self.index, self.name, self.title = index, name, f"layer {name!r}"
        self.module, self.masters, self.weights = module, weights.masters, weights
        self.state = ModuleState(name, module)
        self.buffers = LayerBuffers(name, buffers)
        self.observers = Observers()
        self.check = WriteCheck(name, self.state)
        self.seen = SeenCode(module, self.masters)


def host_layers(
    modules: Mapping[str, nn.Module], device: Device, formats: Formats, *, double_buffered: bool, mapped: Container[int]
) -> list[HostLayer]:
    """Make a `HostLayer` of each module.

    The memory that weights leave is returned to the system now and then. Otherwise the C library would keep it, and the
    weights would take their memory twice.
    """
    owned: Owned = {}
    portion = max(_LEAST_PORTION, sum(p.nbytes for m in modules.values() for p in m.parameters()) // _PORTIONS)
    layers: list[HostLayer] = []
    left, buffers = 0, HostBuffers()
    for name, module in modules.items():
        deliver_interrupts()  # weights of a large model take long, and each layer is whole by itself
        weights = LayerWeights(module, device, owned, formats, double_buffered=double_buffered, mapped=mapped)
        layers.append(HostLayer(len(layers), name, module, weights, buffers))
        left += weights.nbytes
        if left >= portion:
            give_back()
            left = 0
    return layers


def make_buckets(
    layers: Sequence[HostLayer], masters: Iterable[nn.Parameter], formats: Formats | None = None, *,
    double_buffered: bool = False,
) -> list[ParamBucket]:  # fmt: skip
    """Return the buckets of a module in forward order and set each layer's ``bucket``. Tied layers share a bucket.

    Those of ``masters``, all of the module's, that are in no layer make the first bucket, as user code may read them
    anywhere.
    """
    groups: list[list[HostLayer]] = []
    for layer in layers:
        mine = {id(p) for p in layer.masters}
        shared = [g for g in groups if any(id(p) in mine for other in g for p in other.masters)]
        groups = [g for g in groups if g not in shared]
        groups.append([*(other for g in shared for other in g), layer])
    groups.sort(key=lambda group: min(layer.index for layer in group))
    inside = {id(p) for layer in layers for p in layer.masters}
    buckets = [
        ParamBucket(0, _unique(p for p in masters if id(p) not in inside), (), formats, double_buffered=double_buffered)
    ]
    for group in groups:
        held = [p for layer in group for p in layer.masters]
        flats = [flat for layer in group for flat in layer.weights.flats]
        bucket = ParamBucket(len(buckets), _unique(held), flats, formats, double_buffered=double_buffered)
        several = {key for key, holders in Counter(map(id, held)).items() if holders > 1}
        for layer in group:
            layer.bucket, layer.weights.shared = bucket, several
        buckets.append(bucket)
    return buckets


def begin_to_train(
    layers: Iterable[HostLayer], others: Iterable[nn.Parameter], formats: Formats, *, double_buffered: bool
) -> None:
    """Adapt to a change of ``requires_grad``: widen newly trained masters, also ``others`` that belong to no layer.

    They are copied if the optimizer writes to masters while they are uploaded (``double_buffered``).
    """
    weights = [layer.weights for layer in layers]
    for one in weights:
        one.round({})
    for flat in (flat for one in weights for flat in one.flats):
        flat.widen()
        if double_buffered and flat.trained:
            flat.double_buffer()
    for master in formats.too_narrow(others):
        widen(master)
    for one in weights:
        one.place()  # tied masters of other layers may have moved


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(p): p for p in parameters}.values())
