"""Which tensors a call holds on its worker, and when: what its bytes consist of.

A plan counts bytes. Whoever wants fewer of them has to know which module makes them, in what shape and format, and how
long they live. A `Census` names the storages that a `Meter` counts, and `Memory` writes them down, so both agree to the
byte. In backward, a tensor belongs to the module whose forward made the graph's node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

Part = Literal["input", "forward", "loss", "backward"]


class Name(NamedTuple):
    """Who made a storage, and what it was made for."""

    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Held:
    """A storage.

    Args:
        name: of what it holds.
        nbytes: of all of it.
        made, gone: how many storages were made or freed before; None: it outlives the call.
        made_s, gone_s: estimated seconds.
    """

    name: Name
    nbytes: int
    made: int
    made_s: float
    gone: int | None = None
    gone_s: float | None = None

    def is_alive(self, moment: int) -> bool:
        return self.made <= moment and (self.gone is None or moment < self.gone)


@dataclass
class Memory:
    """Storages that were made in some scopes.

    Attributes:
        live: bytes of those that are still alive.
        peak: the most that ``live`` was.
        worst: the moment of that.
        moment: how many storages were made or freed.
        clock_s: estimated seconds of what ran.
        log: all of them, if somebody names them.
    """

    live: int = 0
    peak: int = 0
    worst: int = 0
    moment: int = 0
    clock_s: float = 0.0
    log: list[Held] = field(default_factory=list)

    def allocate(self, nbytes: int, name: Name | None = None) -> Held | None:
        self.live += nbytes
        self.moment += 1
        if self.live > self.peak:
            self.peak, self.worst = self.live, self.moment
        if name is None:
            return None
        self.log.append(Held(name, nbytes, self.moment, self.clock_s))
        return self.log[-1]

    def free(self, nbytes: int, held: Held | None = None) -> None:
        self.live -= nbytes
        self.moment += 1
        if held is not None:
            held.gone, held.gone_s = self.moment, self.clock_s


class Census:
    """Names storages by the modules of ``model``, and within a layer's call by those of the layer."""

    def __init__(self, model: nn.Module) -> None:
        self._names = _names(model)
        self._inside: list[nn.Module] = []
        self._nodes: list[int] = []
        self._owners: list[str] = []
        """Numbers of the graph's nodes, and the module that ran when each was made."""

    @contextmanager
    def watching(self) -> Iterator[Census]:
        """Knows which module runs."""
        hooks = [
            global_hooks.register_module_forward_pre_hook(self._enter),
            global_hooks.register_module_forward_hook(self._leave),
        ]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def calling(self, layer: nn.Module) -> Iterator[None]:
        outside, self._names = self._names, _names(layer)
        try:
            yield
        finally:
            self._names = outside

    def name(self, operation: str, tensor: Tensor) -> Name:
        """Of a storage that ``operation`` makes now."""
        node: Any = torch._C._current_autograd_node()
        number = torch._C._autograd._get_sequence_nr() if node is None else node._sequence_nr()
        if node is None:
            owner = self._owner()
            if not self._owners or self._owners[-1] != owner:
                self._nodes.append(number - 1)  # its node has just been made
                self._owners.append(owner)
        else:
            owner = self._owners[max(0, bisect_right(self._nodes, number) - 1)] if self._owners else ""
        return Name(owner, operation.partition("::")[2] or operation, tuple(tensor.shape), tensor.dtype)

    def _owner(self) -> str:
        return next((self._names[module] for module in reversed(self._inside) if module in self._names), "")

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append(module)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._inside.pop()


def _names(root: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in root.named_modules()}


class Row(NamedTuple):
    """A storage of a call, on the call's own clock."""

    part: Part
    name: Name
    nbytes: int
    start_s: float
    end_s: float
    at_worst: bool


@dataclass(frozen=True)
class CallMemory:
    """What a call holds: forward, the loss behind it if there is one, backward.

    Attributes:
        layer: that is called.
        rows: all storages; those that are there at the worst moment together are its ``activation_bytes``.
        parts: seconds at which each part begins.
        worst_s: the second of the worst moment.
        end_s: the second at which it is over.
    """

    layer: str
    rows: tuple[Row, ...]
    parts: tuple[tuple[Part, float], ...]
    worst_s: float
    end_s: float

    @property
    def at_worst(self) -> list[Row]:
        """The largest first."""
        return sorted((row for row in self.rows if row.at_worst), key=lambda row: -row.nbytes)


def call_memory(
    layer: str, inputs: Sequence[tuple[Name, int]], own: Memory, turn: int, turn_s: float, worst: int, after: Memory
) -> CallMemory:
    """Puts a call's parts in the order in which training runs them.

    Args:
        layer: that is called.
        inputs: which are there all the time.
        own: of forward and backward.
        turn, turn_s: the moment and the second at which forward is over.
        worst: the moment of ``own`` at which most is counted.
        after: of what follows the forward, before the backward begins.
    """
    kept = sum(one.nbytes for one in own.log if one.is_alive(turn))
    counted = sum(one.nbytes for one in own.log if one.is_alive(worst))
    in_loss = kept + after.peak > counted
    loss_s = after.clock_s
    end_s = own.clock_s + loss_s

    def at(seconds: float | None, moment: int | None) -> float:
        if seconds is None or moment is None:
            return end_s
        return seconds + (loss_s if moment > turn else 0.0)

    rows = [Row("input", name, nbytes, 0.0, end_s, True) for name, nbytes in inputs]
    rows += [
        Row(
            "forward" if one.made <= turn else "backward",
            one.name,
            one.nbytes,
            at(one.made_s, one.made),
            at(one.gone_s, one.gone),
            one.is_alive(turn if in_loss else worst),
        )
        for one in own.log
    ]
    rows += [
        Row(
            "loss",
            one.name,
            one.nbytes,
            turn_s + one.made_s,
            turn_s + (loss_s if one.gone_s is None else min(one.gone_s, loss_s)),
            in_loss and one.is_alive(after.worst),
        )
        for one in after.log
    ]
    parts: list[tuple[Part, float]] = [("forward", 0.0)]
    if loss_s:
        parts.append(("loss", turn_s))
    if own.clock_s > turn_s:
        parts.append(("backward", turn_s + loss_s))
    worst_s = max((row.start_s for row in rows if row.at_worst), default=0.0)
    return CallMemory(layer, tuple(rows), tuple(parts), worst_s, end_s)
