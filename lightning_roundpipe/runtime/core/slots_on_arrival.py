"""Slots without a plan: one for each call, made when the call arrives.

All training steps without a plan use these, such as the first batch, manual optimization and steps of one microbatch.
Their control flow is free. `NextCallPredictor` may announce a call so that its weights are uploaded ahead; a wrong
prediction only costs time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_roundpipe.runtime.core.turns import Slot, Slots

if TYPE_CHECKING:
    from lightning_roundpipe.planning.costs import Phase
    from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
    from lightning_roundpipe.runtime.memory.host_layer import HostLayer


class SlotsOnArrival(Slots):
    """Makes a slot for each call when it arrives or is predicted. Only one microbatch runs at a time.

    Args:
        make: makes a slot for (phase, microbatch, call, layer, sums).
        prepare: starts uploading a slot's weights.
        cancel: undoes ``prepare`` for a slot whose call does not come.
        open: makes a slot the worker's open one.
        close: closes a slot.
        ahead: whether to upload the weights of predicted calls.
    """

    def __init__(
        self,
        make: Callable[[Phase, int, int, HostLayer, HostGradSums | None], Slot],
        prepare: Callable[[Slot], None],
        cancel: Callable[[Slot], None],
        open: Callable[[Slot], None],
        close: Callable[[Slot], None],
        *,
        ahead: bool = True,
    ) -> None:
        self._make = make
        self._prepare = prepare
        self._cancel = cancel
        self._open = open
        self._close = close
        self.foresees = ahead
        self._foreseen: Slot | None = None
        self._fused: Slot | None = None

    def forward(self, microbatch: int, call: int, layer: HostLayer) -> Slot:
        self._release_fused()
        return self._arrive("forward", microbatch, call, layer, None)

    def fused(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        """Return a slot for the forward of what is probably the last call. It stays open for the backward."""
        self._release_fused()
        self._fused = self._arrive("fused", microbatch, call, layer, sums)
        return self._fused

    def keeps_graph(self, call: int) -> bool:
        return self._fused is not None and call in self._fused.calls

    def backward(self, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        if self._fused is not None and self.keeps_graph(call):
            fused, self._fused = self._fused, None
            return fused
        self._release_fused()
        return self._arrive("backward", microbatch, call, layer, sums)

    def foresee(self, microbatch: int, phase: Phase, call: int, layer: HostLayer, sums: HostGradSums | None) -> None:
        if self.foresees:
            self._foresee(microbatch, phase, call, layer, sums)

    def _foresee(self, microbatch: int, phase: Phase, call: int, layer: HostLayer, sums: HostGradSums | None) -> None:
        if not self._is_foreseen(phase, call, layer):
            self._drop_foreseen()
            self._foreseen = self._make(phase, microbatch, call, layer, sums)
            self._prepare(self._foreseen)

    def is_over(self, slot: Slot, call: int) -> bool:
        return slot is not self._fused

    def after(self, microbatch: int, slot: Slot, call: int) -> None:
        if self.is_over(slot, call):
            self._close(slot)

    def finish(self, microbatch: int) -> None:
        self._drop_foreseen()
        self._release_fused()

    def _arrive(self, phase: Phase, microbatch: int, call: int, layer: HostLayer, sums: HostGradSums | None) -> Slot:
        self._foresee(microbatch, phase, call, layer, sums)
        slot, self._foreseen = self._foreseen, None
        assert slot is not None
        self._open(slot)
        return slot

    def _is_foreseen(self, phase: Phase, call: int, layer: HostLayer) -> bool:
        slot = self._foreseen
        return slot is not None and (slot.phase, slot.calls[0], slot.layers[0]) == (phase, call, layer)

    def _drop_foreseen(self) -> None:
        if self._foreseen is not None:
            foreseen, self._foreseen = self._foreseen, None
            self._cancel(foreseen)

    def _release_fused(self) -> None:
        """Close the fused slot, if one is open: its call was not the last one, or needs no backward."""
        if self._fused is not None:
            fused, self._fused = self._fused, None
            self._close(fused)
