"""Gradients of masters that user code uses where `UserCodeMode` does not see it.

`UserCodeMode` replaces each master by a stand-in, a tensor of the microbatch's own, in the arguments of torch
functions. Some uses are not such calls:

* A layer's code may use a parameter of another module, through a hook, a closure or an object. `Borrowing` replaces it
  by the microbatch's stand-in, as in user code.
* `torch.autograd.Function.apply` gets stand-ins here, for as long as there are workers.
* TorchScript, C++ extensions, transforms, other threads and so on use the master itself. Autograd then brings the
  gradient to the master's own accumulator node. A hook on it sees which context differentiates:

      a microbatch, or a layer on a worker ── the microbatch takes it, and the master gets nothing ── [1]
      the loss's own backward, manual optimization, code outside of a step ── to ``.grad``, as usual ── [2]

Such code has read the master. If the step computes with another copy of it, or if it may be written to meanwhile, [1]
is refused (`WeightGuard.take_bypassed_grad`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from lightning_roundpipe.devices.process_context import shared_context
from lightning_roundpipe.devices.thread_owner import context_of_thread
from lightning_roundpipe.user_code.mode import ACCESSORS, DATA, DTYPE, VIEWS, UserCodeMode
from lightning_roundpipe.user_code.torch_functions import IN_PLACE, WatchedTensors


class Lender(Protocol):
    """The microbatch for which a layer runs."""

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor: ...

    def take_bypassed_grad(self, master: nn.Parameter, grad: Tensor) -> bool: ...


class Borrowing(TorchFunctionMode):
    """Torch function mode for layer code that also computes with masters, not only with the replica's parameters.

    Args:
        masters: ids of all masters.
        known: masters that the layer has computed with before.
        own: the replica's parameters, in order.

    Attributes:
        found: the masters that the layer has computed with so far.
        reads_data: whether the layer has read or set the ``.data`` of one of its own parameters.
    """

    def __init__(
        self, masters: Container[int], lender: Lender, device: torch.device, known: Iterable[nn.Parameter] = (),
        own: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.found = list(known)
        self.reads_data = False
        self._own = {id(parameter): i for i, parameter in enumerate(own) if parameter.is_floating_point()}
        self._data = WatchedTensors[int]()
        """Each ``.data`` that was read, by the position of the parameter."""
        self._set: set[int] = set()
        self._masters = masters
        self._lender = lender
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not IN_PLACE.fullmatch(name) and (name not in ACCESSORS or func in _READ):
            args = self.given_to_function(args)
            kwargs = {key: self._borrowed(value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if name in ACCESSORS and args and id(args[0]) in self._own:
            if func == DATA:
                self._data.add(self._own[id(args[0])], result)
            elif func == _SET_DATA:
                self._set.add(self._own[id(args[0])])
            self.reads_data |= func in (DATA, _SET_DATA)
        return result

    def written_by_data(self) -> set[int]:
        """Return positions of parameters that the layer has written to through their ``.data``."""
        return self._set.union(self._data.written())

    def given_to_function(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments for an autograd function, with stand-ins."""
        return tuple(map(self._borrowed, args))

    def _borrowed(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and id(value) in self._masters:
            if not any(value is known for known in self.found):
                self.found.append(value)
            return self._lender.lend(value, self._device)
        if type(value) in (list, tuple) and any(isinstance(item, nn.Parameter) for item in value):
            return type(value)(map(self._borrowed, value))
        return value


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_READ = {*VIEWS, DATA, DTYPE, Tensor.device.__get__}
"""Attribute getters that give another result for the stand-in than for the master."""


class Accumulators:
    """The accumulator nodes of all trained masters, with a prehook. They are kept, or graphs make new ones."""

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[Any, RemovableHandle]] = {}
        self._seen: list[tuple[bool, torch.dtype]] = []

    def watch(self, masters: Iterable[nn.Parameter]) -> None:
        """Before a batch: hook the masters that are trained now. A master whose dtype changes gets a new node."""
        masters = list(masters)
        seen = [(master.requires_grad, master.dtype) for master in masters]
        if seen == self._seen:
            return
        self._seen = seen
        for master in masters:
            if not master.requires_grad:
                continue
            node = torch.autograd.graph.get_gradient_edge(master).node
            known = self._nodes.get(id(master))
            if known is None or known[0] is not node:
                self._nodes[id(master)] = node, node.register_prehook(functools.partial(_arriving, master))

    def end(self) -> None:
        """Remove all hooks."""
        for _, handle in self._nodes.values():
            handle.remove()
        self._nodes.clear()
        self._seen = []


def _arriving(master: nn.Parameter, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
    """Return the gradients for the accumulator; None leaves them as they are."""
    take_bypassed_grad = getattr(context_of_thread(), "take_bypassed_grad", None)
    if take_bypassed_grad is None or grads[0] is None:
        return None  # [2]
    with torch._C.DisableTorchFunction():  # user code's mode is active in its backward
        return (None,) if take_bypassed_grad(master, grads[0]) else None


@shared_context
def functions_given_stand_ins() -> Iterator[None]:
    """Patch the ``apply`` that ``Function.apply`` calls, until the last context of several has exited.

    A ``Function.apply`` that user code has kept, such as ``loss = MyLoss.apply``, comes there too.
    """
    called: Any = _SingleLevelFunction
    called.apply = classmethod(_apply)
    yield
    del called.apply


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if torch._C._len_torch_function_stack() and not torch._C._is_torch_function_all_disabled():
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        modes = [mode for mode in stack if isinstance(mode, (UserCodeMode, Borrowing))]
        args = modes[-1].given_to_function(args) if modes else args
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
