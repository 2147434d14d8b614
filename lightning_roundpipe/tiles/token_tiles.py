"""Runs the modules inside layers that act on each token alone in tiles of tokens, as ``token_tiles`` asks for.

The forward of each module of a worker's copy is wrapped. When a wrapped module is called with more tokens than a tile
has, `tile_check` compares it with its parts, once for each state of the layer's attributes. The outermost modules are
called first, so they are compared first; what is inside a module that runs in tiles is not looked at. So a block that
mixes tokens runs as it is, and its norms and its MLP in tiles.

A call runs untiled, as it would without the option, if tiles could not repeat it:

    attributes with tensors came with the call, or the layer writes to buffers ── the backward would not find them
    the module's attributes, parameters or class were set in this call, as PEFT does around experts ── nor these
    hooks inside the module ── they would see tiles

``"auto"`` begins without tiles. They are turned on for good if a layer's first call in training, with its graph, does
not fit on a worker, or if no plan of the first batch does. What was measured until then is measured again with tiles.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_roundpipe.config import AUTO_TILE
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.model.attributes import StateDiff
from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.tiles.tile_check import TileVerdict, check
from lightning_roundpipe.tiles.tiled_call import (
    PLAIN,
    Adding,
    CallSurroundings,
    CannotTile,
    Layout,
    TiledCall,
)

_NEVER = (nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.ParameterList)
"""Modules that keep nothing but their inputs and outputs, or are not called."""
_BOOKKEEPING = frozenset(nn.Module().__dict__)
"""Attributes of every module, among them its hooks, which are looked at on their own."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(eq=False)
class Known:
    """What is known of a layer's modules in one state of its attributes.

    Attributes:
        state: how the attributes differ from those at first.
        verdicts: by number of the module.
    """

    state: StateDiff | None
    verdicts: dict[int, TileVerdict] = field(default_factory=dict)


class TokenTiles:
    """What the modules of all layers have shown, and the tiles that follow from it.

    Args:
        tile: tokens in a tile at most; ``"auto"``: `AUTO_TILE`, once something does not fit without tiles.
    """

    def __init__(self, tile: int | Literal["auto"]) -> None:
        self.tile = AUTO_TILE if tile == "auto" else tile
        self.on = tile != "auto"
        """Whether modules run in tiles at all."""
        self.came = False
        """Whether tiles were turned on since the engine has learned its calls."""
        self._known: dict[int, list[Known]] = {}
        self._copies: weakref.WeakKeyDictionary[Replica, _TiledReplica] = weakref.WeakKeyDictionary()
        self.ran: dict[str, list[str]] = {}
        """By layer, the names of its modules that have run in tiles."""
        self.compared = False
        """Whether a module has been called with more tokens than a tile has, and was compared with its parts."""

    def unknown(self, layer: HostLayer, state: StateDiff | None) -> bool:
        """Return whether the layer has not run with these attributes yet."""
        return not any(known.state is state for known in self._known.get(layer.index, ()))

    def turn_on(self) -> None:
        """Run modules in tiles from now on."""
        self.on = self.came = True

    @contextlib.contextmanager
    def around(
        self,
        layer: HostLayer,
        replica: Replica,
        state: StateDiff | None,
        surroundings: CallSurroundings,
    ) -> Iterator[None]:
        """Let modules of ``replica`` run in tiles while its layer is called.

        Args:
            layer: the layer.
            replica: its copy on a worker.
            state: how its attributes differ from those at first.
            surroundings: of the call.
        """
        copy = self.of(layer, replica)
        copy.run = _Run(self._of(layer, state), surroundings, replica.attributes())
        try:
            yield
        finally:
            copy.run = None

    def of(self, layer: HostLayer, replica: Replica) -> _TiledReplica:
        """Return the wrapped modules of ``replica``."""
        copy = self._copies.get(replica)
        if copy is None:
            copy = self._copies[replica] = _TiledReplica(self, layer, replica)
        return copy

    def seen(self, layer: HostLayer, number: int) -> bool:
        """Return whether a module has run in tiles in any state of the layer's attributes."""
        return any(
            number in known.verdicts and not known.verdicts[number].why_not for known in self._known[layer.index]
        )

    def why_not(self, layer: HostLayer) -> dict[str, str]:
        """Return why modules of a layer do not run in tiles, by name; the layer's own is empty."""
        names = [name for name, _ in layer.module.named_modules()]
        return {
            names[number]: verdict.why_not
            for known in self._known.get(layer.index, ())
            for number, verdict in known.verdicts.items()
            if verdict.why_not
        }

    def _of(self, layer: HostLayer, state: StateDiff | None) -> Known:
        of_layer = self._known.setdefault(layer.index, [])
        for known in of_layer:
            if known.state is state:
                return known
        of_layer.append(Known(state))
        del of_layer[:-16]
        return of_layer[-1]


