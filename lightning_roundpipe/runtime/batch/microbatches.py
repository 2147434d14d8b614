"""Cuts a batch into microbatches, and merges what training_step returned for them.

Tensors and arrays whose first dimension is the batch size are cut, and so are lists and tuples of strings of that
length. Every microbatch gets the rest as it is. Containers keep their type (including a tokenizer's ``BatchEncoding``,
dataclasses and named tuples).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.messages import plural
from lightning_roundpipe.runtime.batch.samples import are_similar, are_texts, listed_samples

_LOOKED_AT = 1 << 18
"""Elements of a tensor that `memory_of` looks at."""


def sizes_of(samples: int, count: int | None, size: int | None, workers: int, fewest: int = 1) -> list[int]:
    """Return how many samples each microbatch gets. An empty batch is one microbatch, as in plain training.

    Args:
        samples: the batch size.
        count: requested number of microbatches; there are fewer if there are fewer samples.
        size: or requested samples per microbatch.
        workers: number of workers; the default count is 2 per worker.
        fewest: least samples of a microbatch under the default count.
    """
    if not samples:
        return [0]
    if size is not None:
        return [min(size, samples - start) for start in range(0, samples, size)]
    if count is None:
        count = max(1, min(2 * workers, samples // fewest))
    count = min(samples, count)
    return [samples // count + (i < samples % count) for i in range(count)]


def given_weights(function: Callable[[Any], Any], parts: Sequence[Any]) -> list[float]:
    """Return what ``function``, the user's ``loss_weight``, returns for each microbatch.

    Raises:
        ValueError: if the weights are not finite numbers of at least 0, or are all 0.
    """
    weights = []
    for index, part in enumerate(parts):
        given = function(part)
        try:
            weights.append(float(given))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"loss_weight returned {given!r} for microbatch {index}: it must give one number, such as that of the "
                "targets in it."
            ) from error
    if not all(0 <= w < math.inf for w in weights) or not sum(weights):
        raise ValueError(
            f"loss_weight returned {weights} for the microbatches: weights must be finite, at least 0, and not all 0."
        )
    return weights


def memory_of(batch: Any) -> dict[int, tuple[Any, int]]:
    """Map the address of each tensor's and array's memory to the object and a checksum of its first elements."""
    found: dict[int, tuple[Any, int]] = {}
    for leaf in tree_iter(batch):
        tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" else leaf
        is_plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_nested
        if is_plain and tensor.device.type == "cpu":
            values = tensor.detach().reshape(-1).resolve_neg().resolve_conj()[:_LOOKED_AT].contiguous()
            found[tensor.untyped_storage().data_ptr()] = leaf, zlib.crc32(values.view(torch.uint8).numpy().tobytes())
    return found


Rows = slice | list[int]
"""Samples of a batch."""


class Columns:
    """Remembers which tensors of a batch have a row per sample, from the first batch of the same structure.

    A tensor that all samples share may have as many rows as a smaller last batch has samples.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[bool]] = {}

    def split(self, batch: Any, sizes: list[int]) -> list[Any]:
        """Return the microbatches. Their tensors are views of the batch."""
        if len(sizes) == 1:
            return [batch]
        return [self.part(batch, rows, sum(sizes)) for rows in rows_of(sizes)]

    def part(self, batch: Any, rows: Rows, samples: int, *, copied: bool = False) -> Any:
        """Return the part of ``batch`` that belongs to the samples in ``rows``.

        Args:
            batch: the batch.
            rows: the samples of the part; a list may name one twice.
            samples: the batch size.
            copied: whether the part gets memory of its own, to which user code may write.
        """
        listed = listed_samples(batch) is not None
        found: list[tuple[Any, bool]] = []

        def see(value: Any, mine: Rows | None) -> Any:
            found.append((value, mine is not None))
            return value

        part_of(batch, rows, samples, listed, see)
        key = tuple((type(value), value.ndim) for value, _ in found)
        cut, taken = iter(self._known.setdefault(key, [mine for _, mine in found])), RowSlicer()

        def take(value: Any, mine: Rows | None) -> Any:
            part = taken(value, mine if next(cut) else None)
            if copied and isinstance(part, Tensor):
                return part if part.requires_grad else part.clone()
            return part.copy() if copied and isinstance(part, np.ndarray) else part

        return part_of(batch, rows, samples, listed, take)


def uncut_tensors(part: Any, samples: int) -> str:
    """Name the tensors of a microbatch that each microbatch has whole, as their rows are not its ``samples``."""
    items = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, (list, tuple)) else ()
    return ", ".join(
        f"{name!r} ({plural(len(value), 'row')})"
        for name, value in items
        if isinstance(value, Tensor) and value.ndim and len(value) != samples
    )


