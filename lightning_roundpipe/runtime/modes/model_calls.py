"""A call of the model that runs in parts: cuts its arguments, merges its outputs, and routes the gradients.

    arguments ── a microbatch gets its rows of tensors with a row per sample, and all else as it is ── [1]
    outputs of all microbatches ── rows are concatenated, what is the same for all is taken once ── [2]
    gradient of an output ── its rows go to their microbatches ── [3]
    gradients of an argument ── rows are concatenated; what all microbatches were given gets their sum, in order ── [4]

Tensors that cannot be merged exactly are refused once user code looks at them: above all a scalar such as a loss, which
has already reduced over the samples. No autograd node connects the parts with the whole, only `GraphCut`: a part's
graph must not extend into the graph of another thread.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.model.attributes import bits
from lightning_roundpipe.runtime.batch import microbatches
from lightning_roundpipe.runtime.batch.samples import batch_size, listed_samples
from lightning_roundpipe.runtime.batch.unmerged import Unmerged, refuse_unmerged
from lightning_roundpipe.runtime.layer_calls.arguments import flatten, is_cache, unflatten
from lightning_roundpipe.runtime.user_code.graph_cuts import GraphCut, boundary
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState


class Part(Protocol):
    """A part of a call: the model's forward on one microbatch.

    Attributes:
        outputs: the model's return value, as leaves and structure.
        device: the device that it ran on last; None is the host.
    """

    outputs: tuple[list[Any], TreeSpec]

    @property
    def device(self) -> Device | None: ...

    def bring(self, tensor: Tensor, source: Device | None, target: Device | None) -> Tensor:
        """Return ``tensor``, one of this part's on ``source``, on ``target``."""


P = TypeVar("P", bound=Part)


@dataclass(eq=False)
class CutArgument(GraphCut):
    """The graph cut at one argument of a part, or at its outputs; ``name`` is the model's, for errors."""

    name: str

    @property
    def what(self) -> str:
        return f"the call of {self.name!r}"


