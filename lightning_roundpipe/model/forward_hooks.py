"""Forward hooks inside a layer that only observe: they run with the forward, and not when it is repeated.

In plain training such a hook runs once per forward. Here the layer's code may run several times: for recomputation, and
in the first batch to find out what the layer does. A hook that was seen to return nothing, change no tensor and no
attribute, and register no other hook is left out of these runs, so that what it counts or stores is as in plain
training. A hook that does any of that is part of the layer's computation and runs each time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

_KINDS = ("_forward_pre_hooks", "_forward_hooks")
_PRE, _FORWARD = map(itemgetter, _KINDS)


class Observers:
    """The hooks of one layer. All its replicas share this object.

    ``acting``: whether a hook does more than observe, by module, kind and key. Hooks that have not run yet are missing.
    """

    def __init__(self) -> None:
        self.acting: dict[tuple[int, str, int], bool] = {}

    def watched(self, modules: Sequence[nn.Module], *, again: bool) -> contextlib.AbstractContextManager[None] | None:
        """Return the context of a replica's run, if its ``modules`` have hooks. ``again``: the run is a repetition."""
        held = [m.__dict__ for m in modules]
        if not (any(map(_FORWARD, held)) or any(map(_PRE, held))):
            return None
        return self._watched(modules, again)

    @contextlib.contextmanager
    def _watched(self, modules: Sequence[nn.Module], again: bool) -> Iterator[None]:
        replaced: list[tuple[nn.Module, str, dict[int, Any], OrderedDict[int, Any]]] = []
        for index, module in enumerate(modules):
            for kind in _KINDS:
                if hooks := module.__dict__[kind]:
                    mine = self._those((index, kind), hooks, again)
                    replaced.append((module, kind, hooks, mine))
                    module.__dict__[kind] = OrderedDict(mine)
        try:
            yield
        finally:
            for module, kind, hooks, mine in replaced:
                now, module.__dict__[kind] = module.__dict__[kind], hooks
                hooks.update({key: hook for key, hook in now.items() if key not in mine})  # registered during the run

    def act(self) -> None:
        """Mark all hooks as acting: the forward set attributes or collected values, and hooks may have done that."""
        self.acting.update(dict.fromkeys(self.acting, True))

    def _those(self, place: tuple[int, str], hooks: dict[int, Any], again: bool) -> OrderedDict[int, Any]:
        found: OrderedDict[int, Any] = OrderedDict()
        for key, hook in hooks.items():
            acts = self.acting.get((*place, key))
            if acts or (again and acts is None):
                found[key] = hook
            elif not again:
                found[key] = functools.partial(self._run, (*place, key), hook)
        return found

    def _run(self, place: tuple[int, str, int], hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_iter((args[1:], kwargs)) if isinstance(t, Tensor)]
        before = [*map(_mark, tensors)]
        result = hook(*args, **kwargs)
        acts = self.acting.get(place, False)  # a hook may run several times in one forward
        self.acting[place] = acts or result is not None or before != [*map(_mark, tensors)]
        return result


def _mark(tensor: Tensor) -> tuple[int, int, bool, bool]:
    hooks, version = tensor._backward_hooks, -1 if tensor.is_inference() else tensor._version
    return (version, len(hooks) if hooks else 0, tensor.retains_grad, tensor.requires_grad)
