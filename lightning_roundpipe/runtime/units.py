"""What is updated together, and which version of it is there.

A step's uploads of a layer wait for the version that the updates before the step have made of it, and for no other
layer's: the optimizer goes through the layers in forward order, and the next forward follows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_roundpipe.runtime.control import Control, Waiter

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.weights import HostLayer


class Unit:
    """Masters of one layer, or of layers that share some; or those that belong to no layer.

    Args:
        index: position in forward order.
        masters: those.
        layers: that they belong to.
        apart: whether masters are updated while a step computes with their working copies.

    Attributes:
        version: the number of the last update that has been published: that uploads may read.
    """

    def __init__(
        self, index: int, masters: Sequence[nn.Parameter], layers: Sequence[HostLayer] = (), *, apart: bool = False
    ) -> None:
        self.index = index
        self.masters = list(masters)
        self.layers = list(layers)
        self.version = 0
        self._apart = apart
        self._copies: dict[int, Tensor] = {}
        """Working copies of masters that belong to no layer, by id, once glue has read them."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def when(self, version: int, then: Callable[[], None]) -> bool:
        """Have ``then`` called, by the thread that publishes, when ``version`` is there.

        Returns:
            False if it is there already: then nobody calls it.
        """
        with self._lock:
            if self.version >= version:
                return False
            self._waiting.append((version, then))
            return True

    def has(self, version: int) -> bool:
        """Whether ``version`` is there."""
        return self.version >= version

    def wait(self, version: int, control: Control) -> None:
        """Wait until ``version`` is there."""
        if self.has(version):
            return
        waiter = Waiter()
        if self.when(version, waiter.wake):
            control.wait(waiter)

    def publish(self, version: int) -> None:
        """Let everybody read ``version``."""
        with self._lock:
            self.version = max(self.version, version)
            due = [then for wanted, then in self._waiting if wanted <= version]
            self._waiting = [(wanted, then) for wanted, then in self._waiting if wanted > version]
        for then in due:
            then()

    # -- working copies -----------------------------------------------------------------------------------------------

    def read(self, master: nn.Parameter) -> Tensor:
        """What glue reads of ``master``: what a layer would find on its worker."""
        if not self._apart:
            return master
        for layer in self.layers:
            if any(master is mine for mine in layer.masters):
                return layer.read(master)
        if id(master) not in self._copies:
            self._copies[id(master)] = master.detach().clone()
        return self._copies[id(master)]

    def refresh(self) -> None:
        """Bring the working copies up to date. Nobody reads them now, and nobody writes to the masters."""
        for layer in self.layers:
            for flat in layer.flats:
                flat.refresh()
        for master in self.masters:
            if id(master) in self._copies:
                self._copies[id(master)].copy_(master.detach())


def units_of(layers: Sequence[HostLayer], masters: Iterable[nn.Parameter], *, apart: bool = False) -> list[Unit]:
    """The units of a module, in forward order; every layer gets to know its own.

    Args:
        layers: all of them, in order.
        masters: all parameters of the module. Those of no layer make the first unit,
            as glue may read them anywhere.
        apart: see `Unit`.
    """
    groups: list[list[HostLayer]] = []
    for layer in layers:
        mine = {id(p) for p in layer.masters}
        shared = [g for g in groups if any(id(p) in mine for other in g for p in other.masters)]
        groups = [g for g in groups if g not in shared]
        groups.append([*(other for g in shared for other in g), layer])
    groups.sort(key=lambda group: min(layer.index for layer in group))
    inside = {id(p) for layer in layers for p in layer.masters}
    units = [Unit(0, _unique(p for p in masters if id(p) not in inside), apart=apart)]
    for group in groups:
        unit = Unit(len(units), _unique(p for layer in group for p in layer.masters), group, apart=apart)
        for layer in group:
            layer.unit = unit
        units.append(unit)
    return units


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(p): p for p in parameters}.values())
