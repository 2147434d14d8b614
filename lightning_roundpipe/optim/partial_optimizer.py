"""Steps some parameters of the user's optimizer, on any thread, while the gradients of others are still computed.

Calling the user's ``optimizer.step()`` for a few parameters would mean changing its groups, or hiding the gradients of
all others, where user code can see it. Instead, a second instance is created for each step::

    optimizer (the user's)               stand-in
      param_groups, schedulers  ──────►    groups: a snapshot of when the step was requested     [1]
      state[master]  ◄────────────────►    state[alias]: the same inner dicts                    [2]
      master: version, .grad               alias: the same memory, its own version and .grad     [3]
      step, patched and hooked             step of the class

Because of [2], checkpoints are those of plain training. Because of [3], the optimizer's writes are not mistaken for the
user's.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.optim import direct
from lightning_roundpipe.optim.fused import fits
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.optim.independence import DECLARATION, KNOWN, unwrapped
from lightning_roundpipe.optim.narrow_gradient import AnyGradient, all_widened
from lightning_roundpipe.optim.packed_moments import FP32, first_state, pack, unpacked
from lightning_roundpipe.optim.split_masters import SplitTensor

State = defaultdict[Tensor, Any]

NUMBERS = 8
"""How many numbers a step on a worker may hold for each number of a parameter: the parameter, its gradient, its state
and intermediates. ``torch.optim.Muon`` has six of fp32."""


class Place(Protocol):
    """A device on which parameters are stepped, one after another."""

    def run(self, given: Sequence[Tensor], step: Callable[[list[Tensor]], list[Change]]) -> list[Tensor]:
        """Begin to run ``step`` with copies of the ``given`` host tensors.

        Returns:
            The host tensors that will hold what ``step`` returns. They do after `finish`.
        """

    def finish(self) -> None:
        """Wait until what was begun has reached the host."""


Change = tuple[Tensor, Tensor | None]
"""A tensor on a device, and the host tensor to copy it to; None for a new one."""


def has_fused_kernel(values: Hyperparameters, number: int) -> bool:
    """Return whether a fused kernel of the host steps group ``number``: one pass over memory, as a copy would be."""
    return values.fused[number] or bool(values.groups[number].get("fused"))


def bytes_elsewhere(optimizer: Optimizer | None) -> int:
    """Return the bytes that a step of the largest parameter that no fused kernel steps takes; 0 if all have one."""
    if optimizer is None:
        return 0
    values = Hyperparameters.of(optimizer)
    groups = enumerate(unwrapped(optimizer).param_groups)
    sizes = [p.nbytes for number, group in groups if not has_fused_kernel(values, number) for p in group["params"]]
    return NUMBERS * max(sizes, default=0)


class PartialOptimizer:
    """Steps some of an optimizer's parameters.

    How parameters are distributed over calls changes no bit: one call for several layers does what one call per layer
    would do, at the Python cost of one.

    Args:
        optimizer: the user's optimizer, for which ``stepped_by_parameter`` returns None.
        masters: all parameters to be stepped. Some may be in no group of the optimizer.
        memory: returns where a master's numbers are. Default: its ``.data``.
        form: how moments are kept, one of `config.OPTIMIZER_STATES`.
        mapped: ids of masters whose state lies in the file of a checkpoint. Their first step copies it.
        places: where masters are stepped that no fused kernel steps. Default: here.
    """

    def __init__(
        self, optimizer: Optimizer, masters: Sequence[nn.Parameter],
        memory: Callable[[nn.Parameter], Tensor | SplitTensor] = lambda master: master.data, form: str = FP32,
        mapped: set[int] | None = None, places: Sequence[Place] = (),
    ) -> None:  # fmt: skip
        self._places = places
        self._optimizer, self._memory, self._form = unwrapped(optimizer), memory, form
        self._masters = {id(master): master for master in masters}
        self._mapped = set() if mapped is None else mapped
        self._aliases: dict[int, nn.Parameter] = {}
        self._laid_out: tuple[Hyperparameters, dict[int, direct.KernelRow]] | None = None

    @contextlib.contextmanager
    def prepared(self, hyperparameters: Hyperparameters) -> Iterator[None]:
        """Lay out all masters once for the calls of ``step`` with these ``hyperparameters`` within the context.

        Only these calls may write to masters and to the optimizer's state meanwhile.
        """
        self._laid_out = hyperparameters, self._lay_out(hyperparameters, hyperparameters.group_of)
        try:
            yield
        finally:
            self._laid_out = None  # or it would keep memory alive that the user has replaced

    def step(self, hyperparameters: Hyperparameters, gradients: Mapping[int, AnyGradient]) -> None:
        """Step exactly the masters that have a gradient. ``gradients`` is by id of the master; other ids are ignored.

        A master without a gradient, or in no group, stays as it is and gets no state. Two steps of one optimizer must
        not run at the same time, nor may anything read its state during a step.
        """
        prepared = self._laid_out is not None and self._laid_out[0] is hyperparameters
        rows = self._laid_out[1] if self._laid_out is not None and prepared else {}
        self._copy_state(self._mapped & gradients.keys())
        rows |= self._lay_out(hyperparameters, [key for key in gradients if key not in rows], begin=True)
        mine, values = list(map(rows.get, gradients)), hyperparameters.groups
        if not all(direct.takes(values, rows.get(key), gradient) for key, gradient in gradients.items()):
            gradients = all_widened(gradients)
        if direct.step(values, mine, gradients.values()):
            return
        known, wide = hyperparameters.group_of, all_widened(gradients)
        masters = [self._masters[key] for key in gradients if key in self._masters and key in known]
        if self._places:
            masters = self._step_elsewhere(hyperparameters, masters, wide)
        if not masters:
            return
        numbers = [self._memory(master) for master in masters]
        aliases = [
            self._alias_of(master, own.joined_like(master))
            if isinstance(own, SplitTensor)
            else self._alias(master, own)
            for master, own in zip(masters, numbers, strict=True)
        ]
        everyones = self._optimizer.state
        before = [everyones.get(master) for master in masters]
        if self._form != FP32:
            before = [
                unpacked(own) if own is not None and master.dtype is torch.float32 else own
                for master, own in zip(masters, before, strict=True)
            ]
        state: State = defaultdict(dict)
        state.update((alias, own) for alias, own in zip(aliases, before, strict=True) if own is not None)  # [2]
        try:
            for master, alias in zip(masters, aliases, strict=True):
                alias.grad = wide[id(master)]
            self._run(self._groups(hyperparameters, masters, aliases, before), state)
            for memory, alias in zip(numbers, aliases, strict=True):
                if isinstance(memory, SplitTensor):
                    memory.split_all(alias.data.view(-1))
        finally:
            for master, alias, own in zip(masters, aliases, before, strict=True):
                alias.grad = None
                after = state.get(alias)
                if self._form != FP32 and after is not None and master.dtype is torch.float32:
                    pack(after, self._form)
                elif after is own:
                    continue
                if after is None:
                    del everyones[master]
                else:
                    everyones[master] = after

    def _step_elsewhere(
        self, values: Hyperparameters, masters: Sequence[nn.Parameter], gradients: Mapping[int, Tensor]
    ) -> list[nn.Parameter]:
        """Step the masters that no fused kernel steps, spread evenly over the places. Returns the others."""
        here: list[nn.Parameter] = []
        there: list[nn.Parameter] = []
        for master in masters:
            (here if has_fused_kernel(values, values.group_of[id(master)]) else there).append(master)
        load = [0] * len(self._places)
        try:
            for master in sorted(there, key=torch.numel, reverse=True):
                least = load.index(min(load))
                load[least] += master.numel()
                self._step_on(self._places[least], values, master, gradients[id(master)])
        finally:
            for place in self._places:
                place.finish()
        return here

    def _step_on(self, place: Place, values: Hyperparameters, master: nn.Parameter, gradient: Tensor) -> None:
        """Begin the step of one master on ``place``.

        Its state's tensors go there and back, as ``load_state_dict`` puts them on their parameter's device: all but the
        counter ``step``, which is the host's.
        """
        numbers, own = self._memory(master), self._optimizer.state.get(master)
        count_too = bool(values.groups[values.group_of[id(master)]].get("capturable"))
        moved = [k for k, v in (own or {}).items() if isinstance(v, Tensor) and (k != "step" or count_too)]
        halves = list(numbers) if isinstance(numbers, SplitTensor) else [numbers]
        rest: dict[str, Any] = {}
        names: list[str] = []
        nothing = contextlib.nullcontext()

        def step(copies: list[Tensor]) -> list[Change]:
            weights = copies[: len(halves)]
            values_there = SplitTensor(*weights).joined().view(master.shape) if len(weights) == 2 else weights[0]
            alias = self._alias_of(master, values_there)
            alias.grad = copies[len(halves)]
            state: State = defaultdict(dict)
            if own is not None:
                state[alias] = {**own, **dict(zip(moved, copies[len(halves) + 1 :], strict=True))}
            with nothing if type(self._optimizer) in KNOWN else _RefusesDraws():  # type: ignore[no-untyped-call]
                self._run(self._groups(values, [master], [alias], [state.get(alias)]), state)
            after = SplitTensor.of(alias.data.view(-1)) if len(weights) == 2 else [alias.data]
            changes: list[Change] = list(zip(after, halves, strict=True))
            for name, value in state.get(alias, {}).items():
                self._refuse_to_move(name, value)
                if isinstance(value, Tensor) and (name in moved or name != "step" or value.device != master.device):
                    names.append(name)
                    changes.append((value, _alike(own[name] if own is not None and name in moved else None, value)))
                else:
                    rest[name] = value
            return changes

        held = place.run([*halves, gradient, *(own[name] for name in moved if own is not None)], step)
        kept = rest | dict(zip(names, held[len(halves) :], strict=True))
        if own is not None:
            own.clear()
            own.update(kept)
        elif kept:
            self._optimizer.state[master] = kept

    def _refuse_to_move(self, name: str, value: Any) -> None:
        plain = (int, float, bool, str, type(None), Tensor, nn.Parameter)
        if type(value) not in plain:
            cls = type(self._optimizer).__name__
            raise RoundPipeError(
                "optimizer_device='worker' brings tensors and numbers of an optimizer's state to workers and back, "
                f"and {cls} keeps a {type(value).__name__} in state[p][{name!r}]. Set optimizer_device='cpu'."
            )

    def release(self) -> None:
        """Release the masters' memory until the next step."""
        self._aliases.clear()

    def _lay_out(
        self, values: Hyperparameters, keys: Iterable[int], *, begin: bool = False
    ) -> dict[int, direct.KernelRow]:
        """Return rows for the masters that the kernel can step directly.

        ``begin``: whether those without a state get one. The optimizer's own first step would hold their numbers, and
        moments that are packed, in fp32.
        """
        rows = {}
        everyones = self._optimizer.state
        for key in keys:
            number, master = values.group_of.get(key), self._masters.get(key)
            if number is None or master is None or not values.direct[number] or key in self._mapped:
                continue
            if not (state := everyones.get(master)):
                if not begin:
                    continue
                state = first_state(master, self._form, amsgrad=values.groups[number]["amsgrad"])
            numbers = self._memory(master)
            if not isinstance(numbers, SplitTensor):
                numbers = self._alias(master, numbers)
            if row := direct.row_of(number, values.groups[number], numbers, master.shape, state):
                rows[key], everyones[master] = row, state
        return rows

    def copy_rest(self) -> None:
        """Copy the states that still lie in a checkpoint's file, of parameters without a gradient."""
        self._copy_state(set(self._mapped))

    def _copy_state(self, keys: Iterable[int]) -> None:
        for key in keys:
            copy_state(self._optimizer.state.get(self._masters[key]))
        self._mapped.difference_update(keys)

    def _alias(self, master: nn.Parameter, values: Tensor) -> nn.Parameter:
        """Return the master's alias [3]; create it again if user code has moved the master's memory."""
        alias = self._aliases.get(id(master))
        if alias is None or not alias.is_set_to(values):
            alias = self._aliases[id(master)] = self._alias_of(master, values)
        return self._marked(alias, master)

    def _alias_of(self, master: nn.Parameter, values: Tensor) -> nn.Parameter:
        known = type(self._optimizer) in KNOWN  # known optimizers use nothing but a parameter's values
        return self._marked(nn.Parameter(values, requires_grad=master.requires_grad and not known), master)

    def _marked(self, alias: nn.Parameter, master: nn.Parameter) -> nn.Parameter:
        """Give the alias the attributes of the master, which the user's own optimizer may use."""
        if type(self._optimizer) not in KNOWN and (marks := vars(master)):
            vars(alias).update(marks)
        return alias

    def _groups(
        self,
        values: Hyperparameters,
        masters: list[nn.Parameter],
        aliases: list[nn.Parameter],
        states: list[Mapping[str, Any] | None],
    ) -> list[dict[str, Any]]:
        """Return the snapshot's groups of these masters [1], each split where parameters need different kernels."""
        cls = type(self._optimizer)
        cut: dict[int, dict[tuple[bool, bool], list[int]]] = {}
        if cls not in KNOWN:  # it may rely on a group's number
            cut = {number: {} for number in range(len(values.groups))}
        for index, (master, alias, state) in enumerate(zip(masters, aliases, states, strict=True)):
            number = values.group_of[id(master)]
            fused = values.fused[number] and fits(alias, alias.grad, state or {})
            # SGD's fused kernel takes only first steps or none in one call.
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
        """Run one step of a fresh instance with all present attributes of the user's instance."""
        cls = type(self._optimizer)
        stand_in: Optimizer = object.__new__(cls)  # constructors fill the state, and need arguments that we do not have
        given = vars(self._optimizer).copy()
        given.pop("step", None)  # a scheduler's wrapper, which would step the user's instance
        given.update(state=state, param_groups=groups, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
        vars(stand_in).update(given)
        if cls in KNOWN:
            # Without its wrappers (a name for profilers, hooks, torch.compile), which cost as much as all the rest.
            with torch.no_grad():
                inspect.unwrap(cls.step)(stand_in)
            return
        before = [group.copy() for group in groups]
        stand_in.step()
        _refuse_writes(cls, "self.", given, vars(stand_in))
        for group, unstepped in zip(groups, before, strict=True):
            _refuse_writes(cls, "its group's ", unstepped, group)


def copy_state(state: Any) -> None:
    """Give the tensors in the state of a parameter, which was loaded from a checkpoint, memory of their own."""
    if isinstance(state, dict):
        state.update({name: _copied(value) for name, value in state.items() if isinstance(value, Tensor)})


def _copied(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor:
        return tensor.clone()
    # A subclass need not have clone(), but has come from a file: torchao's packed moments.
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    copied: Tensor = torch.load(file, weights_only=False)
    return copied


class _RefusesDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random numbers, which would come from the generator of the layers that run on the device meanwhile."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RoundPipeError(f"the optimizer draws random numbers ({func}). Set optimizer_device='cpu'.")
        return func(*args, **(kwargs or {}))


def _alike(host: Tensor | None, value: Tensor) -> Tensor | None:
    """Return ``host`` if it can hold ``value``."""
    fits_it = host is not None and (host.shape, host.dtype, host.stride()) == (value.shape, value.dtype, value.stride())
    return host if fits_it else None


def _has_momentum(state: Mapping[str, Any] | None) -> bool:
    return state is not None and state.get("momentum_buffer") is not None


def _refuse_writes(cls: type, owner: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise if a step wrote outside its parameters' state: the stand-in loses that, and would count pieces as steps."""
    for name, value in after.items():
        if name not in before or before[name] is not value:
            raise RoundPipeError(
                f"{cls.__name__} declares {DECLARATION} = True, but its step() sets {owner}{name}, which parameters "
                f"share: keep it in self.state[p], or take {DECLARATION} away."
            )