@dataclass(eq=False)
class ModelCall(CutArgument, Generic[P]):
    """One call of the model, on the whole batch.

    Attributes:
        number: how many calls precede it in the step.
        thread_state: the modes of the thread that made it.
        trained: the parameters of layers.
        sizes: number of samples of each microbatch.
        cut: per argument that requires grad, whether it has a row per sample.
        arguments: per microbatch and such argument, the graph cut where the gradient of the part's argument arrives.
        runs: the parts, in order.
        rows: per output tensor, whether it has a row per sample; else it is the same for all microbatches.
        flags: per output tensor, whether it requires grad.
    """

    number: int
    thread_state: TorchThreadState
    trained: Sequence[nn.Parameter] = ()
    sizes: list[int] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    arguments: list[list[CutArgument]] = field(default_factory=list)
    runs: list[P] = field(default_factory=list)
    rows: list[bool] = field(default_factory=list)
    flags: list[bool] = field(default_factory=list)

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        return self.trained

    # -- arguments ----------------------------------------------------------------------------------------------------

    def split(
        self, args: Any, kwargs: Any, sizes_of: Callable[[int], list[int]], masters: Collection[int],
        locate: Callable[[Tensor], Device | None],
    ) -> list[tuple[Any, Any]]:  # fmt: skip
        """Return the arguments of each part [1].

        Args:
            args, kwargs: the arguments of the call.
            sizes_of: returns the sizes of the microbatches for a number of samples.
            masters: ids of the user's parameters. They are passed on uncut, as each microbatch reads them by itself.
            locate: returns the device of a tensor; None for the host.

        Raises:
            RoundPipeError: if an argument is a key-value cache, or an object that holds a tensor which requires grad.
            ValueError: if the number of samples cannot be told.
        """
        leaves = [leaf for leaf in flatten((args, kwargs))[0] if id(leaf) not in masters]
        refuse_unmerged(leaves)
        if any(map(is_cache, leaves)):
            raise RoundPipeError(
                f"{self.what} is given a key-value cache, which cannot be cut into microbatches. Call the model with "
                "use_cache=False, or set microbatch_scope='step'."
            )
        samples = self._samples(leaves, args, kwargs, masters)
        self.sizes = sizes_of(samples) if samples is not None else [1]
        listed = samples is not None and listed_samples((args, kwargs)) is not None
        wanted = {id(t): t for t in leaves if isinstance(t, Tensor) and t.requires_grad and self.thread_state.grad}
        self.connect(list(wanted.values()))
        self.cut = [False] * len(wanted)
        places = {key: place for place, key in enumerate(wanted)}
        parts = []
        for rows in microbatches.rows_of(self.sizes):
            ends = [CutArgument(self.name) for _ in wanted]
            self.arguments.append(ends)
            take = _Taker(masters, places, self.cut, ends, locate)
            parts.append(microbatches.part_of((args, kwargs), rows, samples or 1, listed, take))
            if take.overlooks(parts[-1]):
                raise RoundPipeError(
                    f"{self.what} is given a list or an object that holds a tensor which requires grad, and cannot be "
                    "cut into microbatches. Give it the tensors, or set microbatch_scope='step'."
                )
        return parts

    @staticmethod
    def _samples(leaves: list[Any], args: Any, kwargs: Any, masters: Collection[int]) -> int | None:
        """Return the number of samples; None if no argument is a tensor with rows."""
        if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
            return None
        return batch_size(microbatches.without((args, kwargs), lambda value: id(value) in masters))

    # -- outputs ------------------------------------------------------------------------------------------------------

    def merge(self, home: Device | None, of_pairs: Callable[[Tensor, int], None]) -> Any:
        """Return the output for the whole batch, a boundary of this cut [2].

        Args:
            home: the device to merge on.
            of_pairs: called with a part's output that may hold a value for each pair of samples, and its place.

        Raises:
            RoundPipeError: if the parts' outputs differ in structure, or in something that is no tensor. A tensor that
                has no row per sample and is not the same for all parts raises it when it is used.
        """
        outputs = [run.outputs for run in self.runs]
        first, spec = outputs[0]
        if any(other != spec or len(leaves) != len(first) for leaves, other in outputs):
            self._refuse("something of another structure for each part")
        merged: list[Any] = []
        tensors = []
        for column in zip(*(leaves for leaves, _ in outputs), strict=True):
            if isinstance(column[0], Tensor):
                brought = [r.bring(t, r.device, home) for r, t in zip(self.runs, column, strict=True)]
                try:
                    whole = self._merge(brought, len(merged))
                except RoundPipeError as error:
                    whole = self._unmerged(error)
                if self.rows[-1] and len(self.runs) > 1 and whole.dim() > 1 and {column[0].shape[1]} == set(self.sizes):
                    of_pairs(column[0], len(merged))
                is_there = not isinstance(whole, Unmerged)
                tensors.append(whole if is_there else torch.empty(0))
                self.flags.append(is_there and any(t.requires_grad for t in column))
                merged.append(whole)
            else:
                merged.append(self._merge_others(list(column)))
        for run in self.runs:
            run.outputs = ([], spec)  # frees the parts' outputs on the devices
        self.home = home
        if self.thread_state.grad and any(self.flags):
            tensors = boundary(self, tensors, self.flags)
        rest = iter(tensors)
        leaves = [(leaf, next(rest) if isinstance(leaf, Tensor) else leaf) for leaf in merged]
        return unflatten([leaf if isinstance(leaf, Unmerged) else whole for leaf, whole in leaves], spec)

    def _unmerged(self, error: RoundPipeError) -> Tensor:
        """Return what stands for a tensor that cannot be merged, for the reason ``error``."""
        return Unmerged.of(error)

    def _merge_others(self, parts: list[Any]) -> Any:
        """Return what stands for leaves that are no tensors."""
        if not all(microbatches.same(leaf, parts[0]) for leaf in parts[1:]):
            self._refuse(f"another {type(parts[0]).__name__} for each part ({parts[0]!r}, {parts[1]!r}, ...)")
        return parts[0]

    def _merge(self, parts: list[Tensor], place: int) -> Tensor:
        """Return the tensor for the whole batch, the output's leaf number ``place``."""
        first = parts[0]
        rows = microbatches.are_rows(parts, self.sizes)
        self.rows.append(rows)
        with torch.no_grad():
            if rows and len(parts) > 1:
                return torch.cat(parts)
            if all(p.dtype is first.dtype and p.shape == first.shape and torch.equal(p, first) for p in parts[1:]):
                return first.detach().clone()  # training_step may write to it, and the part's graph may have saved it
        if not first.dim():
            raise RoundPipeError(
                f"{self.what} returns a number for each part of the batch, such as a loss, which does not give that of "
                "the whole batch. With microbatch_scope='model' compute the loss in training_step, from what the model "
                "returns for each sample (call a Hugging Face model without labels)."
            )
        self._refuse(f"tensors of the shapes {', '.join(str(tuple(p.shape)) for p in parts)}")

    def _refuse(self, what: str) -> NoReturn:
        raise RoundPipeError(
            f"{self.what} returns {what}, for microbatches of sizes {', '.join(map(str, self.sizes))}: with "
            "microbatch_scope='model' only tensors with a row for each sample can be put together, and what is the "
            "same for all parts. Return those, and compute the rest in training_step."
        )

    # -- gradients ----------------------------------------------------------------------------------------------------

    def output_gradients(self, whole: list[Tensor | None]) -> list[list[Tensor | None]]:
        """Return the gradients of each microbatch's outputs [3].

        An output that is the same for all microbatches gives each a share of its gradient, by number of samples.
        """
        shares = [size / sum(self.sizes) for size in self.sizes] if len(self.sizes) > 1 else [1.0]
        return [
            [
                None if grad is None else grad[part] if rows else grad * share
                for grad, rows in zip(whole, self.rows, strict=True)
            ]
            for part, share in zip(microbatches.rows_of(self.sizes), shares, strict=True)
        ]

    def argument_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the whole batch's arguments that require grad [4]."""
        return [self._argument_gradient(index, cut) for index, cut in enumerate(self.cut)]

    def _argument_gradient(self, index: int, cut: bool) -> Tensor | None:
        found: list[Tensor | None] = []
        for run, end in zip(self.runs, (ends[index] for ends in self.arguments), strict=True):
            parts = [run.bring(grad, device, end.home) for grad, device in (end.grads[0] if end.grads else ())]
            found.append(functools.reduce(torch.add, parts) if parts else None)
        there = [grad for grad in found if grad is not None]
        if not there or not cut:
            return functools.reduce(torch.add, there) if there else None
        return microbatches.rows_or_zeros(found, self.sizes)


