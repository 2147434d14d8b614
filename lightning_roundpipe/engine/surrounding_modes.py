"""Modes, transforms and flags around a layer call that do not reach the worker."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_roundpipe.config import RoundPipeError


class Surroundings:
    """The modes and flags around the user's code when it began."""

    def __init__(self) -> None:
        self._function_modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._dispatch_modes = _get_current_dispatch_mode_stack()
        self._flags = _flags()

    def refuse(self, layer: str) -> None:
        """Check at a call of ``layer`` that user code has entered nothing since that the layer would not see.

        Raises:
            RoundPipeError: if it has.
        """
        what = ""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            what = "a transform of torch.func (vmap, grad, jvp, ...)"
        elif forward_ad._current_level >= 0:
            what = "forward-mode differentiation"
        elif parametrize._cache_enabled:
            what = "torch.nn.utils.parametrize.cached()"
        elif (mode := self._entered()) is not None:
            what = f"the mode {type(mode).__name__}"
        if what:
            raise RoundPipeError(
                f"layer {layer!r} is called under {what}, which does not reach into a layer that runs on a worker. Use "
                "it inside a layer, or between layers."
            )
        if _flags() != self._flags:
            raise RoundPipeError(
                f"layer {layer!r} is called with another default dtype, or another choice of deterministic algorithms, "
                "than the step began with. They hold for the whole process, where other layers run now: set them "
                "before training."
            )

    def _entered(self) -> Any:
        """Return a mode that the layer would not see; None if there is none."""
        # Torch's functions that return the stacks are written in Python and take several times as long.
        if torch._C._len_torch_function_stack() == len(self._function_modes) and not (
            self._dispatch_modes or torch._C._len_torch_dispatch_stack()
        ):
            mine = enumerate(self._function_modes)
            if all(torch._C._get_function_stack_at(i) is mode for i, mode in mine):
                return None
        before = [*self._function_modes, *self._dispatch_modes]
        now = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]  # type: ignore[no-untyped-call]
        return next(
            (m for m in now if not isinstance(m, DeviceContext) and not any(m is known for known in before)), None
        )


def _flags() -> tuple[Any, ...]:
    """Return torch's process-wide flags."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
