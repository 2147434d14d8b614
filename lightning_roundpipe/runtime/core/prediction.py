"""Prediction of the next layer call from the calls of earlier batches. A wrong prediction only costs time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.trace import Trace, TracedCall
from lightning_roundpipe.runtime.core.turns import Slots
from lightning_roundpipe.runtime.memory.grad_buffers import HostGradSums
from lightning_roundpipe.runtime.memory.host_layer import HostLayer


class NextCallPredictor:
    """Predicts the calls of one microbatch, and lets their slots upload weights ahead of time.

    Args:
        slots: the slots that are told of predicted calls.
        sums_of: returns the host sums of a call's gradients.
        recent: the calls of the last step of one microbatch; None predicts the backward only.
    """

    def __init__(
        self, slots: Slots, sums_of: Callable[[TracedCall], HostGradSums | None], recent: Trace | None
    ) -> None:
        self._slots = slots
        self._sums_of = sums_of
        self._recent = recent

    def see(self, index: int, layer: HostLayer) -> None:
        """Observe that call ``index`` calls ``layer``. If the last step did not, stop predicting forward calls."""
        if self._recent is not None and not self._recent.has(index, layer):
            self._recent = None

    def is_last(self, index: int) -> bool:
        """Return whether ``index`` is predicted to be the last call."""
        return self._recent is not None and self._recent.ends_with(index)

    def after_forward(self, microbatch: int, index: int, tape: Sequence[RecordedCall], trace: Trace) -> None:
        """Start uploading the weights of the call predicted to follow ``index``, while that call still runs."""
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
        """Predict the backward of the deepest call on the tape. It may not come: a gradient may not reach it."""
        if tape and self._slots.foresees:
            recorded = tape[-1]
            sums = self._sums_of(trace.calls[recorded.call])
            self._slots.foresee(microbatch, "backward", recorded.call, recorded.layer, sums)


class CallOrder:
    """Which layer followed each pair of consecutive layers the last time. Outlives a batch.

    Pairs, because different layers follow a layer that is used several times.
    """

    def __init__(self) -> None:
        self._following: dict[tuple[int, int], HostLayer] = {}
        self._last = (-1, -1)

    def begin(self) -> None:
        """Begin a batch: forget the last two layers, keep the order."""
        self._last = (-1, -1)

    def see(self, layer: HostLayer) -> None:
        """Observe a call of ``layer``."""
        self._following[self._last] = layer
        self._last = (self._last[1], layer.index)

    def following(self) -> HostLayer | None:
        """Return the layer that is predicted to be called next; None if unknown."""
        return self._following.get(self._last)


class LayerCallPredictor(NextCallPredictor):
    """Predictor for manual optimization: layers are called in any order, and user code writes to weights at any time.

    Args:
        slots: the slots that are told of predicted calls.
        sums_of: returns the host sums of a call's gradients.
        order: order of earlier calls; updated.
        ahead: whether to predict forward calls.
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
        """Return whether ``layer``, which is called now, was predicted and then written to: its upload is stale."""
        uploading, self._uploading = self._uploading, None
        return uploading is not None and uploading[0] is layer and uploading[1] != layer.written()

    def stay_behind(self) -> None:
        """Stop predicting: from now on user code may write to weights without moving a version counter."""
        self._ahead = False
