"""Finds out whether a module acts on each token alone, so that its calls may run in tiles.

Some tokens of the call, spread over all of it, go through the module on their own:

    all of them at once, twice ── the same, without random numbers, writes to buffers, attributes or arguments ── [1]
    all of them, and in parts of unequal sizes ── outputs are equal to rounding ── [2]
    every second token replaced by another ── the outputs of the others stay ── [3]
    gradients of inputs and weights, of all tokens and added up over parts ── equal to rounding ── [4]
    the graph ── ends in the inputs and the module's own parameters, and keeps enough to be worth it ── [5]

A loss over tokens, such as a router's, does not pass: its gradient in parts is not that of the whole.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.attributes import STRUCTURE, differing, frozen
from lightning_roundpipe.model.below_modes import call_below
from lightning_roundpipe.model.graph_nodes import nodes_of
from lightning_roundpipe.tiles.tiled_call import CannotTile, Layout, TokenSpan, part_of

TOKENS = 512
"""The most tokens that are compared."""
_ROUNDING = {torch.float64: 2**12, torch.float32: 2**10}
"""Multiples of the format's resolution by which results may differ, relative to their largest; `_COARSE` for others."""
_COARSE = 8
_WORTH = 4
"""A module is worth tiles if its graph keeps at least this part of what its inputs and outputs take."""
_SEED = 0x711E


@dataclass(frozen=True)
class TileVerdict:
    """What the comparison has shown of a module.

    Attributes:
        why_not: why its calls do not run in tiles; empty if they may.
        differentiable: by output tensor, whether it may require grad.
    """

    why_not: str = ""
    differentiable: tuple[bool, ...] = ()


def refuse_random() -> TorchDispatchMode:
    """Return a mode in which drawing random numbers is an error."""
    return _NoRandom(_refuse_random)


def check(
    module: nn.Module, call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor], layout: Layout, *, grad: bool
) -> TileVerdict:
    """Compare a module on some tokens with the same module on parts of them.

    Args:
        module: the module.
        call: calls it with other values of its tensor arguments.
        tensors: the tensor arguments of the call that is under way.
        layout: where their tokens are.
        grad: whether to compare gradients, too. Without, the module was seen to be worth it in another mode.
    """
    look = _Look(module, call, tensors, layout)
    with _disable_current_modes():  # the engine's modes would take this for the layer's own
        try:
            look.forward()
            return look.backward() if grad else TileVerdict()
        except CannotTile as error:
            return TileVerdict(str(error))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return TileVerdict(f"fails on some of the tokens ({type(error).__name__}: {str(error)[:200]})")


