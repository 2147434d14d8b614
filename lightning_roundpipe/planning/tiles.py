"""What a model would take if modules that act on each token alone ran in tiles of tokens: a what-if of the estimate.

Such a module (an MLP, the experts, a norm) gives the same whether it sees all tokens or some of them. In tiles, its
intermediates are those of one tile; its inputs and outputs stay whole. Backward computes each tile's forward again:

    forward    tile by tile, without graphs: inputs ─► outputs
    backward   tile by tile: forward with a graph, its backward, the inputs' gradients into their place

There are no data here to compare a module on the whole with one on parts. So a module is taken to act on each token
alone if nothing in it attends, convolves, or takes a softmax over as many numbers as there are tokens, and if it takes
one tensor of tokens and gives tensors of as many. As in training, its graph has to keep something beside these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_roundpipe.planning.meter import Meter, current_meter
from lightning_roundpipe.planning.profile import Format, Hardware

_PROBE = 509
"""Number of tokens in the probe, which no other dimension of a model has."""
_PLAIN = (nn.Linear, nn.Embedding)
_WORTH = 4
"""As in training: the part of what a module takes and gives that its graph has to keep beside it."""
_MIXING = ("conv", "cumprod", "fft", "roll", "scan")
_SOFTMAX = ("aten::_softmax", "aten::_log_softmax")


def token_wise(
    model: nn.Module, layers: Mapping[str, nn.Module], batch: Mapping[str, Tensor], hardware: Hardware
) -> list[nn.Module]:
    """Layers, and modules inside of them, that act on each token alone: the outermost ones, without linear layers and
    embeddings, which hold nothing but what they take and give. ``batch`` is `probe_batch`."""
    inside = {module for layer in layers.values() for module in layer.modules() if not isinstance(module, _PLAIN)}
    with _Probe(hardware) as probe:
        with ExitStack() as hooks, torch.no_grad():
            for module in inside:
                hooks.callback(module.register_forward_pre_hook(probe.enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(probe.leave, with_kwargs=True).remove)
            model(**batch, use_cache=False)
        found = [module for module in inside if probe.alone.get(module) and probe.is_worth_it(module)]
    covered = {inner for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if module not in covered]


def probe_batch() -> dict[str, Tensor]:
    """For a language model."""
    return {"input_ids": torch.zeros(1, _PROBE, dtype=torch.long, device="meta")}


class _Probe(Meter):  # type: ignore[no-untyped-call]
    """Meter that records which modules mix tokens."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(hardware)
        self._running: list[nn.Module] = []
        self.alone: dict[nn.Module, bool] = {}
        self._given: dict[nn.Module, tuple[Any, Any]] = {}

    def add(self, flops: float, nbytes: float, form: Format, filling: float = 1.0, *, attention: bool = False) -> None:
        if attention:
            self._mixes()
        super().add(flops, nbytes, form, filling, attention=attention)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name
        over_tokens = name in _SOFTMAX and args[0].shape[args[1]] >= _PROBE and args[0].shape[args[1]] % _PROBE == 0
        if over_tokens or any(word in name for word in _MIXING):
            self._mixes()
        super()._count(func, args, kwargs, out)

    def _mixes(self) -> None:
        self.alone |= dict.fromkeys(self._running, False)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.alone.setdefault(module, True)
        self._running.append(module)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self._running.pop()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        whole = len(given) == 1 and args and args[0] is given[0] and _has_tokens(given[0])
        if not (whole and made and all(_has_tokens(leaf) for leaf in made)):
            self.alone[module] = False
        self._given[module] = args, kwargs

    def is_worth_it(self, module: nn.Module) -> bool:
        """Return whether its graph keeps enough beside what it takes and gives, as `tile_check` asks in training."""
        args, kwargs = self._given[module]
        taken = args[0].detach().requires_grad_()
        self.ignore([taken, *module.parameters(), *module.buffers()])
        with torch.enable_grad(), self.scope() as work:
            made = [leaf for leaf in tree_leaves(module(taken, *args[1:], **kwargs)) if isinstance(leaf, Tensor)]
            given = sum(leaf.nbytes for leaf in made)
            kept = work.memory.live - given
        return bool(_WORTH * kept >= taken.nbytes + given)


def _has_tokens(tensor: Tensor) -> bool:
    return _PROBE in tensor.shape[:2]


@contextmanager
def tiled(modules: list[nn.Module], tokens: int) -> Iterator[None]:
    """Run the forwards of ``modules`` in tiles of at most ``tokens`` tokens."""
    for module in modules:
        module.forward = _Tiled(module.forward, tokens)
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


class _Tiled:
    def __init__(self, run: Any, tokens: int) -> None:
        self._run, self._tokens = run, tokens

    def __call__(self, whole: Tensor, *args: Any, **kwargs: Any) -> Any:
        tile = _Tile(lambda part: self._run(part, *args, **kwargs), whole, self._tokens)
        if tile.count == 1:
            return self._run(whole, *args, **kwargs)
        graph = torch.empty((), device="meta", requires_grad=torch.is_grad_enabled())  # for weights that are trained
        found = _InTiles.apply(whole, graph, tile)  # type: ignore[no-untyped-call]
        return tree_unflatten(found, tile.form)


class _Tile:
    """The first of ``count`` equal tiles: a part of a row, or several rows."""

    def __init__(self, run: Any, whole: Tensor, tokens: int) -> None:
        self._run = run
        self._rows, self._columns = whole.shape[:2] if whole.dim() > 2 else (1, whole.shape[0])
        self._part = max(1, tokens // self._columns), self._columns
        self.count = -(-self._rows // self._part[0])
        if self._columns > tokens:
            of_row = -(-self._columns // tokens)
            self._part, self.count = (1, -(-self._columns // of_row)), self._rows * of_row
        self.form: Any = None

    def of(self, whole: Tensor) -> Tensor:
        rows, columns = self._part
        shaped = tuple(whole.shape[:2]) == (self._rows, self._columns)
        return whole[:rows, :columns] if shaped else whole[: rows * columns]

    def whole_like(self, part: Tensor) -> Tensor:
        shaped = tuple(part.shape[:2]) == self._part
        every = (self._rows, self._columns) if shaped else (self._rows * self._columns,)
        return part.new_empty(*every, *part.shape[len(every) :])

    def compute(self, part: Tensor) -> list[Tensor]:
        leaves, self.form = tree_flatten(self._run(part))
        return leaves


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, graph: Tensor, tile: _Tile) -> tuple[Tensor, ...]:
        ctx.tile = tile
        ctx.save_for_backward(whole)
        with torch.no_grad(), _repeated(tile.count):
            parts = tile.compute(tile.of(whole))
            return tuple(tile.whole_like(part) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None]:
        tile, (whole,) = ctx.tile, ctx.saved_tensors
        given = torch.empty_like(whole) if ctx.needs_input_grad[0] else None
        with torch.enable_grad(), _repeated(tile.count):
            part = tile.of(whole).detach().requires_grad_(given is not None)
            with _kept_by_tile():
                results = tile.compute(part)
            pairs = [
                (made, tile.of(gradient))
                for made, gradient in zip(results, gradients, strict=True)
                if made.requires_grad
            ]
            del results
            torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
        return given, None, None


@contextmanager
def _kept_by_tile() -> Iterator[None]:
    """Record the bytes that the graph of a tile keeps."""
    meter = current_meter()
    assert meter is not None, "tiles are counted, not computed"
    before = meter.innermost.memory.live
    yield
    meter.innermost.tile_bytes = max(meter.innermost.tile_bytes, meter.innermost.memory.live - before)


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
