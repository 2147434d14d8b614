"""The tape: the layer calls of one microbatch that wait for their backward; `graph_cuts` says how they are joined."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_roundpipe.model.attributes import StateDiff
from lightning_roundpipe.runtime.core.detached_inputs import DetachedInputs
from lightning_roundpipe.runtime.layer_calls.discrete_ops import Choices
from lightning_roundpipe.runtime.layer_calls.recompute_check import CallFingerprint
from lightning_roundpipe.runtime.layer_calls.side_outputs import Key
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.module_buffers import BufferValue
from lightning_roundpipe.runtime.user_code.graph_cuts import GraphCut
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState


@dataclass(eq=False)
class RecordedCall(GraphCut):
    """One call of one microbatch, from its forward until its gradients have been handed on.

    Attributes:
        call: position in the trace.
        leaves: the call's flattened arguments; a tensor stands as its `HostTensor`, or as None if the graph is kept.
        requires_grad: per leaf, whether its gradient is wanted.
        mutates: positions of arguments that the layer writes to; they are outputs as well.
        given: of tensors that user code could overwrite while they are needed, (position, `witness`, version then).
        graph: the kept graph of a fused call, as (detached_inputs, outputs); ``recomputed``: of one that was recomputed
            ahead; ``failed``: what was raised when it was.
        trainable: per parameter of the layer, whether it required grad at the call.
        side_outputs: how many tensors, by side output; they are the last outputs.
        found: per output, whether its recomputation found that it requires grad.
        choices: what its forward chose, to be chosen again.
        fingerprint: what its recomputation is compared with, if it is.
    """

    call: int
    layer: HostLayer
    microbatch: int
    spec: Any
    leaves: list[Any]
    requires_grad: list[bool]
    thread_state: TorchThreadState
    state: StateDiff | None
    seed: int | None
    context: contextvars.Context
    mutates: frozenset[int] = frozenset()
    buffers: dict[int, BufferValue] = field(default_factory=dict)
    given: list[tuple[int, Tensor, int]] = field(default_factory=list)
    graph: tuple[DetachedInputs, list[Tensor]] | None = None
    recomputed: tuple[DetachedInputs, list[Tensor]] | None = None
    failed: Exception | None = None
    trainable: list[bool] = field(default_factory=list)
    side_outputs: dict[Key, int] = field(default_factory=dict)
    found: tuple[bool, ...] = ()
    choices: Choices | None = None
    fingerprint: CallFingerprint | None = None

    @property
    def what(self) -> str:
        return f"layer {self.layer.name!r}"

    def overwritten(self) -> set[int]:
        """Positions of arguments that have been written to since the call."""
        return {position for position, tensor, version in self.given if tensor._version != version}

    def raise_failed(self) -> None:
        """Raise what its recomputation ahead has raised."""
        failed, self.failed = self.failed, None
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # whose frames know this one

    def release(self) -> None:
        """Drop what is kept for the backward: it may hang on the recorded call in a circle (``h += layer(h)``)."""
        self.graph = self.recomputed = self.failed = None
        self.given.clear()
