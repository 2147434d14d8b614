"""Predicts a call from the same call in the last step, where there is no plan.

A step of one microbatch may take any path, so it learns its calls as they come. The forward builds its graph, which is
dropped again, only to see what requires grad and what else the layer does. If the last step made the same call in the
same manner, and the layer only returned tensors that require grad, the call runs without grad:

    same outputs, nothing else done ──► they require grad, as in the last step
    anything else ────────────────────► undone; the call runs again, with grad, and is learned
    fails, and again if repeated ─────► the same, as it may need grad mode
    fails once only ──────────────────► the error is raised, as in plain training

Without grad it cannot be seen that an output no longer requires it. The recomputation shows that: the gradient ends
there, as in plain training, and the next step learns the call anew. No output can begin to require grad, because all
did; a layer with an output that does not is learned in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_roundpipe.model.attributes import StateDiff
from lightning_roundpipe.runtime.layer_calls.arguments import CallSpec, FlatValue, Given
from lightning_roundpipe.runtime.user_code.thread_state import TorchThreadState

_Ran = TypeVar("_Ran")

_VALUES = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device)
"""Types that are compared by value; for all others only the type is."""


@dataclass(frozen=True)
class Manner:
    """How a layer is called, apart from shapes and tensor contents. Holds no tensor.

    Contiguity and ``requires_grad`` are included, because torch folds a matrix product or not depending on them.
    """

    spec: CallSpec
    leaves: tuple[Any, ...]
    requires_grad: tuple[bool, ...]
    trainable: tuple[bool, ...]
    thread_state: TorchThreadState
    state: StateDiff | None


def kind_of(leaf: Any) -> Any:
    """Return what a `Manner` keeps of a leaf."""
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.dtype, leaf.dim(), leaf.is_contiguous()
    return (type(leaf), leaf) if isinstance(leaf, _VALUES) else type(leaf)


@dataclass(frozen=True)
class Precedent:
    """A call of which only one fact matters: its outputs require grad.

    Attributes:
        manner: how the layer was called.
        outputs: structure and kinds of the outputs.
        flags: per tensor, whether it requires grad; true for all floating point and complex tensors.
        alike: whether the layer computes the same without grad; None if that was not tried.
    """

    manner: Manner
    outputs: tuple[Any, ...]
    flags: tuple[bool, ...]
    alike: bool | None

    @classmethod
    def of(cls, manner: Manner | None, output: FlatValue, alike: bool | None) -> Precedent | None:
        """Return the precedent; None if a tensor could begin to require grad, none does, or objects hold tensors."""
        tensors = output.tensors()
        flags = tuple(t.requires_grad for t in tensors)
        if manner is None or output.objects or not any(flags) or flags != tuple(map(_can_require_grad, tensors)):
            return None
        return cls(manner, _kinds(output), flags, alike)

    def matches(self, output: FlatValue) -> bool:
        """Return whether ``output`` is as expected, as far as can be seen without grad."""
        return not output.objects and _kinds(output) == self.outputs


def _kinds(output: FlatValue) -> tuple[Any, ...]:
    kinds = [
        _can_require_grad(x) if isinstance(x, Tensor) else x if isinstance(x, Given) else type(x) for x in output.leaves
    ]
    return output.spec, *kinds


def _can_require_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def attempt(run: Callable[[], _Ran], holds: Callable[[_Ran], bool], undo: Callable[[], None]) -> _Ran | None:
    """Return the result of ``run`` if ``holds`` accepts it. Otherwise call ``undo`` and return None.

    Raises:
        Exception: the exception of ``run`` if a second run succeeds, because then it was not for lack of grad mode.
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