class _Look:
    def __init__(
        self, module: nn.Module, call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor], layout: Layout
    ) -> None:
        self._module, self._call = module, call
        number = min(TOKENS, layout.tokens)
        device = tensors[0].device
        places = torch.arange(number, device=device) * layout.tokens // number
        self._layout = Layout(1, number, layout.shaped)
        self._shaped = [layout.is_shaped(t) for t in tensors]
        with torch.no_grad():
            self._some = [
                t.flatten(0, 1)[places][None] if shaped else t[places]
                for t, shaped in zip(tensors, self._shaped, strict=True)
            ]
        cuts = [0, number // 4, number - number // 3, number]
        self._parts = [TokenSpan(slice(0, 1), slice(a, b), slice(a, b)) for a, b in itertools.pairwise(cuts)]
        self._all = TokenSpan(slice(0, 1), slice(0, number), slice(0, number))
        self._generator = torch.Generator(device).manual_seed(_SEED)
        self._formats = {t.dtype for t in tensors if t.is_floating_point()}
        if torch.is_autocast_enabled(device.type):
            self._formats.add(torch.get_autocast_dtype(device.type))

    def forward(self) -> None:
        """Check [1], [2] and [3].

        Raises:
            CannotTile: if the module does not pass.
        """
        with torch.no_grad():
            self._outputs(self._some, self._all)  # the first call of a module may set it up
            before = _UnchangedState(self._module, self._some)
            with _NoRandom(_draws):
                whole = self._outputs(self._some, self._all)
                again = self._outputs(self._some, self._all)
            self._compare(whole, again, "gives something else the second time")
            parts = [self._outputs(self._cut(self._some, span), span) for span in self._parts]
            if what := before.changed(self._module, self._some):
                raise CannotTile(what)
            joined = [torch.cat(list(column)) for column in zip(*parts, strict=True)]
            self._compare(whole, joined, "gives something else for some of the tokens")
            others = [self._others(t, shaped) for t, shaped in zip(self._some, self._shaped, strict=True)]
            moved = self._outputs(others, self._all)
            self._compare([t[::2] for t in whole], [t[::2] for t in moved], "mixes tokens")

    def backward(self) -> TileVerdict:
        """Check [4] and [5].

        Raises:
            CannotTile: if the module does not pass.
        """
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        with torch.enable_grad():
            slopes: list[Tensor] = []
            kept = [0]
            whole = self._gradients(self._all, parameters, slopes, kept)
            parts = [self._gradients(span, parameters, slopes) for span in self._parts]
        inputs = len(self._some)
        joined: list[Tensor | None] = []
        for i, column in enumerate(zip(*parts, strict=True)):
            present = [g for g in column if g is not None]
            if not present:
                joined.append(None)
            elif i < inputs:
                joined.append(_rows_or_zeros(column, [span.flat.stop - span.flat.start for span in self._parts]))
            else:
                total = present[0].to(torch.promote_types(present[0].dtype, torch.float32), copy=True)
                for g in present[1:]:
                    total += g
                joined.append(total.to(present[0].dtype))
        for one, other in zip(whole, joined, strict=True):
            if (one is None) != (other is None):
                raise CannotTile("has gradients on some of the tokens only")
        self._compare(
            [g for g in whole if g is not None],
            [g for g in joined if g is not None],
            "gives other gradients for some of the tokens",
        )
        around = sum(t.nbytes for t in self._some) + sum(s.nbytes for s in slopes)
        if _WORTH * kept[0] < around:
            raise CannotTile("keeps little for its backward")
        return TileVerdict("", self._differentiable)

    # -- runs

    def _outputs(self, tensors: Sequence[Tensor], span: TokenSpan) -> list[Tensor]:
        """Return the outputs' tensors, each of shape (tokens, ...)."""
        layout = Layout(1, span.flat.stop - span.flat.start, self._layout.shaped)
        found = []
        for value in tree_flatten(self._call(tensors))[0]:
            if isinstance(value, Tensor):
                if not layout.fits(value):
                    raise CannotTile(f"returns a tensor of shape {tuple(value.shape)}")
                found.append(value.flatten(0, 1) if layout.is_shaped(value) else value)
                if value.is_floating_point():
                    self._formats.add(value.dtype)
            elif not isinstance(value, (type(None), bool, int, float, str)):
                raise CannotTile(f"returns a {type(value).__name__}")
        if not found:
            raise CannotTile("returns no tensor")
        return found

    def _compare(self, one: Sequence[Tensor], other: Sequence[Tensor], what: str) -> None:
        """Raise `CannotTile` with ``what`` if two results differ by more than rounding."""
        if len(one) != len(other):
            raise CannotTile(what)
        for a, b in zip(one, other, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise CannotTile(what)
            if torch.equal(a, b):
                continue
            if not a.is_floating_point():
                raise CannotTile(what)
            formats = {a.dtype, *self._formats}  # the coarsest of them explains the largest difference
            allowed = max(torch.finfo(f).eps * _ROUNDING.get(f, _COARSE) for f in formats)
            a, b = a.detach().double(), b.detach().double()
            allowed *= max(float(a.abs().max()), float(b.abs().max()))
            if not bool(((a - b).abs() <= allowed).all()):  # also if there are NaN
                raise CannotTile(what)

    def _cut(self, tensors: Sequence[Tensor], span: TokenSpan) -> list[Tensor]:
        return [part_of(t, span, shaped=shaped) for t, shaped in zip(tensors, self._shaped, strict=True)]

    def _others(self, tensor: Tensor, shaped: bool) -> Tensor:
        """Return ``tensor`` with other values, far larger ones, for every second token."""
        if not tensor.is_floating_point():
            return tensor
        other = tensor.clone()
        flat = other.flatten(0, 1) if shaped else other
        flat[1::2] = flat[1::2].flip(0) * 8 + 1
        return flat[None] if shaped else flat

    def _gradients(
        self, span: TokenSpan, parameters: list[nn.Parameter], slopes: list[Tensor], kept: list[int] | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of inputs, of shape (tokens, ...), and of parameters.

        Args:
            span: the tokens.
            parameters: the module's trained parameters.
            slopes: gradients of all tokens' outputs; the first call makes them.
            kept: if given, the bytes that the graph keeps are added.
        """
        pieces = [t.detach().requires_grad_(t.is_floating_point()) for t in self._cut(self._some, span)]
        keeping = _Kept([*pieces, *self._module.parameters(), *self._module.buffers()])
        with keeping if kept is not None else contextlib.nullcontext():
            outputs = self._outputs(pieces, span)
        self._differentiable = tuple(o.requires_grad for o in outputs)
        if not slopes:
            slopes += [
                torch.randn(o.shape, generator=self._generator, device=o.device).to(o.dtype)
                if o.is_floating_point()
                else torch.zeros((), device=o.device)
                for o in outputs
            ]
        roots = [o for o in outputs if o.requires_grad]
        if not roots:
            raise CannotTile("has no gradients")
        ends = [p for p in pieces if p.requires_grad] + parameters
        if _leads_out(roots, ends):
            raise CannotTile("uses parameters that are not its own")
        if kept is not None:
            kept[0] += keeping.bytes_without(outputs)
        given = [s[span.flat] for o, s in zip(outputs, slopes, strict=True) if o.requires_grad]
        found = iter(torch.autograd.grad(roots, ends, given, allow_unused=True))
        ofs = [next(found) if p.requires_grad else None for p in pieces]
        mine = [g.flatten(0, 1) if g is not None and shaped else g for g, shaped in zip(ofs, self._shaped, strict=True)]
        return [*mine, *found]


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a graph saves, apart from ``known`` tensors; each storage once."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        self._known = {self._key(t) for t in known}
        self._sizes: dict[int, int] = {}
        self._alive: list[Tensor] = []
        super().__init__(self._pack, lambda t: t)

    def bytes_without(self, others: Sequence[Tensor]) -> int:
        """Return the bytes that are in none of ``others``."""
        apart = {self._key(t) for t in others}
        self._alive.clear()
        return sum(size for key, size in self._sizes.items() if key not in apart)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = self._key(tensor)
        if key is not None and key not in self._known:
            self._sizes[key] = tensor.untyped_storage().nbytes()
            self._alive.append(tensor.detach())  # no other storage gets its address
        return tensor

    @staticmethod
    def _key(tensor: Tensor) -> int | None:
        try:
            return int(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # a tensor without a storage
            return None


class _UnchangedState:
    """What a call of a module must not change: attributes, buffers, parameters and arguments."""

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        self._attributes = [_attributes(m) for m in module.modules()]
        self._versions = _versions([*module.parameters(), *module.buffers(), *tensors])

    def changed(self, module: nn.Module, tensors: Sequence[Tensor]) -> str:
        """Return what has changed, for messages; empty if nothing has."""
        for before, inner in zip(self._attributes, module.modules(), strict=True):
            for key in differing(before, _attributes(inner)):
                return f"sets attribute {key!r}"
        now_versions = _versions([*module.parameters(), *module.buffers(), *tensors])
        return "" if now_versions == self._versions else "writes to a parameter, a buffer or an argument"


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: frozen(v) for k, v in module.__dict__.items() if k not in STRUCTURE}


def _versions(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(id(t), 0 if t.is_inference() else t._version) for t in tensors]


class _NoRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refuse = refuse

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # otherwise torch.compile, possibly in another thread, would skip compilation in this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws_with(func, args, kwargs or {}):
            self._refuse(str(func))
        return call_below(func, args, kwargs or {})


def _draws_with(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the operation draws with these arguments; attention without dropout does not."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value != 0.0)
    return True


def _draws(name: str) -> None:
    raise CannotTile(f"draws random numbers ({name})")


def _refuse_random(name: str) -> None:
    raise RoundPipeError(
        f"a module that runs in tiles of tokens draws random numbers ({name}), which it did not do when it was "
        "compared with its parts: its tiles could not draw them again. Set token_tiles=None, or let it draw from the "
        "first batch on."
    )


def _leads_out(roots: Sequence[Tensor], ends: Sequence[Tensor]) -> bool:
    """Return whether the graph ends in a tensor that requires grad and is not among ``ends`` [5]."""
    own = set(map(id, ends))
    for node in nodes_of(t.grad_fn for t in roots):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in own and isinstance(variable, nn.Parameter):
            return True
        if getattr(node, "graph_cut", None) is not None or getattr(node, "detached_inputs", None) is not None:
            return True
    return False


def _rows_or_zeros(parts: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """Concatenate parts of these sizes, with zeros in place of those that are None. At least one is not."""
    like = next(part for part in parts if part is not None)
    pairs = zip(parts, sizes, strict=True)
    return torch.cat([like.new_zeros((size, *like.shape[1:])) if part is None else part for part, size in pairs])
