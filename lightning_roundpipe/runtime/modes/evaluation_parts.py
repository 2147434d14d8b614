"""Evaluation in microbatches: cuts the calls of models, to give all workers something to do.

The step itself runs once, on the whole batch, on the calling thread. `Parting` cuts a call of a model only where the
result is the same but for rounding:

    first call of its kind ── runs whole, examined ── [1]       draws, logs, keeps or changes something: never cut
    second call ── runs in parts, then the samples of two parts as one ── [2]      the outputs differ: never cut
    later calls ── run in parts ── [3]     another order of layers, an error, a branch not taken at [2]: whole after all
    the 2nd, 4th, 8th, ... of these ── as at [2]

A model that passes [1] leaves nothing behind, so a failed attempt in parts can be repeated whole. A call may be given a
key-value cache, as in ``generate`` (`parted_caches`). A model may return tensors with a row for each sample, caches
that it has filled, and losses, if the function that computed them tells how those of the parts combine
(`known_losses`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.model.attributes import same
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.forward_plan import ForwardPlan, plan_forward
from lightning_roundpipe.planning.nominal import nominal
from lightning_roundpipe.runtime.batch import microbatches
from lightning_roundpipe.runtime.batch.logs import log_as
from lightning_roundpipe.runtime.batch.samples import batch_size
from lightning_roundpipe.runtime.core.call import Forward
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.trace import Trace
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.layer_calls.arguments import flatten, is_cache, unflatten
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.modes.evaluation import Evaluation
from lightning_roundpipe.runtime.modes.evaluation_step import (
    Branches,
    EvaluatedCall,
    EvaluationStep,
    is_number,
    raise_unsplittable,
    without_caches,
)
from lightning_roundpipe.runtime.modes.parted_caches import contents, joined, parts_of
from lightning_roundpipe.runtime.user_code.module_state import StateWatch

_PLAIN = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device)
KINDS = 64
"""Kinds of calls to know at most: some models are given another number in each call."""
LOOKS = 3
"""Calls to examine at most while another dimension of an output is as long as the batch."""
COMPARED = 2
"""Parts whose samples also run as one."""
ROUNDING = 1e-3
"""Tolerated difference between whole and parts, relative to the largest value: the rounding of low precision."""


@dataclass
class _CallKind:
    """What earlier calls have shown of one kind of call: one model, with arguments of the same structure and types.

    Attributes:
        cut: whether calls run in parts; None until the first comparison.
        looks: examined calls.
        trace: the layer calls that the model makes; None until examined.
        home: the device of the last one. Outputs of parts go there, so that user code finds them on the same device in
            every batch.
        seconds: forward time of each of them, on the whole batch.
        plans: the stages over them, by number of microbatches.
        calls: attempts in parts; those whose number is a power of two are compared with the whole.
        branches: truth values of tensors that user code branched on in compared parts, with every prefix.
    """

    cut: bool | None = None
    looks: int = 0
    trace: Trace | None = None
    home: Device | None = None
    seconds: list[float] = field(default_factory=list)
    plans: dict[int, ForwardPlan] = field(default_factory=dict)
    calls: int = 0
    branches: Branches = frozenset()


class Parting:
    """Decides which calls of models evaluation cuts, and makes them. Lives as long as the engine.

    It depends on many modules because the decision compares everything that a call may do (outputs, buffers,
    attributes, logs, random numbers), and a call in parts needs a trace, a partition and a step of its own.

    Args:
        engine: the context of the engine.

    Attributes:
        possible: whether there are several workers and the options allow cutting.
    """

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        self._known: dict[Any, _CallKind] = {}
        self.possible = len(engine.worker_pool.devices) > 1 and engine.options.num_microbatches != 1
        self.expected = False
        """Whether the last call of a model ran in parts; then the next batch does not begin with a prefetch."""

    def call(
        self, evaluation: Evaluation, name: str, function: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Make a call of a model, whole or in parts."""
        given, spec = flatten((args, kwargs))
        leaves = [None if is_cache(leaf) else leaf for leaf in given]
        samples = self._samples(leaves, *without_caches(given, spec))
        sizes = self._sizes_of(samples) if samples > 1 else []
        whole = _Whole(evaluation, function, args, kwargs)
        self.expected = False
        if len(sizes) < 2 or torch.is_grad_enabled() or evaluation.follows_writes or self._hooked():
            return whole()
        kind = (name, repr(spec), *map(_kind, given))
        known = self._known.get(kind) or _CallKind()
        if known.cut is False or (kind not in self._known and len(self._known) >= KINDS):
            return whole()
        self._known[kind] = known
        if known.trace is None:
            return self._look(known, whole, samples)  # [1]
        known.calls += 1
        compared = COMPARED if known.calls & (known.calls - 1) == 0 else 0
        output = self._in_parts(evaluation, known, name, whole, compared)
        if output is not None and output.compared is not None:
            agrees = _agree(_Whole(evaluation, function, *output.few)(), output.compared)  # [2]
            evaluation.go_on(known.home)
            self._decide(known, name, agrees)
            output = output if agrees else None
        elif output is None and known.cut is None:
            self._decide(known, name, False)
        self.expected = output is not None
        if output is None:
            return whole()
        output.keep_cache()
        return output.whole  # [3]

    def _decide(self, known: _CallKind, name: str, agrees: bool) -> None:
        """Set whether this kind is cut. A failure in parts decides only at the first comparison.

        Later it may be an exception of this batch.
        """
        earlier, known.cut = known.cut, agrees
        if agrees and not earlier:
            self._engine.hints.of_evaluation(name)
        elif earlier and not agrees:
            self._engine.hints.of_uneven_evaluation(name)

    def _hooked(self) -> bool:
        """Return whether there are forward hooks on modules, which would run once for each part."""
        hooks = torch.nn.modules.module
        listening = hooks._global_forward_hooks or hooks._global_forward_pre_hooks
        return bool(listening) or any(
            m._forward_hooks or m._forward_pre_hooks for m in self._engine.model.module.modules()
        )

    def _samples(self, leaves: list[Any], args: Any, kwargs: Any) -> int:
        """Return the number of samples; 0 if the call cannot be cut."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not any(t.dim() for t in tensors) or not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            return 0
        if any(isinstance(t, nn.Parameter) for t in tensors):
            return 0
        try:
            return batch_size((args, kwargs))
        except ValueError:
            return 0

    def _sizes_of(self, samples: int) -> list[int]:
        options, workers = self._engine.options, len(self._engine.worker_pool.workers)
        return microbatches.sizes_of(samples, options.num_microbatches, options.microbatch_size, workers)

    # -- the first call -----------------------------------------------------------------------------------------------

    def _look(self, known: _CallKind, whole: _Whole, samples: int) -> Any:
        module: Any = self._engine.model.module
        evaluation = whole.evaluation
        if any(m.training for m in module.modules()):
            return whole()
        watch = StateWatch(list(module.modules()), list(module.parameters()))
        buffers = [(b, b.detach().clone()) for b in module.buffers()]
        states, first = self._random_states(), evaluation.calls
        layers: list[tuple[HostLayer, Forward]] = []
        evaluation.looked_at = layers
        logged: list[Any] = []
        with log_as(module, _noting(module.log, logged)):
            output = whole()
        self._engine.model.buffers.settle()
        evaluation.looked_at = None
        known.looks += 1
        left = any(
            not same(old.get(key), new.get(key)) for _, old, new in watch.changes() for key in old.keys() | new.keys()
        )
        drew = any(not _equal(a, b) for a, b in zip(states, self._random_states(), strict=True))
        changed = any(not torch.equal(b, before) for b, before in buffers)
        effects = any(forward.side_outputs or forward.mutated for _, forward in layers)
        if (
            left
            or drew
            or changed
            or effects
            or logged
            or not layers
            or not self._can_merge(output, samples, evaluation)
        ):
            known.cut = False
        elif not _ambiguous(output, samples):
            trace = Trace()
            for layer, _ in layers:
                trace.append(layer)
            for device in self._engine.worker_pool.devices:
                device.compute.synchronize()  # what has been timed has ended
            seconds = evaluation.recorder.call_seconds()
            known.seconds = [min(seconds.get(("forward", 0, first + i), [0.0])) for i in range(len(layers))]
            known.trace, known.home = trace, evaluation.device
        elif known.looks >= LOOKS:
            known.cut = False
        return output

    @staticmethod
    def _can_merge(output: Any, samples: int, evaluation: Evaluation) -> bool:
        """Return whether such outputs of parts make up that of the whole batch."""
        leaves = flatten(output)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (
            all(isinstance(leaf, (Tensor, *_PLAIN)) or is_cache(leaf) for leaf in leaves)
            and bool(tensors)
            and all(
                evaluation.losses.weight_of(t) is not None if is_number(t) else t.dim() and len(t) == samples
                for t in tensors
            )
        )

    def _random_states(self) -> list[Any]:
        generators = {id(d.generator): d.generator for d in self._engine.worker_pool.devices}
        generators[id(torch.default_generator)] = torch.default_generator
        state: Any = np.random.get_state()
        return [*(g.get_state() for g in generators.values()), random.getstate(), (state[2], state[1].tobytes())]

    # -- in parts -----------------------------------------------------------------------------------------------------

    def _in_parts(
        self, evaluation: Evaluation, known: _CallKind, name: str, whole: _Whole, compared: int
    ) -> _Parted | None:
        """Return the output; None if the call cannot be made in parts.

        Args:
            evaluation: the batch's evaluation.
            known: what is known of such calls.
            name: the model's.
            whole: the call.
            compared: parts whose output is to be compared, and is returned by itself.
        """
        engine, trace = self._engine, known.trace
        assert trace is not None
        evaluation.stop_foreseeing()
        call = EvaluatedCall(name, 0, engine.thread_state())
        call.settle = self._settle
        with torch._C.DisableTorchFunction(), interrupts_allowed(False):
            try:
                evaluation.surroundings.refuse(name)
                parts = call.split_with_cache(
                    whole.args, whole.kwargs, self._sizes_of, engine.model.bucket_of, evaluation.locate
                )
                few = self._few(call, whole, evaluation) if compared else ((), {})
            except (ValueError, RoundPipeError):
                return None
            plan = known.plans.get(len(parts)) or known.plans.setdefault(len(parts), self._plan(known, len(parts)))
            step = EvaluationStep(engine, evaluation, trace, plan, self._sizes_of, known.branches, compared)
            with log_as(engine.model.module, raise_unsplittable):
                step.run_parts(call, whole.function, parts)
            try:
                if step.unsplittable:
                    return None
                known.branches = step.branches
                home = known.home
                evaluation.go_on(home)
                beginning = call.beginning(compared).merge(home, lambda _: None) if compared else None
                return _Parted(call.merge(home, lambda _: None), few, beginning, call.keep_cache)
            except RoundPipeError:
                return None  # `merge` cannot put the outputs together
            finally:
                step.release()

    def _few(self, call: EvaluatedCall, whole: _Whole, evaluation: Evaluation) -> tuple[Any, Any]:
        """Return the arguments of the call with the samples of the compared parts alone."""
        samples = sum(call.sizes[:COMPARED])
        sizes = [samples, sum(call.sizes) - samples] if len(call.sizes) > COMPARED else [samples]
        alone = EvaluatedCall(call.name, 0, call.thread_state)
        masters = self._engine.model.bucket_of
        leaves, spec = flatten((whole.args, whole.kwargs))
        args, kwargs = without_caches(leaves, spec)
        part = alone.split(args, kwargs, lambda _: sizes, masters, evaluation.locate)[0]
        if call.cache is None:
            return part
        caches = parts_of(call.cache, call.sizes)
        assert caches is not None, "the call was cut"
        self._settle()
        cache = joined(caches[:COMPARED], call.sizes[:COMPARED])
        filled = [cache if is_cache(old) else new for old, new in zip(leaves, flatten(part)[0], strict=True)]
        args, kwargs = unflatten(filled, spec)
        return args, kwargs

    def _settle(self) -> None:
        for device in self._engine.worker_pool.devices:
            device.compute.synchronize()

    def _plan(self, known: _CallKind, microbatches: int) -> ForwardPlan:
        """Return a plan whose stages fit the existing weight arenas."""
        assert known.trace is not None
        rooms = [worker.weights[0].buffer for worker in self._engine.worker_pool.workers]
        costs = Costs(
            tuple(
                CallCost(
                    call.layer.name,
                    max(seconds / microbatches, 1e-9),
                    0.0,
                    call.layer.nbytes,
                    0,
                    0,
                    0,
                    needs_backward=False,
                )
                for call, seconds in zip(known.trace.calls, known.seconds, strict=True)
            )
        )
        size = min((room.numel() for room in rooms if room is not None), default=None)
        rate = nominal(self._engine.worker_pool.accelerator or "cpu").upload
        return plan_forward(costs, len(self._engine.worker_pool.workers), microbatches, rate, size)


@dataclass
class _Parted:
    """The output of a call in parts.

    Attributes:
        whole: that of all samples.
        few: the arguments of a call with the samples of the compared parts alone.
        compared: the output of these parts; None if nothing is compared.
        keep_cache: lets the cache that the call was given stand for those of the parts.
    """

    whole: Any
    few: tuple[Any, Any]
    compared: Any
    keep_cache: Callable[[], None]


@dataclass
class _Whole:
    """The call, uncut."""

    evaluation: Evaluation
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        self.evaluation.losses.clear()
        with self.evaluation.within_model():
            return self.function(*self.args, **self.kwargs)


def _noting(real: Callable[..., Any], logged: list[Any]) -> Callable[..., None]:
    def log(*args: Any, **kwargs: Any) -> None:
        logged.append(args)
        real(*args, **kwargs)

    return log


def _kind(leaf: Any) -> Any:
    if is_cache(leaf):
        return "cache", type(leaf).__name__
    return ("tensor", leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _ambiguous(output: Any, samples: int) -> bool:
    """Return whether a further dimension is as long as the batch: the rows may not be the samples."""
    return any(samples in leaf.shape[1:] for leaf in flatten(output)[0] if isinstance(leaf, Tensor))


def _agree(whole: Any, parts: Any) -> bool:
    """Return whether two outputs are the same but for rounding."""
    (one, spec), (other, found) = flatten(whole), flatten(parts)
    return spec == found and all(map(_near, one, other))


def _cached_alike(one: Any, other: Any) -> bool:
    """Return whether two key-value caches hold the same but for rounding."""
    try:
        held, found = list(contents(one)), list(contents(other))
    except RoundPipeError:  # those of the parts cannot be joined
        return False
    return len(held) == len(found) and all(map(_near, held, found))


def _near(a: Any, b: Any) -> bool:
    if is_cache(a) and is_cache(b):
        return _cached_alike(a, b)
    if not isinstance(a, Tensor):
        return bool(a == b)
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype is not b.dtype:
        return False
    a, b = a.cpu(), b.cpu()  # the whole may be on another device than the parts
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    x, y = torch.nan_to_num(a.double()), torch.nan_to_num(b.double())
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    return bool((x - y).abs().max() <= ROUNDING * x.abs().max())


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
