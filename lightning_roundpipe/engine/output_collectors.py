"""What Hugging Face models collect inside a layer while it runs: router logits, attentions.

Their forward hooks append to a dict in a context variable, bypassing the layer's outputs. On a worker the gradients of
what is collected would be lost, and a recomputation would collect it twice. So the layer runs with a fresh collector.
Its contents become further outputs, which user code adds to the real collector.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def _variable() -> Any:
    """Return the context variable if transformers is imported and this version has it."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


def collecting(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Any]]]:
    """Call ``function`` and return its result with what it collected."""
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
    """Return the layer's output and add what it collected to the calling thread's collector."""
    output, collected = result
    if collected:
        outer = _variable().get()
        for key, values in collected.items():
            outer[key].extend(values)
    return output
