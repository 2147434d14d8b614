"""What user code gets in place of the masters that it reads: leaves of its own microbatch.

On a GPU, the microbatches of a step share one copy of the values: ``lm_head.weight`` in a fused loss travels once to
each device, and its gradient comes back from each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

Copies = dict[tuple[int, torch.device, int], Tensor]
"""Values of masters on devices, by id and version of the master."""


class Proxies:
    """One microbatch's stand-ins for the masters that user code reads.

    A stand-in is a leaf of its own with the master's values; it collects the microbatch's gradient. ``copies`` are
    those that have been made for the step's microbatches so far.
    """

    def __init__(self, read: Callable[[nn.Parameter], Tensor], copies: Copies | None = None) -> None:
        self._copies = {} if copies is None else copies
        self.factor = 1.0
        """Factor by which the gradients are yet to be multiplied."""
        self._read = read
        self._known: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._bypassed: dict[int, tuple[nn.Parameter, Tensor]] = {}
        """Gradients that autograd brought to a master itself, by id of the master."""
        self._moved: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, master: nn.Parameter) -> Tensor:
        known = self._known.get(id(master))
        if known is None:
            # Made outside of all torch.func transforms: the one that happens to need it first must not wrap it.
            with torch.inference_mode(False), temporarily_clear_interpreter_stack():
                made = self._read(master).detach().requires_grad_(master.requires_grad)
            known = self._known.setdefault(id(master), (master, made))  # a worker's thread may have made it meanwhile
            known[1].roundpipe_stand_in = True  # type: ignore[attr-defined]
        return known[1]

    def on(self, proxy: Tensor, device: torch.device) -> Tensor:
        """Return ``proxy`` on ``device``, as a differentiable copy that is made once."""
        key = (id(proxy), device)
        if key not in self._moved:
            # Outside of modes and transforms, and with grad, whatever the first use is in.
            with torch.inference_mode(False), torch.enable_grad(), temporarily_clear_interpreter_stack():
                copy = self.values_on(proxy, device, lambda value: value.to(device, non_blocking=True))
                with torch._C.DisableTorchFunction():
                    self._moved.setdefault(key, _OnDevice.apply(proxy, copy))  # type: ignore[no-untyped-call]
        return self._moved[key]

    def values_on(self, value: Tensor, device: torch.device, bring: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the values of a master or stand-in on ``device``, without grad. ``bring`` copies them once a step."""
        master = next((id(master) for master, proxy in self._known.values() if proxy is value), id(value))
        key = master, device, value._version
        copy = self._copies.get(key)
        return self._copies.setdefault(key, bring(value.detach())) if copy is None else copy

    def end(self) -> None:
        """Release the copies on devices: the microbatch's backward is over."""
        self._moved.clear()

    def masters_of(self, tensors: Tensor | Sequence[Tensor]) -> list[nn.Parameter]:
        """Return the masters among whose stand-ins ``tensors`` are."""
        ids = {id(tensor) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)}
        return [master for master, proxy in self._known.values() if id(proxy) in ids]

    def add_bypassed(self, master: nn.Parameter, grad: Tensor) -> None:
        """Add ``grad``, which autograd brought to ``master`` itself rather than to the stand-in."""
        known = self._bypassed.get(id(master))
        self._bypassed[id(master)] = master, grad if known is None else known[1] + grad

    def gradients(self, masters: Container[int] | None = None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield masters and their gradients, a master possibly twice; all of them, or those with ids in ``masters``."""
        found = [(master, proxy.grad) for master, proxy in self._known.values()]
        for master, grad in (*found, *self._bypassed.values()):
            if grad is not None and (masters is None or id(master) in masters):
                grad = grad.to(master.dtype)
                yield master, grad if self.factor == 1.0 else grad * self.factor


class _OnDevice(torch.autograd.Function):
    """The values of ``proxy``, which are on another device already."""

    @staticmethod
    def forward(ctx: Any, proxy: Tensor, copy: Tensor) -> Tensor:
        ctx.home = proxy.device
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.home), None


def is_stand_in(value: object) -> bool:
    """Return whether ``value`` is a stand-in for a master."""
    return getattr(value, "roundpipe_stand_in", False)
