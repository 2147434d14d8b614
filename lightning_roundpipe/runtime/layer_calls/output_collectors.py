"""What Hugging Face models collect from inside a layer while it runs: router logits, attentions.

Their forward hooks append to a dict that a context variable holds, past the layer's outputs. On a worker that would
lose the gradients of what is collected, and a recomputation would collect it twice. So the layer runs under a fresh
collector, what it gathers becomes further outputs, and user code adds them to the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def _variable() -> Any:
    """The context variable, if this version of transformers has one and it was imported."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


def collecting(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Any]]]:
    """``function(*args, **kwargs)``, and what it collected."""
    variable = _variable()
    outer = variable.get() if variable is not None else None
    if outer is None:
        return function(*args, **kwargs), {}
    fresh = {k: [] if isinstance(v, list) else v for k, v in outer.items()}
    token = variable.set(fresh)
    try:
        output = function(*args, **kwargs)
    finally:
        variable.reset(token)
    return output, {k: v for k, v in fresh.items() if isinstance(v, list) and v}


def hand_over(result: tuple[Any, dict[str, list[Any]]]) -> Any:
    """The layer's output; what was collected goes to the calling thread's collector."""
    output, collected = result
    if collected:
        outer = _variable().get()
        for key, values in collected.items():
            outer[key].extend(values)
    return output
