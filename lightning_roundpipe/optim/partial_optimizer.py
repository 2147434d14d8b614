"""A stand-in for the user's optimizer that steps some of its parameters, on any thread, while others still compute.

Calling the user's ``optimizer.step()`` for a few parameters would mean to change its groups or to hide the gradients of
all others, in front of everybody who looks. Instead a second instance is made for the moment of a step::

    optimizer (the user's)               stand-in
      param_groups, schedulers  ──────►    groups: a snapshot of when the step was asked for     [1]
      state[master]  ◄────────────────►    state[alias]: the same inner dicts                    [2]
      master: version, .grad               alias: the same memory, its own version and .grad     [3]
      step, patched and hooked             step of the class

[2] is why checkpoints are those of plain training, and [3] why the optimizer's writes are not taken for the user's.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.optim import direct
from lightning_roundpipe.optim.fused import fits
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.independence import DECLARATION, KNOWN, stepped_by_parameter, unwrapped

__all__ = ["Hyperparameters", "PartialOptimizer", "stepped_by_parameter"]

State = defaultdict[Tensor, Any]


class PartialOptimizer:
    """Steps some of an optimizer's parameters.

    Which of them is for each call to say, and changes no bit: one call for several layers does what one for each of
    them would, and costs its Python only once.

    Args:
        optimizer: the user's, one that ``stepped_by_parameter`` has nothing against.
        masters: all parameters that are to be stepped through it. Some may be in no group of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, masters: Sequence[nn.Parameter]) -> None:
        self._optimizer = unwrapped(optimizer)
        self._masters = {id(master): master for master in masters}
        self._aliases: dict[int, nn.Parameter] = {}
        self._laid_out: tuple[Hyperparameters, dict[int, direct.Row]] | None = None

    @contextlib.contextmanager
    def prepared(self, hyperparameters: Hyperparameters) -> Iterator[None]:
        """Within it calls of ``step`` with these ``hyperparameters`` find laid out what each would lay out for itself.

        Masters and the optimizer's state are written to by these calls alone meanwhile.
        """
        self._laid_out = hyperparameters, self._lay_out(hyperparameters, hyperparameters.group_of)
        try:
            yield
        finally:
            self._laid_out = None  # or memory would live on that the user has replaced

    def step(self, hyperparameters: Hyperparameters, gradients: Mapping[int, Tensor]) -> None:
        """Step exactly the masters that have a gradient, given by id of the master; ids of others are ignored.

        A master without a gradient, or in no group, stays as it is and gets no state. Two steps of one optimizer must
        not run at the same time, and neither must anything that reads its state.
        """
        if self._laid_out is not None and self._laid_out[0] is hyperparameters:
            rows = self._laid_out[1]
        else:
            rows = self._lay_out(hyperparameters, gradients)
        mine = list(map(rows.get, gradients))
        if direct.step(type(self._optimizer), hyperparameters.groups, mine, gradients.values()):
            return
        known = hyperparameters.group_of
        masters = [self._masters[key] for key in gradients if key in self._masters and key in known]
        if not masters:
            return
        aliases = [self._alias(master) for master in masters]
        everyones = self._optimizer.state
        before = [everyones.get(master) for master in masters]
        state: State = defaultdict(dict)
        state.update((alias, own) for alias, own in zip(aliases, before, strict=True) if own is not None)  # [2]
        try:
            for master, alias in zip(masters, aliases, strict=True):
                alias.grad = gradients[id(master)]
            self._run(self._groups(hyperparameters, masters, aliases, before), state)
        finally:
            for master, alias, own in zip(masters, aliases, before, strict=True):
                alias.grad = None
                if (after := state.get(alias)) is own:
                    continue
                if after is None:
                    del everyones[master]
                else:
                    everyones[master] = after

    def steps_parts(self, hyperparameters: Hyperparameters, keys: Iterable[int]) -> bool:
        """Whether `step_part` may be called for all masters of ``keys``; within `prepared`."""
        laid_out = self._laid_out
        return laid_out is not None and laid_out[0] is hyperparameters and all(key in laid_out[1] for key in keys)

    def step_part(self, hyperparameters: Hyperparameters, key: int, gradient: Tensor, start: int, end: int) -> None:
        """Step the numbers ``start`` to ``end`` of one master, part by part up to the last one. Parts that begin at
        multiples of a cache line change no bit."""
        assert self._laid_out is not None
        direct.step_part(type(self._optimizer), hyperparameters.groups, self._laid_out[1][key], gradient, start, end)

    def release(self) -> None:
        """Hold no master's memory until the next step."""
        self._aliases.clear()

    def _lay_out(self, values: Hyperparameters, keys: Iterable[int]) -> dict[int, direct.Row]:
        """What is needed to step masters by the kernel alone, where that may be."""
        rows = {}
        everyones = self._optimizer.state
        for key in keys:
            number, master = values.group_of.get(key), self._masters.get(key)
            if number is None or master is None or not values.direct[number]:
                continue
            state = everyones.get(master)
            if state and (row := direct.row_of(number, values.groups[number], self._alias(master), state)):
                rows[key] = row
        return rows

    def _alias(self, master: nn.Parameter) -> nn.Parameter:
        """[3], made again when user code has moved the master elsewhere."""
        key, known = id(master), type(self._optimizer) in KNOWN  # which do not ask what a parameter is beside numbers
        alias = self._aliases.get(key)
        if alias is None or not alias.is_set_to(master):
            requires_grad = master.requires_grad and not known
            alias = self._aliases[key] = nn.Parameter(master.data, requires_grad=requires_grad)
        if not known and (marks := vars(master)):  # which the user's own optimizer may go by
            vars(alias).update(marks)
        return alias

    def _groups(
        self,
        values: Hyperparameters,
        masters: list[nn.Parameter],
        aliases: list[nn.Parameter],
        states: list[Mapping[str, Any] | None],
    ) -> list[dict[str, Any]]:
        """[1] The snapshot's groups of these masters, in order, each cut where the kernel has to be another."""
        cls = type(self._optimizer)
        cut: dict[int, dict[tuple[bool, bool], list[int]]] = {}
        if cls not in KNOWN:  # it may count on the number of a group
            cut = {number: {} for number in range(len(values.groups))}
        for index, (master, alias, state) in enumerate(zip(masters, aliases, states, strict=True)):
            number = values.group_of[id(master)]
            fused = values.fused[number] and fits(alias, alias.grad, state or {})
            # SGD's fused kernel takes either only first steps or none.
            first = cls is SGD and bool(fused or values.groups[number].get("fused")) and not _has_momentum(state)
            cut.setdefault(number, {}).setdefault((fused, first), []).append(index)
        groups = []
        for number, kinds in sorted(cut.items()):
            for (fused, _), indices in kinds.items() or [((False, False), [])]:
                made = {**values.groups[number], "params": [aliases[i] for i in indices]}
                if fused:
                    made["fused"] = True
                if values.names:
                    made["param_names"] = [values.names[id(masters[i])] for i in indices]
                groups.append(made)
        return groups

    def _run(self, groups: list[dict[str, Any]], state: State) -> None:
        """One step of a fresh instance, which knows all that the user's instance knows now."""
        cls = type(self._optimizer)
        stand_in: Optimizer = object.__new__(cls)  # constructors fill the state, and ask for more than we know
        given = vars(self._optimizer).copy()
        given.pop("step", None)  # a scheduler's wrapper, which would step the user's instance
        given.update(state=state, param_groups=groups, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
        vars(stand_in).update(given)
        if cls in KNOWN:
            # Without what wraps it (a name for profilers, hooks, torch.compile), which costs as much as all the rest.
            with torch.no_grad():
                inspect.unwrap(cls.step)(stand_in)
            return
        before = [group.copy() for group in groups]
        stand_in.step()
        _refuse_writes(cls, "self.", given, vars(stand_in))
        for group, unstepped in zip(groups, before, strict=True):
            _refuse_writes(cls, "its group's ", unstepped, group)


def _has_momentum(state: Mapping[str, Any] | None) -> bool:
    return state is not None and state.get("momentum_buffer") is not None


def _refuse_writes(cls: type, owner: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """What a step keeps outside its parameters' state is lost with the stand-in, and would count pieces as steps."""
    for name, value in after.items():
        if name not in before or before[name] is not value:
            raise RoundPipeError(
                f"{cls.__name__} declares {DECLARATION} = True, but its step() sets {owner}{name}, which parameters "
                f"share: keep it in self.state[p], or take {DECLARATION} away."
            )
