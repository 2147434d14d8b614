"""Execution of plain calls: those that only compute outputs from their arguments and weights.

Most layer calls of most models are plain, while everything that `LayerExecutor` looks for costs microseconds in each
call. So it looks once, and a `CallProfile` says how the call was made:

    LayerExecutor ── the layer only returned tensors of its own ──► profile ── [1]
    the same call of a later microbatch, step or validated batch fits the profile ──► PlainExecutor ── [2]
    the layer did something else than return tensors ──► `surprises`: the results take LayerExecutor's way, and the
    profile is dropped until a call is seen to be plain again ── [3]

[3] looks at all that a layer can do beside returning tensors: set attributes, write to its parameters or arguments,
register hooks or buffers, cache parametrizations, return memory that is not its own. So a plain call that stops being
plain gives the same result or error as if it had never been expected to be. What is not looked for again is what
earlier batches decide for `LayerExecutor`, too: discrete choices, parameters of other modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from lightning_roundpipe.model.replica import Replica
from lightning_roundpipe.runtime.core.call import Call, CallProfile, Forward, LayerExecution
from lightning_roundpipe.runtime.core.computing import Computing
from lightning_roundpipe.runtime.core.detached_inputs import DetachedInputs
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.layer_calls.arguments import FlatValue, OneTensor, unflatten
from lightning_roundpipe.runtime.layer_calls.output_collectors import collecting
from lightning_roundpipe.runtime.layer_calls.side_outputs import collect_attributes
from lightning_roundpipe.runtime.memory.module_buffers import ReplicaBuffers
from lightning_roundpipe.runtime.user_code.inference_writes import counting_writes, is_written
from lightning_roundpipe.runtime.user_code.interception import Inside
from lightning_roundpipe.runtime.user_code.rng import Randomness

_NOTHING = contextlib.nullcontext()


def profile_of(
    call: Call, ran: LayerExecution, result: Forward, replica: Replica, buffers: ReplicaBuffers
) -> CallProfile | None:
    """Return the profile of ``call`` if it was plain [1].

    Args:
        call: the call.
        ran: what the layer's code did.
        result: its results.
        replica: the worker's copy of the layer.
        buffers: its buffers.
    """
    layer, spec = call.layer, call.spec
    does_more = (
        result.side_outputs or result.mutated or result.overlapping[0] or result.choices or not _is_plain(ran.output)
        or buffers or replica.unregistered_tensors or replica.has_hooks()
        or layer.borrows != [] or layer.reaches_out or layer.rewritten or layer.reads_data
        or not (call.evaluates or layer.chooses is False)
    )  # fmt: skip
    modes = call.thread_state  # `locals` may hold the user's tensors; without a seed, grad is a rehearsal's
    special = call.bare or modes.locals or (modes.grad if call.evaluates else modes.inference)
    if does_more or special or spec.carried is not None or not spec.is_immutable:
        return None
    return CallProfile(spec.arguments, call.state, modes, call.recomputed)


class PlainExecutor:
    """Runs the code of plain calls on one worker [2].

    It has many collaborators because it is `LayerExecutor` without what plain calls do not need: what is left still
    takes the call, its slot, weights, seed, modes and tape.

    Args:
        worker: the worker on whose thread this runs.
        randomness: returns the object that seeds calls.
    """

    def __init__(self, worker: Worker, randomness: Callable[[], Randomness]) -> None:
        self._worker = worker
        self._device = worker.device
        self._randomness = randomness

    def run(
        self,
        slot: Slot,
        call: Call | RecordedCall,
        index: int,
        replica: Replica,
        leaves: list[Any],
        kind: str,
        *,
        graph: bool,
    ) -> LayerExecution:
        """Run the layer's code under the modes, context variables and random state that were active at the call.

        Args:
            slot: the slot whose turn it is.
            call: the call.
            index: position of the call in the trace.
            replica: the worker's copy of the layer.
            leaves: its arguments on the worker.
            kind: kind of event to record.
            graph: whether to build a graph.

        Returns:
            The results. If they have ``surprises``, the caller looks at them as at those of any other call [3].
        """
        worker, device, layer = self._worker, self._device, call.layer
        cache = parametrize._cache
        replica.apply(call.state)
        replica.train(call.trainable)
        grad, inference = call.thread_state.grad and graph, call.thread_state.inference
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors, detached_inputs = [leaves[i] for i in positions], None
        versions = [p._version for p in replica.parameters]
        before = replica.attributes()
        computing = Computing(worker, slot, kind, index, layer, call.microbatch, Inside(layer.name))
        seeded: contextlib.AbstractContextManager[None] = _NOTHING
        if call.seed is not None:
            again = kind == "recompute"
            seeded = self._randomness().segment(layer.index, call.seed, device, layer.title, backward=again)
        with call.thread_state.entered(grad=grad), seeded:
            if grad:
                detached_inputs = DetachedInputs(layer.name)
                tensors = detached_inputs.open(tensors, [call.requires_grad[i] for i in positions])
            else:
                tensors = counting_writes(tensors, inference=inference)
            given = dict(zip(positions, tensors, strict=True))
            args, kwargs = unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], call.spec.arguments)
            counter = device.saved_counter(layer.saved_amounts, self._kind(call, leaves)) if grad else None
            with computing, _NOTHING if counter is None else counter:
                output, collected = call.context.run(collecting, replica.module.forward, *args, **kwargs)
        alone = type(output) is Tensor and output.layout is torch.strided and not collected
        flat = OneTensor(output) if alone else FlatValue.of((output, collected), given)
        if counter is not None and detached_inputs is not None:
            detached_inputs.saved = counter.held(tensors, flat.tensors())
        untouched = replica.is_untouched(before)
        ran = LayerExecution(detached_inputs, flat, {}, given, end=computing.end)
        if not untouched:
            ran.side_outputs = collect_attributes(replica, before, given, layer.name)
        ran.written = [i for i, p in enumerate(replica.parameters) if p._version != versions[i]]
        if parametrize._cache is not cache:
            layer.caches_parametrizations = True
        ran.surprises = bool(
            ran.written or ran.side_outputs or layer.caches_parametrizations
            or any(is_written(t, inference=inference) for t in tensors)
            or replica.has_hooks() or (not untouched and replica.has_registered()) or not _is_plain(flat)
            or self._share(flat.tensors(), tensors)
        )  # fmt: skip
        if ran.surprises and alone:
            ran.output = FlatValue.of((output, collected), given)  # it may be an input
        return ran

    @staticmethod
    def _kind(call: Call | RecordedCall, leaves: list[Any]) -> Hashable:
        """Return what is equal for calls that save as much for backward."""
        arguments = [(t.shape, t.dtype) if isinstance(t, Tensor) else t for t in leaves]
        return call.state, call.thread_state, *call.requires_grad, *call.trainable, *arguments

    def _share(self, outputs: list[Tensor], inputs: list[Tensor]) -> bool:
        """Return whether outputs lie in the memory of inputs, of other outputs, or of an arena."""
        taken = {t.untyped_storage().data_ptr() for t in inputs} | self._worker.addresses
        for tensor in outputs:
            address = tensor.untyped_storage().data_ptr()
            if address in taken and address:
                return True
            taken.add(address)
        return False


def _is_plain(output: FlatValue) -> bool:
    """Return whether ``output`` consists of strided tensors, and nothing else."""
    if type(output) is OneTensor:
        return True
    return not output.objects and all(
        leaf is None or (type(leaf) is Tensor and leaf.layout is torch.strided) for leaf in output.leaves
    )
