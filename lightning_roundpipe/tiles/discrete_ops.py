"""Repeats a layer's discrete choices in its recomputation, above all which experts a token goes to.

A recomputation may differ from the forward in the last bit: a GPU adds up in any order, and kernels differ. This is
mere rounding except where a layer decides. A router whose two best experts are nearly equal would send a token
elsewhere, and the gradients would belong to a computation that never took place. So choices are recorded:

    forward: operations that make integers of real numbers (topk, argmax, comparisons) ── results, in order ── [1]
    packed into one small tensor, which is saved as inputs are ── [2]
    recomputation: the same operations give the same results; values are gathered anew, and differentiated ── [3]
    backward: a checkpoint inside the layer runs some of them once more ── [4]

The first batch shows which layers choose. All others run without any of this. So does a layer whose recomputation
chooses by other operations, because it leaves out a hook that only looks. The modes work below
autograd, so that gradients of an
operation flow to where its values came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_roundpipe.memory.host_tensor import HostTensor
from lightning_roundpipe.model.below_modes import call_below
from lightning_roundpipe.planning.crossing import tensor_bytes
from lightning_roundpipe.tiles.layer_mode import LayerMode

_ALIGNMENT = 8
_SMALL = 8
"""A comparison is a choice if its result times this is smaller than the call's inputs; else it is an activation."""

aten = torch.ops.aten

_PAIRS = {
    aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim, aten.kthvalue.default,
    aten.mode.default, aten.median.dim, aten.nanmedian.dim, aten.cummax.default, aten.cummin.default,
}  # fmt: skip
"""Operations that return values along a dimension and their indices."""
_DIMENSION = {aten.topk.default: 2, aten.kthvalue.default: 2}
"""Position of the dimension among the arguments; 1 for all others."""
_INDICES = {aten.argmax.default, aten.argmin.default, aten.searchsorted.Tensor, aten.bucketize.Tensor}
_DRAWN = {aten.multinomial.default}
"""Operations that the replay runs all the same, to consume random numbers."""
_COMPARISONS = {
    getattr(getattr(aten, name), kind) for name in ("gt", "ge", "lt", "le", "eq", "ne") for kind in ("Tensor", "Scalar")
} | {aten._to_copy.default}
_ASKS = aten._local_scalar_dense.default
_NUMBERS = {_ASKS, aten.equal.default}
"""Operations that return values to Python, whose control flow may depend on them."""
_CHOOSING = _PAIRS | _INDICES | _DRAWN | _COMPARISONS | _NUMBERS


class _RecordedOp(NamedTuple):
    """A recorded choice: its `_Mode._key`, result and result dtype. ``place``: byte offset in the packed tensor."""

    key: Any
    value: Any
    dtype: torch.dtype | None
    place: int = 0


@dataclass(frozen=True)
class Choices:
    """The choices of one call, on the host.

    Attributes:
        made: choices in order; tensors that are packed are represented by meta tensors of their dtype and shape.
        packed: the data of all tensors, one after another; None if there are none, or if they are in ``made``.
    """

    made: list[_RecordedOp]
    packed: HostTensor | None


