"""A layer call as user code made it, and what its forward gave."""

from __future__ import annotations

import contextvars
import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_roundpipe.model.attributes import StateDiff
from lightning_roundpipe.runtime.core.detached_inputs import DetachedInputs
from lightning_roundpipe.runtime.layer_calls.arguments import CallSpec, FlatValue
from lightning_roundpipe.runtime.layer_calls.discrete_ops import Choices, DiscreteOpRecorder
from lightning_roundpipe.runtime.layer_calls.precedent import Manner, Precedent
from lightning_roundpipe.runtime.layer_calls.recompute_check import CallFingerprint
from lightning_roundpipe.runtime.layer_calls.side_outputs import SideOutputs
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.memory.module_buffers import BufferValue
from lightning_roundpipe.runtime.user_code.bypassed_gradients import Lender
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState


@dataclass
class Call:
    """A layer call as the user code made it.

    Attributes:
        seed: of its random numbers; None draws from the caller's state.
        leaves: flattened arguments and carried attributes; a tensor stands as itself if it is on the worker already,
            else as its `HostTensor`.
        originals: the same as user code gave them; ``saved``: and as they lie on the host, where they were saved.
        requires_grad: per leaf.
        trainable: per parameter of the layer, whether it required grad when it was called.
        graph: whether to run with grad: to keep the graph (fused), to learn what requires grad (first batch, or without
            a precedent), or because the layer computes other bits without.
        probe: whether to find out if it does.
        walk: whether to look if the graph leads out of the layer.
        kept: whether the graph is kept for the backward.
        recomputed: whether the layer may be run again for its backward, so that its inputs have to be saved.
        learning: whether there is no plan yet, or none at all.
        measure: whether to find out how much memory it takes.
        checked: whether its recomputation is compared with it.
        precedent: what the last step's call in the same manner gave.
        may_mutate: positions of inputs that the layer is known to write to; None while learning.
        forward_bytes: what it took on its worker without a graph, if it was probed.
        bare: whether nothing of it can require grad, unless the layer reaches out.
        tentative: whether it is on the tape only to see if the layer does.
        lender: the microbatch, which has stand-ins of parameters that are not the layer's.
    """

    index: int
    layer: HostLayer
    microbatch: int
    spec: CallSpec
    leaves: list[Any]
    requires_grad: list[bool]
    trainable: list[bool]
    thread_state: TorchThreadState
    state: StateDiff | None
    seed: int | None
    context: contextvars.Context
    originals: list[Any] = field(default_factory=list)
    saved: dict[int, HostTensor] = field(default_factory=dict)
    graph: bool = False
    probe: bool = False
    walk: bool = False
    kept: bool = False
    recomputed: bool = False
    learning: bool = False
    measure: bool = False
    checked: bool = False
    precedent: Precedent | None = None
    may_mutate: frozenset[int] | None = None
    forward_bytes: int | None = None
    bare: bool = False
    tentative: bool = False
    lender: Lender | None = None

    @functools.cached_property
    def manner(self) -> Manner | None:
        """What a precedent has to have in common with it."""
        return Manner.of(self.spec, self.originals, self.requires_grad, self.trainable, self.thread_state, self.state)


@dataclass
class LayerExecution:
    """One execution of a layer's code. ``given`` are the tensors that it was given, by position."""

    detached_inputs: DetachedInputs | None
    output: FlatValue
    side_outputs: SideOutputs
    given: dict[int, Tensor]
    recording: DiscreteOpRecorder | None = None

    def tensors(self) -> list[Tensor]:
        return [t for flat in (self.output, *self.side_outputs.values()) for t in flat.tensors()]


@dataclass
class Forward:
    """What a forward gave: the layer's output with what it collected, and its side outputs, with their graph if there
    is one.

    Attributes:
        mutated: inputs that the layer wrote to, by position.
        foretold: whether the call ran without grad and did what its precedent had done.
        overlapping: which tensors of the output share memory with others or with inputs, and positions of such inputs.
        fingerprint: what its recomputation is compared with, if it is.
        choices: to be chosen again when it is recomputed; ``chosen``: what is on its way to the host of them.
    """

    output: FlatValue
    side_outputs: SideOutputs
    detached_inputs: DetachedInputs | None
    mutated: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[int, BufferValue] = field(default_factory=dict)
    activation_bytes: int = 0
    differs_without_grad: bool = False
    overlapping: tuple[list[int], list[int]] = ([], [])
    foretold: bool = False
    fingerprint: CallFingerprint | None = None
    choices: Choices | None = None
    chosen: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Of the output, and then the mutated inputs."""
        return self.output.tensors() + [self.mutated[i] for i in sorted(self.mutated)]

    def drop_graph(self) -> None:
        """Here and now: by the time the microbatch's thread gets round to it, the next microbatch has the worker.

        Tensors still say whether they require grad.
        """
        for flat in (self.output, *self.side_outputs.values()):
            flat.leaves = [_without_graph(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves]
        self.mutated = {i: _without_graph(t) for i, t in self.mutated.items()}
        self.detached_inputs = None


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
