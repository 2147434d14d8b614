"""Recomputation ahead of its gradient: what a worker does while the microbatch whose turn it is is still elsewhere.

    a backward slot's turn passes to a microbatch that is not there ── [1]   or one that has the turn has come further
    worker: the deepest call of the slot that is not recomputed yet ── [2]   from what its forward saved
            and the one in front of it, until the whole stage is ── [3]      one microbatch's graphs are kept
    the microbatch arrives with its gradient ── [4]                          and finds graphs, as far as they are made

Nothing waits for any of this, and calls are recomputed in the order in which their gradients arrive, so being ahead
never delays anybody who is there. Results are the same to the bit: a call's random state is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_roundpipe.runtime.core.context import EngineContext
from lightning_roundpipe.runtime.core.microbatch import MicrobatchTask
from lightning_roundpipe.runtime.core.recorded_call import RecordedCall
from lightning_roundpipe.runtime.core.turns import Slot
from lightning_roundpipe.runtime.threads.sync import CancelScope


class RecomputeAhead:
    """Of one step.

    Args:
        engine: whose workers recompute.
        cancel_scope: of the step.
        runs: gives its microbatches; none once it is over.
    """

    def __init__(
        self, engine: EngineContext, cancel_scope: CancelScope, runs: Callable[[], Sequence[MicrobatchTask]]
    ) -> None:
        self._engine, self._cancel_scope, self._runs = engine, cancel_scope, runs

    def look(self, slot: Slot, microbatch: int) -> None:
        """The turn of ``slot`` is, or has come to, ``microbatch`` [1]. From any thread; costs a hand-off."""
        worker = self._engine.worker_pool.workers[slot.worker]
        worker.post(lambda: self._go_on(slot, microbatch), self._cancel_scope)

    def _go_on(self, slot: Slot, microbatch: int) -> None:
        """On the worker's thread."""
        runs = self._runs()
        if not (slot.is_turn_of(microbatch) and runs):
            return
        run = runs[microbatch]
        recorded = _deepest(run, slot)  # [2]
        if recorded is None:
            return
        try:
            self._engine.executors[slot.worker].recompute_ahead(slot, recorded, run.activations, run)
        except torch.OutOfMemoryError:
            return  # when the microbatch is there, nothing is kept beside it
        except Exception as error:
            if not self._cancel_scope.failed:  # else it only says that the step has
                recorded.failed = error  # raised where it belongs, if the call is needed at all
            return
        self.look(slot, microbatch)  # [3]; behind the microbatch, if that has arrived meanwhile [4]


def _deepest(run: MicrobatchTask, slot: Slot) -> RecordedCall | None:
    """The call of ``slot`` that is to be recomputed next; None: there is none, or the forward is not that far."""
    if run.reached <= slot.calls[-1] + 1:  # the call before the one that it makes now is on the tape
        return None
    for recorded in reversed(run.tape.copy()):
        if recorded.call in slot.calls and recorded.recomputed is None and not recorded.done:
            return recorded
    return None
