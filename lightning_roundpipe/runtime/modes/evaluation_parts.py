"""Evaluation in microbatches: cuts the calls of models, to give all workers something to do.

The step itself runs once, on the whole batch, on the calling thread. `Parting` cuts a call of a model only where the
result is the same but for rounding:

    first call of its kind ── runs in parts, by the layer calls that are expected ── [1]
        it draws, logs, keeps or changes something ── that is put back; [2]
        it does not call the layers that are expected, in their order ── [2]
    whole, examined ── draws, logs, keeps or changes something: never cut ── [2]
    the 1st, 3rd, 7th, ... call in parts, and where parts differ in a new way (`compared_parts`)
        ── the samples of two parts once more, as one part ── [3]
        the outputs differ: never cut
    later calls ── another order of layers, an error, a branch not taken at [3]: whole after all ── [4]

A call that passes [1] or [2] leaves nothing behind, so a failed attempt in parts can be repeated whole. A call may be
given a key-value cache, as in ``generate`` (`parted_caches`). A model may return tensors with a row for each sample,
caches that it has filled, and losses, if the function that computed them tells how those of the parts combine
(`known_losses`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.planning.costs import CallCost, Costs
from lightning_roundpipe.planning.forward_plan import ForwardPlan, plan_forward
from lightning_roundpipe.planning.memory import BESIDE
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
from lightning_roundpipe.runtime.modes.call_effects import CallEffects
from lightning_roundpipe.runtime.modes.compared_parts import Numbers, Pairs, numbers_of
from lightning_roundpipe.runtime.modes.evaluation import Evaluation
from lightning_roundpipe.runtime.modes.evaluation_step import (
    Branches,
    EvaluatedCall,
    EvaluationStep,
    is_number,
    without_caches,
)
from lightning_roundpipe.runtime.modes.model_calls import PartArguments
from lightning_roundpipe.runtime.modes.parted_caches import contents, joined, parts_of

_PLAIN = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device)
KINDS = 64
"""Kinds of calls to know at most: some models are given another number in each call."""
LOOKS = 3
"""Calls to examine at most while another dimension of an output is as long as the batch."""
ROUNDING = 1e-3
"""Tolerated difference between whole and parts, relative to the largest value: the rounding of low precision."""


@dataclass
class _CallKind:
    """What earlier calls have shown of one kind of call: one model, with arguments of the same structure and types.

    Attributes:
        cut: whether calls run in parts; None until the first comparison.
        looks: calls that ran whole and were examined.
        tried: whether the first call was tried in parts.
        trace: the layer calls that the model makes; None until one was examined.
        home: the device of the last one. Outputs of parts go there, so that user code finds them on the same device in
            every batch.
        seconds: forward time of each of them, for a sample.
        plans: the stages over them, by the sizes of the microbatches.
        calls: attempts in parts, by a known trace or successful.
        pairs: chooses the parts of each comparison.
        branches: truth values of tensors that user code branched on in compared parts, with every prefix.
    """

    cut: bool | None = None
    looks: int = 0
    tried: bool = False
    trace: Trace | None = None
    home: Device | None = None
    seconds: list[float] = field(default_factory=list)
    plans: dict[tuple[int, ...], ForwardPlan] = field(default_factory=dict)
    calls: int = 0
    pairs: Pairs = field(default_factory=Pairs)
    branches: Branches = frozenset()

    def compared(self, numbers: Numbers, parts: int) -> tuple[int, ...]:
        """Return which parts of the next attempt are compared: two in the first, the third, the seventh and so on."""
        number = self.calls + 1
        return self.pairs.next(numbers, parts) if number & (number + 1) == 0 or self.pairs.is_new(numbers) else ()

    def know(self, trace: Trace, seconds: list[float]) -> None:
        self.trace, self.seconds = trace, seconds
        self.plans.clear()


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
        self._in_layers = {id(module) for layer in engine.model.layers for module in layer.state.modules}
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
        if len(sizes) < 2 or torch.is_grad_enabled() or evaluation.follows_writes or (flags := self._flags()) is None:
            return whole()
        kind = (name, repr(spec), *map(_kind, given), *flags)
        known = self._known.get(kind) or _CallKind()
        if known.cut is False or (kind not in self._known and len(self._known) >= KINDS):
            return whole()
        self._known[kind] = known
        with torch._C.DisableTorchFunction():
            numbers = numbers_of(leaves, sizes)
        if known.trace is None:
            output = self._try(known, name, whole, numbers, len(sizes))  # [1]
            if output is None:
                return self._look(known, whole, samples)  # [2]
        else:
            compared = known.compared(numbers, len(sizes))
            with torch._C.DisableTorchFunction():
                effects = CallEffects(self._engine) if compared else None
            output = self._in_parts(known, name, whole, compared)  # [4]
            with torch._C.DisableTorchFunction():
                has_effects = effects is not None and effects.found()  # which the examined call did not have
                if effects is not None and has_effects:
                    effects.undo()
            if output is None or not output.agrees or has_effects:
                if output is not None or known.cut is None:
                    self._decide(known, name, False)
                return whole()
        if output.compared:
            self._decide(known, name, True)
            known.pairs.note(numbers, output.compared)
        self.expected = True
        output.keep_cache()
        return output.whole

    def _decide(self, known: _CallKind, name: str, agrees: bool) -> None:
        """Set whether this kind is cut. A failure in parts decides only at the first comparison.

        Later it may be an exception of this batch.
        """
        earlier, known.cut = known.cut, agrees
        if agrees and not earlier:
            self._engine.hints.of_evaluation(name)
        elif earlier and not agrees:
            self._engine.hints.of_uneven_evaluation(name)

    def _flags(self) -> list[Any] | None:
        """Return the attributes by which code between layers chooses what to do: public ones, truth values and text.

        Returns:
            The values in the order of modules. None if a module is in training mode, or has a forward hook, which would
            run once for each part.
        """
        hooks = torch.nn.modules.module
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return None
        found: list[Any] = []
        for module in self._engine.model.module.modules():
            if module.training or module._forward_hooks or module._forward_pre_hooks:
                return None
            if id(module) not in self._in_layers:
                attributes = vars(module).items()
                found += [v for name, v in attributes if type(v) in (bool, str) and not name.startswith("_")]
        return found

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

    def _try(self, known: _CallKind, name: str, whole: _Whole, numbers: Numbers, parts: int) -> _Parted | None:
        """Make the first call in parts, by the layer calls that are expected.

        Args:
            known: what is known of its kind.
            name: the model's name.
            whole: the call.
            numbers: what tells its samples apart.
            parts: how many parts it has.

        Returns:
            The output; None if nothing is known yet, or the parts differ from the whole, which decides. What the
            attempt has changed is put back.
        """
        if known.tried or not (expected := self._expected(name, whole)):
            return None
        known.tried = True
        with torch._C.DisableTorchFunction():
            effects = CallEffects(self._engine)
        if not effects.undoable:
            return None
        known.know(trace_of(layer for layer, _ in expected), [seconds for _, seconds in expected])
        known.home = None
        output = self._in_parts(known, name, whole, known.compared(numbers, parts))
        with torch._C.DisableTorchFunction():
            if output is not None and output.clean and not effects.found():
                if output.agrees:
                    return output
                self._decide(known, name, False)
            else:
                known.trace, known.calls, known.branches, known.pairs = None, 0, frozenset(), Pairs()
            effects.undo()
        return None

    def _expected(self, name: str, whole: _Whole) -> list[tuple[HostLayer, float]]:
        """Return the layers that the model probably calls, in order, each with its time for a sample, by its weights.

        Those are training's calls, if there is a trace of it; else each layer once, in the order of their definition.
        """
        trace, layers = self._engine.learned.trace, self._engine.model.layers
        rates = nominal(self._engine.worker_pool.accelerator or "cpu")
        a_weight_s = 2.0 * _rows_of_a_sample(whole) / rates.flops["fp32"]
        called = layers if trace is None else [call.layer for call in trace.calls]
        found = [(layer, a_weight_s * _multiplied(layer.module)) for layer in called]
        root = self._engine.model.module
        model = dict(root.named_modules()).get(name, root)  # the LightningModule goes by the name of its class
        within = {id(module) for module in model.modules()}
        return [(layer, seconds) for layer, seconds in found if id(layer.module) in within]

    def _look(self, known: _CallKind, whole: _Whole, samples: int) -> Any:
        """Make the call whole, and find out whether calls of its kind can be cut."""
        module: Any = self._engine.model.module
        evaluation = whole.evaluation
        if known.cut is not None:
            return whole()
        with torch._C.DisableTorchFunction():
            effects = CallEffects(self._engine)
        first = evaluation.calls
        layers: list[tuple[HostLayer, Forward]] = []
        evaluation.looked_at = layers
        logged: list[Any] = []
        with log_as(module, _noting(module.log, logged)):
            output = whole()
        evaluation.looked_at = None
        known.looks += 1
        with torch._C.DisableTorchFunction():
            left = effects.found() or any(forward.side_outputs or forward.mutated for _, forward in layers)
        if left or logged or not layers or evaluation.in_place or not self._can_merge(output, samples, evaluation):
            known.cut = False
        elif not _ambiguous(output, samples):
            self._settle()  # what has been timed has ended
            seconds = evaluation.recorder.call_seconds()
            times = [min(seconds.get(("forward", 0, first + i), [0.0])) for i in range(len(layers))]
            known.know(trace_of(layer for layer, _ in layers), [taken / samples for taken in times])
            known.home = evaluation.device
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

    # -- in parts -----------------------------------------------------------------------------------------------------

    def _in_parts(self, known: _CallKind, name: str, whole: _Whole, compared: tuple[int, ...]) -> _Parted | None:
        """Return the output; None if the call cannot be made in parts.

        Args:
            known: what is known of calls of this kind.
            name: the model's name.
            whole: the call.
            compared: the parts whose samples also run as one part, which comes last; none if there is no comparison.
        """
        engine, evaluation, trace = self._engine, whole.evaluation, known.trace
        assert trace is not None
        known.calls += 1
        evaluation.drop_foreseen()  # a call in parts uploads its own stages
        call = EvaluatedCall(name, 0, engine.thread_state())
        call.settle = self._settle
        with torch._C.DisableTorchFunction(), interrupts_allowed(False):
            try:
                evaluation.surroundings.refuse(name)
                parts = call.split_with_cache(
                    whole.args, whole.kwargs, self._sizes_of, engine.model.bucket_of, evaluation.locate
                )
                sizes, few = list(call.sizes), sum(call.sizes[part] for part in compared)
                if compared:
                    parts, sizes = [*parts, self._few(call, whole, compared)], [*sizes, few]
            except (ValueError, RoundPipeError):
                return None
            step = EvaluationStep(engine, evaluation, trace, self._plan(known, sizes), sizes, known.branches, compared)
            given = [PartArguments(part, copied=True) for part in parts]
            with log_as(engine.model.module, step.give_up):
                step.run_parts(call, whole.function, [part.arguments for part in given])
            try:
                if step.unsplittable or any(part.are_changed() for part in given):
                    return None
                known.branches = step.branches
                if known.home is None:  # the trace and its times are only what was expected
                    self._know_made(known, step, sizes, evaluation)
                evaluation.go_on(known.home)
                agrees = True
                if compared:
                    alone = call.pop_last(few).merge(known.home, lambda *_: None)  # [3]
                    agrees = _agree(alone, call.only(compared).merge(known.home, lambda *_: None))
                merged = call.merge(known.home, lambda *_: None)
                return _Parted(merged, compared, agrees, not call.alike, call.keep_cache)
            except RoundPipeError:
                return None  # `merge` cannot put the outputs together
            finally:
                step.release()

    def _know_made(self, known: _CallKind, step: EvaluationStep, sizes: list[int], evaluation: Evaluation) -> None:
        """Set the trace and its times to what the parts have done."""
        assert known.trace is not None
        self._settle()
        seconds, made = evaluation.recorder.call_seconds(), step.made()
        taken = [
            [seconds.get(("forward", m, index), [0.0])[-1] / size for m, size in enumerate(sizes)] for index in made
        ]
        calls = [known.trace.calls[index] for index in made]
        known.know(Trace(calls), [min(times) for times in taken])
        known.home = evaluation.worker_of(calls[-1].layer).device

    def _few(self, call: EvaluatedCall, whole: _Whole, compared: tuple[int, ...]) -> tuple[Any, Any]:
        """Return the arguments of the call with the samples of the compared parts alone, as one part."""
        leaves, spec = flatten((whole.args, whole.kwargs))
        part = call.part_of_parts(*without_caches(leaves, spec), compared, self._engine.model.bucket_of)
        if call.cache is None:
            return part
        caches = parts_of(call.cache, call.sizes)
        assert caches is not None, "the call was cut"
        self._settle()
        cache = joined([caches[index] for index in compared], [call.sizes[index] for index in compared])
        filled = [cache if is_cache(old) else new for old, new in zip(leaves, flatten(part)[0], strict=True)]
        args, kwargs = unflatten(filled, spec)
        return args, kwargs

    def _settle(self) -> None:
        for device in self._engine.worker_pool.devices:
            device.compute.synchronize()

    def _plan(self, known: _CallKind, sizes: list[int]) -> ForwardPlan:
        """Return a plan for parts of these sizes, whose stages fit the arenas that there are, next to each other."""
        assert known.trace is not None
        if (made := known.plans.get(tuple(sizes))) is not None:
            return made
        rooms = [worker.arena.buffer for worker in self._engine.worker_pool.workers]
        calls = zip(known.trace.calls, known.seconds, strict=True)
        costs = Costs(
            tuple(
                CallCost(call.layer.name, max(seconds, 1e-9), 0.0, call.layer.nbytes, 0, 0, 0, needs_backward=False)
                for call, seconds in calls
            )
        )
        size = min((room.numel() // BESIDE for room in rooms if room is not None), default=None)
        workers = len(rooms)
        rates = dataclasses.replace(nominal(self._engine.worker_pool.accelerator or "cpu"), workers=workers)
        turn_s = rates.hop_s + rates.turn_s if known.home is not None else 0.0  # expected times only compare calls
        plan = known.plans[tuple(sizes)] = plan_forward(costs, workers, sizes, rates.link(rates).upload, turn_s, size)
        return plan


@dataclass
class _Parted:
    """The output of a call in parts.

    Attributes:
        whole: that of all samples.
        compared: the parts that were compared with their samples as one part, if any.
        agrees: whether these gave the same; True if nothing was compared.
        clean: whether every output has a row for each sample or is a known loss.
        keep_cache: lets the cache that the call was given stand for those of the parts.
    """

    whole: Any
    compared: tuple[int, ...]
    agrees: bool
    clean: bool
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


def trace_of(layers: Iterable[HostLayer]) -> Trace:
    trace = Trace()
    for layer in layers:
        trace.append(layer)
    return trace


def _multiplied(module: nn.Module) -> int:
    """Return how many weights each token is multiplied by: all but embeddings, which are looked up."""
    modules = [m for m in module.modules() if not isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return sum(p.numel() for m in modules for p in m.parameters(recurse=False))


def _rows_of_a_sample(whole: _Whole) -> float:
    """Return how many tokens, or rows of features, an argument has for each sample, at most."""
    tensors = [leaf for leaf in flatten((whole.args, whole.kwargs))[0] if isinstance(leaf, Tensor) and leaf.numel()]
    rows = [t.numel() / len(t) / (t.shape[-1] if t.is_floating_point() else 1) for t in tensors if t.dim() > 1]
    return max(rows, default=1.0)


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
    x, y = a.double(), b.double()
    differ = (x != y) & ~(x.isnan() & y.isnan())  # what masks have filled in is the same, and says nothing of the scale
    if not bool(differ.any()):
        return True
    x, y = x[differ], y[differ]
    return bool((x - y).abs().max() <= ROUNDING * x.abs().max() < math.inf)
