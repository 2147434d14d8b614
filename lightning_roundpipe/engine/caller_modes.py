"""Torch's modes and flags around a layer call: what the layer must not see, and what would not reach it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_roundpipe.config import RoundPipeError

_autograd: Any = torch._C._autograd


class without_caller_modes:
    """Context in which the calling thread has no torch-function modes and no hooks on saved tensors, and may use
    tensor subclasses.

    A microbatch's thread has the mode of its user code, which layers must not see, and disables torch functions in the
    engine's own code. Hooks on saved tensors, such as those of ``torch.utils.checkpoint``, are the caller's, and so is
    their prohibition: a layer keeps or recomputes what it saves by the plan.
    """

    __slots__ = ("_enabled", "_hooks", "_modes", "_refused")

    def __enter__(self) -> None:
        pop = torch._C._pop_torch_function_stack
        self._modes = [pop() for _ in range(torch._C._len_torch_function_stack())]
        self._refused = _autograd._saved_tensors_hooks_get_disabled_error_message()
        if self._refused is not None:
            _autograd._saved_tensors_hooks_enable()
        self._hooks: list[tuple[Any, Any]] = []
        while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None:
            self._hooks.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()
        enabled: Any = torch._C._EnableTorchFunction()
        enabled.__enter__()
        self._enabled = enabled

    def __exit__(self, *error: object) -> None:
        self._enabled.__exit__(*error)
        while self._hooks:
            _autograd._push_saved_tensors_default_hooks(*self._hooks.pop())
        if self._refused is not None:
            _autograd._saved_tensors_hooks_disable(self._refused)
        while self._modes:
            torch._C._push_on_torch_function_stack(self._modes.pop())


class Surroundings:
    """The modes and flags around the user's code when it began."""

    def __init__(self) -> None:
        self._modes, self._depth, self._flags = _modes(), _depth(), _flags()

    def refuse(self, layer: str) -> None:
        """Check at a call of ``layer`` that user code has entered nothing since that the layer would not see.

        Raises `RoundPipeError` if it has.
        """
        what = ""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            what = "a transform of torch.func (vmap, grad, jvp, ...)"
        elif forward_ad._current_level >= 0:
            what = "forward-mode differentiation"
        elif parametrize._cache_enabled:
            what = "torch.nn.utils.parametrize.cached()"
        elif _depth() != self._depth:
            entered = [mode for mode in _modes() if not any(mode is known for known in self._modes)]
            what = next((f"the mode {type(m).__name__}" for m in entered if not isinstance(m, DeviceContext)), "")
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


def _depth() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def _modes() -> list[Any]:
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]  # type: ignore[no-untyped-call]


def _flags() -> tuple[Any, ...]:
    """Return torch's process-wide flags."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
