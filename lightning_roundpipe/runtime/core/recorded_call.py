"""The entries of a microbatch's tape: layer calls that wait for their backward. `graph_cuts` connects them."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.model.attributes import StateDiff
from lightning_roundpipe.runtime.core.detached_inputs import DetachedInputs
from lightning_roundpipe.runtime.layer_calls.discrete_ops import Choices
from lightning_roundpipe.runtime.layer_calls.side_outputs import Key
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.module_buffers import BufferValue
from lightning_roundpipe.runtime.user_code.graph_cuts import GraphCut
from lightning_roundpipe.runtime.user_code.rng import Seed
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState


@dataclass(eq=False)
class RecordedCall(GraphCut):
    """One call of one microbatch, from its forward until its gradients have been passed on.

    It has many fields because the forward's arguments, modes and results must all outlive the forward: a recomputation
    reproduces the call from them alone.

    Attributes:
        call: position of the call in the trace.
        layer: the called layer.
        microbatch: number of the microbatch.
        spec: structure of the arguments.
        leaves: flattened arguments, with each tensor replaced by its `HostTensor`. Empty if the call is never
            recomputed (fused stage).
        requires_grad: whether each leaf requires grad.
        thread_state: torch modes of the calling thread.
        state: how attributes of the layer's modules differed from the replicas'.
        seed: seed of the call's random numbers.
        context: context variables at the call.
        mutates: positions of the arguments that the layer wrote to; they are outputs as well.
        buffers: values of the layer's buffers before the forward, by position; None if they were not saved.
        given: inputs of a kept graph that user code could overwrite, as (position, `witness`, version at the call).
        held: the arguments of a call whose graph is kept; see `off_plan`.
        graph: the kept graph, as (detached inputs, outputs).
        recomputed: the graph of a recomputation ahead, likewise.
        failed: what a recomputation ahead raised.
        trainable: whether each of the layer's parameters required grad at the call.
        side_outputs: number of tensors of each side output; they are the last outputs.
        found: whether each output required grad in the graph that backward ran on.
        choices: discrete choices of the forward, which the recomputation repeats.
        kinds: shape and dtype of each output, which those of the recomputation must equal.
        is_plain: whether the forward was plain; see `plain_executor`.
    """

    call: int
    layer: HostLayer
    microbatch: int
    spec: Any
    leaves: list[Any]
    requires_grad: list[bool]
    thread_state: TorchThreadState
    state: StateDiff | None
    seed: Seed | None
    context: contextvars.Context
    mutates: frozenset[int] = frozenset()
    buffers: dict[int, BufferValue] | None = None
    given: list[tuple[int, Tensor, int]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    graph: tuple[DetachedInputs, list[Tensor]] | None = None
    recomputed: tuple[DetachedInputs, list[Tensor]] | None = None
    failed: Exception | None = None
    trainable: list[bool] = field(default_factory=list)
    side_outputs: dict[Key, int] = field(default_factory=dict)
    found: tuple[bool, ...] = ()
    choices: Choices | None = None
    kinds: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    is_plain: bool = False

    @property
    def what(self) -> str:
        return f"layer {self.layer.name!r}"

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        return self.layer.masters

    def overwritten(self) -> set[int]:
        """Return the positions of the arguments that have been written to since the call."""
        return {position for position, tensor, version in self.given if tensor._version != version}

    def check_kinds(self, outputs: list[Tensor]) -> None:
        """Raise if a recomputation returned ``outputs`` of another number, shape or dtype than the forward."""
        found = [(t.shape, t.dtype) for t in outputs]
        if found == self.kinds:
            return
        before, now = (", ".join(f"{dtype} of shape {tuple(shape)}" for shape, dtype in k) for k in (self.kinds, found))
        raise RoundPipeError(
            f"layer {self.layer.name!r} returned {before or 'no tensor'}, and when it was recomputed for its backward "
            f"{now or 'no tensor'}. What a layer returns may depend on its arguments, parameters, buffers and "
            "attributes and on torch's default generators: give it what else it needs as an argument of its forward."
        )

    def raise_failed(self) -> None:
        """Raise the error of a recomputation ahead, if there was one."""
        failed, self.failed = self.failed, None
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # its traceback refers to this frame: a reference cycle would keep all of it alive

    def release(self) -> None:
        """Drop the graphs, which may form a reference cycle with this object (``h += layer(h)``)."""
        self.graph = self.recomputed = self.failed = None
        self.given.clear()
        self.held = []