class PartArguments:
    """The arguments of one part, and whether the model has changed them.

    A part has lists, dicts and objects of its own, so the caller does not see what the model puts into them. Its
    tensors are views of the caller's.

    Args:
        part: the arguments.
        copied: whether to copy the tensors, so that the model does not write to the caller's.
    """

    def __init__(self, part: tuple[Any, Any], *, copied: bool) -> None:
        self._rows, self._spec = flatten(part)
        self._leaves = [leaf.clone() if copied and isinstance(leaf, Tensor) else leaf for leaf in self._rows]
        self.arguments: tuple[Any, Any] = unflatten(self._leaves, self._spec) if copied else part

    def are_changed(self) -> bool:
        """Return whether the model has changed a list, a dict or an object, or written to a copied tensor."""
        leaves, spec = flatten(self.arguments)
        return (
            spec != self._spec
            or any(map(operator.is_not, leaves, self._leaves))
            or any(
                own is not rows and not torch.equal(bits(own), bits(rows))
                for own, rows in zip(self._leaves, self._rows, strict=True)
                if isinstance(rows, Tensor)
            )
        )


class _Taker:
    """Takes a part's rows of tensors. A tensor that requires grad becomes a boundary of the part's own graph cut."""

    def __init__(
        self, masters: Collection[int], places: dict[int, int], cut: list[bool], ends: list[CutArgument],
        locate: Callable[[Tensor], Device | None],
    ) -> None:  # fmt: skip
        self._masters, self._places, self._cut, self._ends = masters, places, cut, ends
        self._locate = locate
        self._taken: dict[int, Any] = {}

    def __call__(self, value: Any, rows: microbatches.Rows | None) -> Any:
        if id(value) in self._masters:
            return value
        if id(value) not in self._taken:
            self._taken[id(value)] = self._take(value, rows)
        return self._taken[id(value)]

    def _take(self, value: Any, rows: microbatches.Rows | None) -> Any:
        place = self._places.get(id(value)) if isinstance(value, Tensor) else None
        if place is None:
            return value if rows is None else value[rows]
        self._cut[place] = rows is not None
        end = self._ends[place]
        end.home = self._locate(value)
        # A copy: the part's graph may save it, and training_step may write to the tensor afterwards.
        part = value.detach().clone() if rows is None else value.detach()[rows].clone()
        return boundary(end, [part], [True])[0]

    def overlooks(self, part: Any) -> bool:
        """Return whether something in ``part`` requires grad and was not taken, so that its gradient would be lost."""
        taken = {id(value) for value in self._taken.values()}
        leaves = [leaf for leaf in flatten(part)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        return any(id(leaf) not in taken and id(leaf) not in self._masters for leaf in leaves)