def rows_of(sizes: list[int]) -> list[slice]:
    """Return the rows of each microbatch."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def are_rows(parts: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether each tensor, of parts of these sizes, has a row for each sample, and rows are alike."""
    first = parts[0]
    return first.dim() > 0 and all(
        part.dtype is first.dtype and part.shape == (size, *first.shape[1:])
        for part, size in zip(parts, sizes, strict=True)
    )


def rows_or_zeros(parts: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """Concatenate parts of these sizes, with zeros in place of those that are None. At least one is not."""
    like = next(part for part in parts if part is not None)
    pairs = zip(parts, sizes, strict=True)
    return torch.cat([like.new_zeros((size, *like.shape[1:])) if part is None else part for part, size in pairs])


def part_of(value: Any, rows: Rows, samples: int, listed: bool, take: Callable[[Any, Rows | None], Any]) -> Any:
    """Return the part of a batch that belongs to the samples in ``rows``.

    Args:
        value: the batch, or something in it.
        rows: the samples of the part.
        samples: the batch size.
        listed: whether the batch has lists with one item per sample.
        take: called with each tensor or array, and with ``rows`` if it is to be cut, else None; returns its part.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return take(value, rows if value.ndim and value.shape[0] == samples else None)
    if (isinstance(value, list) or are_texts(value)) and _has_an_item_each(value, samples, listed):
        return value[rows] if isinstance(rows, slice) else type(value)(value[row] for row in rows)
    return _rebuild(value, lambda item: part_of(item, rows, samples, listed, take))


class RowSlicer:
    """Takes the rows of one microbatch out of a batch.

    The parts share the batch's memory, but their version counters are separate from those of other microbatches, which
    have other rows. Parts of one microbatch that share a storage share a counter, since inputs and targets may be views
    of one tensor.
    """

    def __init__(self) -> None:
        self._roots: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, value: Any, rows: Rows | None) -> Any:
        if rows is None:
            return value
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            return _rows_of_sparse(value, rows)
        part = value[rows]
        if type(part) is not Tensor or part.layout is not torch.strided or part.requires_grad or part.is_inference():
            return part
        key = part.untyped_storage()._cdata, part.dtype
        root = self._roots.setdefault(key, part.data)
        return root.as_strided(part.shape, part.stride(), part.storage_offset())


def _rows_of_sparse(value: Tensor, rows: Rows) -> Tensor:
    """Return rows of a sparse tensor, in its layout, as a copy: it has no views of them."""
    if value.layout not in (torch.sparse_coo, torch.sparse_csr):
        return value[rows]
    wanted = torch.arange(value.shape[0], device=value.device)[rows]
    whole = value if value.layout is torch.sparse_coo else value.to_sparse()
    part = whole.index_select(0, wanted)
    if value.layout is torch.sparse_csr:
        return part.to_sparse_csr()
    return part.coalesce() if value.is_coalesced() else part


def _has_an_item_each(values: Sequence[Any], samples: int, listed: bool) -> bool:
    """Return whether ``values`` has an item per sample. If it is a list of columns, the columns are cut instead."""
    if len(values) != samples or (listed and are_similar(values)):
        return len(values) == samples
    return not any(_is_column(value, samples, listed) for value in values)


def _is_column(value: Any, samples: int, listed: bool) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return bool(value.ndim) and value.shape[0] == samples
    return (are_texts(value) or (listed and isinstance(value, list))) and len(value) == samples


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return _with_items(value, {k: change(v) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(change(v) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fresh: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(fresh, field.name, change(getattr(value, field.name)))
        return fresh
    return value


def _with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return ``items`` as a mapping of the type of ``value``, which has the same keys."""
    if type(value) is dict:
        return items
    mapping: Any = copy.copy(value)
    if isinstance(getattr(mapping, "data", None), dict):  # the copy of a UserDict shares its dict
        mapping.data = dict(mapping.data)
    for key, item in items.items():
        mapping[key] = item
    return mapping


def merge(outputs: Sequence[Any], sizes: list[int], weights: list[float], added: Sequence[Addend] | None = None) -> Any:
    """Return what ``training_step`` would have returned for the whole batch, as far as possible.

    Tensors with one row per sample are concatenated and scalars `combined`. Other values are kept if they are equal for
    all microbatches, and collected in a list otherwise.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return _detached(first)
    if isinstance(first, Tensor):
        tensors = [o.detach().cpu() for o in outputs]
        if first.dim() and all(t.shape == (n, *first.shape[1:]) for t, n in zip(tensors, sizes, strict=True)):
            return torch.cat(tensors)
        if all(t.shape == first.shape for t in tensors):
            return combined(tensors, weights, added)
        return tensors
    if isinstance(first, Mapping) and all(isinstance(o, Mapping) and o.keys() == first.keys() for o in outputs):
        return _with_items(first, {k: merge([o[k] for o in outputs], sizes, weights, added) for k in first})
    if isinstance(first, (list, tuple)) and all(type(o) is type(first) and len(o) == len(first) for o in outputs):
        parts = [merge(list(column), sizes, weights, added) for column in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, float):
        return float(combined([torch.tensor(float(o), dtype=torch.float64) for o in outputs], weights, added))
    return first if all(same(o, first) for o in outputs[1:]) else list(outputs)


def same(a: Any, b: Any) -> bool:
    """Return whether two outputs are certainly equal. Arrays and holders of tensors have no single truth value."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:
        return False


def without(value: Any, drop: Callable[[Any], bool]) -> Any:
    """Return ``value`` with None in place of everything for which ``drop`` is true."""
    return None if drop(value) else _rebuild(value, lambda item: without(item, drop))


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return _rebuild(value, _detached)


class RaisedCount(float):
    """The divisor of a mean that user code has raised above what it counts, as ``clamp(min=1)`` does.

    Attributes:
        count: what is counted.
    """

    count: float

    @classmethod
    def of(cls, divisor: float, count: float) -> RaisedCount:
        made = cls(divisor)
        made.count = count
        return made


def counted(weights: Iterable[float]) -> list[float]:
    """Return ``weights`` with what is counted in place of divisors that were raised."""
    return [weight.count if isinstance(weight, RaisedCount) else weight for weight in weights]


def total_of(weights: Sequence[float]) -> float:
    """Return the sum of ``weights``; of counts of which some were raised, the sum raised to the same number."""
    return max([sum(counted(weights)), *(float(weight) for weight in weights if isinstance(weight, RaisedCount))])


class Addend(NamedTuple):
    """The loss of a microbatch, and what it is multiplied by in the sum that is the loss of the batch."""

    loss: Tensor
    factor: float = 1.0


def combined(tensors: list[Tensor], weights: list[float], added: Sequence[Addend] | None = None) -> Tensor:
    """Combine tensors of the same shape into one: their mean by ``weights``, or their sum.

    Args:
        tensors: one per microbatch.
        weights: one per microbatch.
        added: one per microbatch if losses are added. Tensors that equal these losses are added too.
    """
    if added is None or not all(is_number(t, float(one.loss)) for t, one in zip(tensors, added, strict=True)):
        return weighted_mean(tensors, weights)
    terms = [t.detach().cpu().double() * one.factor for t, one in zip(tensors, added, strict=True) if one.factor]
    return torch.stack(terms).sum(0).to(tensors[0].dtype)


def is_number(value: Any, number: float) -> bool:
    """Return whether ``value``, a number or a tensor with one, is ``number``; one NaN is as good as another."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return False
    if not isinstance(value, (Tensor, float)):
        return False
    return float(value) == number or (math.isnan(value) and math.isnan(number))


def dtype_of_numbers() -> torch.dtype:
    """Return the dtype of means of Python's numbers and whole numbers: float64 in ``64-true``, else float32."""
    return torch.promote_types(torch.float32, torch.get_default_dtype())


def weighted_mean(tensors: list[Tensor], weights: list[float]) -> Tensor:
    """Return the weighted mean of tensors of one shape. A weight of 0 leaves its tensor out, even if it holds NaN."""
    total = total_of(weights)
    dtype = tensors[0].dtype if tensors[0].is_floating_point() else dtype_of_numbers()
    result = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        if weight:
            result += tensor.detach().cpu().double() * (weight / total)
    return result.to(dtype) if total else tensors[0].detach().cpu()


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what ``training_step`` returned. None if there is none; Lightning reports what is wrong then.

    Raises:
        RoundPipeError: if the loss is not one real number in a tensor.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        if isinstance(output, Mapping) and loss is not None:
            raise RoundPipeError(
                f"training_step returned 'loss' as a {type(loss).__name__}: return the tensor, without .item()."
            )
        return None
    if loss.numel() != 1 or loss.is_complex():
        raise RoundPipeError(
            f"training_step returned a loss of shape {tuple(loss.shape)} and {loss.dtype}; it must be one real number "
            "(take its mean)."
        )
    return loss


def seed_of(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seed of a loss's backward, and the factor by which its gradients are multiplied when summed.

    Their product is ``scale``. In half precision, of the loss or of the gradients behind it, a seed such as 1/3 would
    be rounded, so the seed is a power of two.
    """
    if not scale or dtype not in (torch.bfloat16, torch.float16):
        return scale, 1.0
    rest, exponent = math.frexp(scale)
    return (math.ldexp(1.0, exponent - 1), 1.0) if rest == 0.5 else (math.ldexp(1.0, exponent), rest)


def filled_like(loss: Tensor, seed: float) -> Tensor:
    """Return a tensor of ``seed`` for the backward of ``loss``; infinity where the format does not reach so far."""
    return torch.full_like(loss, seed, dtype=torch.float64).to(loss.dtype)  # in fp16, CUDA refuses to fill with 2**17


def detached(output: Any) -> Any:
    """Return what ``training_step`` returned, detached."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {k: detached(v) for k, v in output.items()}
    return output
