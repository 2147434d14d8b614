"""A layer's copy on a worker: the same module tree, with parameters that are views into the worker's arena.

``copy.deepcopy`` would be wrong here: it would copy configurations, tokenizers and whatever else hangs on a module,
and leave bound methods pointing at the original. The copy made here is new only in what must be new (modules, parameter
and buffer dictionaries) and shares the rest, so that what user code changes on shared objects is seen at once.

Python attributes are compared by identity before each call (`ModuleState`): a flag that user code flips between two
calls, such as `train()`/`eval()` or PEFT's `disable_adapter()`, must hold for that call and again for its
recomputation, however late that runs.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError

_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules", "forward"})


def unique_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``module``, each once, in registration order."""
    return list(module.parameters())


def parameter_places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every place that holds a parameter (a tied one has several)."""
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                yield inner, name, parameter


class Replica:
    """The copy of one layer for one worker.

    Args:
        layer: the user's module.
        device: where the copy's parameters and buffers live.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self._memo: dict[int, Any] = {}
        self.device = device
        self.originals = list(layer.modules())
        for module in self.originals:
            clone = module.__class__.__new__(module.__class__)
            self._memo[id(module)] = clone
        self.modules: list[nn.Module] = [self._memo[id(m)] for m in self.originals]
        placeholders = [_placeholder(p, device) for p in unique_parameters(layer)]
        self.parameters = placeholders
        by_id = {id(p): q for p, q in zip(unique_parameters(layer), placeholders, strict=True)}
        self._memo.update(by_id)  # some modules keep lists of their parameters (recurrent ones do)
        for module, clone in zip(self.originals, self.modules, strict=True):
            self._fill(module, clone, by_id)
        self.module = self.modules[0]
        self._base = [dict(m.__dict__) for m in self.modules]
        self._applied: StateDiff | None = None

    def _fill(self, module: nn.Module, clone: nn.Module, parameters: dict[int, nn.Parameter]) -> None:
        state = clone.__dict__
        for key, value in module.__dict__.items():
            if key == "forward" and getattr(value, "is_interceptor", False):
                continue
            state[key] = value if key in _STRUCTURE and key != "forward" else self.translate(value)
        state["_parameters"] = {n: None if p is None else parameters[id(p)] for n, p in module._parameters.items()}
        state["_buffers"] = dict(module._buffers)
        if "_orig_mod" in module._modules:  # torch.compile's wrapper: its forward is bound to the original
            state["forward"] = self._memo[id(module._modules["_orig_mod"])]
        state["_modules"] = {n: None if m is None else self._memo[id(m)] for n, m in module._modules.items()}

    def translate(self, value: Any) -> Any:
        """``value`` with the layer's own modules and parameters replaced, also inside methods and containers."""
        if isinstance(value, (nn.Module, nn.Parameter)):
            return self._memo.get(id(value), value)
        if isinstance(value, types.MethodType) and id(value.__self__) in self._memo:
            return types.MethodType(value.__func__, self._memo[id(value.__self__)])
        if isinstance(value, functools.partial):
            args = [self.translate(v) for v in value.args]
            return functools.partial(
                self.translate(value.func), *args, **{k: self.translate(v) for k, v in value.keywords.items()}
            )
        if type(value) in (list, tuple, set):
            items = [self.translate(v) for v in value]
            return type(value)(items) if any(map(operator.is_not, items, value)) else value
        if type(value) is dict:
            pairs = {k: self.translate(v) for k, v in value.items()}
            return pairs if any(map(operator.is_not, pairs.values(), value.values())) else value
        return value

    def bind(self, views: list[Tensor], requires_grad: list[bool]) -> None:
        """Point the copy's parameters at ``views`` (in the order of the layer's unique parameters)."""
        for parameter, view, trainable in zip(self.parameters, views, requires_grad, strict=True):
            parameter.data = view
            parameter.requires_grad_(trainable)

    def apply(self, diff: StateDiff | None) -> None:
        """Give the copy the Python attributes that the layer had when ``diff`` was taken."""
        if diff is self._applied:
            return
        for index in self._applied.changed if self._applied else ():
            _restore(self.modules[index].__dict__, self._base[index])
        for index, (changed, removed) in (diff.changed if diff else {}).items():
            state = self.modules[index].__dict__
            for key in removed:
                state.pop(key, None)
            state.update({k: self._localize(v) for k, v in changed.items()})
        self._applied = diff

    def _localize(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) else self.translate(value)

    def attributes(self) -> list[dict[str, Any]]:
        """The attributes of every module, for :meth:`written` after the call."""
        return [dict(module.__dict__) for module in self.modules]

    def written(self, before: list[dict[str, Any]]) -> list[tuple[int, str, Any]]:
        """Attributes that the layer's code set during a call, as (module index, name, value)."""
        changes = []
        for index, (module, old) in enumerate(zip(self.modules, before, strict=True)):
            state = module.__dict__
            if len(state) == len(old) and all(map(operator.is_, state.values(), old.values())):
                continue
            changes += [(index, k, v) for k, v in state.items() if k not in _STRUCTURE and old.get(k, self) is not v]
        return changes

    def drop_written(self) -> None:
        """Forget attributes set during a call: the next call starts from the layer's own."""
        for module, base in zip(self.modules, self._base, strict=True):
            _restore(module.__dict__, base)
        self._applied = None


