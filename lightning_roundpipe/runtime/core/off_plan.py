"""Microbatches that leave the plan: they make a call that the first batches have not shown, and go on one by one.

A loss term that begins after a thousand steps, a head for each task, a network that grows: the plan has no stage for
such a call. Other microbatches need not wait for that, and nothing is computed twice:

    a call that the plan does not have ── the microbatch gives up its turns ── [1]
    all slots of the plan are closed, and the microbatches before are over ── it goes on, alone ── [2]
    its further calls and its backward have a slot each, as in the first batch ── [3]
    what the fused slot kept for it is recomputed: the weights are no longer there ── [4]

The step then ends before the next one begins, and the next batches are learned (`Learned.unseen`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_roundpipe.devices.waiter import Waiter
from lightning_roundpipe.runtime.core.slots_on_arrival import SlotsOnArrival
from lightning_roundpipe.runtime.threads.sync import CancelScope

if TYPE_CHECKING:
    from lightning_roundpipe.runtime.core.activation_store import ActivationStore
    from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
    from lightning_roundpipe.runtime.core.trace import Kind

OFF_PLAN = -1
"""The round of their slots."""


class OffPlan:
    """The microbatches of one step that have left its plan.

    Args:
        microbatches: number of microbatches of the step.
        slots: makes their slots [3].
        plans: number of plans whose slots have to be closed first: the step's, and that of the step before if it is
            still in flight.

    Attributes:
        left: by microbatch, the calls that it has made.
        what: describes the first call that the plan does not have.
    """

    def __init__(self, microbatches: int, slots: SlotsOnArrival, plans: int) -> None:
        self.left: dict[int, list[Kind]] = {}
        self.what = ""
        self.slots = slots
        self._running = set(range(microbatches))
        self._waiting: dict[int, Waiter] = {}
        self._plans = plans
        self._lock = threading.Lock()

    def wait(self, microbatch: int, called: list[Kind], what: str, cancel_scope: CancelScope) -> None:
        """Wait until ``microbatch``, which has given up its turns, may go on [2].

        Args:
            microbatch: its number.
            called: the calls that it has made; it goes on to add to them.
            what: describes the call that the plan does not have.
            cancel_scope: the step's cancel scope.
        """
        waiter = Waiter()
        with self._lock:
            self.left[microbatch] = called
            self.what = self.what or what
            self._waiting[microbatch] = waiter
            self._wake_next()
        cancel_scope.wait(waiter)

    def closed(self) -> None:
        """Note that all slots of a plan are closed."""
        with self._lock:
            self._plans -= 1
            self._wake_next()

    def ended(self, microbatch: int) -> None:
        """Note that ``microbatch`` is over."""
        with self._lock:
            self._running.discard(microbatch)
            self._wake_next()

    def _wake_next(self) -> None:
        if not self._plans and self._running and (waiter := self._waiting.pop(min(self._running), None)) is not None:
            waiter.wake()


def why_not_recomputed(recorded: RecordedCall) -> str:
    """Return why a call whose graph was kept cannot be recomputed; empty if it can [4]."""
    if recorded.mutates:
        return "writes to its arguments"
    if recorded.overwritten():
        return "had its arguments written to by code between layers"
    if any(not isinstance(module, _BatchNorm) for module, _ in recorded.layer.mutable_buffers.values()):
        return "changes a buffer that its output depends on"
    return ""


def give_up_graph(recorded: RecordedCall, activations: ActivationStore) -> None:
    """Save what a kept graph was computed from, by way of ``activations``, and drop the graph [4]."""
    recorded.leaves = [activations.save(x, recorded.home) if isinstance(x, Tensor) else x for x in recorded.held]
    recorded.given.clear()
    recorded.held, recorded.graph = [], None
