"""Layer calls in a backward of user code, such as those of a `torch.utils.checkpoint` around layers.

In the forward, the checkpoint's function calls a layer like any other code. In the backward it calls it once more:

    the layer runs in the turn that the microbatch holds ── it draws what the call of the forward has drawn ── [1]
    its outputs hang on a node that recomputes the layer and runs its backward if a gradient arrives ── [2]

A checkpoint that is not reentrant only takes the values that its function saves. The call of the forward is on the tape
and gets the gradients; [2] never happens. A reentrant one has made the call of the forward without grad, so that it is
not on the tape, and differentiates what it computes now before it returns: by then [2] must be over.

Which call is repeated [1] the generator tells. Each section of user code has a seed of its own, and a checkpoint
restores the generator's state of the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.devices import Device
from lightning_roundpipe.engine.executor import LayerCall
from lightning_roundpipe.engine.layer_calls import Tape
from lightning_roundpipe.engine.randomness import Seed, derive
from lightning_roundpipe.engine.trace import TracedCall
from lightning_roundpipe.memory.host_layer import HostLayer

_ANCHOR = torch.empty(0, requires_grad=True)


def repeated(layer: HostLayer, calls: Sequence[TracedCall], seed_of: Callable[[int], Seed], *, draws: bool) -> int:
    """Return which of the ``calls`` is repeated [1]; the layer's last one if the generator does not tell.

    ``seed_of`` returns the seed of the section of user code in front of a call.
    """
    mine = [number for number, call in enumerate(calls) if call.layer is layer]
    if not mine:
        raise RoundPipeError(
            f"layer {layer.name!r} was called in a backward of user code, and not before: call it in training_step."
        )
    now = torch.default_generator.initial_seed()
    found = next((number for number in mine if derive(*seed_of(number)) == now), None)
    if found is None and draws and len(mine) > 1:
        raise RoundPipeError(
            f"layer {layer.name!r}, which draws random numbers, was called several times and again in a backward, and "
            "nothing tells which call is repeated. Let checkpoints preserve the state of the random generators."
        )
    return found if found is not None else mine[-1]


class _Node(torch.autograd.Function):
    """The outputs of a repeated call. It saves no tensor: a checkpoint counts them."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, differentiate: Callable[..., list[Tensor | None]], inner: list[Any],
        outputs: list[Tensor], *inputs: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.differentiate, ctx.inner = differentiate, inner
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, i in zip(outputs, inner, strict=True) if i is None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch._C.DisableTorchFunction():
            for inner, gradient in zip(ctx.inner, gradients, strict=True):
                if inner is not None and gradient is not None:
                    inner[0].arrive(inner[1], gradient)
            return None, None, None, None, *ctx.differentiate()


_connect: Any = super(torch.autograd.Function, _Node).apply


def call_again(calls: Tape, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat one of the ``calls`` of the forward within a backward of user code; the optimizer waits for it."""
    context, spec, turns, sections = calls.context, calls.spec, calls.turns, calls.sections
    if spec.overlaps and layer.bucket not in context.learned.read_by_user_code:
        raise RoundPipeError(
            f"layer {layer.name!r} is called in a backward, which no earlier batch did, while the optimizer may be "
            "changing its weights. Let it be called so from the first batch on."
        )
    context.learned.calls_in_backward = True
    calls.weights.read.add(layer.bucket)
    traced, planned = calls.trace.calls, turns.slots.trace
    again = repeated(layer, traced, sections.seed_of, draws=layer.index in context.pool.randomness.draws)
    call = calls.capture(layer, args, kwargs, traced[again].use)
    call.index = again + len(planned.calls if planned is not None else traced)
    call.reconnect = functools.partial(_reconnect, calls, call, traced[again], call.inputs.arguments.tensors)
    tensors = call.inputs.arguments.tensors
    sections.exit()
    outcome = calls.forward(call, taped=call.is_taped)
    layer.seen.sets_attributes |= outcome.sets_attributes
    sections.enter(again + 1)
    return calls.deliver(call, outcome, tensors)


def _reconnect(
    calls: Tape, call: LayerCall, traced: TracedCall, inputs: Sequence[Tensor], outputs: list[Tensor], device: Device
) -> list[Tensor]:
    """Return the outputs of a repeated call on the device of those of the forward, connected to its inputs [2]."""
    home = calls.turns.device = calls.context.pool.devices[traced.worker]
    moved = [calls.moved(t.detach(), device, home) for t in outputs]
    if not call.environment.thread_state.grad or not any(t.requires_grad for t in outputs):
        return moved
    call.gradients.home = home
    call.gradients.expected = True
    differentiate = functools.partial(_differentiate, calls, call)
    ends = [(t.grad_fn.gradients, t.output_nr) if t.grad_fn is not None else None for t in outputs]  # type: ignore[attr-defined]
    needed = [t for t, needs in zip(inputs, call.inputs.needs, strict=True) if needs]
    with torch.enable_grad():
        return list(_connect(_ANCHOR, differentiate, ends, moved, *needed))


def _differentiate(calls: Tape, call: LayerCall) -> list[Tensor | None]:
    """Run the backward of a repeated call, whose gradients have come, within the backward of user code."""
    turns, sections = calls.turns, calls.sections
    before = turns.device
    sections.exit()
    gradients, device = calls.through(call)
    moved = [
        None if g is None else calls.moved(g, device, edge.home)
        for g, edge in zip(gradients, call.inputs.edges, strict=True)
    ]
    turns.device = before
    call.slot = None
    sections.enter()
    return moved
