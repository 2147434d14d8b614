"""Delivery of a call's results to user code: outputs connected to the tape, writes to inputs, side outputs.

`check_inputs` and `refuse_hooked_module` run before the call's backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.messages import plural
from lightning_roundpipe.planning.crossing import Crossing
from lightning_roundpipe.runtime.core.call import Call, Forward
from lightning_roundpipe.runtime.core.offloading import mark_output, may_leave
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.trace import TracedCall
from lightning_roundpipe.runtime.layer_calls.output_collectors import hand_over
from lightning_roundpipe.runtime.layer_calls.shared_memory import SharedOutputs
from lightning_roundpipe.runtime.layer_calls.side_outputs import Key, put, refuse_new_gradients
from lightning_roundpipe.runtime.user_code.graph_cuts import boundary
from lightning_roundpipe.runtime.user_code.inference_writes import touched


def learn(
    call: Call, traced: TracedCall, forward: Forward, crossing: Crossing, owner: int, *, taped: bool, made_bytes: int
) -> None:
    """Write what the first batch shows about a call to ``traced``.

    Args:
        call: the call as it ran.
        traced: its entry in the trace.
        forward: its results.
        crossing: tracks which tensors the microbatch's calls share.
        owner: number of the microbatch's `ActivationStore`.
        taped: whether the call has an entry for the tape.
        made_bytes: bytes that user code has made and holds.
    """
    traced.flags = tuple(t.requires_grad for t in forward.tensors())
    side_outputs = {key: tuple(t.requires_grad for t in flat.tensors()) for key, flat in forward.side_outputs.items()}
    traced.side_outputs = {key: flags for key, flags in side_outputs.items() if any(flags)}
    traced.taped = taped and (any(traced.flags) or bool(traced.side_outputs))
    traced.mutates = frozenset(forward.mutated)
    if call.measure:
        traced.kept_bytes = traced.forward_bytes = forward.activation_bytes
        given = [*forward.tensors(), *(t for flat in forward.side_outputs.values() for t in flat.tensors())]
        stay = call.staying(traced.mutates | traced.overwritten)
        leaving = [
            t for i, t in enumerate(call.originals) if isinstance(t, Tensor) and i not in stay and may_leave(t, owner)
        ]
        traced.crossed = crossing.see(_strided(call.originals), _strided(given), leaving, made_bytes)
        traced.boundary_bytes = traced.crossed.input_bytes - sum(size for _, size in traced.crossed.shared)
        traced.boundary_bytes += forward.chosen.nbytes if forward.chosen is not None else 0


def _strided(leaves: Iterable[Any]) -> list[Tensor]:
    """Return the strided tensors among ``leaves``; others have no storage to count."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def hand_back(
    call: Call,
    recorded: RecordedCall | None,
    traced: TracedCall,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    watched: SharedOutputs,
    owner: int = 0,
) -> tuple[Any, bool]:
    """Deliver a forward's results to user code.

    Args:
        call: the call as it ran.
        recorded: its entry for the tape, which is connected to the outputs; None if gradients cannot flow through it.
        traced: what the first batch has shown about the call.
        forward: its results.
        args: positional arguments as user code passed them; lists and dicts among them are updated in place.
        kwargs: keyword arguments, likewise.
        watched: takes the outputs that share memory, to which user code must not write.
        owner: number of the microbatch's `ActivationStore`; 0: the outputs stay on their device.

    Returns:
        The layer's output as user code sees it, and whether ``recorded`` belongs on the tape.
    """
    outputs = forward.tensors()
    through: dict[Key, tuple[bool, ...]] = {}
    if recorded is not None and forward.side_outputs:
        through = {key: flags for key, flags in traced.side_outputs.items() if key in forward.side_outputs}
        for key, side in through.items():
            tensors = forward.side_outputs[key].tensors()
            _refuse_other_number(call, len(tensors), len(side))
            outputs += tensors
    if recorded is None or not (any(traced.flags) or through):
        aliases = outputs if call.thread_state.inference else [t.data for t in outputs]
    else:
        flags = [*traced.flags, *(flag for side in through.values() for flag in side)]
        if call.kept:
            assert forward.detached_inputs is not None
            refuse_new_gradients(forward.side_outputs, through, call.layer.name)
            recorded.graph = (forward.detached_inputs, outputs)
            flags = [t.requires_grad for t in outputs]
        _refuse_other_number(call, len(outputs), len(flags))
        recorded.mutates = frozenset(forward.mutated)
        recorded.side_outputs = {key: len(side) for key, side in through.items()}
        recorded.buffers, recorded.choices = forward.buffers, forward.choices
        recorded.kinds = [(t.shape, t.dtype) for t in outputs]
        aliases = boundary(recorded, outputs, flags)
    for alias in aliases if owner else ():
        mark_output(alias, owner)
    taped = recorded is not None and bool(recorded.grads)
    return deliver(call, forward, aliases, through, args, kwargs, watched), taped


