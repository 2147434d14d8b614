"""Runs ``training_step`` on a few samples, forward only, before any training, to see what it does.

It runs as evaluation does, on the calling thread with layers on workers, but in training mode and with a graph between
layers, so that losses show which operations they come from. The graph of a layer call is dropped at its end; if it
contains backward code of the user's own, `custom_backward` runs that first. Side effects are prevented or undone:

    self.log ── goes to a recorder ── [1]    writes to parameters ── each is copied before, and restored ── [2]
    dropout ── passes its input ── [3]       other random numbers ── the same for a sample in any part ── [4]

`left_behind` restores the other Python state that user code changes.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.process_context import replaced
from lightning_roundpipe.runtime.batch import microbatches
from lightning_roundpipe.runtime.batch.logs import LogRecorder, gathered, is_returned, issue
from lightning_roundpipe.runtime.batch.losses import COUNTED, Counts, reduction_of
from lightning_roundpipe.runtime.core.call import Call, Forward, LayerExecution
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.layer_executor import LayerExecutor
from lightning_roundpipe.runtime.core.outputs import hand_back
from lightning_roundpipe.runtime.core.prediction import CallOrder
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.trace import TracedCall
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.layer_calls.arguments import flatten
from lightning_roundpipe.runtime.layer_calls.compiling import LayerCompiler
from lightning_roundpipe.runtime.layer_calls.discrete_ops import DiscreteOpRecorder
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.modes.evaluation import Evaluation
from lightning_roundpipe.runtime.modes.model_calls import ModelCall
from lightning_roundpipe.runtime.profile.custom_backward import CustomBackwards, GradEnd, code_in, hooked
from lightning_roundpipe.runtime.profile.outside_writes import OutsideWrites
from lightning_roundpipe.runtime.profile.recorded_operations import OperationRecorder
from lightning_roundpipe.runtime.user_code.inference_writes import IN_PLACE
from lightning_roundpipe.runtime.user_code.interception import Inside, calling, current
from lightning_roundpipe.runtime.user_code.mode import DATA, UserCodeMode, completed
from lightning_roundpipe.runtime.user_code.rng import host_state
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState
from lightning_roundpipe.runtime.user_code.untraced import leave_untraced

_WRITTEN_BYTES = 1 << 30
"""Limit for the copies of parameters that user code writes to, in bytes."""


class CannotRehearse(Exception):
    """Raised where a rehearsal could not undo, or not compare, what user code does."""


class Rehearsal(Evaluation):
    """One run of training_step: on one microbatch, or on the whole batch.

    It uses much of the engine because it is evaluation with a second set of observers on it: random numbers, parameter
    writes, backward code and shared state.

    Args:
        engine: the context of the engine.
        index: number of the microbatch.
        draws: supplies the random numbers of its samples.
        written: copies the parameters that are written to.
        order: the order of layer calls in earlier rehearsals.
        backwards: collects what the user's own backward code gives.
        outside: observes the shared state that user code changes.
        cut: returns the sizes that a call of a model is cut into, for its number of samples; None keeps calls whole.
        renew: called before each of these parts.
        inside: names of layers whose own code is recorded.
    """

    def __init__(
        self, engine: EngineContext, index: int, draws: SameDraws, written: Written, order: CallOrder,
        backwards: CustomBackwards, outside: OutsideWrites,
        cut: Callable[[int], list[int]] | None = None, renew: Callable[[], None] = lambda: None,
        inside: Container[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(engine)
        self.index, self.weight, self._within = index, 0.0, False
        self.output: Any = None
        me = weakref.ref(self)  # a method would be a reference cycle, which keeps device memory until a gc run

        def about_to_write(parameter: nn.Parameter) -> None:
            written.keep(parameter)
            if (run := me()) is not None:
                run._stay_behind()

        self.operations = OperationRecorder()
        self.mode: UserCodeMode = _RehearsalUserCode(engine, about_to_write, self.operations)
        self._mode = self.mode
        self.logs: LogRecorder = _NotedLogs(
            engine.worker_pool.devices, self.mode.counts, self.mode.saw, self.operations
        )
        self._order = order
        self._draws, self._cut, self._renew, self._backwards = draws, cut, renew, backwards
        self._outside = outside
        workers, self._inside = engine.worker_pool.workers, inside
        self._runners = [_Runner(engine, worker, draws, backwards, self.operations, inside) for worker in workers]
        self._executors = [*self._runners]

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with TorchThreadState.capture(self._engine.worker_pool.device_types).entered(), self._draws:
            self._outside.begin()
            return super().run(function, args, kwargs)

    @property
    def lost(self) -> bool:
        """Whether the engine gave up waiting for a thread, which has died or is stuck."""
        return self._cancel_scope.given_up or self._engine.worker_pool.broken

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._cut is None or self._within:
            self._outside.enter()
            output = super().call(layer, args, kwargs)
            self._outside.leave(layer.name)
            self.operations.see_attributes(layer.name, layer.module)
            if layer.name in self._inside:
                runner = self._runners[layer.index % len(self._runners)]
                with torch._C.DisableTorchFunction():
                    self.operations.see_inside(runner.given, zip(flatten(output)[0], runner.returned, strict=False))
            else:
                self.operations.see_layer(layer.name, (args, kwargs), output)
            return output
        whole = super().call
        return self.call_model(layer.name, lambda *a, **k: whole(layer, a, k), args, kwargs)

    @contextlib.contextmanager
    def within_model(self) -> Iterator[None]:
        """Run the models that a model calls in its forward as part of that forward."""
        before, self._within = self._within, True
        try:
            yield
        finally:
            self._within = before

    def locate(self, tensor: Tensor) -> Device | None:
        return self._locate(tensor)

    def call_model(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._within or self._cut is None:
            with self.operations.within_model():
                return function(*args, **kwargs)
        call: ModelCall[_RehearsalPart] = ModelCall(
            name, 0, TorchThreadState.capture(self._engine.worker_pool.device_types)
        )
        with torch._C.DisableTorchFunction():
            parts = call.split(args, kwargs, self._cut, self._engine.model.bucket_of, self.locate)
        whole, recorders = self.logs, []
        for part_args, part_kwargs in parts:
            self._draws.narrow(len(call.runs), call.sizes)
            self._renew()
            self._outside.begin()
            self.logs = whole.another()
            recorders.append(self.logs)
            with self.within_model():
                output = function(*part_args, **part_kwargs)
            call.runs.append(_RehearsalPart(*flatten(output), self))
        self._draws.widen()
        self.logs = whole
        issue(whole, gathered(recorders), call.sizes, [float(size) for size in call.sizes])
        with torch._C.DisableTorchFunction():
            for run, size in zip(call.runs, call.sizes, strict=True):
                self._engine.learned.columns.see(name, run.outputs[0], size)
            return call.merge(self.device, lambda tensor, place: None)

    def _adapt(self, call: Call) -> None:
        call.requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in call.originals]
        call.graph = call.thread_state.grad  # which costs nothing where nothing requires grad
        self.look_back(f"the code in front of layer {call.layer.name!r}", call.originals)

    def look_back(self, place: str, values: Iterable[Any], share: float | None = None) -> None:
        """Run backward through the code between layers, if it is the loss's or some of it is the user's own.

        Losses whose values are those of their parts may have other gradients: a policy's ratio to itself is one,
        whatever its gradient is multiplied by.

        Args:
            place: names the code.
            values: what the code has computed.
            share: weight of this part's loss in the loss of the batch; see `CustomBackwards.see`.
        """
        if self._cut is not None and not self._within:  # code around cut calls runs once, on the whole batch
            return
        roots = [v for v in values if isinstance(v, Tensor) and v.requires_grad and v.grad_fn is not None]
        code, ends = code_in(roots)
        code = hooked(code, self._draws.hooked)
        if ends and (code or share is not None):
            self._backwards.see(place, roots, ends, code, share)

    def _hand_back(self, call: Call, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traced, recorded = TracedCall(call.layer, 0), None
        if call.graph:
            traced.flags = tuple(t.requires_grad for t in forward.tensors())
            side_outputs = {
                key: tuple(t.requires_grad for t in flat.tensors()) for key, flat in forward.side_outputs.items()
            }
            traced.side_outputs = {key: flags for key, flags in side_outputs.items() if any(flags)}
            recorded = RecordedCall(
                call.index, call.layer, 0, call.spec, [], call.requires_grad, call.thread_state, call.state, None,
                call.context, trainable=call.trainable,
            )  # fmt: skip
        return hand_back(call, recorded, traced, forward, args, kwargs, self._watched)[0]


class _NotedLogs(LogRecorder):
    """Lets ``operations`` know which values are logged, and which ones metrics are given."""

    def __init__(
        self, devices: Sequence[Device], counts: Counts, observe: Callable[..., None], operations: OperationRecorder
    ) -> None:  # fmt: skip
        super().__init__(devices, counts, observe)
        self._operations = operations

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        self._operations.see_logged(name, value, None if is_returned(kwargs) else sys._getframe(1))
        super().log(name, value, **kwargs)

    def see_given(self, value: Any) -> None:
        self._operations.see_given(value)


class _RehearsalPart:
    """One part of a call of a model. Implements `model_calls.Part`."""

    def __init__(self, leaves: list[Any], spec: Any, rehearsal: Rehearsal) -> None:
        self.outputs = leaves, spec
        self.device = rehearsal.device

    def bring(self, tensor: Tensor, source: Device | None, target: Device | None) -> Tensor:
        return tensor if target is None else tensor.to(target.torch_device)


class _Runner(LayerExecutor):
    """Runs layers uncompiled, under the random numbers of the rehearsal, and looks for the user's backward code."""

    def __init__(
        self, engine: EngineContext, worker: Any, draws: SameDraws, backwards: CustomBackwards,
        operations: OperationRecorder, inside: Container[str],
    ) -> None:  # fmt: skip
        super().__init__(
            worker,
            lambda: engine.learned.randomness,
            engine.model.formats,
            lambda: False,
            LayerCompiler(),
            masters=engine.model.bucket_of,
        )
        self._draws, self._backwards, self._operations, self._inside = draws, backwards, operations, inside
        self._new_code = engine.learned.new_code
        self.given: list[tuple[Any, Any]] = []
        """What user code has passed to the last call whose code was recorded, and what the code got."""
        self.returned: list[Any] = []
        """What that code has returned."""
        self._names = {id(p): name for name, p in engine.model.module.named_parameters()}

    def _run(self, slot: Slot, call: Call, *args: Any, **kwargs: Any) -> LayerExecution:
        outside, self._draws.hooked = self._draws.hooked, False
        try:
            ran = super()._run(slot, call, *args, **kwargs)
            if ran.recording is not None:
                self._new_code.learn_truths(call.layer.name, ran.recording.truths())
            if call.layer.name in self._inside:
                self.given = [(call.originals[i], inner) for i, inner in ran.given.items()]
                self.returned = ran.output.leaves
            roots = [t for t in ran.tensors() if t.requires_grad]
            if roots and (code := hooked(code_in(roots)[0], self._draws.hooked)):
                self._look_back(call, ran, roots, code)
        finally:
            self._draws.hooked = outside
        return ran

    def _recording(self, call: Call, leaves: list[Any]) -> DiscreteOpRecorder:
        return DiscreteOpRecorder(self._device.torch_device, [leaf for leaf in leaves if isinstance(leaf, Tensor)])

    def _look_back(self, call: Call, ran: LayerExecution, roots: list[Tensor], code: str) -> None:
        name, replica = call.layer.name, self._worker.replica(call.layer)
        ends = [GradEnd(f"an argument of layer {name!r}", t) for t in ran.given.values() if t.requires_grad]
        for master, parameter in zip(call.layer.masters, replica.parameters, strict=True):
            if parameter.requires_grad:
                ends.append(GradEnd(f"parameter {self._names.get(id(master), 'of layer ' + repr(name))!r}", parameter))
        assert ran.detached_inputs is not None
        with self._device.acquire_core(), calling(Inside(name)), ran.detached_inputs:
            self._backwards.see(f"layer {name!r}", roots, ends, code)
        for parameter in replica.parameters:
            parameter.grad = None  # set by code that runs a backward of its own

    @contextlib.contextmanager
    def _watching(self, layer: HostLayer) -> Iterator[None]:
        recording = self._operations.inside() if layer.name in self._inside else contextlib.nullcontext()
        with super()._watching(layer), self._draws, recording:
            yield


