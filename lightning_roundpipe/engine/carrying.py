"""Products that travel: a recomputation takes the outputs of matrix products and attention instead of computing them.

    the forward of a carried call ── a product's outputs are copied as it makes them ── [1]
    behind the forward ── the copies go to the host ── [2]
    its backward's turn ── they come from there, as its saved inputs do ── the recomputation: a product returns what has
    come, all else is computed again ── [3]

The graph is made where the backward runs, by the layer's own code, so any worker can do it, and the bits are those of a
recomputation. The copy in [1] has the values that the product returned, whatever is written to its outputs later, and
its strides and alignment, on which the rounding of what reads them may depend.

Products are what torch's FLOP counter counts. One whose outputs have no such copy (other devices, views, tensor
subclasses, sparse and nested tensors) is computed again, and so is what runs where no dispatch mode sees it: compiled
code, higher-order operators, a checkpoint inside the layer, which recomputes in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.alike import ALIGNED, copy_alike, misalignment, reach
from lightning_roundpipe.engine.activations import download_parts
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.estimates.meter import flops_of
from lightning_roundpipe.memory.flat_params import ParamSlice
from lightning_roundpipe.memory.host_tensor import HostTensor

COPIES = "carried products"
_C: Any = torch._C


class Product(NamedTuple):
    """A product of a forward.

    Attributes:
        operation: what was called.
        outputs: what it returned: for tensors of the device copies, and once these go to the host, their place;
            None: it is computed again.
        state: of the device's generator behind it, if it may have drawn from it.
    """

    operation: OpOverload
    outputs: Sequence[Any] | None
    state: Tensor | None


class Carried(NamedTuple):
    """The products of a forward that its recomputation gets.

    Attributes:
        block: their outputs on the host, in one block, if any of them has.
    """

    products: Sequence[Product]
    block: Sequence[HostTensor]

    def returning(self, brought: Sequence[Tensor], generator: torch.Generator) -> Returning | None:
        """Return the mode of the recomputation, where the block has been ``brought``; None if there is nothing."""
        return Returning(self.products, brought[0], generator) if self.products else None


NOTHING_CARRIED = Carried((), ())


class _ProductMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that hands products to ``product``, and leaves everything else alone."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile inside as elsewhere: code that runs as written is rounded otherwise."""
        return True

    # TorchDispatchMode's own methods set flags of the process, which threads that enter at once would confuse.
    def __enter__(self) -> _ProductMode:
        _C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *error: object) -> None:
        _C._pop_torch_dispatch_stack(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_product(func):
            return func(*args, **(kwargs or {}))
        return self.product(func, args, kwargs or {})

    def product(self, operation: OpOverload, args: Any, kwargs: Any) -> Any:
        """Return what a product returns."""
        raise NotImplementedError


@functools.cache
def _is_product(operation: Any) -> bool:
    """Return whether torch counts the FLOPs of ``operation``, and it returns tensors of its own."""
    if not isinstance(operation, OpOverload) or operation.overloadpacket not in flop_registry:
        return False
    schema = operation._schema
    return not schema.is_mutable and all(value.alias_info is None for value in schema.returns)


def _outputs(returned: Any, device: Device) -> Sequence[Any] | None:
    """Return what a product on ``device`` has returned, one by one; None if it is not carried."""
    outputs = returned if isinstance(returned, tuple) else (returned,)
    return outputs if all(_is_plain(t, device) for t in outputs if isinstance(t, Tensor)) else None


def _is_plain(tensor: Tensor, device: Device) -> bool:
    if tensor.device != device.torch_device:  # seeds of attention may be on the host
        return not (tensor.is_floating_point() or tensor.is_complex())
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _travels(value: Any, device: Device) -> bool:
    return isinstance(value, Tensor) and value.device == device.torch_device


class Gathering(_ProductMode):  # type: ignore[no-untyped-call]
    """Mode of a carried call's forward: keeps a copy of what each product returns [1].

    Args:
        draws: whether the layer draws random numbers.
        least: least FLOPs for each byte of outputs of products that are carried.
    """

    def __init__(self, device: Device, *, draws: bool, least: int = 0) -> None:
        self._device, self._draws, self._least = device, draws, least
        self._products: list[Product] = []

    def product(self, operation: OpOverload, args: Any, kwargs: Any) -> Any:
        device, returned = self._device, operation(*args, **kwargs)
        outputs = _outputs(returned, device)
        if outputs is not None and self._least and _intensity(operation, args, kwargs, returned, device) < self._least:
            outputs = None
        if outputs is not None:
            outputs = [copy_alike(t) if _travels(t, device) else t for t in outputs]
            device.track_until_freed([t for t in outputs if _travels(t, device)], COPIES)
        drew = self._draws and torch.Tag.nondeterministic_seeded in operation.tags
        self._products.append(Product(operation, outputs, device.generator.get_state() if drew else None))
        return returned

    def send(self, recorder: Recorder, microbatch: int) -> Carried:
        """Let the copies begin to go to the host, as one block of bytes [2]."""
        device, products, self._products, end = self._device, self._products, [], 0
        copies = [t for product in products for t in product.outputs or () if _travels(t, device)]
        places: dict[int, ParamSlice] = {}
        for copy in copies:
            place = places[id(copy)] = _place_behind(end, copy)
            end = place.offset + place.nbytes
        if not end:
            return NOTHING_CARRIED
        block = device.host_like(torch.empty(end, dtype=torch.uint8, device="meta"))
        parts = [(places[id(copy)].bytes_of(block), _flat(copy)) for copy in copies]
        gone = [p._replace(outputs=p.outputs and [places.get(id(t), t) for t in p.outputs]) for p in products]
        return Carried(gone, [download_parts(block, parts, device, recorder, microbatch)])


class Returning(_ProductMode):  # type: ignore[no-untyped-call]
    """Mode of a carried call's recomputation: products return what their forward has made [3].

    Args:
        products: of the forward.
        block: what their outputs came in.
    """

    def __init__(self, products: Iterable[Product], block: Tensor, generator: torch.Generator) -> None:
        self._left, self._block, self._generator = iter(products), block, generator
        self._fits = True

    def product(self, operation: OpOverload, args: Any, kwargs: Any) -> Any:
        product = next(self._left, None) if self._fits else None
        self._fits = product is not None and product.operation is operation
        if product is None or not self._fits or product.outputs is None:
            return operation(*args, **kwargs)
        if product.state is not None:
            self._generator.set_state(product.state)
        # By way of ``data``, each has a version counter of its own.
        outputs = [v.view(self._block).data if isinstance(v, ParamSlice) else v for v in product.outputs]
        return outputs[0] if len(operation._schema.returns) == 1 else tuple(outputs)

    def has_fitted(self) -> bool:
        """Return whether the products were those of the forward. Call once, behind the recomputation."""
        return self._fits and next(self._left, None) is None


class Measuring(_ProductMode):  # type: ignore[no-untyped-call]
    """Mode of a forward of the first window: finds what its products would take.

    ``clock``: returns a point of time, as a number or a timed event.
    """

    def __init__(self, device: Device, clock: Callable[[], Any]) -> None:
        self._device, self._clock = device, clock
        self._measured: list[tuple[int, int, Any, Any]] = []
        """Of each product FLOPs for each byte of its outputs, these bytes, and when it began and ended."""

    def __enter__(self) -> Measuring:
        self._began = self._clock()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._ended = self._clock()

    def product(self, operation: OpOverload, args: Any, kwargs: Any) -> Any:
        began = self._clock()
        returned = operation(*args, **kwargs)
        ended = self._clock()
        if nbytes := _nbytes(returned, self._device):
            self._measured.append((_intensity(operation, args, kwargs, returned, self._device), nbytes, began, ended))
        return returned

    def shares(self) -> dict[int, tuple[int, float]]:
        """Return, by FLOPs a byte, the products' bytes and share of the forward's time. The device is at rest."""
        whole, found = _between(self._began, self._ended), dict[int, tuple[int, float]]()
        for flops, nbytes, began, ended in self._measured:
            before, share = found.get(flops, (0, 0.0))
            found[flops] = before + nbytes, share + (_between(began, ended) / whole if whole > 0 else 0.0)
        return found


def _nbytes(returned: Any, device: Device) -> int:
    """Return the bytes of what a product has returned that travel."""
    return sum(t.nbytes for t in _outputs(returned, device) or () if _travels(t, device))


def _intensity(operation: OpOverload, args: Any, kwargs: Any, returned: Any, device: Device) -> int:
    """Return the FLOPs of a product for each byte of its outputs."""
    return int(flops_of(operation, args, kwargs, returned)) // max(1, _nbytes(returned, device))


def _between(began: Any, ended: Any) -> float:
    return float(ended - began) if isinstance(began, float) else float(ended.time() - began.time())


def _place_behind(end: int, tensor: Tensor) -> ParamSlice:
    """Return the first place for ``tensor`` from byte ``end`` of a block on that has its alignment."""
    start = end + -end % ALIGNED + misalignment(tensor) * tensor.itemsize
    return ParamSlice(start, reach(tensor) * tensor.itemsize, tensor.shape, tensor.stride(), tensor.dtype)


def _flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor of any strides, gaps included: the link takes them in chunks."""
    return tensor.as_strided((reach(tensor),), (1,)).view(torch.uint8)
