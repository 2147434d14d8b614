"""Layer calls in a backward of user code, such as those of a `torch.utils.checkpoint` around layers.

In the forward, the checkpoint's function calls a layer like any other code. In the backward it calls it once more:

    the layer runs in the turn that the microbatch holds, on its worker ── [1]
    its weights are those of the open slot, or are brought for this run alone ── [2]
    it draws what the call of the forward has drawn, which the state of the generator tells ── [3]
    its outputs hang on a node that recomputes the layer and runs its backward if a gradient arrives ── [4]

A checkpoint that is not reentrant only takes the values that the function saves. The call of the forward is on the tape
and gets the gradients; [4] never happens. A reentrant one has made the call of the forward without grad, so that it is
not on the tape, and differentiates what it computes now before it returns: by then [4] must be over.

[1] User code's backward runs on the microbatch's own thread (`graph_cuts.driven_backward`), which waits for the worker.
If one of autograd's threads waited, the worker could run no backward on the device of that thread.

[3] Each section of user code has a seed of its own. A checkpoint restores the generator's state of the forward, so the
seed that the generator was given last names the section, and with it the call that follows.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.runtime.core.activation_store import ActivationStore
from lightning_roundpipe.runtime.core.call import Call, Forward
from lightning_roundpipe.runtime.core.context import EngineContext, StepSpec
from lightning_roundpipe.runtime.core.outputs import deliver
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.sections import UserCodeSections
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.faults.notes import FaultPlace, noted
from lightning_roundpipe.runtime.layer_calls.arguments import flatten_call
from lightning_roundpipe.runtime.layer_calls.shared_memory import SharedOutputs
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.user_code.bypassed_gradients import Lender
from lightning_roundpipe.runtime.user_code.graph_cuts import ANCHOR
from lightning_roundpipe.runtime.user_code.mode import UserCodeMode
from lightning_roundpipe.runtime.user_code.rng import Seed, derive, yielded

T = TypeVar("T")
_Differentiate = Callable[[Sequence[Tensor | None]], list[Tensor | None]]

_NOT_TRACED = -1
"""Position in the trace of a repeated call."""


class MadeCall(NamedTuple):
    """A call of the forward: its layer and seed, and the device on which user code went on behind it."""

    layer: HostLayer
    seed: Seed
    device: Device


class Microbatch(Lender, Protocol):
    """What repeated calls need of their microbatch.

    Attributes:
        mode: the mode of its user code.
    """

    mode: UserCodeMode

    def add_gradient(self, master: nn.Parameter, grad: Tensor) -> None:
        """Add a gradient, on the host, of a parameter that a repeated call has computed with."""


class RepeatedCalls:
    """Runs the layer calls of one microbatch's user code in backward.

    Args:
        engine: the parts of the engine that outlive the step.
        step: the step that the microbatch belongs to.
        index: number of the microbatch.
        segments: its sections of user code.
        activations: its store of activations.

    Attributes:
        made: the calls of the forward, in order: each ends the section of user code of the same number.
        segments: see above.
    """

    def __init__(
        self,
        engine: EngineContext,
        step: StepSpec,
        index: int,
        segments: UserCodeSections,
        activations: ActivationStore,
    ) -> None:
        self.made: list[MadeCall] = []
        self._engine, self._step, self._index = engine, step, index
        self.segments, self._activations = segments, activations
        self._sections: dict[int, int] = {}
        """The numbers of sections by their derived seeds."""

    def call(
        self, microbatch: Microbatch, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any],
        slot: Slot | None, watched: SharedOutputs,
    ) -> tuple[Any, Forward]:  # fmt: skip
        """Run a layer call in a backward of user code.

        Args:
            microbatch: the microbatch.
            layer: the layer.
            args: its positional arguments.
            kwargs: its keyword arguments.
            slot: the slot that the microbatch ran in last.
            watched: see `hand_back`.

        Returns:
            The layer's output as user code sees it, and the results of the call.

        Raises:
            RoundPipeError: if the microbatch has no turn.
        """
        if slot is None or not slot.is_turn_of(self._index):
            raise RoundPipeError(
                f"layer {layer.name!r} was called in a backward between two turns of its microbatch, by a hook, or "
                "after the microbatch has left out its last layers. Call it in training_step, or in a checkpoint there."
            )
        self.segments.read_late(layer)
        position = self._position(layer)
        made = self.made[position] if position is not None else self._last_of(layer)
        state = layer.state.current()
        leaves, spec = flatten_call(args, kwargs, state.carried if state else {})
        leaves = microbatch.mode.stand_ins(leaves)
        call = Call(
            _NOT_TRACED, layer, self._index, spec, [], [isinstance(x, Tensor) and x.requires_grad for x in leaves],
            layer.trainable(), self._engine.thread_state(), state, made.seed, contextvars.copy_context(), leaves,
            graph=True, repeated=True, lender=microbatch,
        )  # fmt: skip
        worker, executor = self._worker_of(slot), self._engine.executors[slot.worker]
        call.leaves = self._placed(leaves, worker)

        def forward() -> tuple[list[Any], Forward]:
            # User code may write to the arguments before the backward, which it may also do without.
            inputs = [x.clone() if isinstance(x, Tensor) else x for x in call.leaves]
            with worker.weights_of(layer, slot), noted(lambda: self._place(layer, slot, "recomputation")):
                return inputs, executor.forward(slot, call, self._activations)

        inputs, result = self._run(worker, forward, position)
        sides = {key: flat.tensors() for key, flat in result.side_outputs.items()}
        outputs = [*result.tensors(), *(t for tensors in sides.values() for t in tensors)]
        flags = [t.requires_grad for t in outputs]
        aliases = [self._moved(t, worker, made.device) for t in outputs]
        if call.thread_state.grad and any(flags):
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            recorded = RecordedCall(
                _NOT_TRACED, layer, self._index, spec, inputs, call.requires_grad, call.thread_state, state, made.seed,
                call.context, mutates=frozenset(result.mutated), trainable=call.trainable,
                kinds=[(t.shape, t.dtype) for t in outputs],
                side_outputs={key: len(tensors) for key, tensors in sides.items()},
            )  # fmt: skip
            homes = [self._home_of(t, worker) for t in tensors]
            differentiate = functools.partial(self._differentiate, microbatch, recorded, slot, homes)
            aliases = list(_apply(ANCHOR, differentiate, aliases, flags, *tensors))
        through = {key: tuple(t.requires_grad for t in tensors) for key, tensors in sides.items()}
        return deliver(call, result, aliases, through, args, kwargs, watched), result

    def _differentiate(
        self, microbatch: Microbatch, recorded: RecordedCall, slot: Slot, homes: list[Device | None],
        grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:  # fmt: skip
        """Recompute a repeated call and run its backward, in the turn of the call [4].

        Args:
            microbatch: the microbatch.
            recorded: the call.
            slot: the slot that it ran in.
            homes: the devices of its tensor arguments.
            grads: the gradients of its outputs.

        Returns:
            The gradients of its tensor arguments.
        """
        layer = recorded.layer
        if not slot.is_turn_of(self._index):
            raise RoundPipeError(
                f"a gradient reached a call of layer {layer.name!r} that user code has made in a backward, after that "
                "backward. Detach what is kept."
            )
        worker, executor = self._worker_of(slot), self._engine.executors[slot.worker]
        recorded.grads = [[] if g is None else [(g, self._home_of(g, worker))] for g in grads]

        def backward() -> tuple[list[Tensor | None], dict[int, Tensor]]:
            with worker.weights_of(layer, slot), noted(lambda: self._place(layer, slot, "backward")):
                return executor.repeated_backward(slot, recorded, self._activations, microbatch)

        found, of_parameters = self._run(worker, backward, None)
        for position, grad in of_parameters.items():
            host = self._activations.transfer(grad, worker.device, None)
            microbatch.add_gradient(layer.masters[position], host)
        return [
            None if g is None else self._activations.transfer(g, worker.device, home)
            for g, home in zip(found, homes, strict=True)
        ]

    def _run(self, worker: Worker, function: Callable[[], T], position: int | None) -> T:
        """Return ``function()``, run on the thread of ``worker`` [1]. Then let user code draw as behind a made call.

        Args:
            worker: the worker.
            function: runs a layer.
            position: of the call that is repeated; None: user code draws as before.
        """
        with yielded(self._engine.worker_pool.devices) as held:
            result = worker.run(function, self._step.cancel_scope)
        if position is not None and held:
            seed = derive(*self.segments.seed_of(position + 1))
            for generator in (torch.default_generator, self.made[position].device.generator):
                generator.manual_seed(seed)
        return result

    def _position(self, layer: HostLayer) -> int | None:
        """Return which call of the forward is repeated; None if the generator does not tell [3]."""
        for number in range(len(self._sections), len(self.made)):
            self._sections[derive(*self.segments.seed_of(number))] = number
        found = self._sections.get(torch.default_generator.initial_seed())
        if found is None or self.made[found].layer is not layer:
            return None
        self.segments.needs_seed(found)
        return found

    def _last_of(self, layer: HostLayer) -> MadeCall:
        """Return the layer's last call of the forward."""
        found = next((made for made in reversed(self.made) if made.layer is layer), None)
        if found is None:
            raise RoundPipeError(
                f"layer {layer.name!r} was called in a backward of user code, and not before: call it in training_step."
            )
        return found

    def _worker_of(self, slot: Slot) -> Worker:
        return self._engine.worker_pool.workers[slot.worker]

    def _place(self, layer: HostLayer, slot: Slot, phase: str) -> FaultPlace:
        return FaultPlace(layer.title, phase, self._index, slot, self._worker_of(slot).device)

    def _home_of(self, tensor: Tensor, worker: Worker) -> Device | None:
        return self._engine.worker_pool.locate(tensor, worker.device)

    def _moved(self, output: Tensor, worker: Worker, target: Device) -> Tensor:
        """Return an alias of ``output`` without its graph, on the device on which the forward has had it."""
        home = self._home_of(output, worker)
        return output.data if home is None else self._activations.transfer(output.data, home, target)

    def _placed(self, leaves: Sequence[Any], worker: Worker) -> list[Any]:
        """Return ``leaves`` with host copies in place of the tensors that are not on ``worker``."""
        homes = [self._home_of(x, worker) if isinstance(x, Tensor) else worker.device for x in leaves]
        save = self._activations.save
        return [x if home is worker.device else save(x, home) for x, home in zip(leaves, homes, strict=True)]


class _NodeFunction(torch.autograd.Function):
    """The node of a repeated call. It saves no tensor: a checkpoint counts them."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, differentiate: _Differentiate, aliases: list[Tensor], flags: list[bool],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.differentiate = differentiate
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(a for a, flag in zip(aliases, flags, strict=True) if not flag))
        return tuple(aliases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch._C.DisableTorchFunction():
            return None, None, None, None, *ctx.differentiate(grads)


_apply: Any = super(torch.autograd.Function, _NodeFunction).apply
"""The C++ ``apply``, as for `graph_cuts.boundary`."""