@dataclass(eq=False)
class _Run:
    known: Known
    surroundings: CallSurroundings
    attributes: list[dict[str, Any]]
    """Of each module of the layer, before the call."""
    inside: bool = False


class _TiledReplica:
    """The wrapped modules of one worker's copy of a layer.

    Attributes:
        run: the layer call that is under way; None outside of calls, and in those that run untiled.
        adding: tells tiles' backwards whether ``.grad`` may be added to.
    """

    def __init__(self, tiles: TokenTiles, layer: HostLayer, replica: Replica) -> None:
        self.run: _Run | None = None
        self.adding = Adding()
        self._tiles, self._layer = tiles, layer
        self._names = [name for name, _ in layer.module.named_modules()]
        self._built = [_built(module) for module in replica.modules]
        self._number = {id(module): number for number, module in enumerate(replica.modules)}
        for number, module in enumerate(replica.modules):
            if not isinstance(module, _NEVER) and "forward" not in module.__dict__:
                replica.replace_forward(number, self._wrapped(number, weakref.ref(module)))

    def _wrapped(self, number: int, reference: weakref.ref[nn.Module]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            module = reference()
            assert module is not None
            function = type(module).forward.__get__(module)
            run = self.run
            if run is None or run.inside:
                return function(*args, **kwargs)
            call = self._tiled(run, number, module, function, args, kwargs)
            if call is None:
                return function(*args, **kwargs)
            run.inside = True
            try:
                return self._in_tiles(run, number, call)
            except CannotTile as error:  # by what it returns for these arguments
                run.known.verdicts[number] = TileVerdict(str(error))
                return function(*args, **kwargs)
            finally:
                run.inside = False

        return forward

    def _in_tiles(self, run: _Run, number: int, found: tuple[TiledCall, list[Tensor]]) -> Any:
        call, tensors = found
        result = call.run(tensors)
        names = self._tiles.ran.setdefault(self._layer.name, [])
        if self._names[number] not in names:
            names.append(self._names[number])
        return result

    def _tiled(
        self, run: _Run, number: int, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[TiledCall, list[Tensor]] | None:
        """Return the call in tiles, and its tensors; None if it is to run as it is."""
        verdict = run.known.verdicts.get(number)
        if verdict is not None and verdict.why_not:
            return None
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in places]
        layout = Layout.of(tensors)
        if layout is None or not all(isinstance(x, (Tensor, *PLAIN)) for x in leaves):
            run.known.verdicts.setdefault(number, TileVerdict("takes something else than a row for each token"))
            return None
        if layout.tokens <= self._tiles.tile or _is_hooked(module) or not self._is_as_before(run, module):
            return None
        given = [None if isinstance(x, Tensor) else x for x in leaves]
        around = run.surroundings
        call = TiledCall(
            function, spec, given, places, [layout.is_shaped(t) for t in tensors], layout, self._tiles.tile,
            [p for p in module.parameters() if p.requires_grad], around,
        )  # fmt: skip
        if verdict is None:
            verdict = run.known.verdicts[number] = self._verdict(run, number, module, call, tensors)
        if verdict.why_not:
            return None
        call.differentiable = verdict.differentiable
        return call, tensors

    def _is_as_before(self, run: _Run, module: nn.Module) -> bool:
        """Return whether ``module`` is as it was before the call, and so as its backward will find it."""
        for inner in module.modules():
            number = self._number.get(id(inner))
            if number is None or self._built[number] != _built(inner):
                return False
            before, now = run.attributes[number], inner.__dict__
            if len(before) != len(now) or any(
                now.get(key) is not value for key, value in before.items() if key not in _BOOKKEEPING
            ):
                return False
        return True

    def _verdict(
        self, run: _Run, number: int, module: nn.Module, call: TiledCall, tensors: list[Tensor]
    ) -> TileVerdict:
        """Compare the module with its parts. Modules in it are not wrapped meanwhile."""
        grad = run.surroundings.thread_state.grad and not run.surroundings.thread_state.inference
        if not grad and not self._tiles.seen(self._layer, number):
            return TileVerdict("has not been compared in training yet")
        run.inside = self._tiles.compared = True
        try:
            return check(module, call.call, tensors, call.layout, grad=grad)
        finally:
            run.inside = False


def _built(module: nn.Module) -> tuple[Any, ...]:
    """Return what changes if the module's class, parameters or modules are replaced."""
    held = (module._parameters, module._modules)
    return type(module), *(tuple((name, id(value)) for name, value in each.items()) for each in held)


def _is_hooked(module: nn.Module) -> bool:
    """Return whether modules inside ``module`` have hooks, which would see tiles. Its own see all tokens."""
    if any(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS):
        return True
    return any(getattr(inner, name) for inner in module.modules() if inner is not module for name in _HOOKS)