class _Mode(LayerMode):  # type: ignore[no-untyped-call]
    """Sees the operations of one call.

    Args:
        device: device on which the call computes.
        inputs: the call's inputs; comparisons are small or large relative to these.
    """

    def __init__(self, device: torch.device, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._device = device
        self._room = sum(map(tensor_bytes, inputs))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key = self._key(func, args, kwargs) if func in _CHOOSING else None
        return call_below(func, args, kwargs) if key is None else self.choose(key, func, args, kwargs)

    def choose(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError  # `DiscreteOpRecorder` and `DiscreteOpReplayer` do it, each in its way

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what must be equal for two choices to be the same; None if this is no choice, or too large for one."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        asks = func is _ASKS and tensors[0].dtype is torch.bool
        if not (asks or any(t.is_floating_point() for t in tensors)):
            return None
        if not any(t.device == self._device for t in tensors):
            return None
        if any(type(t) not in (Tensor, nn.Parameter) for t in tensors) or (func in _PAIRS and not tensors[0].dim()):
            return None
        if func is aten._to_copy.default and not _makes_integers(kwargs):
            return None
        if func in _COMPARISONS:
            size = max(t.numel() for t in tensors)
            if _SMALL * size * kwargs.get("dtype", torch.bool).itemsize > self._room:
                return None
        return func, *((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in args), *sorted(_plain(kwargs))


class DiscreteOpRecorder(_Mode):  # type: ignore[no-untyped-call]
    """Records what the call chooses [1]."""

    def __init__(self, device: torch.device, inputs: Iterable[Tensor]) -> None:
        super().__init__(device, inputs)
        self.made: list[_RecordedOp] = []

    def truths(self) -> list[bool]:
        """Return the truth values of tensors that the call has asked for, on which its control flow may depend."""
        return [made.value for made in self.made if type(made.value) is bool]

    def choose(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        value = found[1] if func in _PAIRS else found
        if isinstance(value, Tensor):
            self.made.append(_RecordedOp(key, value.to(_narrowest(func, args, kwargs, value.dtype)), value.dtype))
        else:
            self.made.append(_RecordedOp(key, value, None))
        return found

    def saved(self, save: Callable[[Tensor], HostTensor]) -> tuple[Tensor | None, Choices]:
        """Pack all recorded tensors into one [2].

        Args:
            save: begins to save a tensor on the host.

        Returns:
            The packed tensor, None without data, and the choices.
        """
        places, end = [], 0
        for made in self.made:
            places.append(end)
            if isinstance(made.value, Tensor):
                end += -(-made.value.nbytes // _ALIGNMENT) * _ALIGNMENT
        packed = torch.empty(end, dtype=torch.uint8, device=self._device)
        for i, (made, place) in enumerate(zip(self.made, places, strict=True)):
            if isinstance(value := made.value, Tensor):
                packed[place : place + value.nbytes].copy_(value.contiguous().view(-1).view(torch.uint8))
                self.made[i] = made._replace(value=value.to("meta"), place=place)
        return (packed, Choices(self.made, save(packed))) if end else (None, Choices(self.made, None))


class DiscreteOpReplayer(_Mode):  # type: ignore[no-untyped-call]
    """Repeats the recorded choices [3], and those that a checkpoint makes again in backward [4].

    Args:
        device: device on which the call computes.
        inputs: the call's inputs.
        choices: the forward's choices.
        bring: brings the packed tensor to the device. The choices of a tile are not packed, and stay on the device.
    """

    def __init__(
        self, device: torch.device, inputs: Iterable[Tensor], choices: Choices,
        bring: Callable[[HostTensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device, inputs)
        self._made = choices.made
        self._packed = bring(choices.packed) if bring is not None and choices.packed is not None else None
        self._next = 0
        self._again = False
        self.agrees = True
        """Whether the recomputation has chosen by the same operations as the forward so far."""

    def choose(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = self._like(key, func, args, kwargs) if self._again else self._take(key)
        if made is None or func in _DRAWN:
            drawn = func(*args, **kwargs)
            if made is None:
                return drawn
        if not isinstance(made.value, Tensor):
            return made.value
        chosen = self._tensor(made).to(made.dtype)
        return (_values(func, args, kwargs, chosen), chosen) if func in _PAIRS else chosen

    def ended(self) -> bool:
        """End the recomputation's forward; later choices are a checkpoint's. Return whether all choices agreed."""
        self.agrees &= self._next == len(self._made)
        self._again = True
        return self.agrees

    def _take(self, key: Any) -> _RecordedOp | None:
        """Return the next choice; None from the first disagreement on."""
        made = self._made[self._next] if self._next < len(self._made) else None
        self.agrees &= made is not None and made.key == key
        self._next += 1
        return made if self.agrees else None

    def _like(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _RecordedOp | None:
        """Return the choice that a checkpoint makes again: the one with this key, or the best fit of several.

        Without grad mode the operation is autograd's own, and no choice.
        """
        kind = [made for made in self._made if made.key == key] if torch.is_grad_enabled() else []
        if len(kind) < 2 or kind[0].dtype is None:
            return kind[0] if len(kind) == 1 else None
        now = func(*args, **kwargs)
        now = now[1] if func in _PAIRS else now
        return max(kind, key=lambda made: int((self._tensor(made) == now).sum()))

    def _tensor(self, made: _RecordedOp) -> Tensor:
        like: Tensor = made.value
        if self._packed is None:
            return like
        part = self._packed[made.place : made.place + like.numel() * like.element_size()]
        return part.view(like.dtype).view(like.shape)


def _makes_integers(kwargs: Mapping[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _plain(kwargs: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in kwargs.items() if not isinstance(value, (Tensor, torch.Generator))]


def _narrowest(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Return the smallest integer dtype that holds the indices; results that are no indices keep ``dtype``."""
    if func in _PAIRS:
        most = args[0].shape[_dim(func, args, kwargs)]
    elif func in _INDICES:
        most = max(a.numel() for a in args if isinstance(a, Tensor))
    else:
        return dtype
    return next(t for t in (torch.uint8, torch.int16, torch.int32, torch.int64) if most <= torch.iinfo(t).max)


def _dim(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    position = _DIMENSION.get(func, 1)
    dim: int = args[position] if len(args) > position else kwargs.get("dim", -1)
    return dim


def _values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], indices: Tensor) -> Tensor:
    """Gather the values of the operation's input at ``indices``."""
    source, dim = args[0], _dim(func, args, kwargs)
    if indices.dim() == source.dim():
        return torch.gather(source, dim, indices)
    return torch.gather(source, dim, indices.unsqueeze(dim)).squeeze(dim)
