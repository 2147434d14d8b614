"""Ways past the stand-ins: what user code computes with a master itself, where no torch function of user code shows it.

`mode.UserCodeMode` gives torch functions a stand-in in place of each master. Some ways of using one are no such
functions:

* A layer's code that has a parameter of another module, by a hook, a closure or an object: `Borrowing` gives it the
  microbatch's stand-in, as user code would.
* `torch.autograd.Function.apply`, which is given stand-ins here, as long as there are workers.
* TorchScript, extensions in C++, transforms, other threads and the like. Autograd then brings the gradient
  to the master's own accumulator, with a hook on it that sees who differentiates:

      a microbatch, or a layer on a worker ── the microbatch takes it, and the master gets nothing ── [1]
      the loss's own backward, manual optimization, code outside of a step ── to ``.grad``, as ever ── [2]

What was read there is the master. Where everything else reads another copy of it, or where it may be written to
meanwhile, [1] is refused (`UserCodeSections.used_unseen`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from lightning_roundpipe.runtime.user_code.graph_cuts import driven_backward
from lightning_roundpipe.runtime.user_code.inference_writes import IN_PLACE
from lightning_roundpipe.runtime.user_code.interception import current
from lightning_roundpipe.runtime.user_code.mode import ACCESSORS, DATA, DTYPE, VIEWS, UserCodeMode


class Lender(Protocol):
    """The microbatch that a layer runs for."""

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor: ...

    def passed_by(self, master: nn.Parameter, grad: Tensor) -> bool: ...


class Borrowing(TorchFunctionMode):
    """The mode of a layer's code that computes with masters, and not only with what lies on its worker.

    Args:
        masters: ids of all of them.
        lender: gives stand-ins.
        device: that the layer runs on.
        known: masters that it has computed with before.

    Attributes:
        found: these, and others that it has computed with now.
    """

    def __init__(
        self, masters: Container[int], lender: Lender, device: torch.device, known: Iterable[nn.Parameter] = ()
    ) -> None:
        super().__init__()
        self.found = list(known)
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
        return func(*args, **kwargs)

    def given_to_function(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a function is called with instead of ``args``."""
        return tuple(map(self._borrowed, args))

    def _borrowed(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and id(value) in self._masters:
            if not any(value is known for known in self.found):
                self.found.append(value)
            return self._lender.lend(value, self._device)
        if type(value) in (list, tuple) and any(isinstance(item, nn.Parameter) for item in value):
            return type(value)(map(self._borrowed, value))
        return value


_READ = {*VIEWS, DATA, DTYPE, Tensor.device.__get__}
"""Attributes of a parameter that its stand-in has others of."""


class Accumulators:
    """The nodes in which autograd's graphs end, of all masters that are trained.

    They are kept, or each graph would get new ones, and with them the hooks.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[Any, RemovableHandle]] = {}
        self._seen: list[tuple[bool, torch.dtype]] = []

    def watch(self, masters: Iterable[nn.Parameter]) -> None:
        """Before a batch: hook those of ``masters`` that are trained now. Another format brings another node."""
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
        """Leave no hook behind."""
        for _, handle in self._nodes.values():
            handle.remove()
        self._nodes.clear()
        self._seen = []


def _arriving(master: nn.Parameter, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
    """What goes on to the accumulator; None: what came."""
    passed_by = getattr(current(), "passed_by", None)
    if passed_by is None or grads[0] is None:
        return None  # [2]
    return (None,) if passed_by(master, grads[0]) else None


def user_of(master: nn.Parameter) -> str:
    """The operation with ``master``, as autograd names it, in the graph that is being differentiated."""
    accumulator = torch.autograd.graph.get_gradient_edge(master).node
    nodes, seen = [driven_backward.root], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [after for after, _ in node.next_functions]
        if accumulator in following:
            return str(node.name())
        nodes += following
    return "code that runs in backward"


_users = 0
_own: Any = vars(torch.autograd.Function)["apply"]


@contextlib.contextmanager
def functions_given_stand_ins() -> Iterator[None]:
    """Until the last of those who have entered this leaves it. For the main thread."""
    global _users, _own
    _users += 1
    try:
        if _users == 1:
            _own = vars(torch.autograd.Function)["apply"]
            torch.autograd.Function.apply = classmethod(_wrapped(_own.__func__))  # type: ignore[method-assign, assignment]
        yield
    finally:
        _users -= 1
        if not _users:
            torch.autograd.Function.apply = _own  # type: ignore[method-assign]


def _wrapped(own: Any) -> Any:
    @functools.wraps(own)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack() and not torch._C._is_torch_function_all_disabled():
            stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
            modes = [mode for mode in stack if isinstance(mode, (UserCodeMode, Borrowing))]
            args = modes[-1].given_to_function(args) if modes else args
        return own(cls, *args, **kwargs)

    return apply
