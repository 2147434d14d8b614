"""Names and lifetimes of the tensors that a call holds on its worker.

A plan only counts bytes. To reduce them, a user has to know which module allocates a tensor, its shape and dtype, and
its lifetime. A `Census` names the storages that a `Meter` counts, and `Memory` records them, so both agree to the byte.
In backward, a tensor belongs to the module whose forward made the graph's node.
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
    """Origin of a storage: module, operation, and shape and dtype of the tensor."""

    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Held:
    """Lifetime of a storage.

    Args:
        name: origin of the storage.
        nbytes: size in bytes.
        made, gone: moments of allocation and release (`Memory.moment`); ``gone`` is None if it outlives the call.
        made_s, gone_s: the same in estimated seconds.
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
    """Memory of one or several scopes.

    Attributes:
        live: bytes of the storages that are alive.
        peak: maximum of ``live``.
        worst: moment of the peak.
        moment: number of allocations and releases so far.
        clock_s: estimated seconds of the operations so far.
        log: all storages that have a name.
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
    """Names storages by the modules of ``model``, and within `calling` by the modules of that layer."""

    def __init__(self, model: nn.Module) -> None:
        self._names = _names(model)
        self._inside: list[nn.Module] = []
        self._nodes: list[int] = []
        self._owners: list[str] = []
        """Module that ran when the graph's nodes from ``_nodes`` on were made."""

    @contextmanager
    def watching(self) -> Iterator[Census]:
        """Track the running module, by global module hooks."""
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
        """Name storages by the modules of ``layer``."""
        outside, self._names = self._names, _names(layer)
        try:
            yield
        finally:
            self._names = outside

    def name(self, operation: str, tensor: Tensor) -> Name:
        """Return the name of the storage of ``tensor``, which ``operation`` has just made."""
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


class StorageLifetime(NamedTuple):
    """A storage of a call. Times are seconds since the call began."""

    part: Part
    name: Name
    nbytes: int
    start_s: float
    end_s: float
    at_worst: bool


@dataclass(frozen=True)
class CallMemory:
    """Memory of a call over its time: forward, the loss if it follows, and backward.

    Attributes:
        layer: name of the called layer.
        rows: all storages. Those alive at the worst moment add up to the call's ``activation_bytes``.
        parts: each part with the second at which it begins.
        worst_s: second of the worst moment.
        end_s: second at which the call ends.
    """

    layer: str
    rows: tuple[StorageLifetime, ...]
    parts: tuple[tuple[Part, float], ...]
    worst_s: float
    end_s: float

    @property
    def at_worst(self) -> list[StorageLifetime]:
        """Storages alive at the worst moment, the largest first."""
        return sorted((row for row in self.rows if row.at_worst), key=lambda row: -row.nbytes)


def call_memory(
    layer: str,
    inputs: Sequence[tuple[Name, int]],
    own: Memory,
    turn: int,
    turn_s: float,
    worst: int,
    after: Memory,
    waiting: Sequence[Held] = (),
) -> CallMemory:
    """Return the memory of a call, with its parts in the order of training.

    Args:
        layer: name of the called layer.
        inputs: name and bytes of each input. Inputs live as long as the call.
        own: memory of forward and backward.
        turn, turn_s: moment and second at which forward ends.
        worst: moment of ``own`` at which most memory is in use.
        after: memory of the user code between forward and backward, such as the loss.
        waiting: storages of ``own`` that are there from the beginning if the forward is a recomputation.
    """
    early = {id(one) for one in waiting}
    kept = sum(one.nbytes for one in own.log if one.is_alive(turn))
    counted = sum(one.nbytes for one in own.log if one.is_alive(worst) or id(one) in early)
    in_loss = kept + after.peak > counted
    loss_s = after.clock_s
    end_s = own.clock_s + loss_s

    def at(seconds: float | None, moment: int | None) -> float:
        if seconds is None or moment is None:
            return end_s
        return seconds + (loss_s if moment > turn else 0.0)

    rows = [StorageLifetime("input", name, nbytes, 0.0, end_s, True) for name, nbytes in inputs]
    rows += [
        StorageLifetime(
            "forward" if one.made <= turn else "backward",
            one.name,
            one.nbytes,
            0.0 if id(one) in early else at(one.made_s, one.made),
            at(one.gone_s, one.gone),
            one.is_alive(turn if in_loss else worst) or (id(one) in early and not in_loss),
        )
        for one in own.log
    ]
    rows += [
        StorageLifetime(
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
