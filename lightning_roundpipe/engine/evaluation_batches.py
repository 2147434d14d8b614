"""Batches of an evaluation: forward only, each on a thread of its own, as many as are in flight.

A batch makes its calls as a microbatch does, without a tape, and its step runs whole, once. Batches follow one another
through the stages of a forward plan:

    start ── user code, in the order of batches ── a call in the turn of its slot ── user code ── ... ── [1]
    the last call has returned ── the turn is left ── the step goes on when the batch before has ended ── [2]
    anything that the plan lacks ── the batch leaves its turns; when the batches before have ended and all slots are
    closed, it goes on alone; no more batches start ── [3]

Alone in any case are steps that draw random numbers, write to weights, want gradients, exchange something with other
machines, have layers that set attributes, call a layer twice that changes its buffers, or give a layer an object again,
as `generate` does with a cache. A batch alone stays on one worker, so that a cache need not move. A call for which user
code wants gradients runs in place, on the user's own weights: autograd then sees what it sees in plain Lightning. So
does every later call of the batch.

A step that makes fewer calls than are known ends while batches before it still run: what it does behind its last call
may come before what they do behind theirs.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_roundpipe.batches.weights import LossWeights
from lightning_roundpipe.devices.thread_owner import working
from lightning_roundpipe.engine.arguments import collect, is_box
from lightning_roundpipe.engine.context import Context
from lightning_roundpipe.engine.events import Recorder
from lightning_roundpipe.engine.executor import LayerCall
from lightning_roundpipe.engine.layer_calls import LayerCalls
from lightning_roundpipe.engine.microbatch import CallingThread
from lightning_roundpipe.engine.slots import StepSpec
from lightning_roundpipe.engine.step_slots import StepSlots, Turns
from lightning_roundpipe.engine.sync import Cancelled, CancelScope, Signal
from lightning_roundpipe.engine.trace import Trace
from lightning_roundpipe.engine.user_sections import UserSections, WeightGuard
from lightning_roundpipe.memory.host_layer import HostLayer
from lightning_roundpipe.planning.forward_plan import plan_forward
from lightning_roundpipe.planning.memory import BESIDE
from lightning_roundpipe.planning.schedule import Stage
from lightning_roundpipe.threads.task_thread import Task
from lightning_roundpipe.user_code.mode import DATA, UserCodeMode
from lightning_roundpipe.user_code.module_state import AttributeView, SharedAttributes
from lightning_roundpipe.user_code.torch_functions import IN_PLACE


class Kind(NamedTuple):
    """What batches of one kind of step have shown: their calls, and the attributes of modules that they set."""

    trace: Trace
    shared: SharedAttributes


def evaluation_spec(context: Context, version: int, scope: CancelScope) -> StepSpec:
    """Return what is fixed for batches that compute with ``version`` of the weights."""
    return StepSpec(version, context.user.thread_state(), scope, LossWeights(None, [1], [0]))


class Flight:
    """Batches that are in flight together, from the first to the last.

    Args:
        known: what their kind has shown; None for a batch alone.
        size: how many are in flight at a time.
        in_place: runs a call of a layer on the user's own weights.

    Attributes:
        closed: whether no more may start [3].
        without_plan: makes the slots of calls of a batch alone.
    """

    def __init__(
        self, context: Context, known: Kind | None, version: int, size: int, in_place: Callable[..., Any]
    ) -> None:
        self.context, self.known, self.in_place = context, known, in_place
        self.scope = CancelScope(lambda: context.pool.fail(self.scope))
        self.shared = known.shared if known is not None else context.user.shared_attributes()
        self.shared.begin()
        self.closed = False
        self.last: Batch | None = None
        self.tasks: list[Task[None]] = []
        self._version, self._size, self._count = version, size, 0
        self.without_plan = self._layout()
        self._rounds: list[StepSlots] = []
        """The slots that some batches share, one for each stage of a plan."""
        self._places = range(1 if known is None else 0)
        """The numbers of the batches that the present slots are for."""

    def _layout(self, trace: Trace | None = None) -> StepSlots:
        return StepSlots(self.context, evaluation_spec(self.context, self._version, self.scope), trace)

    def start(self, function: Callable[[], Any]) -> Batch:
        """Start a batch. The caller holds the baton."""
        index, before, begins = self._count, self.last, self._count not in self._places
        self._count += 1
        if begins:
            self._add_round(index)
        batch = self.last = Batch(self, self._rounds[-1] if self._rounds else self.without_plan, index, before)
        if begins and before is not None:
            batch.turns.predecessor_progress = before.turns.progress
        self.tasks = [task for task in self.tasks if not task.finished]
        work = functools.partial(batch.around.run, batch.run, function)
        self.tasks.append(self.context.pool.thread(index % self._size).submit(work))
        return batch

    def _add_round(self, first: int) -> None:
        """Make the slots of the next batches, with the times that calls have taken so far."""
        assert self.known is not None
        workers, calls = self.context.pool.workers, self.known.trace.calls
        rooms = [w.planned.arena.buffer.numel() // BESIDE for w in workers if w.planned.arena.buffer is not None]
        nbytes = {call.layer.index: call.layer.weights.nbytes for call in calls}
        plan = plan_forward(
            [call.forward_s for call in calls], [call.layer.index for call in calls], nbytes, len(workers),
            min(rooms, default=None),
        )  # fmt: skip
        stages = [Stage(position, "forward", span.first, span.last) for position, span in enumerate(plan.forward)]
        self._places = range(first, first + plan.round_batches(len(workers), self._size))
        layout, before = self._layout(self.known.trace), [slot for slots in self._rounds for slot in slots.all]
        for slot in layout.lay_out(stages, self._places):
            # With fewer stages than workers, rounds would run the same layers side by side.
            changing = [layer for layer in slot.layers if layer.buffers.mutable]
            slot.gradients.after = [other for other in before if any(map(other.has, changing))]
        layout.enqueue()
        self._rounds.append(layout)

    def close_round(self) -> None:
        """Give up the turns of batches that are not started. Others make a new round. The caller holds the baton."""
        for batch in self._places[max(0, self._count - self._places.start) :]:
            for slot in self._rounds[-1].all if self._rounds else ():
                self.context.pool.workers[slot.worker].tickets.release(slot, batch)
        self._places = range(0)

    def close(self) -> None:
        """Let no more batches start."""
        self.closed = True
        self.close_round()

    def unsent(self) -> list[Signal]:
        """Return what is reached once all slots are closed."""
        return [slot.gradients.sent for slots in self._rounds for slot in slots.all]

    def forget(self, shown: float) -> Iterator[Recorder]:
        """Forget rounds whose batches have all ended; yield what was recorded of them."""
        for slots in [slots for slots in self._rounds if slots.all[0].microbatches[-1] < shown]:
            self._rounds.remove(slots)
            yield slots.spec.recorder
        if shown == math.inf:
            yield self.without_plan.spec.recorder


class _Weights(WeightGuard):
    """The weights, which only a batch alone may write to.

    Args:
        make_exclusive: waits until nothing else is in flight.

    Attributes:
        writes: whether user code may have written to weights.
        in_place: whether it has wanted gradients: calls then run on the weights themselves.
    """

    def __init__(self, sections: UserSections, make_exclusive: Callable[[], None]) -> None:
        self._make_exclusive = make_exclusive
        self.writes = self.in_place = False
        super().__init__(sections, _EvaluationUserCode(sections.context, self.touched, sections.run_unlocked))

    def touched(self) -> None:
        """Be alone, as user code is about to write to weights, when no upload reads them. Calls read what it writes."""
        if not self.writes:
            self.writes = True
            self._make_exclusive()
            for device in self.context.pool.devices:
                device.weights_up.synchronize()
            self.context.model.join()

    def runs_in_place(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether user code wants gradients of the call, or has wanted some: an optimizer may have stepped."""
        if not self.in_place and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            found: list[Tensor] = []
            collect((args, kwargs), set(), found)
            self.in_place = any(layer.weights.trainable()) or any(tensor.requires_grad for tensor in found)
        return self.in_place

    def check(self, layer: HostLayer) -> None:
        """Let the call's upload read what user code has written, and refuse writes that `touched` was not told of."""
        if self.writes:
            layer.bucket.refresh()
            layer.check.snapshot()
        layer.check.assert_unmodified()

    def note_call(self, call: LayerCall) -> bool:
        return self.writes

    def lend(self, master: nn.Parameter, device: torch.device) -> Tensor:
        """Return a copy of a parameter of another module for a layer on ``device``."""
        return self.context.model.values(master).to(device)

    def take_bypassed_grad(self, master: nn.Parameter, grad: Tensor, layer: str = "") -> bool:
        """Leave a gradient that reached ``master`` itself to autograd, which adds it to ``.grad``."""
        return False


