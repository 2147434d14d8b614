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

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.optim.fused import fits, fused_for, is_open
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.independence import DECLARATION, KNOWN, stepped_by_parameter, unwrapped

__all__ = ["Hyperparameters", "Shadow", "fused_for", "stepped_by_parameter"]

_OWN = ("step", "state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of the user's optimizer that a stand-in does not take over."""

State = defaultdict[Tensor, Any]


class Shadow:
    """Steps some of an optimizer's parameters.

    Args:
        optimizer: the user's, one that ``stepped_by_parameter`` has nothing against.
        masters: those parameters. Some may be in no group of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, masters: Sequence[nn.Parameter]) -> None:
        self._optimizer = unwrapped(optimizer)
        self._masters = list({id(master): master for master in masters}.values())
        self._aliases: dict[int, nn.Parameter] = {}

    def step(self, hyperparameters: Hyperparameters, gradients: Mapping[int, Tensor]) -> None:
        """Step exactly the masters that have a gradient, given by id of the master; ids of others are ignored.

        A master without a gradient, or in no group, stays as it is and gets no state. Two steps of one optimizer must
        not run at the same time, and neither must anything that reads its state.
        """
        known = hyperparameters.group_of
        stepped = [master for master in self._masters if id(master) in gradients and id(master) in known]
        if not stepped:
            return
        aliases = [self._alias(master) for master in stepped]
        everyones = self._optimizer.state
        pairs = zip(stepped, aliases, strict=True)
        state: State = defaultdict(dict, {a: everyones[m] for m, a in pairs if m in everyones})  # [2]
        try:
            for master, alias in zip(stepped, aliases, strict=True):
                alias.grad = gradients[id(master)]
            groups = self._groups(hyperparameters, stepped, aliases, state)
            self._run(groups, state)
        finally:
            for master, alias in zip(stepped, aliases, strict=True):
                alias.grad = None
                if alias in state:
                    everyones[master] = state[alias]
                else:
                    everyones.pop(master, None)

    def _alias(self, master: nn.Parameter) -> nn.Parameter:
        """[3], made again when user code has moved the master elsewhere."""
        alias = self._aliases.get(id(master))
        if alias is None or _place(alias) != _place(master):
            alias = nn.Parameter(master.data, requires_grad=master.requires_grad)
            self._aliases[id(master)] = alias
        vars(alias).update(vars(master))  # marks that an optimizer may go by
        return alias

    def _groups(
        self, values: Hyperparameters, masters: list[nn.Parameter], aliases: list[nn.Parameter], state: State
    ) -> list[dict[str, Any]]:
        """[1] All groups of the snapshot in their order, each cut where the kernel has to be another."""
        cut: list[dict[tuple[bool, bool], list[int]]] = [{} for _ in values.groups]
        for index, (master, alias) in enumerate(zip(masters, aliases, strict=True)):
            number = values.group_of[id(master)]
            kind = self._kind(values.groups[number], alias, state.get(alias, {}))
            cut[number].setdefault(kind, []).append(index)
        groups = []
        for group, kinds in zip(values.groups, cut, strict=True):
            for (fused, _), indices in kinds.items() or [((False, False), [])]:
                made = {**group, "params": [aliases[i] for i in indices]}
                if fused:
                    made["fused"] = True
                if values.names:
                    made["param_names"] = [values.names[id(masters[i])] for i in indices]
                groups.append(made)
        return groups

    def _kind(self, group: Mapping[str, Any], alias: nn.Parameter, state: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether the kernel is a fused one of our choice; and whether it is the first step of SGD's fused kernel,
        which takes either only first steps or none."""
        cls = type(self._optimizer)
        assert alias.grad is not None
        likewise = [t for t in state.values() if isinstance(t, Tensor) and t.dim()]
        ours = is_open(cls, group) and fits([alias, alias.grad, *likewise])
        first = cls is SGD and bool(ours or group.get("fused")) and state.get("momentum_buffer") is None
        return ours, first

    def _run(self, groups: list[dict[str, Any]], state: State) -> None:
        """One step of a fresh instance, which knows all that the user's instance knows now."""
        cls = type(self._optimizer)
        stand_in: Optimizer = object.__new__(cls)  # constructors fill the state, and ask for more than we know
        given = {name: value for name, value in vars(self._optimizer).items() if name not in _OWN}
        given["_optimizer_step_pre_hooks"] = OrderedDict()
        given["_optimizer_step_post_hooks"] = OrderedDict()
        given["state"], given["param_groups"] = state, groups
        vars(stand_in).update(given)
        before = [dict(group) for group in groups]
        stand_in.step()
        if cls not in KNOWN:
            _refuse_writes(cls, "self.", given, vars(stand_in))
            for group, unstepped in zip(groups, before, strict=True):
                _refuse_writes(cls, "its group's ", unstepped, group)


def _place(parameter: nn.Parameter) -> tuple[object, ...]:
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype


def _refuse_writes(cls: type, owner: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """What a step keeps outside its parameters' state is lost with the stand-in, and would count pieces as steps."""
    for name, value in after.items():
        if name not in before or before[name] is not value:
            raise RoundPipeError(
                f"{cls.__name__} declares {DECLARATION} = True, but its step() sets {owner}{name}, which parameters "
                f"share: keep it in self.state[p], or take {DECLARATION} away."
            )
