"""How many samples a batch holds.

Nothing in a batch says so. Usually its tensors have a row per sample, and the first tensor tells; a batch without
tensors has lists. But user code may collect samples in lists, as object detection does (images and boxes of different
sizes), and a batch may carry constants. A wrong guess would cut images by channels or sequences by tokens, on which
some models train without an error. So a batch that can be read in two ways is refused.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lightning_roundpipe.messages import plural


class NoSamples(ValueError):
    """Raised if nothing in the batch has a row or an item per sample."""


_REMEDY = "Return tensors with a row for each sample from the dataloader, or set num_microbatches=1."


def batch_size(batch: Any) -> int:
    """Return the number of samples.

    Raises:
        NoSamples: if nothing in the batch tells it.
        ValueError: if the batch can be read in several ways.
    """
    if (listed := listed_samples(batch)) is not None:
        return listed
    rows = [count for count, length in _rows(batch) if count is not None]
    if rows:
        (common, times), *_ = Counter(rows).most_common(1)
        if times > 1 and rows.count(rows[0]) == 1 and rows[0] > 1:
            raise _untold(f"its first tensor has {plural(rows[0], 'row')}, and {times} others have {common}")
        return rows[0]
    for items in (*_outermost(batch, _is_array), *_outermost(batch, _is_plain_list)):
        return len(items)
    raise NoSamples(
        f"the size of the batch cannot be found: {type(batch).__name__} holds no tensor with a batch dimension and no "
        f"list. {_REMEDY}"
    )


def listed_samples(batch: Any) -> int | None:
    """Return the number of samples if a list has one item per sample; None if the tensors' rows are the samples.

    A list of similar items may hold samples or columns (a pair of batches). Columns have equally many rows.
    Mappings beside a tensor with as many rows as they are, or beside a list of as many items, are samples if they have
    other numbers of rows themselves: the targets of object detection.

    Raises:
        ValueError: if it can be either.
    """
    known = list(_rows(batch))
    lengths = {length for _, length in known if length}
    inside = {count for count, length in known if length}
    outside = {count for count, length in known if not length}
    if len(lengths) != 1 or not outside <= lengths:
        return None
    (length,) = lengths
    lists = list(_outermost(batch, lambda value: isinstance(value, list) and are_similar(value)))
    if inside != lengths and (outside or len(lists) > 1) and any(isinstance(items[0], Mapping) for items in lists):
        return length
    if len(inside) > 1 and not (isinstance(batch, list) and isinstance(batch[0], Tensor)):
        return length
    if len(inside) > 1 or (outside and inside != lengths):
        raise _untold(f"a list in it may hold {plural(length, 'sample')}, or as many parts of all samples")
    return None


def _outermost(value: Any, is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield what is wanted in ``value``, and not what is in that again."""
    if is_wanted(value):
        yield value
    else:
        for item in _items(value):
            yield from _outermost(item, is_wanted)


def _untold(why: str) -> ValueError:
    return ValueError(f"the size of the batch cannot be told: {why}. {_REMEDY}")


def _rows(value: Any, length: int | None = None) -> Iterator[tuple[int | None, int | None]]:
    """Yield for each tensor its number of rows, and the length of the outermost list of similar items around it.

    Plain numbers (None rows) count within such lists only: elsewhere collation would have made tensors with rows of
    them.
    """
    if isinstance(value, Tensor):
        if value.is_nested:
            raise NoSamples(f"a batch with a nested tensor (torch.nested) cannot be cut into microbatches. {_REMEDY}")
        if value.dim() or length:
            yield (int(value.shape[0]) if value.dim() else None), length
    elif isinstance(value, (int, float)):
        if length:
            yield None, length
    else:
        if length is None and isinstance(value, list) and are_similar(value):
            length = len(value)
        for item in _items(value):
            yield from _rows(item, length)


def are_similar(values: Sequence[Any]) -> bool:
    """Return whether the values may be samples of one kind."""
    kinds = {_kind(value) for value in values}
    return len(values) > 1 and len(kinds) == 1 and None not in kinds


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.dim(), value.dtype) if value.dim() else None
    if isinstance(value, Mapping):
        return (type(value), frozenset(value))
    if isinstance(value, tuple):
        return (type(value), len(value))
    return type(value) if dataclasses.is_dataclass(value) else None


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value))


def are_texts(value: Any) -> bool:
    """Return whether it is a tuple of strings, into which collation turns the strings of samples that are tuples."""
    return type(value) is tuple and bool(value) and all(isinstance(v, (str, bytes)) for v in value)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 0


def _is_plain_list(value: Any) -> bool:
    """Return whether it is a list without containers in it."""
    return are_texts(value) or (
        isinstance(value, list) and not any(isinstance(v, (Tensor, Mapping, list)) for v in value)
    )
