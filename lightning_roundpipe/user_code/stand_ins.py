"""What user code gets in place of the masters that it reads: leaves of its own microbatch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


class Proxies:
    """One microbatch's stand-ins for the masters that user code reads.

    A stand-in is a leaf of its own with the master's values; it collects the microbatch's gradient.
    """

    def __init__(self, read: Callable[[nn.Parameter], Tensor]) -> None:
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
            with torch.inference_mode(False), torch.enable_grad():  # the first use may be in no-grad mode
                self._moved.setdefault(key, proxy.to(device, non_blocking=True))
        return self._moved[key]

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


def is_stand_in(value: object) -> bool:
    """Return whether ``value`` is a stand-in for a master."""
    return getattr(value, "roundpipe_stand_in", False)
