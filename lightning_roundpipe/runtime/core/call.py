"""The data of a layer call: its arguments and how it runs (`Call`), and the results of its forward (`Forward`)."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from lightning_roundpipe.devices import Event
from lightning_roundpipe.model.attributes import StateDiff
from lightning_roundpipe.runtime.core.detached_inputs import DetachedInputs
from lightning_roundpipe.runtime.layer_calls.arguments import CallSpec, FlatValue, is_cache
from lightning_roundpipe.runtime.layer_calls.discrete_ops import Choices, DiscreteOpRecorder
from lightning_roundpipe.runtime.layer_calls.side_outputs import SideOutputs
from lightning_roundpipe.runtime.memory.host_layer import HostLayer
from lightning_roundpipe.runtime.memory.host_tensor import HostTensor
from lightning_roundpipe.runtime.memory.module_buffers import BufferValue
from lightning_roundpipe.runtime.user_code.bypassed_gradients import Lender
from lightning_roundpipe.runtime.user_code.rng import Seed
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState


@dataclass(frozen=True)
class CallProfile:
    """How a plain call was made. A call that is made in the same way is expected to be plain; see `plain_executor`."""

    arguments: TreeSpec
    state: StateDiff | None
    thread_state: TorchThreadState
    recomputed: bool

    def fits(self, call: Call) -> bool:
        """Return whether ``call`` is made in the same way, with arguments that its layer cannot change."""
        return (
            call.spec.arguments is self.arguments
            and call.spec.carried is None
            and call.state is self.state
            and call.recomputed is self.recomputed
            and call.thread_state == self.thread_state
            and (_UNCHANGEABLE.issuperset(map(type, call.originals)) or (call.evaluates and _fills_caches_only(call)))
            and (call.evaluates or call.layer.chooses is False)
            and not (call.bare or call.layer.caches_parametrizations)
        )


_UNCHANGEABLE = {Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device}
"""Types of arguments that hold nothing that a layer could change unseen."""


def _fills_caches_only(call: Call) -> bool:
    """Return whether the arguments that a layer could change are key-value caches, which it fills in place."""
    return all(type(leaf) in _UNCHANGEABLE or is_cache(leaf) for leaf in call.originals)


@dataclass
class Call:
    """A layer call: what user code passed, and how `LayerExecutor` is to run it.

    It has many fields because it carries everything about the call from the microbatch's thread to the worker's: the
    arguments, the modes of the calling thread, and each thing that the first batch finds out about a layer.

    Attributes:
        index: position of the call in the trace.
        seed: seed of its random numbers; None lets it draw from the caller's generators.
        leaves: flattened arguments and carried attributes. A tensor is itself if it is on the worker already, else its
            `HostTensor`.
        originals: the same leaves as user code passed them.
        saved: host copies of tensor leaves, by position, if the call may be recomputed.
        requires_grad: whether each leaf requires grad.
        trainable: whether each of the layer's parameters required grad at the call.
        graph: whether to run in grad mode where the caller does, as its recomputation will; not in an evaluation.
        walk: whether to search the graph for paths that lead out of the layer.
        kept: whether the graph is kept for the backward. Else it is dropped as soon as the layer has returned.
        recomputed: whether the call may be recomputed for its backward, so that its inputs must be saved.
        learning: whether the step records its calls: there is no plan yet, or none at all.
        measure: whether to measure the memory that the call takes.
        may_mutate: positions of the inputs that the layer is known to write to; None while learning.
        bare: whether grad mode is on but neither inputs nor parameters require grad. Outputs can require grad only if
            the layer reaches a trained tensor by another way.
        tentative: whether a bare call is put on the tape to find that out.
        repeated: whether it is a call in a backward of user code; see `repeated_calls`.
        profile: the profile that the call fits; None if it is not expected to be plain.
        lender: the microbatch, which lends stand-ins for parameters of other modules.
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
    seed: Seed | None
    context: contextvars.Context
    originals: list[Any] = field(default_factory=list)
    saved: dict[int, HostTensor] = field(default_factory=dict)
    graph: bool = False
    walk: bool = False
    kept: bool = False
    recomputed: bool = False
    learning: bool = False
    measure: bool = False
    may_mutate: frozenset[int] | None = None
    bare: bool = False
    tentative: bool = False
    repeated: bool = False
    profile: CallProfile | None = None
    lender: Lender | None = None

    @property
    def evaluates(self) -> bool:
        """Whether the call belongs to an evaluation, so that it is never recomputed."""
        return self.seed is None

    def staying(self, written: Set[int]) -> Set[int]:
        """Return the positions of leaves that stay on their worker when the microbatch goes on to another one.

        They are those that are ``written`` to, and the layer's attributes, which are every microbatch's.
        """
        return written if self.spec.carried is None else written | set(range(self.spec.count, len(self.originals)))


@dataclass
class LayerExecution:
    """Results of one execution of a layer's code.

    Attributes:
        detached_inputs: the start of its graph; None if it ran without grad.
        output: its return value.
        side_outputs: the attributes, lists and dicts that it changed.
        given: the tensors that it was called with, by position.
        recording: the discrete choices that it made, if they were recorded.
        surprises: whether a call that was expected to be plain may not have been.
        written: positions of the parameters that such a call wrote to.
        end: end of the compute of such a call.
    """

    detached_inputs: DetachedInputs | None
    output: FlatValue
    side_outputs: SideOutputs
    given: dict[int, Tensor]
    recording: DiscreteOpRecorder | None = None
    surprises: bool = False
    written: list[int] = field(default_factory=list)
    end: Event | None = None

    def tensors(self) -> list[Tensor]:
        return [t for flat in (self.output, *self.side_outputs.values()) for t in flat.tensors()]


@dataclass
class Forward:
    """Results of a layer call's forward. The tensors carry their graph if the call keeps one.

    Attributes:
        output: the layer's return value, with what its output collectors gathered.
        side_outputs: the attributes, lists and dicts that the layer changed.
        detached_inputs: the start of the graph; None if there is none.
        mutated: inputs that the layer wrote to, by position.
        buffers: values of the layer's buffers before the call, by position, for the recomputation; None if none is
            expected.
        activation_bytes: memory that the call took on the worker, if it was measured.
        overlapping: positions of output tensors that share memory with others or with inputs, and positions of these
            inputs.
        choices: discrete choices, which the recomputation repeats.
        chosen: the packed choices on the worker, whose download may still run.
        truths: the truth values of tensors that the layer has asked for.
        profile: how the next call must be made to be expected plain; None if this one was not.
    """

    output: FlatValue
    side_outputs: SideOutputs
    detached_inputs: DetachedInputs | None
    mutated: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[int, BufferValue] | None = None
    activation_bytes: int = 0
    overlapping: tuple[list[int], list[int]] = ([], [])
    choices: Choices | None = None
    chosen: Tensor | None = None
    truths: Sequence[bool] = ()
    profile: CallProfile | None = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the output, followed by the mutated inputs in order of position."""
        return self.output.tensors() + [self.mutated[i] for i in sorted(self.mutated)]

    def drop_graph(self) -> None:
        """Replace all tensors by detached ones that still tell whether they required grad.

        The worker's thread calls this. By the time the microbatch's thread could, the next microbatch may be computing
        on the worker, and its memory would add to that of this graph.
        """
        for flat in (self.output, *self.side_outputs.values()):
            flat.leaves = [_without_graph(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves]
        self.mutated = {i: _without_graph(t) for i, t in self.mutated.items()}
        self.detached_inputs = None


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
