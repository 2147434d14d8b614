"""Finds numbers that tell the samples of a batch apart in what a part may take from all of its samples.

Padding is cut to the longest sample of a batch, and losses are divided by the largest length. Nothing in a batch says
how long its samples are, so each number that may be a length counts as a size:

    a list of tensors or texts ── how long each is
    one whole number per sample ── the number; whether it is not negative: a target that is not ignored
    another number per sample ── whether it is not zero, as a weight is
    a row per sample ── how many elements are not zero, which is the sum of a mask
                     ── how many are not negative: targets that are not ignored
                     ── how many repeat the one before, as padding with any value does
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, str]
"""The place of a leaf, and what of its samples is counted."""


def sizes_of(
    leaves: Sequence[Any], samples: int, most_elements: int, keys: Collection[Key] | None = None, *, waits: bool = False
) -> dict[Key, Tensor]:  # fmt: skip
    """Return the sizes of the samples, on the host.

    Args:
        leaves: what the batch consists of.
        samples: how many samples it has.
        most_elements: elements of a tensor that is looked at, at most.
        keys: sizes to look at; None for all.
        waits: whether to look at tensors on devices, which are waited for.

    Returns:
        By leaf and kind, an integer for each sample.
    """
    found: dict[Key, Tensor] = {}
    for place, leaf in enumerate(leaves):
        if is_listed(leaf, samples):
            found[place, "lengths"] = torch.tensor([x.numel() if isinstance(x, Tensor) else len(x) for x in leaf])
        elif isinstance(leaf, Tensor) and _is_looked_at(leaf, samples, most_elements, waits=waits):
            wanted = None if keys is None else {kind for at, kind in keys if at == place}
            found.update({(place, kind): sizes for kind, sizes in _sizes(leaf.detach(), wanted)})
    return found if keys is None else {key: sizes for key, sizes in found.items() if key in keys}


def is_listed(tree: Any, samples: int) -> bool:
    """Return whether it is a list of one tensor or text per sample."""
    if not isinstance(tree, (list, tuple)) or len(tree) != samples:
        return False
    return all(isinstance(x, str) for x in tree) or (
        isinstance(tree, list) and all(isinstance(x, Tensor) for x in tree)
    )


def _is_looked_at(tensor: Tensor, samples: int, most_elements: int, *, waits: bool) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.dim() or len(tensor) != samples:
        return False
    return 0 < tensor.numel() <= most_elements and (waits or tensor.device.type == "cpu")


def _sizes(tensor: Tensor, wanted: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    if tensor.dim() == 1:
        if not is_whole and (wanted is None or "elements" in wanted):
            yield "elements", (tensor != 0).long().cpu()
        if is_whole and (wanted is None or "numbers" in wanted):
            yield "numbers", tensor.cpu().long()
        if is_whole and (wanted is None or "targets" in wanted):
            yield "targets", (tensor >= 0).long().cpu()
        return
    rows = tensor.flatten(1)
    if wanted is None or "elements" in wanted:
        yield "elements", (rows != 0).sum(1).cpu()
    if wanted is not None and len(wanted) == 1 and "elements" in wanted:
        return
    if tensor.dtype is torch.bool or (is_whole and bool(((rows == 0) | (rows == 1)).all())):
        return  # a mask
    if is_whole and (wanted is None or "targets" in wanted):
        yield "targets", (rows >= 0).sum(1).cpu()
    if wanted is None or "repeats" in wanted:
        steps = tensor.flatten(2)[..., 0] if tensor.dim() > 2 else tensor
        yield "repeats", (steps[:, 1:] == steps[:, :-1]).sum(1).cpu()
