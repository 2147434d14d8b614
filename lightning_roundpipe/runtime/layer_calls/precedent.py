"""What a call did in the last step, as a guess at what the same call does in this one, where there is no plan.

A step of one microbatch may go any way, so its calls are learned as they come: the forward builds its graph, which is
dropped again, only to see what requires grad and what else the layer does. Where the last step made the same call in
the same manner, and all that the layer did was to return tensors that require grad, it runs without grad:

    same outputs, nothing else done ──► they require grad, as they did
    anything else ────────────────────► undone; the call runs again, with grad, and is learned
    fails, and again if repeated ─────► the same, as it may fail for want of grad
    fails once only ──────────────────► that is raised, as plain training would

What cannot be seen without grad is whether an output has ceased to require it. The recomputation shows that: the
gradient ends there as it does in plain training, and the next step learns the call anew. No output can begin to
require grad, as all of them did; a layer with one that does not is learned in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightning_roundpipe.runtime.layer_calls.arguments import FlatValue, Given

if TYPE_CHECKING:
    from lightning_roundpipe.model.attributes import StateDiff
    from lightning_roundpipe.runtime.layer_calls.arguments import CallSpec
    from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState

_Ran = TypeVar("_Ran")

_VALUES = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device)
"""What is compared by value; of everything else only the type is."""


@dataclass(frozen=True)
class Manner:
    """How a layer is called. Shapes may differ, and so may what is in a tensor. Holds no tensor.

    Torch folds a matrix product or not by how its input lies in memory and whether it requires grad.
    """

    spec: CallSpec
    leaves: tuple[Any, ...]
    requires_grad: tuple[bool, ...]
    trainable: tuple[bool, ...]
    thread_state: TorchThreadState
    state: StateDiff | None

    @classmethod
    def of(
        cls,
        spec: CallSpec,
        leaves: Sequence[Any],
        requires_grad: Sequence[bool],
        trainable: Sequence[bool],
        thread_state: TorchThreadState,
        state: StateDiff | None,
    ) -> Manner | None:
        """None if tensors come along in objects or attributes: each call has others."""
        if spec.objects or (state is not None and state.carried):
            return None
        return cls(spec, tuple(map(_kind, leaves)), tuple(requires_grad), tuple(trainable), thread_state, state)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.dtype, leaf.dim(), leaf.is_contiguous()
    return (type(leaf), leaf) if isinstance(leaf, _VALUES) else type(leaf)


@dataclass(frozen=True)
class Precedent:
    """A call of which nothing is to be known but that its outputs require grad.

    Attributes:
        outputs: their structure and kinds.
        flags: per tensor, whether it requires grad: all that can.
        alike: whether the layer computes the same bits without grad; None if that was not tried.
    """

    manner: Manner
    outputs: tuple[Any, ...]
    flags: tuple[bool, ...]
    alike: bool | None

    @classmethod
    def of(cls, manner: Manner | None, output: FlatValue, alike: bool | None) -> Precedent | None:
        """None if there is a tensor that could begin to require grad, or none that does, or one in an object."""
        tensors = output.tensors()
        flags = tuple(t.requires_grad for t in tensors)
        if manner is None or output.objects or not any(flags) or flags != tuple(map(_can_require_grad, tensors)):
            return None
        return cls(manner, _kinds(output), flags, alike)

    def matches(self, output: FlatValue) -> bool:
        """Whether ``output`` is what is expected, as far as can be seen without grad."""
        return not output.objects and _kinds(output) == self.outputs


def _kinds(output: FlatValue) -> tuple[Any, ...]:
    kinds = [
        _can_require_grad(x) if isinstance(x, Tensor) else x if isinstance(x, Given) else type(x) for x in output.leaves
    ]
    return output.spec, *kinds


def _can_require_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def attempt(run: Callable[[], _Ran], holds: Callable[[_Ran], bool], undo: Callable[[], None]) -> _Ran | None:
    """What ``run`` gives, if it ``holds``; else it is undone, and None.

    Raises:
        Exception: of ``run``, if it is not raised again when repeated: it is not for want of grad.
    """
    try:
        ran = run()
        if holds(ran):
            return ran
    except Exception:
        undo()
        if _passes(run):
            undo()
            raise
    undo()
    return None


def _passes(run: Callable[[], Any]) -> bool:
    try:
        run()
    except Exception:
        return False
    return True