def deliver(
    call: Call,
    forward: Forward,
    aliases: list[Tensor],
    through: Collection[Key],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    watched: SharedOutputs,
) -> Any:
    """Return the layer's output as user code sees it, and apply what else the layer has done.

    Args:
        call: the call as it ran.
        forward: its results.
        aliases: the tensors of the results, connected to the graph: those of ``forward.tensors()``, then those of the
            side outputs in ``through``.
        through: side outputs that gradients pass through.
        args, kwargs, watched: see `hand_back`.
    """
    outputs_shared, inputs_shared = forward.overlapping
    if not (forward.mutated or forward.side_outputs or outputs_shared or inputs_shared):
        return hand_over(forward.output.value(aliases, call.originals))
    rest = iter(aliases)
    returned = [next(rest) for _ in forward.output.tensors()]
    if forward.mutated:
        with torch.set_grad_enabled(call.thread_state.grad):
            for position in sorted(forward.mutated):
                # Repeat the layer's write on user code's own tensor, so that autograd differentiates through it.
                call.originals[position].copy_(next(rest))
                touched(call.originals[position])
    if outputs_shared or inputs_shared:
        shared = [returned[i] for i in outputs_shared] + [call.originals[i] for i in inputs_shared]
        watched.add(shared, call.layer.name)
    side_outputs: dict[Key, Any] = {}
    for key in (*through, *(k for k in forward.side_outputs if k not in through)):
        flat = forward.side_outputs[key]
        tensors = [next(rest) for _ in flat.tensors()] if key in through else [t.data for t in flat.tensors()]
        side_outputs[key] = flat.value(tensors, call.originals)
    put(call.layer.state.modules, (args, kwargs), side_outputs)
    return hand_over(forward.output.value(returned, call.originals))


def check_inputs(recorded: RecordedCall, traced: TracedCall, *, learning: bool) -> None:
    """Check, before a call's backward, whether user code has overwritten inputs that its graph computes from.

    The first batch remembers such inputs, so that later graphs start from clones of them.

    Raises:
        RoundPipeError: if a later batch overwrites an input for the first time.
    """
    overwritten = recorded.overwritten() - traced.mutates
    recorded.given.clear()
    if learning:
        traced.overwritten |= overwritten
        if overwritten:
            recorded.graph = None  # its backward would compute from the overwritten values: recompute instead
    elif overwritten:
        raise RoundPipeError(
            f"code between layers wrote in place to argument {min(overwritten)} of layer {recorded.layer.name!r} after "
            "the call, which it did not do in the first batch: gradients would be wrong. Write out of place."
        )


def refuse_hooked_module(recorded: RecordedCall) -> None:
    """Raise if a layer has backward hooks and its output's gradient arrived in several parts.

    Hooks on the layer itself run in user code, once for each part.
    """
    module = recorded.layer.module
    if recorded.grad_arrivals > 1 and (module._backward_hooks or module._backward_pre_hooks):
        raise RoundPipeError(
            f"layer {recorded.layer.name!r} has backward hooks, which would be called with parts of its gradient, "
            "because what it returns goes to several layers. Put them on a module inside it."
        )


def _refuse_other_number(call: Call, now: int, before: int) -> None:
    if now != before:
        raise RoundPipeError(
            f"layer {call.layer.name!r} returned {plural(now, 'tensor')} where the first batch had {before}: with "
            "several microbatches it must return as many each time. Set overlap=False."
        )
