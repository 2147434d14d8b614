"""torch's process-wide state: code that changes it runs alone, with the baton.

* The level of forward-mode differentiation, and the nesting depth of `torch.func.jvp`.
* Generators within `torch.random.fork_rng`, which checkpoints use in their backward: others would draw from the state
  that is put in, and the fork would undo their draws.

The first window, which runs one microbatch after another, shows what does so. So torch's functions note who calls them,
for as long as there is an engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from lightning_roundpipe.devices.process_context import replaced, shared_context
from lightning_roundpipe.devices.thread_owner import context_of_thread

USER_CODE = ""
"""Stands for user code among the names of layers."""
_exclusive: set[str] = set()


@shared_context
def noticed_changes() -> Iterator[None]:
    """Note who changes torch's state, until the last context of several has exited."""
    _exclusive.clear()
    with (
        replaced(forward_ad, enter_dual_level=_noting(forward_ad.enter_dual_level)),
        replaced(eager_transforms, enter_jvp_nesting=_noting(eager_transforms.enter_jvp_nesting)),
        replaced(torch.random, fork_rng=_noting(torch.random.fork_rng)),
    ):
        yield


def changes(name: str) -> bool:
    """Return whether the layer of that name, or `USER_CODE`, changes torch's state."""
    return name in _exclusive


def any_changes() -> bool:
    """Return whether any layer, or user code, changes torch's state: the main thread must not run beside it."""
    return bool(_exclusive)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if (context := context_of_thread()) is not None:
            inside = context.runner.inside
            _exclusive.add(inside[0] if inside is not None else USER_CODE)
        return function(*args, **kwargs)

    return noting
