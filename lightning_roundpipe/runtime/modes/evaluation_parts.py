"""Evaluation in microbatches: a call of the model is cut, so that all workers have something to do.

The step itself runs once, on the whole batch, on the calling thread. Only a call of the model may be cut, and only
where nobody can tell the difference:

    first call of its kind ── runs whole, and is looked at ── [1]   draws, logs, keeps or changes something: never cut
    second ── whole, and in parts as well ── [2]                    they differ by more than rounding: never cut
    later ── in parts ── [3]      order of calls, outputs, errors, branches that were not taken at [2]: whole after all
    the 2nd, 4th, 8th, ... of these ── whole as well, as at [2]

What has been looked at leaves nothing behind, so a call that cannot be made in parts is simply made whole. Key-value
caches are never cut, nor is a loss that the model computes itself: their samples have met already.
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
from lightning_roundpipe.model.attributes import same
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.partition import greedy_partition
from lightning_roundpipe.planning.span import Span
from lightning_roundpipe.runtime.batch import microbatches
from lightning_roundpipe.runtime.batch.logs import log_as
from lightning_roundpipe.runtime.batch.samples import batch_size
from lightning_roundpipe.runtime.core.call import Forward
from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.trace import Trace
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.layer_calls.arguments import flatten
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.modes.evaluation import Evaluation
from lightning_roundpipe.runtime.modes.evaluation_step import Branches, EvaluationStep, raise_unsplittable
from lightning_roundpipe.runtime.modes.model_calls import ModelCall
from lightning_roundpipe.runtime.modes.model_tasks import PartRun
from lightning_roundpipe.runtime.user_code.module_state import StateWatch

_PLAIN = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device)
LOOKS = 3
"""First calls that are looked at, if it cannot be told from the first one."""
ROUNDING = 1e-3
"""Parts of the largest value by which whole and parts may differ: low precision rounds so."""


@dataclass
class _CallKind:
    """What is known of calls of one kind.

    Attributes:
        cut: whether they run in parts; None until that is known.
        calls: that ran in parts; those whose number is a power of two run whole as well, and are compared.
        branches: that its code took by the truth values of tensors in parts that were compared, as far as each went.
        trace: the layers that they call; ``spans``: of stages over these, by the number of microbatches.
    """

    cut: bool | None = None
    looks: int = 0
    trace: Trace | None = None
    seconds: list[float] = field(default_factory=list)
    spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    calls: int = 0
    branches: set[tuple[bool, ...]] = field(default_factory=set)


class Parting:
    """What outlives a batch.

    Args:
        engine: whose evaluation it is.
    """

    def __init__(self, engine: EngineContext) -> None:
        self._engine = engine
        self._known: dict[Any, _CallKind] = {}
        self.possible = len(engine.worker_pool.devices) > 1 and engine.options.num_microbatches != 1
        self.expected = False
        """Whether the last call of a model ran in parts."""

    def call(
        self, evaluation: Evaluation, name: str, function: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """A call of the model, whole or in parts."""
        leaves, spec = flatten((args, kwargs))
        samples = self._samples(leaves, args, kwargs)
        sizes = self._sizes_of(samples) if samples > 1 else []
        whole = _Whole(evaluation, function, args, kwargs)
        self.expected = False
        if len(sizes) < 2 or torch.is_grad_enabled() or evaluation.follows_writes or self._hooked():
            return whole()
        known = self._known.setdefault((name, repr(spec), *map(_kind, leaves)), _CallKind())
        if known.cut is False:
            return whole()
        if known.trace is None:
            return self._look(known, whole, samples)  # [1]
        known.calls += 1
        compared = known.calls & (known.calls - 1) == 0
        branches = known.branches if compared else frozenset(known.branches)
        output = self._in_parts(evaluation, known, name, function, args, kwargs, branches)
        self.expected = output is not None
        if output is None or compared:
            expected = whole()
            self._compare(known, name, expected, output)  # [2]
            return expected
        return output[0]  # [3]

    def _compare(self, known: _CallKind, name: str, whole: Any, parts: tuple[Any] | None) -> None:
        """A call was made ``whole``, and in ``parts``, which is None if it is unsplittable."""
        earlier = known.cut
        if parts is not None or earlier is None:
            known.cut = parts is not None and _agree(whole, parts[0])
        if known.cut and not earlier:
            self._engine.hints.of_evaluation(name)
        elif earlier and not known.cut:
            self._engine.hints.of_uneven_evaluation(name)

    def _hooked(self) -> bool:
        """Whether somebody listens to modules, who would be told of each part."""
        hooks = torch.nn.modules.module
        listening = hooks._global_forward_hooks or hooks._global_forward_pre_hooks
        return bool(listening) or any(
            m._forward_hooks or m._forward_pre_hooks for m in self._engine.model.module.modules()
        )

    def _samples(self, leaves: list[Any], args: Any, kwargs: Any) -> int:
        """How many; 0 if the call is none that could be cut."""
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
        if left or drew or changed or effects or logged or not layers or not _rows_only(output, samples):
            known.cut = False
        elif not _ambiguous(output, samples):
            trace = Trace()
            for layer, _ in layers:
                trace.append(layer)
            for device in self._engine.worker_pool.devices:
                device.compute.synchronize()  # what has been timed has ended
            seconds = evaluation.recorder.call_seconds()
            known.seconds = [min(seconds.get(("forward", 0, first + i), [0.0])) for i in range(len(layers))]
            known.trace = trace
        elif known.looks >= LOOKS:
            known.cut = False
        return output

    def _random_states(self) -> list[Any]:
        generators = {id(d.generator): d.generator for d in self._engine.worker_pool.devices}
        generators[id(torch.default_generator)] = torch.default_generator
        state: Any = np.random.get_state()
        return [*(g.get_state() for g in generators.values()), random.getstate(), (state[2], state[1].tobytes())]

    # -- in parts -----------------------------------------------------------------------------------------------------

    def _in_parts(
        self, evaluation: Evaluation, known: _CallKind, name: str, function: Callable[..., Any], args: Any, kwargs: Any,
        branches: Branches,
    ) -> tuple[Any] | None:  # fmt: skip
        """The output; None if it cannot be had so."""
        engine, trace = self._engine, known.trace
        assert trace is not None
        evaluation.stop_foreseeing()
        call: ModelCall[PartRun] = ModelCall(name, 0, engine.thread_state())
        with torch._C.DisableTorchFunction(), interrupts_allowed(False):
            try:
                evaluation.surroundings.refuse(name)
                parts = call.split(args, kwargs, self._sizes_of, engine.model.bucket_of, evaluation.locate)
            except (ValueError, RoundPipeError):
                return None
            spans = known.spans.get(len(parts)) or known.spans.setdefault(len(parts), self._spans(known, len(parts)))
            step = EvaluationStep(engine, evaluation, trace, spans, self._sizes_of, branches)
            with log_as(engine.model.module, raise_unsplittable):
                step.run_parts(call, function, parts)
            try:
                if step.unsplittable:
                    return None
                evaluation.go_on(call.runs[-1].device)
                return (call.merge(evaluation.device, lambda tensor: None),)
            except RoundPipeError:
                return None  # what was returned cannot be put together
            finally:
                step.release()

    def _spans(self, known: _CallKind, microbatches: int) -> tuple[Span, ...]:
        """Stages of nearly equal time that fit the arenas that there are."""
        assert known.trace is not None
        room = self._engine.worker_pool.workers[0].weights[0].buffer
        costs = Costs(
            tuple(
                CallCost(call.layer.name, max(seconds, 1e-9), 0.0, call.layer.nbytes, 0, 0, 0, needs_backward=False)
                for call, seconds in zip(known.trace.calls, known.seconds, strict=True)
            )
        )
        size = room.numel() if room is not None else None
        plan = greedy_partition(costs, len(self._engine.worker_pool.workers), microbatches, stage_bytes=size)
        return (*plan.forward, plan.fused)


@dataclass
class _Whole:
    """The call as the user made it."""

    evaluation: Evaluation
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        with self.evaluation.within_model():
            return self.function(*self.args, **self.kwargs)


def _noting(real: Callable[..., Any], logged: list[Any]) -> Callable[..., None]:
    def log(*args: Any, **kwargs: Any) -> None:
        logged.append(args)
        real(*args, **kwargs)

    return log


def _kind(leaf: Any) -> Any:
    return ("tensor", leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _rows_only(output: Any, samples: int) -> bool:
    leaves = flatten(output)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
    return plain and bool(tensors) and all(t.dim() and len(t) == samples for t in tensors)


def _ambiguous(output: Any, samples: int) -> bool:
    """Whether another dimension is that of the samples, too."""
    return any(samples in leaf.shape[1:] for leaf in flatten(output)[0] if isinstance(leaf, Tensor))


def _agree(whole: Any, parts: Any) -> bool:
    """Whether two outputs are the same but for rounding."""
    (one, spec), (other, found) = flatten(whole), flatten(parts)
    return spec == found and all(map(_near, one, other))


def _near(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    x, y = torch.nan_to_num(a.double().cpu()), torch.nan_to_num(b.double().cpu())
    return bool((x - y).abs().max() <= ROUNDING * x.abs().max())


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
