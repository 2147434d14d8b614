"""What a model takes if modules run in tiles of tokens, as ``token_tiles`` lets them: a what-if of the estimate.

One tile is computed and counted as often as there are tiles. Beside it there is what the tiles before have made:

    forward    tile by tile, without graphs; outputs are held in parts, and then concatenated
    backward   tile by tile: forward with a graph, and its backward; gradients of inputs are held in parts, and then
               concatenated, and those of weights are summed until the last tile
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_roundpipe.estimates.meter import current_meter

Shapes = Callable[[tuple[int, ...], int], list[tuple[int, ...]]]
"""Returns the shapes of all tiles, of the shape of all tokens and the tokens of a tile."""


@contextmanager
def tiled(modules: Iterable[tuple[nn.Module, int]], shapes: Shapes) -> Iterator[None]:
    """Run modules' forwards in tiles of at most so many tokens."""
    modules = list(modules)
    for module, tokens in modules:
        module.forward = _Tiled(module, tokens, shapes)
    try:
        yield
    finally:
        for module, _ in modules:
            vars(module).pop("forward", None)


class _Tiled:
    def __init__(self, module: nn.Module, tokens: int, shapes: Shapes) -> None:
        self._run, self._tokens, self._shapes = module.forward, tokens, shapes
        self._weights = [p for p in module.parameters() if p.requires_grad]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        lead = tuple(leaves[places[0]].shape[:-1][:2])
        shapes = self._shapes(lead, self._tokens)
        if len(shapes) == 1:
            return self._run(*args, **kwargs)

        def run(parts: Iterable[Tensor]) -> Any:
            given = dict(zip(places, parts, strict=True))
            args, kwargs = tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], form)
            return self._run(*args, **kwargs)

        tile = _Tile(run, lead, shapes[0], len(shapes), self._weights)
        graph = torch.empty((), device="meta", requires_grad=torch.is_grad_enabled())  # for weights that are trained
        found = _InTiles.apply(tile, graph, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
        return tree_unflatten(found, tile.form)


class _Tile:
    """The first of ``count`` tiles."""

    def __init__(
        self, run: Any, lead: tuple[int, ...], shape: tuple[int, ...], count: int, weights: list[nn.Parameter]
    ) -> None:
        self._run, self._lead, self._shape, self.count, self.weights = run, lead, shape, count, weights
        self.form: Any = None

    def of(self, whole: Tensor) -> Tensor:
        if tuple(whole.shape[: len(self._lead)]) == self._lead:
            return whole[tuple(slice(size) for size in self._shape)]
        return whole[: torch.Size(self._shape).numel()]

    def whole_like(self, part: Tensor) -> Tensor:
        shaped = tuple(part.shape[: len(self._shape)]) == self._shape
        every = self._lead if shaped else (torch.Size(self._lead).numel(),)
        return part.new_empty(*every, *part.shape[len(every) :])

    def compute(self, parts: Iterable[Tensor]) -> list[Tensor]:
        leaves, self.form = tree_flatten(self._run(parts))
        return leaves


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tile: _Tile, graph: Tensor, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.tile = tile
        ctx.save_for_backward(*wholes)
        with torch.no_grad(), _repeated(tile.count):
            parts = tile.compute(map(tile.of, wholes))
        pieces = [tile.whole_like(part) for part in parts]
        del parts
        return tuple(torch.empty_like(piece) for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        tile, wholes, wanted = ctx.tile, ctx.saved_tensors, ctx.needs_input_grad[2:]
        pieces = [torch.empty_like(whole) if want else None for whole, want in zip(wholes, wanted, strict=True)]
        sums = [torch.empty_like(weight) for weight in tile.weights]
        with torch.enable_grad(), _repeated(tile.count):
            parts = [tile.of(whole).detach().requires_grad_(want) for whole, want in zip(wholes, wanted, strict=True)]
            results = tile.compute(parts)
            pairs = [
                (made, tile.of(gradient))
                for made, gradient in zip(results, gradients, strict=True)
                if isinstance(made, Tensor) and made.requires_grad
            ]
            del results, parts
            torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
            del pairs, sums
        return None, None, *(None if piece is None else torch.empty_like(piece) for piece in pieces)


@contextmanager
def _repeated(count: int) -> Iterator[None]:
    """Count each operation as ``count`` runs."""
    meter = current_meter()
    assert meter is not None, "tiles are counted, not computed"
    meter.times *= count
    try:
        yield
    finally:
        meter.times //= count
