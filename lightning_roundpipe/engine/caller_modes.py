"""`without_caller_modes`: a context in which the calling thread is as a new one to torch."""

from __future__ import annotations

from typing import Any

import torch

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
