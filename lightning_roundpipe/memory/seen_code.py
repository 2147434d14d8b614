"""What runs of a layer's code have shown of it, so that later runs pay only for what this layer needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from lightning_roundpipe.model.attributes import StateDiff
from lightning_roundpipe.model.cast_weights import Uses
from lightning_roundpipe.model.unpacked import Key, room_for


class SeenCode:
    """What is known of one layer's code.

    Attributes:
        launch_seconds: how long it occupies the thread that runs it; see `launched`.
        caches_parametrizations: whether it caches parametrizations.
        borrows: parameters of other modules that it computes with; None: it has not run yet.
        reads_data: whether it has read or set the ``.data`` of the layer's parameters: it may write there.
        reaches_out: whether gradients leave the layer other than through its arguments; None: it has not run in
            training.
        sets_attributes: whether its calls set attributes of its modules, so that each finds what the one before has
            set.
        uses: how it uses the layer's weights.
        copies_wanted: bytes of each unpacked copy of a packed master that it has asked for.
    """

    def __init__(self, module: nn.Module, masters: Sequence[nn.Parameter]) -> None:
        self.launch_seconds = math.inf
        self.caches_parametrizations = False
        self.borrows: list[nn.Parameter] | None = None
        self.reads_data = False
        self.reaches_out: bool | None = None
        self.sets_attributes = False
        self.uses = Uses(module, masters)
        self.copies_wanted: dict[Key, int] = {}
        self._states: list[StateDiff | None] = []

    @property
    def copies_nbytes(self) -> int:
        """Bytes of all of its packed masters, unpacked as the layer's code has asked for them."""
        return room_for(self.copies_wanted)

    def launched(self, seconds: float, *, alone: bool) -> None:
        """Record that the layer's code ran for ``seconds``.

        Other threads may hold up a run that is not ``alone``, so such a run only lowers the figure. In the first window
        each runs alone.
        """
        self.launch_seconds = seconds if alone else min(seconds, self.launch_seconds)

    def is_new_state(self, state: StateDiff | None) -> bool:
        """Return whether the layer's code has not run with these attributes yet; another mode may behave otherwise."""
        if any(known is state for known in self._states):
            return False
        self._states = [*self._states[-15:], state]
        return True
