"""Recomputation ahead of the gradient: a worker recomputes a stage while its next microbatch is still elsewhere.

    the turn of a backward slot passes to a microbatch that is not there yet,
    or the microbatch that has the turn gets further in its forward ── [1]
    worker: recompute the slot's deepest call that is not recomputed yet, from its saved inputs ── [2]
            then the call in front of it, up to the whole stage; only this microbatch's graphs are kept ── [3]
    the microbatch arrives with its gradient and uses the graphs that exist by then ── [4]

No thread waits for a recomputation ahead. Calls are recomputed in the order in which their gradients arrive, so it
never delays a microbatch that is there already. Results are the same to the bit, as each call has its own random state.
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
    """Starts recomputations ahead in one step.

    Args:
        engine: its workers and executors recompute.
        cancel_scope: the step's cancel scope.
        runs: returns the step's microbatches; empty once the step is over.
    """

    def __init__(
        self, engine: EngineContext, cancel_scope: CancelScope, runs: Callable[[], Sequence[MicrobatchTask]]
    ) -> None:
        self._engine, self._cancel_scope, self._runs = engine, cancel_scope, runs

    def look(self, slot: Slot, microbatch: int) -> None:
        """Let the worker of ``slot`` recompute for ``microbatch``, which has the turn [1].

        Any thread may call this; it only posts work to the worker's thread.
        """
        worker = self._engine.worker_pool.workers[slot.worker]
        worker.post(lambda: self._go_on(slot, microbatch), self._cancel_scope)

    def _go_on(self, slot: Slot, microbatch: int) -> None:
        """Recompute one call, and post the next one. Runs on the worker's thread."""
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
            return  # the backward recomputes it; by then the deeper graphs have been used up
        except Exception as error:
            if not self._cancel_scope.failed:  # else the error is only a consequence of the step's failure
                recorded.failed = error  # raised by the call's backward, if there is one
            return
        self.look(slot, microbatch)  # [3]; queued behind the microbatch's own work if it has arrived by now [4]


def _deepest(run: MicrobatchTask, slot: Slot) -> RecordedCall | None:
    """Return the call of ``slot`` to recompute next; None if all are recomputed or the forward has not got there."""
    if run.reached <= slot.calls[-1] + 1:  # a call is on the tape for certain once the next one has begun
        return None
    for recorded in reversed(run.tape.copy()):
        if recorded.call in slot.calls and recorded.recomputed is None and not recorded.done:
            return recorded
    return None
