"""A module's call in tiles of tokens, and its backward, which computes each tile again.

A module that acts on each token alone gives the same whether it sees all tokens at once or some at a time. In tiles it
holds the intermediates of one tile, forward and backward, beside its inputs and outputs:

    forward: the tiles one after another, without a graph ── outputs into one buffer ── [1]
    what the graph keeps: the inputs
    backward: each tile once more, with a graph that is differentiated at once ── gradients of inputs into one buffer
    gradients of weights: into ``.grad`` directly, tile after tile ── [2]

On [2]: sums of 16-bit gradients are made in fp32 and rounded once, as one product over all tokens does. The order of
the additions differs from that product's, so gradients of weights are equal to rounding only.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_roundpipe.user_code.thread_state import TorchThreadState

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""Types of arguments that every tile may be given as they are."""
_WIDE = (torch.float32, torch.float64)
"""Formats in which sums over tiles lose nothing that a product over all tokens keeps."""


@dataclass(frozen=True)
class TokenSpan:
    """The tokens of a tile: a part of one row, or several whole rows. They are contiguous in both cases."""

    rows: slice
    columns: slice
    flat: slice


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a call's tensors are.

    Attributes:
        rows, columns: the first two dimensions of tensors with rows of tokens. Without such tensors there is one row.
        shaped: whether there are tensors of shape (rows, columns, ...); else all are of shape (tokens, ...).
    """

    rows: int
    columns: int
    shaped: bool

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Layout | None:
        """Return the layout that fits all tensors; None if there is none."""
        first = tensors[0] if tensors else None
        if first is None or first.dim() < 2 or not first.is_floating_point():
            return None
        rows, columns = first.shape[:2] if first.dim() > 2 else (1, first.shape[0])
        layout = cls(rows, columns, first.dim() > 2)
        return layout if all(layout.fits(t) for t in tensors) else None

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    def is_shaped(self, tensor: Tensor, span: TokenSpan | None = None) -> bool:
        """Return whether ``tensor``, of all tokens or those of ``span``, has rows of tokens."""
        if not self.shaped or tensor.dim() < 2:
            return False
        rows, columns = self.rows, self.columns
        if span is not None:
            rows, columns = span.rows.stop - span.rows.start, span.columns.stop - span.columns.start
        return tensor.shape[0] == rows and tensor.shape[1] == columns

    def fits(self, tensor: Tensor, span: TokenSpan | None = None) -> bool:
        """Return whether ``tensor`` has an entry for each token, or for each one of ``span``."""
        if tensor.layout is not torch.strided or tensor.is_nested or not tensor.dim():
            return False
        tokens = self.tokens if span is None else span.flat.stop - span.flat.start
        return self.is_shaped(tensor, span) or tensor.shape[0] == tokens

    def spans(self, tile: int) -> list[TokenSpan]:
        """Return tiles of at most ``tile`` tokens and about equal sizes, in the order of the tokens."""
        if self.columns >= tile:
            number = -(-self.columns // tile)
            size = -(-self.columns // number)
            return [
                self._span(row, row + 1, start, min(start + size, self.columns))
                for row in range(self.rows)
                for start in range(0, self.columns, size)
            ]
        size = tile // max(1, self.columns)
        return [
            self._span(row, min(row + size, self.rows), 0, self.columns) for row in range(0, self.rows, max(1, size))
        ]

    def _span(self, first: int, last: int, start: int, stop: int) -> TokenSpan:
        flat = slice(first * self.columns + start, (last - 1) * self.columns + stop)
        return TokenSpan(slice(first, last), slice(start, stop), flat)


def part_of(tensor: Tensor, span: TokenSpan, *, shaped: bool) -> Tensor:
    """Return the view of the tokens of ``span``."""
    return tensor[span.rows, span.columns] if shaped else tensor[span.flat]


@dataclass
class Outputs:
    """What a tile returns, apart from its values.

    Attributes:
        spec: structure of the return value.
        leaves: for each leaf a value that is no tensor, or `Leaf`.
    """

    spec: TreeSpec
    leaves: list[Any]


@dataclass(frozen=True)
class Leaf:
    """A tensor among the outputs: of shape (rows, columns, *rest) if ``shaped``, else (tokens, *rest)."""

    shaped: bool
    rest: torch.Size
    dtype: torch.dtype

    def shape(self, layout: Layout) -> tuple[int, ...]:
        return (layout.rows, layout.columns, *self.rest) if self.shaped else (layout.tokens, *self.rest)


class CannotTile(Exception):
    """A call turned out not to act on each token alone, by what it takes or returns."""


@dataclass(eq=False)
class CallSurroundings:
    """What surrounds the layer call that a tiled module is in.

    Attributes:
        thread_state: modes of the calling thread.
        context: its context variables.
        saving: returns the context in which the device counts what autograd saves.
        track: counts tensors of the backward until they are freed.
        guard: returns a context that refuses random numbers, or does nothing.
        adding: set while a backward may add to ``.grad`` of the layer's parameters.
    """

    thread_state: TorchThreadState
    context: contextvars.Context
    saving: Callable[[], contextlib.AbstractContextManager[Any]]
    track: Callable[[Sequence[Tensor]], None]
    guard: Callable[[], contextlib.AbstractContextManager[Any]]
    adding: Adding


@dataclass(eq=False)
class Adding:
    """Whether a worker's backward is running, which has prepared ``.grad`` of its parameters. Entered around it."""

    now: bool = False

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, *error: object) -> None:
        self.now = False


