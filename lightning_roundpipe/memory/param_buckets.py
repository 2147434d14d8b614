"""Parameters that are updated together, and the version of them that is published.

An upload of a layer waits for the version that the step computes with, and only for that of its own layer. The
optimizer goes through the layers in forward order, and the next forward follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_roundpipe.memory.dtypes import Formats
from lightning_roundpipe.memory.flat_buffer import FlatBuffer
from lightning_roundpipe.memory.version_waits import Versioned
from lightning_roundpipe.optim.split_masters import SplitTensor


class ParamBucket(Versioned):
    """The masters of one layer, of layers that share some, or of no layer.

    Args:
        index: position in forward order.
        flats: the buffers of the layers that they belong to.
        double_buffered: whether masters are updated while a step computes with their working copies.
    """

    def __init__(
        self,
        index: int,
        masters: Sequence[nn.Parameter],
        flats: Sequence[FlatBuffer] = (),
        formats: Formats | None = None,
        *,
        double_buffered: bool = False,
    ) -> None:
        super().__init__()
        self.index = index
        self.masters = list(masters)
        self._flats = list(flats)
        self._held = {id(master): (flat, index) for flat in flats for index, master in enumerate(flat.masters)}
        self._formats = formats or Formats()
        self.double_buffered = double_buffered
        self._copies: dict[int, Tensor] = {}
        """Working copies, by id, of masters that belong to no layer and that user code has read."""

    def read(self, master: nn.Parameter) -> Tensor:
        """Return what user code reads for ``master``: the values that a layer finds on its worker."""
        if not (self.double_buffered or self._formats.differ_now(master)):
            return master
        if (held := self._held.get(id(master))) is not None:
            return held[0].read(held[1])
        if id(master) not in self._copies:
            self._copies[id(master)] = master.detach().to(self._formats.of(master), copy=True)
        return self._copies[id(master)]

    def refresh(self, *, trained_only: bool = False) -> None:
        """Bring the working copies up to date. No thread may read them or write to the masters meanwhile."""
        for flat in self._flats:
            if flat.copied and (flat.trained or not trained_only):
                flat.refresh()
        for master in self.masters if self._copies else ():
            if id(master) in self._copies and (master.requires_grad or not trained_only):
                self._copies[id(master)].copy_(master.detach())

    def join(self) -> None:
        """Give all masters their values until the next `refresh`. No upload may read them meanwhile."""
        for flat in self._flats:
            flat.join()

    def split(self) -> None:
        """Undo `join`."""
        for flat in self._flats:
            if flat.shares:
                flat.refresh()

    def unshare(self) -> None:
        """Give masters and what uploads read memory of their own."""
        for flat in self._flats:
            flat.unshare()

    def memory(self, master: nn.Parameter) -> Tensor | SplitTensor:
        """Return where the optimizer finds the numbers of ``master``."""
        held = self._held.get(id(master)) if id(master) in self._formats.hidden else None
        return master.data if held is None else held[0].memory(held[1])
