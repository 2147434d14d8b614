"""A guess at what a step of one microbatch calls next, from what the last one called. Being wrong costs only time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_roundpipe.runtime.core.call import Call
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.trace import Trace, TracedCall
from lightning_roundpipe.runtime.core.turns import Slots
from lightning_roundpipe.runtime.layer_calls.precedent import Precedent
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer


class NextCallPredictor:
    """What is said to the slots ahead of time, for one microbatch.

    Args:
        slots: get to know what will probably come.
        sums_of: where a call's gradients are summed.
        recent: the calls of the last such step; None: only the backward is foreseen.
    """

    def __init__(
        self, slots: Slots, sums_of: Callable[[TracedCall], HostGradSums | None], recent: Trace | None
    ) -> None:
        self._slots = slots
        self._sums_of = sums_of
        self._recent = recent

    def see(self, index: int, layer: HostLayer) -> None:
        """What call ``index`` is. A microbatch that leaves the way of the last one is not foreseen any further."""
        if self._recent is not None and not self._recent.has(index, layer):
            self._recent = None

    def is_last(self, index: int) -> bool:
        """Whether there is probably no call after ``index``."""
        return self._recent is not None and self._recent.ends_with(index)

    def precedent(self, call: Call) -> Precedent | None:
        """What ``call`` gave in the last step, if it was made in the same manner there."""
        if self._recent is None:
            return None
        known = self._recent.calls[call.index].precedent
        return known if known is not None and known.manner == call.manner else None

    def after_forward(self, microbatch: int, index: int, tape: Sequence[RecordedCall], trace: Trace) -> None:
        """Let the weights of what comes after call ``index`` travel meanwhile."""
        if self._recent is None:
            return
        if self._recent.ends_with(index):
            self.backward(microbatch, tape, trace)
            return
        following = self._recent.calls[index + 1]
        if following.taped and self._recent.ends_with(index + 1):
            self._slots.foresee(microbatch, "fused", index + 1, following.layer, self._sums_of(following))
        else:
            self._slots.foresee(microbatch, "forward", index + 1, following.layer, None)

    def backward(self, microbatch: int, tape: Sequence[RecordedCall], trace: Trace) -> None:
        """The deepest call that is still on the tape will come, unless no gradient reaches it."""
        if tape:
            recorded = tape[-1]
            sums = self._sums_of(trace.calls[recorded.call])
            self._slots.foresee(microbatch, "backward", recorded.call, recorded.layer, sums)


class CallOrder:
    """What was called last time after which two layers. Outlives a batch.

    Two, because a shared layer is followed by different ones.
    """

    def __init__(self) -> None:
        self._following: dict[tuple[int, int], HostLayer] = {}
        self._last = (-1, -1)

    def begin(self) -> None:
        """A batch begins."""
        self._last = (-1, -1)

    def see(self, layer: HostLayer) -> None:
        """``layer`` is called."""
        self._following[self._last] = layer
        self._last = (self._last[1], layer.index)

    def following(self) -> HostLayer | None:
        """What will probably be called next."""
        return self._following.get(self._last)


class LayerCallPredictor(NextCallPredictor):
    """Of a step that calls layers in any order, and whose user code may write to weights at any time.

    Args:
        slots: get to know what will probably come.
        sums_of: where a call's gradients are summed.
        order: of earlier calls; updated.
        ahead: whether to foresee forward calls.
    """

    def __init__(
        self, slots: Slots, sums_of: Callable[[TracedCall], HostGradSums | None], order: CallOrder, *, ahead: bool
    ) -> None:
        super().__init__(slots, sums_of, None)
        self._order = order
        self._ahead = ahead
        self._uploading: tuple[HostLayer, list[tuple[int, int]]] | None = None
        order.begin()

    def see(self, index: int, layer: HostLayer) -> None:
        self._order.see(layer)

    def after_forward(self, microbatch: int, index: int, tape: Sequence[RecordedCall], trace: Trace) -> None:
        following = self._order.following() if self._ahead else None
        if following is not None:
            self._uploading = following, following.written()
            self._slots.foresee(microbatch, "forward", index + 1, following, None)

    def is_late(self, layer: HostLayer) -> bool:
        """Whether ``layer``, which is called now, was uploaded ahead and has been written to since."""
        uploading, self._uploading = self._uploading, None
        return uploading is not None and uploading[0] is layer and uploading[1] != layer.written()

    def stay_behind(self) -> None:
        """User code may write to weights without anybody seeing it."""
        self._ahead = False