def _restore(state: dict[str, Any], base: dict[str, Any]) -> None:
    for key in [k for k in state if k not in base]:
        del state[key]
    state.update({k: v for k, v in base.items() if k not in ("_parameters", "_buffers", "_modules")})


def _placeholder(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if type(parameter) is not nn.Parameter:
        raise RoundPipeError(
            f"a parameter of type {type(parameter).__name__} cannot be moved between devices by this strategy; only "
            "plain torch.nn.Parameter can (quantised or sharded weights are not supported)."
        )
    empty = torch.empty(0, dtype=parameter.dtype, device=device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


@dataclass(frozen=True, eq=False)
class StateDiff:
    """What the layer's attributes were, where they differ from when its copies were made.

    ``changed`` maps a module's index to (changed or new attributes, removed names).
    """

    changed: dict[int, tuple[dict[str, Any], tuple[str, ...]]]


class ModuleState:
    """Watches the Python attributes of one layer; :meth:`current` is cheap as long as nothing changes."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name = name
        self.modules = list(layer.modules())
        self._base = [self._own(m) for m in self.modules]
        self._seen = [list(m.__dict__.values()) for m in self.modules]
        self._diff: StateDiff | None = None

    @staticmethod
    def _own(module: nn.Module) -> dict[str, Any]:
        return {k: v for k, v in module.__dict__.items() if k not in _STRUCTURE}

    def current(self) -> StateDiff | None:
        """The difference from the state at which replicas were made, or None. The same object until it changes."""
        if not self._moved():
            return self._diff
        self._seen = [list(m.__dict__.values()) for m in self.modules]
        changed = {}
        for index, (module, base) in enumerate(zip(self.modules, self._base, strict=True)):
            own = self._own(module)
            differing = {k: v for k, v in own.items() if k not in base or base[k] is not v}
            removed = tuple(k for k in base if k not in own)
            if differing or removed:
                self._refuse_graph(differing)
                changed[index] = (differing, removed)
        self._diff = StateDiff(changed) if changed else None
        return self._diff

    def _moved(self) -> bool:
        for module, values in zip(self.modules, self._seen, strict=True):
            state = module.__dict__
            if len(state) != len(values) or not all(map(operator.is_, state.values(), values)):
                return True
        return False

    def _refuse_graph(self, differing: dict[str, Any]) -> None:
        for key, value in differing.items():
            if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter):
                raise RoundPipeError(
                    f"attribute {key!r} set on a module inside layer {self.name!r} is a tensor that requires grad. "
                    "A layer's gradients can only flow through its arguments and outputs: pass the tensor as an "
                    "argument instead."
                )
