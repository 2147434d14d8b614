"""Cuts a batch into microbatches, if the user asks for it.

A batch is a mapping, a list, a tuple or a dataclass, nested as it may be, of tensors whose first dimension is the same.
Every tensor is cut along that dimension, and containers keep their type. Anything else is refused by name: which
tensors belong to all samples, or whether a list has an item for each sample, only the data loader knows. It may return
`Microbatches` instead.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_roundpipe.messages import plural

REMEDIES = (
    "Leave num_microbatches and microbatch_size out, so that microbatches are the batches of accumulate_grad_batches; "
    "or have the collate_fn return roundpipe's Microbatches([...]), whose elements are the microbatches."
)


class Microbatches(list[Any]):
    """A batch whose elements are its microbatches, as a data loader returns it. They may be of any type."""


def cut(batch: Any, count: int | None, size: int | None) -> list[Any]:
    """Return the microbatches of ``batch``.

    Args:
        batch: what the data loader returned.
        count: number of microbatches; fewer if there are fewer samples. They differ by one sample at most.
        size: samples of a microbatch, instead of ``count``; the last one may have fewer.

    Raises:
        ValueError: the batch cannot be cut; the message names the entry and the remedies.
    """
    if isinstance(batch, Microbatches):
        if not batch:
            raise ValueError("the data loader returned Microbatches([]): a batch needs at least one microbatch.")
        return list(batch)
    if count is None and size is None:
        return [batch]
    asked = f"num_microbatches={count}" if size is None else f"microbatch_size={size}"
    found = list(_tensors(batch, "", asked))
    if not found:
        raise ValueError(f"{asked} cuts a batch, and this one ({type(batch).__name__}) has no tensors. {REMEDIES}")
    (first, tensor), *others = found
    samples = len(tensor)
    for path, other in others:
        if len(other) != samples:
            raise ValueError(
                f"{asked} cuts a batch along the first dimension of its tensors, and they disagree: {first} has "
                f"{plural(samples, 'row')} and {path} has {len(other)}. {REMEDIES}"
            )
    sizes = _sizes(samples, count, size)
    if len(sizes) == 1:
        return [batch]
    ends = [0, *itertools.accumulate(sizes)]
    return [apply_to_collection(batch, Tensor, _rows, slice(start, end)) for start, end in itertools.pairwise(ends)]


def samples_in(part: Any) -> int:
    """Return the number of samples of a microbatch: the rows of its first tensor; 1 if there is none."""
    return next((len(value) for value in _leaves(part) if isinstance(value, Tensor) and value.ndim), 1)


def _sizes(samples: int, count: int | None, size: int | None) -> list[int]:
    if size is not None:
        return [min(size, samples - start) for start in range(0, samples, size)] or [0]
    count = max(1, min(samples, count or 1))
    return [samples // count + (i < samples % count) for i in range(count)]


def _items(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the entries of a container, and how Python writes the way to each; None if it is something else."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", item) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ((f".{name}", item) for name, item in zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return ((f"[{i}]", item) for i, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    return None


def _leaves(value: Any) -> Iterator[Any]:
    items = _items(value)
    if items is None:
        yield value
    for _, item in items or ():
        yield from _leaves(item)


def _tensors(value: Any, path: str, asked: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their paths; raise for what is neither a tensor, a container nor None."""
    items = _items(value)
    for name, item in items or ():
        yield from _tensors(item, f"{path}{name}", asked)
    if items is not None or value is None:
        return
    path = f"batch{path}"
    if not isinstance(value, Tensor):
        raise ValueError(f"{asked} cuts the tensors of a batch, and {path} is a {type(value).__name__}. {REMEDIES}")
    if value.layout is not torch.strided:
        raise ValueError(f"{asked} cuts the tensors of a batch, and {path} is a sparse tensor. {REMEDIES}")
    if not value.ndim:
        raise ValueError(f"{asked} cuts the tensors of a batch, and {path} has no dimension. {REMEDIES}")
    yield path, value


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    # A part has a version counter of its own: what a step writes to its part is no write to the others.
    return tensor[rows] if type(tensor) is not Tensor or tensor.requires_grad else tensor.data[rows]
