"""Adam and AdamW by their fused kernel alone, without what torch's ``step()`` does around it.

Beside memory, a call of ``step()`` costs Python for each parameter, and a new tensor for each to add 1 to its counter
of steps. A step of all parameters pays for that in a row; in a step layer by layer it is several times as dear, because
the layer before has driven all of it from the caches. So everything is looked at and laid out once, before gradients
come; what is left for each layer is to call the kernel as ``step()`` would call it.

Nothing is kept from one step to the next, so that nothing goes stale when states are loaded, tensors are replaced or
hyperparameters change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_roundpipe.optim.fused import DTYPES

_ONE = torch.ones((), dtype=torch.float32, device="cpu")


class Row(NamedTuple):
    """What the kernel is given of one parameter, beside its gradient.

    Attributes:
        kind: the number of its group, and its dtype: one call takes those of one kind.
        tensors: the parameter, its counter of steps, and the averages in the kernel's order.
    """

    kind: tuple[int, torch.dtype]
    tensors: tuple[Tensor, ...]


def row_of(number: int, group: Mapping[str, Any], parameter: Tensor, state: Mapping[str, Any]) -> Row | None:
    """That of a parameter of the group ``number``; None if it has no state yet, or the kernel may not walk through it.

    Args:
        parameter: not requiring grad.
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
    return Row((number, dtype), (parameter, count, *tensors[1:]))  # type: ignore[arg-type]


def step(
    cls: type[Optimizer],
    groups: tuple[Mapping[str, Any], ...],
    rows: Sequence[Row | None],
    gradients: Iterable[Tensor],
) -> bool:
    """Step the parameters of ``rows``, if all have one and the kernel may walk through their ``gradients``; or nothing.

    Returns:
        Whether it was done.
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
    cls: type[Optimizer], groups: tuple[Mapping[str, Any], ...], row: Row, gradient: Tensor, start: int, end: int
) -> None:
    """Step the numbers ``start`` to ``end`` of the parameter of ``row``; its counter counts with the last of them.

    Args:
        gradient: of these numbers.
    """
    parameter, count, *averages = row.tensors
    last = end == parameter.numel()
    parts = [tensor.view(-1)[start:end] for tensor in (parameter, *averages)]
    counts = [count if last else count.clone()]
    _call(cls, groups[row.kind[0]], [gradient], parts[:1], counts, *([part] for part in parts[1:]))


def _fit(tensor: Any, dtype: torch.dtype, shape: torch.Size) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


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
    torch._foreach_add_(counts, _ONE, alpha=1.0)  # a number would become a tensor for each of them
    decoupled = group.get("decoupled_weight_decay", cls is AdamW)  # torch < 2.7 knows it by the class alone
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
