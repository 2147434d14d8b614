"""Keeps torch's compiler out of the modes that the operations of user code pass through.

A function that user code has compiled itself (``@torch.compile`` on a loss) would be compiled together with them, once
for each operation, until the compiler gives up with warnings. Its operations run one by one instead: the engine has to
see them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def leave_untraced(function: Callable[..., Any]) -> None:
    """Let torch's compiler neither trace ``function`` nor compile what it calls, if the compiler is imported."""
    if "torch._dynamo" in sys.modules:
        _leave_untraced(function)


@functools.cache
def _leave_untraced(function: Any) -> None:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    # What `torch.compiler.disable` does, without its wrapper, which each operation would call.
    function._torchdynamo_disable = True
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
