"""A layer's copy on a worker: the same module tree, with parameters that are views into the worker's arena.

``copy.deepcopy`` would be wrong here: it would copy configurations, tokenizers and whatever else hangs on a module, and
leave bound methods pointing at the original. A replica copies only what must be separate (modules, dictionaries of
parameters and buffers, lists and dicts that are attributes) and shares the rest, so that user code's changes to shared
objects take effect at once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.attributes import (
    STRUCTURE,
    Container,
    Contents,
    ModuleState,
    StateDiff,
    equal,
    frozen,
    holds_nothing,
    same_objects,
)
from lightning_roundpipe.model.cast_weights import RoundedWeight
from lightning_roundpipe.model.quantized import aliases, companions, empty_like, follow, is_packed
from lightning_roundpipe.model.rebind import Rebinder
from lightning_roundpipe.model.unpacked import Key, UnpackedCopies, class_in_replica, keep_copies
from lightning_roundpipe.model.unregistered_tensors import UnregisteredTensors


def unique_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of ``module``, each once, in registration order, and then their `companions`."""
    return [*module.parameters(), *companions(module)]


class Replica:
    """The copy of one layer for one worker.

    Args:
        state: the layer's attributes when it was first seen, to which differences refer. Default: its present ones.
        rounded: positions of parameters that are uploaded rounded.
        wanted: told of each copy of a packed weight that the layer's code asks for; see `UnpackedCopies`.
    """

    def __init__(
        self, layer: nn.Module, device: torch.device, state: ModuleState | None = None, rounded: Collection[int] = (),
        wanted: dict[Key, int] | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self.copies = UnpackedCopies({} if wanted is None else wanted)
        """Of packed weights, within a stage."""
        self.originals = list(layer.modules())
        # Not with the class's own __new__: torch.fx's creates another class for each instance.
        memo: dict[int, Any] = {id(m): object.__new__(class_in_replica(m)) for m in self.originals}
        self.modules: list[nn.Module] = [memo[id(m)] for m in self.originals]
        parameters = unique_parameters(layer)
        self.parameters = [_placeholder(p, device, i in rounded) for i, p in enumerate(parameters)]
        # Some modules (recurrent ones) keep lists of their parameters.
        memo.update({id(p): q for p, q in zip(parameters, self.parameters, strict=True)})
        self._rebound = Rebinder(memo)
        for position, (parameter, mine) in enumerate(zip(parameters, self.parameters, strict=True)):
            if is_packed(parameter):
                mine.__dict__.update({k: self._rebound(v) for k, v in parameter.__dict__.items()})
                if (packing := mine.__dict__.get("quant_state")) is not None:
                    keep_copies(packing, self.copies, position)
        self.sources: dict[int, Any] = {id(q): p for p, q in zip(parameters, self.parameters, strict=True)}
        """The layer's parameters and modules, by ids of the copy's."""
        self.sources |= {id(memo[id(m)]): m for m in self.originals}
        self.original = Rebinder({id(memo[id(m)]): m for m in self.originals})
        """Translates references to the copy's modules back to the layer's."""
        state = state or ModuleState(type(layer).__name__, layer)
        for module, clone, own in zip(self.originals, self.modules, state.base, strict=True):
            self._fill(module, clone, own, memo)
        self._aliases = aliases(self.module)
        held = [inner._parameters for inner in self.modules]
        self._places = [(those, name, mine) for those in held for name, mine in those.items() if mine is not None]
        self.registrations = Registrations(self.modules)
        self.attributes = ReplicaAttributes(self.modules, self._localized)
        self.unregistered_tensors = UnregisteredTensors(self.attributes.base, self.originals)

    @property
    def module(self) -> nn.Module:
        """The copy itself."""
        return self.modules[0]

    def _fill(self, module: nn.Module, clone: nn.Module, own: dict[str, Any], memo: dict[int, Any]) -> None:
        state, theirs = clone.__dict__, dict(module.__dict__)  # at once: other threads run code that sets attributes
        state.update({k: v for k, v in theirs.items() if isinstance(v, Container) and k not in own})
        state.update({k: self._localized(v) for k, v in own.items()})
        if state.get("_compiled_call_impl") is not None:  # compiled for the original; the copy runs uncompiled
            state["_compiled_call_impl"] = None
        state["_parameters"] = {n: None if p is None else memo[id(p)] for n, p in dict(module._parameters).items()}
        state["_buffers"] = dict(module._buffers)
        if "_orig_mod" in module._modules:  # torch.compile's wrapper: its forward is bound to the original
            state["forward"] = memo[id(module._modules["_orig_mod"])]
        state["_modules"] = {n: None if m is None else memo[id(m)] for n, m in dict(module._modules).items()}

    def _localized(self, value: Any) -> Any:
        """Return ``value`` as the copy should hold it: referring to the copy's parts, in containers of its own."""
        return frozen(value if holds_nothing(value) else self._rebound(value))

    def bind(
        self, views: list[Tensor], requires_grad: tuple[bool, ...], whole: Callable[[int], Tensor] | None = None
    ) -> None:
        """Point the copy's parameters at ``views``, the uploaded values, in the order of the layer's unique parameters.

        ``whole`` returns a parameter's values before rounding, by position. It is needed if there are rounded ones.
        """
        for index, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            if isinstance(parameter, RoundedWeight):
                assert whole is not None
                parameter.set_values(view, functools.partial(whole, index))
            else:
                parameter.data = view
        for held, name, parameter in self._places:
            if held.get(name) is not parameter:  # one that is not trained, by an equal one, as PEFT does
                held[name] = parameter
        follow(self._aliases)
        self.train(requires_grad)

    def unbind(self) -> None:
        """Release the memory that the parameters point at, which the copy's reference cycles would keep for a while."""
        self.copies.open(None)
        for parameter in self.parameters:
            parameter.grad = None
            if isinstance(parameter, RoundedWeight):
                parameter.release()
            else:
                parameter.data = _nothing(parameter, self.device)
        follow(self._aliases)

    def train(self, requires_grad: tuple[bool, ...]) -> None:
        """Set which parameters the next call computes gradients for."""
        if tuple([p.requires_grad for p in self.parameters]) != requires_grad:
            for parameter, trainable in zip(self.parameters, requires_grad, strict=True):
                parameter.requires_grad_(trainable)

    def trains_more(self, requires_grad: tuple[bool, ...]) -> bool:
        """Return whether code has switched gradients on since `train`."""
        now = tuple([p.requires_grad for p in self.parameters])
        return now != requires_grad and any(map(operator.gt, now, requires_grad))


class Registrations:
    """The parameters, modules and buffers of a replica's modules, to notice when the layer's code changes them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._held = [h for m in modules for h in (m._parameters, m._modules, m._buffers)]
        self._before = [dict(held) for held in self._held]
        self._objects = [value for held in self._before for value in held.values()]

    def have_changed(self) -> bool:
        """Return whether code has registered or removed some, or replaced some."""
        return not same_objects(self._held, self._objects)

    def changed(self) -> list[tuple[str, str, Any, Any]]:
        """Return the parameters and modules that code has registered, removed or replaced, if they hold tensors.

        Returns:
            (type of the module that holds it, name, what was there, what is there now).
        """
        found = []
        for position, (held, before) in enumerate(zip(self._held, self._before, strict=True)):
            holder, kind = divmod(position, 3)
            for name in {**before, **held} if kind < 2 else ():
                old, new = before.get(name), held.get(name)
                if old is not new and any(map(_holds_tensors, (old, new))):
                    found.append((type(self._modules[holder]).__name__, name, old, new))
        return found


class ReplicaAttributes:
    """The attributes of a replica's modules, which each call sets to what the layer's were, ``localized``."""

    def __init__(self, modules: list[nn.Module], localized: Callable[[Any], Any]) -> None:
        self._modules, self._localized = modules, localized
        self.base = [{k: v for k, v in m.__dict__.items() if k not in STRUCTURE} for m in modules]
        self._base_contents = [{k: frozen(base[k]) for k in _held(base)} for base in self.base]
        self._applied: StateDiff | None = None
        self._contents: Contents | None = None
        self._filled: list[Any] = []
        """Its own containers, in the order of ``_contents``."""

    def apply(self, diff: StateDiff | None) -> None:
        """Set the attributes that the layer had when ``diff`` was taken."""
        if diff is self._applied:
            return
        self._contents = None
        for index in self._applied.changed if self._applied else ():
            self._restore(index)
        for index, (changed, removed) in (diff.changed if diff else {}).items():
            state = self._modules[index].__dict__
            for key in removed:
                state.pop(key, None)
            state.update({k: self._localized(v) for k, v in changed.items()})
        self._applied = diff

    def fill(self, contents: Contents) -> None:
        """Let containers that are attributes hold ``contents``, in copies of its own."""
        if contents is not self._contents:
            self._contents, self._filled = contents, [frozen(held) for held in contents.held]
            for (index, key), mine in zip(contents.places, self._filled, strict=True):
                self._modules[index].__dict__[key] = mine

    def changed_contents(self) -> list[tuple[tuple[int, str], Any]]:
        """Return the containers whose contents the layer's code has changed since `fill`, with their places."""
        contents = self._contents
        if contents is None or equal(self._filled, contents.held):
            return []
        self._contents = None
        found = zip(contents.places, self._filled, contents.held, strict=True)
        return [(place, mine) for place, mine, held in found if not equal([mine], [held])]

    def hold(self, containers: dict[tuple[int, str], Any]) -> None:
        """Set attributes to containers that are this call's own; what the layer's code changes is found in them."""
        for (index, key), value in containers.items():
            self._modules[index].__dict__[key] = value if isinstance(value, Container) else self._localized(value)

    def release(self, containers: Iterable[tuple[int, str]]) -> None:
        """Let go of what `hold` has set in these places. The next call has containers of its own there."""
        for index, key in containers:
            state, base = self._modules[index].__dict__, self.base[index]
            if key in base:
                state[key] = base[key]
            else:
                del state[key]

    def drop_written(self) -> None:
        """Drop attributes that a call has set: the next call starts from the layer's own."""
        for index in range(len(self._modules)):
            self._restore(index)
        self._applied = self._contents = None

    def _restore(self, index: int) -> None:
        state, base = self._modules[index].__dict__, self.base[index]
        for key in [k for k in state if k not in base and k not in STRUCTURE]:
            del state[key]
        state.update(base)
        state.update({k: frozen(v) for k, v in self._base_contents[index].items()})


_BOOKKEEPING = frozenset(nn.Module().__dict__)
"""Attributes of every module, among them its hooks. Code inside a layer does not change them."""


def _holds_tensors(value: Tensor | nn.Module | None) -> bool:
    if isinstance(value, nn.Module):
        return any(True for _ in chain(value.parameters(), value.buffers()))
    return value is not None


def _held(attributes: dict[str, Any]) -> list[str]:
    return [k for k, v in attributes.items() if isinstance(v, Container) and k not in _BOOKKEEPING]


def _placeholder(parameter: nn.Parameter, device: torch.device, rounded: bool) -> nn.Parameter:
    if is_packed(parameter):
        return empty_like(parameter, device)
    if type(parameter) is not nn.Parameter:
        raise RoundPipeError(
            f"a parameter of type {type(parameter).__name__} cannot be moved between devices by this strategy. It "
            "moves torch.nn.Parameter, and weights that bitsandbytes keeps in four or eight bits; no other quantised "
            "weights, and no sharded ones."
        )
    if rounded:
        made = RoundedWeight(parameter.shape, parameter.stride(), parameter.dtype, device, parameter.requires_grad)
        return cast(nn.Parameter, made)
    return nn.Parameter(_nothing(parameter, device), requires_grad=parameter.requires_grad)


def _nothing(parameter: Tensor, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=parameter.dtype, device=device)