class Batch(CallingThread):
    """A batch of an evaluation.

    Args:
        flight: those that it is among.
        slots: those of its round.
        before: the batch before, if any is in flight.

    Attributes:
        exclusive: whether it has done what only a batch alone may do [3].
        around: the context variables of its step.
    """

    weights: _Weights

    def __init__(self, flight: Flight, slots: StepSlots, index: int, before: Batch | None) -> None:
        self._flight = flight
        turns, behind = Turns(flight.context, slots, slots.all, index, 1), before.ended if before is not None else None
        sections = UserSections(turns, AttributeView(flight.shared), behind)
        sections.phase = "evaluation"
        weights = _Weights(sections, self.make_exclusive)
        super().__init__(LayerCalls(sections, weights), before.sections.begun if before is not None else None)
        self.exclusive = False
        self.around = contextvars.copy_context()
        self._seen: defaultdict[int, list[Any]] = defaultdict(list)
        """Lists, dicts and objects that each layer has got."""

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, function: Callable[[], Any]) -> None:
        with working(self), self.spec.thread_state.entered(), self.weights.mode:
            self.result.output = self.sections.run(function)
            with torch._C.DisableTorchFunction():
                for bucket in self.context.model.buckets if self.weights.writes else ():
                    bucket.refresh()
            assert self.sections.attributes is not None
            self.sections.attributes.end()
            used = {call.worker for call in self.layer_calls.trace.calls}
            self.result.computed = [self.context.pool.devices[worker].compute.record() for worker in used]

    def _fail(self, error: BaseException, predecessors: Sequence[Any]) -> None:
        if not isinstance(error, Cancelled):
            self.result.error = error

    def _end(self) -> None:
        """End behind the batches before."""
        try:
            self._let_others_end()
        except Cancelled:
            pass
        except BaseException as error:
            self.spec.scope.fail(error)
        finally:
            self._seen.clear()
            super()._end()

    def _let_others_end(self) -> None:
        """Leave turns and user code, and wait until the batches before have ended."""
        self.turns.release()
        self.sections.exit()
        self.sections.release_successors()
        if self.sections.behind is not None:
            self.context.pool.baton.wait(self.sections.behind.then)

    # -- what a batch does alone --------------------------------------------------------------------------------------

    def make_exclusive(self) -> None:
        """Wait until nothing else is in flight [3]. User code calls this."""
        if self.exclusive:
            return
        self.exclusive = True
        self._flight.close()
        self._let_others_end()
        for signal in self._flight.unsent():
            self.context.pool.baton.wait(signal.then)
        self.turns.go_on(self._flight.without_plan)
        self.sections.enter()

    def may_exchange(self) -> bool:
        """Return whether user code may exchange something with other machines, in the order of Lightning's own loop.

        A batch alone may, and all others of its kind then run alone, too.
        """
        if self._flight.known is not None or self.runner.inside is not None:
            return False
        self.make_exclusive()
        return True

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer call. User code calls this by way of the intercepted layer."""
        weights = self.weights
        with torch._C.DisableTorchFunction():
            in_place = weights.runs_in_place(layer, args, kwargs)
            if self._needs_order(layer, args, kwargs):
                self.make_exclusive()
            if in_place:
                weights.touched()
                self.context.model.buffers.settle()
            else:
                return self._run_on_worker(layer, args, kwargs)
        return self._flight.in_place(layer, args, kwargs)

    def _needs_order(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the plan does not have the call, or the layer gets an object that it may have written to."""
        trace, known = self.turns.slots.trace, self._seen[layer.index]
        objects = [value for value in (*args, *kwargs.values()) if is_box(value)]
        again = any(one is other for one in objects for other in known)
        known += objects
        return again or (trace is not None and trace.find(layer, self.turns.next, taped=False) is None)

    def _run_on_worker(self, layer: HostLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.layer_calls.check(layer)
        seen, known = layer.seen, layer.seen.sets_attributes
        result = self.layer_calls.call(layer, args, kwargs)
        if seen.sets_attributes and not known:  # batches that are started from now on would not find these in order
            self._flight.close()
        if self.weights.writes:
            layer.bucket.join()
        return result


class _EvaluationUserCode(UserCodeMode):
    """The torch function mode of a batch; tells before user code writes to weights.

    Args:
        touched: called before user code writes to a weight, or reads its ``.data``, through which it may write to it.
    """

    def __init__(
        self, context: Context, touched: Callable[[], None], run_unlocked: Callable[[Callable[[], Any]], Any]
    ) -> None:
        model, pool = context.model, context.pool
        super().__init__(
            model.bucket_of, model.values, model.formats, train=False,
            accelerator=pool.accelerator, devices=pool.devices, run_unlocked=run_unlocked, buffers=model.buffers,
        )  # fmt: skip
        self._all, self._touched = model.bucket_of, touched

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target, name = args[0] if args else None, getattr(func, "__name__", "")
        writes = func == DATA or (IN_PLACE.fullmatch(name) and name != "requires_grad_")
        if writes and isinstance(target, nn.Parameter) and id(target) in self._all:
            self._touched()
        return super().__torch_function__(func, types, args, kwargs)
