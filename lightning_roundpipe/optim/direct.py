"""Calls the fused kernel of Adam and AdamW directly, without what torch's ``step()`` does around it.

Apart from memory traffic, a call of ``step()`` costs Python work per parameter, and a new tensor per parameter to add 1
to its step counter. A step of all parameters pays that once, in a row. A step layer by layer pays several times as
much, because the previous layer has driven all of it from the caches. So everything is checked and laid out once,
before gradients arrive; for each layer only the kernel call remains, with the arguments that ``step()`` would pass.

Nothing is kept between steps, so nothing goes stale when states are loaded, tensors are replaced or hyperparameters
change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_roundpipe.optim import compiled
from lightning_roundpipe.optim.compiled import Gradient, Kept
from lightning_roundpipe.optim.fused import DTYPES, lies_plain
from lightning_roundpipe.optim.narrow_gradient import AnyGradient, NarrowGradient
from lightning_roundpipe.optim.packed_moments import MOMENTS, Moment, moment_of
from lightning_roundpipe.optim.split_masters import SplitTensor, pieces, scratch

_ONE = torch.ones((), dtype=torch.float32, device="cpu")


class KernelRow(NamedTuple):
    """The kernel's arguments for one parameter, except its gradient.

    Attributes:
        kind: the number of its group, and its dtype. One kernel call takes rows of one kind.
        parameter: the parameter, or the two halves of its numbers.
        shape: its shape.
        steps: its step counter.
        averages: its averages, in the kernel's order, some perhaps packed.
    """

    kind: tuple[int, torch.dtype]
    parameter: Tensor | SplitTensor
    shape: torch.Size
    steps: Tensor
    averages: tuple[Tensor | Moment, ...]

    @property
    def is_packed(self) -> bool:
        """Whether numbers have to be unpacked into fp32 for torch's kernel."""
        return isinstance(self.parameter, SplitTensor) or not all(isinstance(a, Tensor) for a in self.averages)


def row_of(
    number: int, group: Mapping[str, Any], parameter: Tensor | SplitTensor, shape: torch.Size, state: Mapping[str, Any]
) -> KernelRow | None:
    """Return the row of a parameter of group ``number``; None if it has no state yet or the kernel cannot take it.

    Args:
        number: the number of the parameter's group.
        group: that group.
        parameter: the parameter, which must not require grad; or the two halves of its numbers.
        shape: the parameter's shape.
        state: the parameter's optimizer state.
    """
    averages = [moment_of(state, key) for key in MOMENTS[: 3 if group["amsgrad"] else 2]]
    count = state.get("step")
    dtype = torch.float32 if isinstance(parameter, SplitTensor) else parameter.dtype
    if dtype not in DTYPES or not _fit(count, torch.float32, torch.Size()):
        return None
    packed = [a for a in averages if a is not None and not isinstance(a, Tensor)]
    plain = [a for a in averages if a is None or isinstance(a, Tensor)]
    if not isinstance(parameter, SplitTensor):
        plain.append(parameter)
    if not all(_fit(tensor, dtype, shape) for tensor in plain):
        return None
    if packed and (dtype is not torch.float32 or any(average.shape != shape for average in packed)):
        return None
    return KernelRow((number, dtype), parameter, shape, count, tuple(averages))  # type: ignore[arg-type]


def takes(groups: tuple[Mapping[str, Any], ...], row: KernelRow | None, gradient: AnyGradient) -> bool:
    """Return whether `step` may be called with a gradient of the parameter of ``row``: not with every narrow one."""
    if isinstance(gradient, Tensor):
        return True
    if row is None or row.kind[1] is not torch.float32 or groups[row.kind[0]]["amsgrad"]:
        return False
    return gradient.shape == row.shape and gradient.parts[0].is_contiguous() and compiled.is_there()


def step(
    groups: tuple[Mapping[str, Any], ...], rows: Sequence[KernelRow | None], gradients: Iterable[AnyGradient]
) -> bool:
    """Step the parameters of ``rows`` if the kernel can take all rows and ``gradients``; otherwise step none.

    `takes` is true of all rows and their gradients.

    Returns:
        Whether the parameters were stepped.
    """
    kinds: dict[tuple[int, torch.dtype], list[tuple[Any, ...]]] = {}
    in_pieces: list[tuple[KernelRow, AnyGradient]] = []
    for row, gradient in zip(rows, gradients, strict=True):
        if row is None or (isinstance(gradient, Tensor) and not _fit(gradient, row.kind[1], row.shape)):
            return False
        if isinstance(gradient, NarrowGradient) or row.is_packed:
            in_pieces.append((row, gradient))
        else:
            kinds.setdefault(row.kind, []).append((gradient, row.parameter, row.steps, *row.averages))
    for (number, _), entries in kinds.items():
        gradients_, parameters, counts, *averages = map(list, zip(*entries, strict=True))
        torch._foreach_add_(counts, _ONE, alpha=1.0)  # a Python number would become a tensor per counter
        _call(groups[number], gradients_, parameters, counts, *averages)
    for row, gradient in in_pieces:
        _step_alone(groups[row.kind[0]], row, gradient)
    return True


def _step_alone(group: Mapping[str, Any], row: KernelRow, gradient: AnyGradient) -> None:
    """Step one parameter in compiled code, or in pieces that are unpacked for torch's kernel."""
    row.steps.add_(_ONE)
    count, length = int(row.steps), row.shape.numel()
    if not group["amsgrad"]:
        kept = Gradient([Kept("fp32", (gradient, 0))]) if isinstance(gradient, Tensor) else gradient.kept()
        weights, averages, squares = (_kept(own, count) for own in (row.parameter, *row.averages))
        if compiled.adam(group, count, length, kept, (weights, averages, squares)):
            return
    assert isinstance(gradient, Tensor), "only compiled code takes narrow gradients"
    flat = gradient.view(-1)
    for first, last in pieces(length):
        _step_piece(group, row, flat[first:last], first, row.steps)


def _kept(own: Tensor | SplitTensor | Moment, count: int) -> Kept:
    if isinstance(own, Tensor):
        return Kept("fp32", (own, 0))
    return own.kept(0) if isinstance(own, SplitTensor) else own.kept(0, count)


def _step_piece(group: Mapping[str, Any], row: KernelRow, gradient: Tensor, first: int, count: Tensor) -> None:
    """Step the elements from ``first`` on in torch's kernel, unpacked into memory that stays in caches."""
    parameter, last = row.parameter, first + gradient.numel()
    if isinstance(parameter, SplitTensor):
        numbers = parameter.join(first, last, scratch(0, last - first))
    else:
        numbers = parameter.view(-1)[first:last]
    averages = [
        a.view(-1)[first:last] if isinstance(a, Tensor) else a.load(first, last, scratch(1 + i, last - first))
        for i, a in enumerate(row.averages)
    ]
    _call(group, [gradient], [numbers], [count], *([a] for a in averages))
    if isinstance(parameter, SplitTensor):
        parameter.split(first, last, numbers)
    for average, stepped in zip(row.averages, averages, strict=True):
        if not isinstance(average, Tensor):
            average.store(first, last, stepped, int(count))


def _fit(tensor: Any, dtype: torch.dtype, shape: torch.Size) -> bool:
    return isinstance(tensor, Tensor) and lies_plain(tensor, dtype, shape) and not tensor.requires_grad


def _call(
    group: Mapping[str, Any],
    gradients: list[Tensor],
    parameters: list[Tensor],
    counts: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    maxima: list[Tensor] | None = None,
) -> None:
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        parameters,
        gradients,
        averages,
        squares,
        maxima or [],
        counts,
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