@dataclass(eq=False)
class TiledCall:
    """One call of a module, cut into tiles.

    Args:
        function: the module's forward.
        spec: structure of its arguments.
        given: the leaves of its arguments; tensors, of which each tile takes its part, are left out of it as None.
        places: positions of the tensors among the leaves.
        layout: where the tokens are.
        tile: the most tokens in a tile.
        parameters: the module's trained parameters.
        around: what surrounds it.
        outputs: what tiles return, if known.
        differentiable: by output tensor, whether it may require grad.
    """

    function: Callable[..., Any]
    spec: TreeSpec
    given: list[Any]
    places: list[int]
    shaped: list[bool]
    layout: Layout
    tile: int
    parameters: list[nn.Parameter]
    around: CallSurroundings
    outputs: Outputs | None = None
    differentiable: Sequence[bool] = ()
    sums: dict[int, Tensor] = field(default_factory=dict)

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the module returns for ``tensors``, with a graph if one is wanted."""
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *self.parameters))
        if trained:
            found = _Tiles.apply(self, *tensors, *self.parameters)  # type: ignore[no-untyped-call]
        else:
            found = self.forward(tensors)
        assert self.outputs is not None
        values = iter(found)
        return tree_unflatten(
            [next(values) if isinstance(x, Leaf) else x for x in self.outputs.leaves], self.outputs.spec
        )

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs' tensors [1]."""
        buffers: list[Tensor] = []
        self.outputs = None
        for span in self.layout.spans(self.tile):
            pieces = self.pieces(tensors, span)
            with self.around.guard():
                found = self.call(pieces)
            self._put(found, span, buffers)
            del found
        return tuple(buffers)

    def backward(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of ``tensors`` and, unless they are added to ``.grad``, of the parameters [2].

        Args:
            tensors: the inputs.
            grads: gradients of the outputs' tensors.
            wanted: by input and parameter, whether its gradient is wanted.
        """
        found: list[Tensor | None] = [None] * len(tensors)
        with self._summing() as add:
            for number, span in enumerate(self.layout.spans(self.tile)):
                pieces = self.pieces(tensors, span)
                leaves = [
                    piece.detach().requires_grad_(want and piece.is_floating_point())
                    for piece, want in zip(pieces, wanted, strict=False)
                ]
                del pieces
                with self.around.thread_state.entered(grad=True), self.around.saving():
                    outputs = self.around.context.copy().run(self.call, leaves)
                roots = [o for o in tree_flatten(outputs)[0] if isinstance(o, Tensor)]
                del outputs
                pairs = [
                    (root, part_of(grad, span, shaped=self.layout.is_shaped(grad)))
                    for root, grad in zip(roots, grads, strict=True)
                    if grad is not None and root.requires_grad
                ]
                del roots
                if pairs:
                    add(leaves, [root for root, _ in pairs], [slope for _, slope in pairs])
                del pairs
                self._collect(found, tensors, leaves, span, number)
        total = [self.sums.pop(i, None) for i in range(len(self.parameters))]
        return [*found, *(None if t is None else t.to(p.dtype) for t, p in zip(total, self.parameters, strict=True))]

    def pieces(self, tensors: Sequence[Tensor], span: TokenSpan) -> list[Tensor]:
        return [part_of(t, span, shaped=s) for t, s in zip(tensors, self.shaped, strict=True)]

    def call(self, pieces: Sequence[Tensor]) -> Any:
        """Call the module with parts of its tensors, or with others of the same kind."""
        leaves = list(self.given)
        for place, piece in zip(self.places, pieces, strict=True):
            leaves[place] = piece
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    # -- outputs

    def _put(self, found: Any, span: TokenSpan, buffers: list[Tensor]) -> None:
        """Write a tile's outputs to their places; the first tile's make the buffers."""
        values, spec = tree_flatten(found)
        tensors = [v for v in values if isinstance(v, Tensor)]
        if self.outputs is None:
            self.outputs = Outputs(spec, [self._leaf(v, span) if isinstance(v, Tensor) else v for v in values])
            of = [x for x in self.outputs.leaves if isinstance(x, Leaf)]
            buffers += [t.new_empty(x.shape(self.layout)) for t, x in zip(tensors, of, strict=True)]
        for buffer, tensor in zip(buffers, tensors, strict=True):
            part_of(buffer, span, shaped=self.layout.is_shaped(buffer)).copy_(tensor)

    def _leaf(self, value: Tensor, span: TokenSpan) -> Leaf:
        if not self.layout.fits(value, span):
            raise CannotTile(f"returns a tensor of shape {tuple(value.shape)}")
        shaped = self.layout.is_shaped(value, span)
        return Leaf(shaped, value.shape[2 if shaped else 1 :], value.dtype)

    # -- gradients

    @contextlib.contextmanager
    def _summing(self) -> Iterator[Callable[[list[Tensor], list[Tensor], list[Tensor]], None]]:
        """Yield the function that differentiates a tile.

        While a worker's backward runs, wide gradients go to ``.grad``; narrow ones pass through it into the sums.
        Elsewhere all go into the sums.
        """
        self.sums.clear()
        if not self.around.adding.now:
            yield self._add_apart
            return
        narrow = [(i, p) for i, p in enumerate(self.parameters) if p.dtype not in _WIDE]
        before = [p.grad for _, p in narrow]
        for _, p in narrow:
            p.grad = None

        def add(leaves: list[Tensor], roots: list[Tensor], slopes: list[Tensor]) -> None:
            torch.autograd.backward(roots, slopes)
            for i, p in narrow:
                if p.grad is not None:
                    self._sum(i, p.grad)
                    p.grad = None

        try:
            yield add
        finally:
            for (_, p), grad in zip(narrow, before, strict=True):
                p.grad = grad

    def _add_apart(self, leaves: list[Tensor], roots: list[Tensor], slopes: list[Tensor]) -> None:
        ends = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(roots, [*ends, *self.parameters], slopes, allow_unused=True)
        for leaf, grad in zip(ends, found, strict=False):
            leaf.grad = grad
        for i, grad in enumerate(found[len(ends) :]):
            if grad is not None:
                self._sum(i, grad)

    def _sum(self, index: int, grad: Tensor) -> None:
        if index in self.sums:
            self.sums[index].add_(grad)
        elif grad.dtype in _WIDE:
            self.sums[index] = grad.clone()
        else:
            self.sums[index] = grad.float()
            self.around.track([self.sums[index]])

    def _collect(
        self, found: list[Tensor | None], tensors: Sequence[Tensor], leaves: list[Tensor], span: TokenSpan, number: int
    ) -> None:
        """Write the gradients of a tile's inputs to their places."""
        for i, (leaf, tensor) in enumerate(zip(leaves, tensors, strict=True)):
            total = found[i]
            if total is None and leaf.grad is not None:
                total = found[i] = (torch.zeros if number else torch.empty)(
                    tensor.shape, dtype=tensor.dtype, device=tensor.device
                )
            if total is not None:
                part = part_of(total, span, shaped=self.shaped[i])
                part.zero_() if leaf.grad is None else part.copy_(leaf.grad)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TiledCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        inputs = tensors[: len(call.places)]
        outputs = call.forward(inputs)
        ctx.save_for_backward(*inputs)
        apart = [
            not (t.is_floating_point() and (i >= len(call.differentiable) or call.differentiable[i]))
            for i, t in enumerate(outputs)
        ]
        ctx.mark_non_differentiable(*(t for t, no in zip(outputs, apart, strict=True) if no))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.call.backward(ctx.saved_tensors, grads, ctx.needs_input_grad[1:])
