"""Evaluation: validation, test and prediction batches, forward only. Several are in flight at once.

the first batch of a kind ── runs alone, with a slot for each call ── shows the calls, how long they take, and which
attributes of modules a step leaves changed ── [1]
others ── the caller starts them ahead of Lightning's loop; see `evaluation_batches` ── [2]
wait_for, show ── the caller holds the baton while its hooks see what the batch has left ── [3]
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.evaluation_batches import Batch, Flight, Kind
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.engine.randomness import CallerRandomState
from lightning_roundpipe.engine.sync import Cancelled
from lightning_roundpipe.engine.trace import TracedCall
from lightning_roundpipe.faults.interrupts import interrupts_deferred
from lightning_roundpipe.faults.notes import remedied
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.user_code.module_state import AttributeView, observed_writes
from lightning_roundpipe.user_code.thread_state import apply_context


class Evaluations:
    """Evaluates as many batches at once as the caller starts. Lives as long as the engine.

    Args:
        account: called with what was recorded of batches.
    """

    def __init__(self, context: Context, account: Callable[[Recorder], None]) -> None:
        self._context, self._account = context, account
        self._known: dict[Hashable, Kind] = {}
        self._kind: Hashable = None
        self._flight: Flight | None = None
        self._around, self._streams = contextlib.ExitStack(), contextlib.ExitStack()
        self._before: CallerRandomState | None = None

    @property
    def _running(self) -> Flight:
        assert self._flight is not None
        return self._flight

    def knows(self, kind: Hashable) -> bool:
        """Return whether several batches of this kind of step may be in flight."""
        return kind in self._known

    @interrupts_deferred()
    def begin(self, kind: Hashable, version: int, in_flight: int, *, exclusive: bool = False) -> None:
        """Begin to run batches of ``kind``, ``in_flight`` at a time [2], or one exclusively, which shows it [1]."""
        context, self._kind = self._context, kind
        known = self._known.pop(kind) if kind in self._known and exclusive else self._known.get(kind)
        self._before = CallerRandomState(context.pool.devices) if exclusive else None
        self._flight = Flight(context, None if exclusive else known, version, in_flight, self._run_in_place)
        for around in (
            context.user.intercepted(),
            observed_writes(),
            context.pool.randomness.paused(),
        ):
            self._around.enter_context(around)

    @interrupts_deferred()
    def start(self, function: Callable[[], Any]) -> Batch | None:
        """Start a batch's step. Return None if no more may start."""
        flight = self._flight
        if flight is None or flight.scope.failed:
            return None
        batch = None
        with self._failing(), self._context.pool.main.holding(flight.scope):
            if not flight.closed:
                batch = flight.start(lambda: self._finished(function))
        return batch

    def _finished(self, function: Callable[[], Any]) -> Any:
        output = function()
        self._context.user.bring_metrics_to_host()
        return output

    def close_round(self) -> None:
        """Give up the turns of batches that are not started, for which slots would wait."""
        if (flight := self._flight) is not None:
            with self._failing(), self._context.pool.main.holding(flight.scope):
                flight.close_round()

    def _run_in_place(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        user, accelerator = self._context.user, self._context.pool.accelerator
        if accelerator is None:
            return user.run_in_place(layer, args, kwargs)
        self._context.hints.say(
            "gradients",
            f"layer {layer.name!r} is called with gradients (torch.enable_grad) in a validation, test or predict step, "
            "in which GPUs only run forward: from there on, the step's layers run on the CPU.",
        )
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("cpu"), (args, kwargs))
        enabled, dtype = torch.is_autocast_enabled(accelerator), torch.get_autocast_dtype(accelerator)
        with torch.autocast("cpu", dtype) if enabled else contextlib.nullcontext():
            return user.run_in_place(layer, args, kwargs)

    # -- the caller, between batches ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End everything if an error comes up here, or has come up in the engine, and raise the first one."""
        flight = self._running
        try:
            yield
        except BaseException as error:
            flight.scope.fail(error)
            self.end(given_up=not isinstance(error, Cancelled))
            flight.scope.raise_error()
            raise

    @interrupts_deferred()
    @remedied()
    def wait_for(self, batch: Batch) -> None:
        """Wait until ``batch``, the oldest one, has ended. Hooks have no turn any more."""
        self.pause_hooks()
        flight = self._running
        with self._failing():
            self._context.pool.wait_for(batch.ended, flight.scope)
            flight.scope.check()
            for event in batch.result.computed:
                event.wait()
        self._see(flight, batch.index + 1)

    def _see(self, flight: Flight, shown: float) -> None:
        for recorder in flight.forget(shown):
            self._account(recorder)
            if flight.known is not None and not flight.closed and not flight.scope.failed:
                flight.known.trace.see_forwards(recorder.call_seconds())

    @interrupts_deferred()
    @remedied()
    def show(self, batch: Batch) -> None:
        """Let hooks find what ``batch`` has left, and no batch run user code until the next `wait_for` [3]."""
        with self._failing():
            self._give_turn(batch.sections.attributes)

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Context of hooks that run while batches do."""
        self._give_turn()
        try:
            yield
        finally:
            self.pause_hooks()

    def _give_turn(self, view: AttributeView | None = None) -> None:
        """Give the caller's hooks the baton, a view of modules, and the streams that outputs are on."""
        flight = self._running
        if not self._context.pool.main.holds:
            self._streams.enter_context(self._context.pool.main.holding(flight.scope))
            self._streams.enter_context(self._context.pool.devices[0].activate())
        flight.shared.enter_hooks(view)

    def pause_hooks(self) -> None:
        """Let batches run user code."""
        if self._flight is not None:
            self._flight.shared.hooks.exit()
        self._streams.close()

    @remedied()
    def result(self, batch: Batch) -> Any:
        """Return what the step of ``batch`` has returned, or raise what it has raised."""
        apply_context(batch.around)
        error, batch.result.error = batch.result.error, None  # the traceback refers to the batch
        try:
            if error is not None:
                self._before = None  # its calls are not all that its kind makes
                raise error
            return batch.result.output
        finally:
            del error

    @interrupts_deferred()
    def end(self, *, given_up: bool = False) -> None:
        """Bring everything to rest. Batches that have not ended are given up."""
        if (flight := self._flight) is None:
            return
        scope, model = flight.scope, self._context.model
        self.pause_hooks()
        self._flight = None
        try:
            if flight.last is not None and not flight.last.ended.is_set:
                scope.fail(Cancelled())
            with self._context.pool.main.holding(flight.scope):
                flight.close_round()
        except BaseException as error:
            scope.fail(error)
        self._context.pool.rest(scope, flight.tasks, given_up=given_up)
        if scope.failed:
            self._context.gradients.drop()  # downloads into them may have been aborted
        flight.shared.leave_to_hooks()
        self._around.close()
        self._learn(flight)
        self._see(flight, math.inf)
        if not scope.failed:
            model.buffers.settle()
        model.buffers.take_history()
        if not isinstance(scope.error, Cancelled):
            scope.raise_error()

    def _learn(self, flight: Flight) -> None:
        """Take note of what a batch alone has shown, or that one has made other calls than those that are known."""
        before, self._before = self._before, None
        if flight.closed:
            self._known.pop(self._kind, None)
        batch = flight.last
        if before is None or batch is None or self._kind == ():
            return
        if batch.exclusive or batch.result.error or flight.scope.failed:
            return
        calls = batch.layer_calls.trace.calls
        if calls and not before.has_moved and not any(map(_needs_exclusive, calls)):
            for call in calls:
                call.forward_s = math.inf
            self._known[self._kind] = flight.known = Kind(batch.layer_calls.trace, flight.shared)


def _needs_exclusive(call: TracedCall) -> bool:
    """Return whether a call must follow all calls of the batches before: each finds what those have left."""
    return call.layer.seen.sets_attributes or bool(call.use and call.layer.buffers.mutable)
