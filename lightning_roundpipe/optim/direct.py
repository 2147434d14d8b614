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
from torch.optim import AdamW, Optimizer

from lightning_roundpipe.optim.fused import DTYPES, lies_plain

_ONE = torch.ones((), dtype=torch.float32, device="cpu")


class KernelRow(NamedTuple):
    """The kernel's arguments for one parameter, except its gradient.

    Attributes:
        kind: the number of its group, and its dtype. One kernel call takes rows of one kind.
        tensors: the parameter, its step counter, and its averages in the kernel's order.
    """

    kind: tuple[int, torch.dtype]
    tensors: tuple[Tensor, ...]


def row_of(number: int, group: Mapping[str, Any], parameter: Tensor, state: Mapping[str, Any]) -> KernelRow | None:
    """Return the row of a parameter of group ``number``; None if it has no state yet or the kernel cannot take it.

    Args:
        number: the number of the parameter's group.
        group: that group.
        parameter: must not require grad.
        state: the parameter's optimizer state.
    """
    tensors = [parameter, state.get("exp_avg"), state.get("exp_avg_sq")]
    if group["amsgrad"]:
        tensors.append(state.get("max_exp_avg_sq"))
    count = state.get("step")
    dtype, shape = parameter.dtype, parameter.shape
    if dtype not in DTYPES or not _fit(count, torch.float32, torch.Size()):
        return None
    if not all(_fit(tensor, dtype, shape) for tensor in tensors):
        return None
    return KernelRow((number, dtype), (parameter, count, *tensors[1:]))  # type: ignore[arg-type]


def step(
    cls: type[Optimizer],
    groups: tuple[Mapping[str, Any], ...],
    rows: Sequence[KernelRow | None],
    gradients: Iterable[Tensor],
) -> bool:
    """Step the parameters of ``rows`` if the kernel can take all rows and ``gradients``; otherwise step none.

    Returns:
        Whether the parameters were stepped.
    """
    kinds: dict[tuple[int, torch.dtype], list[tuple[Tensor, ...]]] = {}
    for row, gradient in zip(rows, gradients, strict=True):
        if row is None:
            return False
        kind, tensors = row
        if not _fit(gradient, kind[1], tensors[0].shape):
            return False
        kinds.setdefault(kind, []).append((gradient, *tensors))
    for (number, _), entries in kinds.items():
        _call(cls, groups[number], *map(list, zip(*entries, strict=True)))
    return True


def step_part(
    cls: type[Optimizer], groups: tuple[Mapping[str, Any], ...], row: KernelRow, gradient: Tensor, start: int, end: int
) -> None:
    """Step elements ``start`` to ``end`` of a parameter. The part with the last element increases the step counter.

    Args:
        cls: the optimizer's class.
        groups: the hyperparameters of all groups.
        row: the parameter's row.
        gradient: the gradient of these elements.
        start: the first element.
        end: one past the last element.
    """
    parameter, count, *averages = row.tensors
    last = end == parameter.numel()
    parts = [tensor.view(-1)[start:end] for tensor in (parameter, *averages)]
    counts = [count if last else count.clone()]
    _call(cls, groups[row.kind[0]], [gradient], parts[:1], counts, *([part] for part in parts[1:]))


def _fit(tensor: Any, dtype: torch.dtype, shape: torch.Size) -> bool:
    return isinstance(tensor, Tensor) and lies_plain(tensor, dtype, shape) and not tensor.requires_grad


def _call(
    cls: type[Optimizer],
    group: Mapping[str, Any],
    gradients: list[Tensor],
    parameters: list[Tensor],
    counts: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    maxima: list[Tensor] | None = None,
) -> None:
    torch._foreach_add_(counts, _ONE, alpha=1.0)  # a Python number would become a tensor per counter
    decoupled = group.get("decoupled_weight_decay", cls is AdamW)  # before torch 2.7, only the class tells
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
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
