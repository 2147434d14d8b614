"""Checks, in some steps, that a recomputation gives what the forward gave.

A layer may depend on state that the engine does not know of: a generator of its own, a counter in an object, a flag set
by a context manager around the model. Its recomputation is then another function, with other gradients. In the first
steps, and then in one of `EVERY`, the outputs of each recomputed call are reduced to a few numbers on the device, both
times. They agree up to rounding, or the step fails before its gradients are used:

    sums along rows and along columns, weighted by place ── two numbers, which a permutation changes
    the norm ── relative to which differences are measured

Reading the numbers makes the worker wait for its device, so not every step is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.reachable import changes, listed

FIRST, EVERY = 2, 100
"""How many steps are checked at first, and the interval at which they are checked afterwards."""
_ROUNDING = {torch.float64: 1024.0, torch.float32: 64.0}
"""Multiples of the dtype's resolution, relative to the norm, that rounding may change; `_COARSE` for other dtypes.

Sums in another order differ in some of the last bits, which partly cancel. Another mask or noise differs by far more.
"""
_COARSE = 4.0
_MOST_INTEGERS = 1 << 22
"""For larger integer tensors only the number of non-zeros is compared."""


def is_checked(step: int) -> bool:
    """Return whether the recomputations of step number ``step`` are checked."""
    return step < FIRST or (step + 1) % EVERY == 0


@dataclass(frozen=True)
class CallFingerprint:
    """The outputs of a call as a few numbers, and the values that its code could read.

    Attributes:
        shapes: shapes and dtypes of the tensors.
        sums: per tensor, two weighted sums and the norm.
        values: see `reachable_values`.
    """

    shapes: tuple[Any, ...]
    sums: list[list[float]]
    values: dict[str, Any]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], values: dict[str, Any]) -> CallFingerprint:
        """Compute the fingerprint, waiting for the device. ``values`` are those before the call."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            rows = [sums_of(t.detach()) for t in tensors]
            devices = {row.device for row in rows}  # a layer may return host tensors, too
            if len(devices) > 1:
                rows = [row.cpu() for row in rows]
            sums = torch.stack(rows).tolist() if rows else []
        return cls(tuple((t.shape, t.dtype) for t in tensors), sums, values)

    def difference(self, other: CallFingerprint, low: torch.dtype | None) -> str | None:
        """Describe the first output that differs; None if none does. ``low``: dtype that layers compute in."""
        if self.shapes != other.shapes:
            return "the outputs have other shapes or formats"
        for index, ((_, dtype), mine, its) in enumerate(zip(self.shapes, self.sums, other.sums, strict=True)):
            norm = max(mine[2], its[2])
            allowed = _resolution(dtype, low) * norm
            far = max(0.0 if a == b or (a != a and b != b) else abs(a - b) for a, b in zip(mine, its, strict=True))
            if far and not far <= allowed:
                size = f", by {far / norm:.1g} of its norm" if 0 < norm < float("inf") and far == far else ""
                return f"output {index} differs{size}"
        return None


def refuse_difference(
    forward: CallFingerprint,
    recomputed: CallFingerprint,
    again: Callable[[], CallFingerprint],
    low: torch.dtype | None,
    layer: str,
) -> None:
    """Raise if the recomputation gave something else than the forward.

    Args:
        forward: the forward's fingerprint.
        recomputed: the recomputation's.
        again: recomputes once more, to tell whether the layer depends on how often it ran or on what ran in between.
        low: dtype that layers compute in, if lower than fp32.
        layer: name of the layer.

    Raises:
        RoundPipeError: names what has changed in between, as far as it can be seen.
    """
    difference = forward.difference(recomputed, low)
    if difference is None:
        return
    said = changes(forward.values, recomputed.values)
    if said:
        why = f"Meanwhile, {listed(said)}."
    elif recomputed.difference(again(), low) is not None:
        why = "A second recomputation differs from the first: the layer draws from a generator of its own, or counts."
    else:
        why = "A second recomputation agrees with the first: the layer reads something that changed in between."
    raise RoundPipeError(
        f"layer {layer!r} computes something else when it is recomputed for its backward ({difference}), so its "
        f"gradients would be wrong. {why} A layer's outputs may depend on its arguments, parameters, buffers and "
        "attributes and on torch's default generators: give it what else it needs as an argument of its forward."
    )


def sums_of(tensor: Tensor) -> Tensor:
    """Return two sums that depend on the places of values, and the norm, as float64. The sums are linear."""
    zeros = torch.zeros(3, dtype=torch.float64, device=tensor.device)
    if tensor.layout is not torch.strided or not tensor.numel():
        return zeros
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        if tensor.numel() > _MOST_INTEGERS:
            zeros[0] = torch.count_nonzero(tensor)
            return zeros
        tensor, exact = tensor.double(), True
    else:
        exact = False
    if tensor.element_size() == 1:
        tensor = tensor.float()
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    shape = tensor.shape or (1,)
    tensor = tensor.reshape(1) if not tensor.dim() else tensor
    rows = tensor.sum(-1, dtype=wide).reshape(-1).double()
    columns = tensor.sum(tuple(range(len(shape) - 1)), dtype=wide).double() if len(shape) > 1 else tensor.double()
    norm = zeros[2] if exact else torch.linalg.vector_norm(tensor, dtype=wide).double()
    return torch.stack([(rows * _weights(rows)).sum(), (columns * _weights(columns)).sum(), norm])


def _weights(like: Tensor) -> Tensor:
    """Return a weight per place; neighbours differ."""
    return torch.arange(1, like.numel() + 1, dtype=torch.float64, device=like.device).cos()


def _resolution(dtype: torch.dtype, low: torch.dtype | None) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    if low is not None and dtype is torch.float32:
        dtype = low
    return _ROUNDING.get(dtype.to_real(), _COARSE) * torch.finfo(dtype).eps
