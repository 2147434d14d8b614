"""What is updated together, and which version of it is there.

A step's uploads of a layer wait for the version that the updates before the step have made of it, and for no other
layer's: the optimizer goes through the layers in forward order, and the next forward follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from lightning_roundpipe.runtime.memory.dtypes import Formats
from lightning_roundpipe.runtime.memory.flat_params import FlatBuffer
from lightning_roundpipe.runtime.memory.version_waits import Versioned

Part = Callable[[nn.Parameter, int, int], None]
"""Is given a master, and the first and last of its numbers that are there."""


class Holder(Protocol):
    """A layer, as its bucket sees it."""

    masters: list[nn.Parameter]
    flats: list[FlatBuffer]

    def read(self, master: nn.Parameter) -> Tensor:
        """What ``master`` is computed with."""


class ParamBucket(Versioned):
    """Masters of one layer, or of layers that share some; or those that belong to no layer.

    Args:
        index: position in forward order.
        masters: those.
        layers: that they belong to.
        formats: that they are computed with in.
        apart: whether masters are updated while a step computes with their working copies.

    Attributes:
        version: of its weights, after the last update that has been published: that uploads may read.
    """

    def __init__(
        self,
        index: int,
        masters: Sequence[nn.Parameter],
        layers: Sequence[Holder] = (),
        formats: Formats | None = None,
        *,
        apart: bool = False,
    ) -> None:
        super().__init__()
        self.index = index
        self.masters = list(masters)
        self.layers = list(layers)
        self._formats = formats or Formats()
        self._apart = apart
        self._copies: dict[int, Tensor] = {}
        """Working copies of masters that belong to no layer, by id, once user code has read them."""
        self._following: list[tuple[int, Part]] = []
        """Told of each part of a version that is there before the others."""

    # -- versions in parts --------------------------------------------------------------------------------------------

    def when(self, version: int, then: Callable[[], None], part: Part | None = None) -> bool:
        """See `Versioned.when`. ``part``: called in the same thread with parts of that version that are there sooner,
        or with some of them."""
        waits = super().when(version, then)
        if waits and part is not None:
            with self._lock:
                self._following.append((version, part))
        return waits

    def publish_part(self, version: int, master: nn.Parameter, start: int, end: int) -> None:
        """Let uploads read the numbers ``start`` to ``end`` of one master; what else reads waits for `publish`."""
        with self._lock:
            due = [part for wanted, part in self._following if wanted == version]
        for part in due:
            part(master, start, end)

    def publish(self, version: int) -> None:
        super().publish(version)
        with self._lock:
            self._following = [(wanted, part) for wanted, part in self._following if wanted > version]

    # -- working copies -----------------------------------------------------------------------------------------------

    def read(self, master: nn.Parameter) -> Tensor:
        """What user code reads of ``master``: what a layer would find on its worker."""
        if not (self._apart or self._formats.differ(master)):
            return master
        for layer in self.layers:
            if any(master is mine for mine in layer.masters):
                return layer.read(master)
        if id(master) not in self._copies:
            self._copies[id(master)] = master.detach().to(self._formats.of(master), copy=True)
        return self._copies[id(master)]

    def refresh(self, *, trained_only: bool = False) -> None:
        """Bring the working copies up to date. Nobody reads them now, and nobody writes to the masters."""
        for layer in self.layers:
            for flat in layer.flats:
                if flat.copied and (flat.trained or not trained_only):
                    flat.refresh()
        for master in self.masters if self._copies else ():
            if id(master) in self._copies and (master.requires_grad or not trained_only):
                self._copies[id(master)].copy_(master.detach())

    def refresh_part(self, master: nn.Parameter, start: int, end: int) -> None:
        """Bring the working copies of the numbers ``start`` to ``end`` of one contiguous master up to date."""
        for layer in self.layers:
            for flat in layer.flats:
                flat.refresh_part(master, start, end)
        if id(master) in self._copies:
            self._copies[id(master)].view(-1)[start:end].copy_(master.detach().view(-1)[start:end])