# -- parameters --------------------------------------------------------------------------------------------------------


class Written:
    """Copies of the parameters that user code writes to, or may write to, with their values before [2].

    Args:
        names: the names of all parameters, by id.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._kept: dict[int, tuple[nn.Parameter, Tensor, Tensor]] = {}

    def keep(self, parameter: nn.Parameter) -> None:
        """Copy ``parameter`` before it is written to.

        Raises:
            CannotRehearse: if the copies would take more than 1 GiB.
        """
        if id(parameter) in self._kept:
            return
        if sum(values.nbytes for _, _, values in self._kept.values()) + parameter.nbytes > _WRITTEN_BYTES:
            raise CannotRehearse("training_step may write to more than 1 GiB of parameters")
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self._kept[id(parameter)] = (parameter, parameter.detach(), parameter.detach().clone())

    def changes(self) -> dict[str, Any]:
        """Return the parameters that differ from their copies, by name."""
        return {
            self._names.get(key, "a parameter"): parameter.detach().clone()
            for key, (parameter, _, values) in self._kept.items()
            if parameter.shape != values.shape or not torch.equal(parameter.detach(), values)
        }

    def put_back(self) -> None:
        """Restore all of them."""
        for parameter, memory, values in self._kept.values():
            with torch.no_grad():
                if parameter.data_ptr() != memory.data_ptr():
                    parameter.data = memory.data
                if not torch.equal(parameter, values):
                    parameter.copy_(values)


class _RehearsalUserCode(UserCodeMode):
    """The mode of training. Calls ``about_to_write`` before user code writes to a parameter, or gets a tensor that
    shares its memory.
    """

    def __init__(
        self, engine: EngineContext, about_to_write: Callable[[nn.Parameter], None], operations: OperationRecorder
    ) -> None:
        model = engine.model
        super().__init__(
            model.bucket_of, lambda p: model.bucket_of[id(p)].read(p), model.formats, train=True,
            accelerator=engine.worker_pool.accelerator, devices=engine.worker_pool.devices, buffers=model.buffers,
            observe=engine.learned.new_code.learn, counted=engine.learned.counted,
        )  # fmt: skip
        self._all, self._about_to_write, self._operations = model.bucket_of, about_to_write, operations

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func is Tensor.register_hook and not _is_known(args[0]):
            return func(*args, **(kwargs or {}))  # unlike `graph_cuts.hook_gradient`, allow it to run several times
        if func == DATA or name in ("__set__", "detach", "copy_") or IN_PLACE.fullmatch(name) or "_foreach" in name:
            for value in tree_iter(args[:1]):
                if isinstance(value, nn.Parameter) and id(value) in self._all and not _is_setting(func):
                    self._about_to_write(value)
        kwargs = kwargs or {}
        if func is F.l1_loss:
            kwargs = completed(kwargs, sys._getframe(1))
        result = super().__torch_function__(func, types, args, kwargs)
        self._operations.see(func, args, kwargs, result, sys._getframe(1))
        return result


def _is_known(tensor: Tensor) -> bool:
    """Return whether the strategy calls the hooks on ``tensor`` itself, or refuses them."""
    return isinstance(tensor, nn.Parameter) or hasattr(tensor.grad_fn, "graph_cut")


def _is_setting(func: Callable[..., Any]) -> bool:
    """Return whether ``func`` sets an attribute other than ``data``."""
    return getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is not Tensor.data


# -- random numbers ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Make dropout pass its input through [3], in all threads: nothing else runs during a rehearsal."""

    def off(name: str, position: int) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(F, name)

        @functools.wraps(function)
        def without(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[_RATES[position]] = 0.0
            return function(*args, **kwargs)

        return without

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    attention = "scaled_dot_product_attention"
    with replaced(F, **{name: off(name, 1) for name in names}, **{attention: off(attention, 4)}):
        yield


@contextlib.contextmanager
def seeding_noted(draws: SameDraws) -> Iterator[None]:
    """Let ``draws`` know when user code calls ``torch.manual_seed``."""
    seed = torch.manual_seed

    @functools.wraps(seed)
    def seeding(*args: Any, **kwargs: Any) -> torch.Generator:
        before = draws.now()
        generator = seed(*args, **kwargs)
        draws.seeded(before)
        return generator

    with replaced(torch, manual_seed=seeding), replaced(torch.random, manual_seed=seeding):
        yield


_RATES = {1: "p", 4: "dropout_p"}

_SHAPED = {torch.rand, torch.randn, torch.randint}
_LIKE = {torch.rand_like, torch.randn_like, torch.randint_like}
_FILLING = {Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.random_, Tensor.bernoulli_}


class SameDraws(TorchFunctionMode):
    """Gives the samples of a part the random numbers that they get in the whole batch [4].

    A draw with rows for each sample of the part is made for the whole batch, and the part's rows are taken from it. A
    sample has several rows where a layer flattens its tokens, as routers do; the run on the whole batch shows which
    draws these are. What user code draws after it has seeded torch itself (`seeding_noted`) is what it would draw in
    the part.

    Args:
        devices: the devices whose generators code may draw from.
        samples: number of samples in the whole batch.
        seed: seeds all generators at the beginning of every run.
    """

    def __init__(self, devices: Sequence[Device], samples: int, seed: int) -> None:
        super().__init__()
        leave_untraced(SameDraws.__torch_function__)
        self.samples, self._seed = samples, seed
        self._generators = list({id(g): g for g in (torch.default_generator, *(d.generator for d in devices))}.values())
        self._rows = self.rows = slice(0, samples)
        """The rows of the whole batch that are running: of all, and now."""
        self._whole: set[tuple[int, ...]] = set()
        """Shapes of draws for the whole batch."""
        self._states: list[Any] = []
        self._before_seeding: list[Any] | None = None
        """States of the generators when user code has seeded them, until it puts these back."""
        self._others: Any = None
        self._alike = True
        self.hooked = False
        """Whether user code of this run has put a hook on a tensor; while a layer runs, whether that layer has."""
        self.losses_inside: dict[str, None] = {}
        """Names of layers that compute a mean cross entropy themselves, in order."""

    def begin(self, rows: slice) -> None:
        """Begin a run of ``rows`` of the whole batch: seed all generators."""
        self._rows = self.rows = rows
        self.hooked = False
        for generator in self._generators:
            generator.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed & 0xFFFFFFFF)
        self._states, self._others = self.now(), host_state()
        self._before_seeding = None

    @property
    def alike(self) -> bool:
        """Whether each sample gets the same random numbers in any part, in all runs so far. Read it after a run.

        False if a generator has advanced other than by a draw that this mode has seen.
        """
        self._look()
        return self._alike and self._others == host_state()

    def narrow(self, part: int, sizes: Sequence[int]) -> None:
        """Begin part number ``part`` of a call of a model, if the call has a row for each sample of the run."""
        rows = microbatches.rows_of(list(sizes))[part]
        if sum(sizes) == self._rows.stop - self._rows.start:
            self.rows = slice(self._rows.start + rows.start, self._rows.start + rows.stop)

    def widen(self) -> None:
        """End the last part of a call of a model."""
        self.rows = self._rows

    def now(self) -> list[Tensor]:
        """Return the states of all generators."""
        return [generator.get_state() for generator in self._generators]

    def seeded(self, before: Sequence[Tensor]) -> None:
        """Note that user code has seeded torch, whose generators had the states ``before``."""
        self._alike &= all(map(torch.equal, self._states, before))
        if self._before_seeding is None:
            self._before_seeding = [*before]
        self._states = self.now()

    def _look(self) -> None:
        now = self.now()
        if self._before_seeding is not None and all(map(torch.equal, self._before_seeding, now)):
            self._states, self._before_seeding = now, None  # as at the end of torch.random.fork_rng
        self._alike &= all(map(torch.equal, self._states, now))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in COUNTED and isinstance(layer := current(), Inside) and reduction_of(func, args, kwargs) == "mean":
            self.losses_inside[layer.name] = None
        self.hooked |= func is Tensor.register_hook
        draw = self._draw(func, args, kwargs)
        if draw is None:
            return func(*args, **kwargs)
        self._look()
        drawn = draw() if self._before_seeding is None else func(*args, **kwargs)
        self._states = self.now()
        return drawn

    def _draw(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        if kwargs.get("generator") is not None:
            return None
        if func in _SHAPED:
            return lambda: self._shaped(func, args, kwargs)
        if func in _LIKE:
            return lambda: self._taken(func(self._full(args[0]), *args[1:], **kwargs), args[0].shape)
        if func in _FILLING and not any(isinstance(a, Tensor) for a in args[1:]):
            return lambda: self._filled(func, args, kwargs)
        if func in (torch.bernoulli, Tensor.bernoulli) and len(args) == 1 and not kwargs:
            return lambda: (self._row(torch.rand, args[0]) < args[0]).to(args[0].dtype)
        if func is torch.normal and len(args) == 2 and isinstance(args[0], Tensor) and not kwargs:
            return lambda: args[0] + self._row(torch.randn, args[0]) * args[1]
        return None

    def _rows_of_a_sample(self, shape: Sequence[int]) -> int:
        """Return the rows that each running sample has in a draw of ``shape``; 0 if the draw is to be made as it is."""
        rows, drawn = self.rows.stop - self.rows.start, tuple(shape)
        if rows == self.samples:
            self._whole.add(drawn)
            return 0
        each, rest = divmod(drawn[0], rows) if drawn else (0, 0)
        known = (each * self.samples, *drawn[1:]) in self._whole or (each == 1 and drawn not in self._whole)
        return each if known and not rest else 0

    def _row(self, func: Callable[..., Any], like: Tensor) -> Tensor:
        return self._taken(func(self._full(like).shape, dtype=like.dtype, device=like.device), like.shape)

    def _full(self, tensor: Tensor) -> Tensor:
        each = self._rows_of_a_sample(tensor.shape)
        return tensor.new_empty((each * self.samples, *tensor.shape[1:])) if each else tensor

    def _taken(self, drawn: Tensor, shape: Sequence[int]) -> Tensor:
        each = self._rows_of_a_sample(shape)
        return drawn[each * self.rows.start : each * self.rows.stop].clone() if each else drawn

    def _filled(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
        target: Tensor = args[0]
        if not self._rows_of_a_sample(target.shape):
            drawn: Tensor = func(*args, **kwargs)
            return drawn
        full = func(self._full(target.detach()), *args[1:], **kwargs)
        return target.copy_(self._taken(full, target.shape))

    def _shaped(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
        sizes = [i for i, a in enumerate(args) if isinstance(a, (tuple, list))]
        shape = kwargs["size"] if "size" in kwargs else args[sizes[-1]] if sizes else args
        each = self._rows_of_a_sample(shape)
        if not each:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        full = (each * self.samples, *shape[1:])
        if "size" in kwargs:
            kwargs = kwargs | {"size": full}
        else:
            args = (*args[: sizes[-1]], full, *args[sizes[-1] + 1 :]) if sizes else full
        return self._taken(func(*args, **kwargs), shape)
