"""One training batch: its microbatches, their turns, and what comes out of all of them.

    batch ── split ──► microbatch threads (`run`) ──► slots (`slots`) ──► workers (`worker`)
                                                                              │
    merged loss and outputs ◄── weights of the microbatches ◄── sums on the host ◄┘

The first error anywhere fails the step: everybody leaves, the devices come to rest, and it is raised here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.planning.schedule import Plan, Stage
from lightning_roundpipe.runtime.context import Ambient
from lightning_roundpipe.runtime.control import Control, UserLock, Waiter
from lightning_roundpipe.runtime.glue import check_counts
from lightning_roundpipe.runtime.gradients import StepGradients
from lightning_roundpipe.runtime.logs import issue, shadowed_log
from lightning_roundpipe.runtime.microbatch import merge, weighted_mean
from lightning_roundpipe.runtime.notes import add_waiting_note
from lightning_roundpipe.runtime.run import MicrobatchRun
from lightning_roundpipe.runtime.slots import PlannedSlots, Slot, SlotsOnArrival
from lightning_roundpipe.runtime.threads import Task
from lightning_roundpipe.runtime.trace import Trace, TracedCall, distinct_layers

if TYPE_CHECKING:
    from lightning_roundpipe.planning.costs import Phase
    from lightning_roundpipe.runtime.engine import Engine
    from lightning_roundpipe.runtime.interception import CallContext
    from lightning_roundpipe.runtime.sums import HostGradients
    from lightning_roundpipe.runtime.weights import HostLayer


class Step:
    """A step in flight.

    Args:
        engine: what outlives it.
        seed: of this batch.
        sizes: samples per microbatch.
        weights: loss weights given by the user; None to count.
    """

    def __init__(self, engine: Engine, seed: tuple[int, ...], sizes: list[int], weights: list[float] | None) -> None:
        self.engine = engine
        self.seed = seed
        self.sizes = sizes
        self.ambient = Ambient.capture(engine.device_types)
        self.belongings = engine.belongings if len(sizes) > 1 and not engine.in_order else None
        self.control = Control(engine.crew.abort)
        self.user_lock = UserLock(self.control)
        self.version = engine.version
        """Of the weights that the step computes with."""
        self.slots: list[Slot] = []
        self._sums: dict[tuple[int, int], HostGradients] = {}
        self._given = weights
        self._provisional: float | None = sum(weights) if weights else None
        self._plan: Plan | None = None
        self._order: list[deque[Slot]] = [deque() for _ in engine.workers]
        self._unclosed = 0
        self._unclosed_lock = threading.Lock()
        self._all_closed = Waiter()
        self.runs: list[MicrobatchRun] = []
        self.gradients: StepGradients | None = None
        """What its loss hands out, once it is there."""
        self.has_loss = False
        """Whether there is a loss to differentiate; training_step may also skip a batch."""

    # -- running ------------------------------------------------------------------------------------------------------

    def run_planned(self, plan: Plan, trace: Trace, function: Callable[..., Any], args: list[tuple[Any, ...]]) -> None:
        """All microbatches at once, under ``plan``."""
        self._plan = plan
        slots = PlannedSlots(self._make_rounds(plan, trace), plan, self.control, self._close)
        self._unclosed = len(self.slots)
        self.runs = [MicrobatchRun(self, m, trace, slots) for m in range(len(args))]
        for worker, order in zip(self.engine.workers, self._order, strict=True):
            if order:
                self._open_next(worker.index)
        self._join(function, args, together=True)

    def run_one_by_one(self, function: Callable[..., Any], args: list[tuple[Any, ...]]) -> None:
        """One microbatch after another, a slot for each call: needs no trace, and records one."""
        slots = SlotsOnArrival(self._make_slot, self._prepare, self._cancel, self._open, self._close)
        recent = self.engine.recent if len(args) == 1 else None
        self.runs = [MicrobatchRun(self, m, None, slots, recent) for m in range(len(args))]
        self._join(function, args, together=False)

    def _join(self, function: Callable[..., Any], args: list[tuple[Any, ...]], *, together: bool) -> None:
        tasks: list[Task[None]] = []
        crew, given_up = self.engine.crew, False
        with shadowed_log(self.engine.module, self._current_log):
            if self.belongings is not None:
                self.belongings.begin()
            try:
                for index, (run, given) in enumerate(zip(self.runs, args, strict=True)):
                    before = self.runs[index - 1].started if index else None
                    thread = crew.thread(index if together else 0)
                    tasks.append(thread.submit(lambda r=run, g=given, b=before: r.run(function, g, b)))  # type: ignore[misc]
                    if not together:
                        crew.wait(tasks[-1].waiter, self.control)
                        if self.control.failed:
                            break
                for task in tasks if together else ():
                    crew.wait(task.waiter, self.control)
                if together:  # slots that nobody needed may be on their way still
                    crew.wait(self._all_closed, self.control, unless_failed=True)
            except BaseException as error:  # a KeyboardInterrupt, most likely, or the watchdog
                add_waiting_note(error, [s for s in self.slots if s.opened and not s.closed])
                self.control.fail(error)
                given_up = True
            crew.rest(self.control, tasks, given_up=given_up)
        self.control.raise_error()
        if self.belongings is not None and (last := self.runs[-1].kept) is not None:
            self.belongings.end(last)

    @staticmethod
    def _current_log() -> Any:
        from lightning_roundpipe.runtime.interception import current

        context: CallContext | None = current()
        if not isinstance(context, MicrobatchRun):
            raise RoundPipeError(
                "self.log was called from a thread that the user's code started inside training_step; log from "
                "training_step itself."
            )
        return context.logs

    def read(self, master: nn.Parameter) -> Tensor:
        """What glue reads, where it reads a master itself: the weights that the step computes with."""
        unit = self.engine.unit_of[id(master)]
        unit.wait(self.version, self.control)
        return unit.read(master)

    # -- slots --------------------------------------------------------------------------------------------------------

    def is_to_be_probed(self, call: TracedCall) -> bool:
        """Whether a plan will be made from this step, and its first call of this kind is this one."""
        key, known = (call.layer.index, call.use), self.engine.probed
        if not self.engine.plans or key in known:
            return False
        known.add(key)
        return True

    def is_to_be_walked(self, call: TracedCall) -> bool:
        """Whether the call's graph is looked at: in all of what a plan is made from, else once."""
        key, known = (call.layer.index, call.use), self.engine.walked
        if key in known:
            return self.engine.plans
        known.add(key)
        return True

    def is_fused(self, call: int) -> bool:
        return self._plan is not None and call >= self._plan.fused.first

    def _make_rounds(self, plan: Plan, trace: Trace) -> list[list[Slot]]:
        size = plan.round_microbatches
        rounds: list[list[Slot]] = []
        for number, start in enumerate(range(0, len(self.sizes), size)):
            microbatches = range(start, min(start + size, len(self.sizes)))
            before = rounds[-1] if rounds else [None] * len(plan.stages())
            rounds.append(
                [
                    self._slot(number, stage, trace, microbatches, predecessor)
                    for stage, predecessor in zip(plan.stages(), before, strict=True)
                ]
            )
        return rounds

    def _slot(self, number: int, stage: Stage, trace: Trace, microbatches: range, predecessor: Slot | None) -> Slot:
        calls = range(stage.first, stage.last + 1)
        loaded = [trace.calls[c] for c in calls if stage.phase != "backward" or trace.calls[c].taped]
        sums = {}
        if stage.phase != "forward":
            for c in calls:
                if trace.calls[c].taped and (total := self.sums_of(trace.calls[c])) is not None:
                    sums[c] = total
        index = self.engine.next_slot()
        worker = index % len(self.engine.workers)
        slot = Slot(
            index, worker, number, stage.phase, calls, distinct_layers(loaded), sums, microbatches, predecessor,
            self.version,
        )  # fmt: skip
        self._order[worker].append(slot)
        self.slots.append(slot)
        return slot

    def _open_next(self, index: int) -> None:
        order = self._order[index]
        if not order:
            return
        slot = order.popleft()
        following = order[0] if order and self.engine.options.prefetch else None
        worker = self.engine.workers[index]

        def open_it() -> None:
            if worker.open(slot, following, self.control):
                self._close(slot)

        worker.post(open_it, self.control)

    def _close(self, slot: Slot) -> None:
        worker = self.engine.workers[slot.worker]

        def close_it() -> None:
            worker.close_slot(slot)
            with self._unclosed_lock:
                self._unclosed -= 1
                if not self._unclosed:
                    self._all_closed.wake()

        worker.post(close_it, self.control)
        self._open_next(slot.worker)

    def _make_slot(
        self, phase: Phase, microbatch: int, call: int, layer: HostLayer, sums: HostGradients | None
    ) -> Slot:
        index = self.engine.next_slot()
        totals = {call: sums} if sums is not None else {}
        worker = index % len(self.engine.workers)
        calls = range(call, call + 1)
        return Slot(index, worker, 0, phase, calls, [layer], totals, [microbatch], None, self.version)

    def _prepare(self, slot: Slot) -> None:
        worker = self.engine.workers[slot.worker]
        worker.post(lambda: worker.prepare(slot, self.control), self.control)

    def _cancel(self, slot: Slot) -> None:
        worker = self.engine.workers[slot.worker]
        worker.post(lambda: worker.cancel(slot), self.control)

    def _open(self, slot: Slot) -> None:
        self.slots.append(slot)
        worker = self.engine.workers[slot.worker]
        worker.run(lambda: worker.open(slot, None, self.control), self.control)

    def sums_of(self, call: TracedCall) -> HostGradients | None:
        """Where the gradients of a call are summed."""
        key = (call.layer.index, call.use)
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = self.engine.buffers_of(call).begin()
        return known if known.layout.nbytes else None

    # -- weights of the microbatches ----------------------------------------------------------------------------------

    def weigh(self, run: MicrobatchRun) -> float:
        """How much the microbatch counts in the loss of the whole batch, known when its loss is."""
        if len(self.sizes) == 1:
            return 1.0  # whatever it holds, even nothing
        if self._given is not None:
            return self._given[run.index]
        return run.mode.counts[0] if run.mode.counts else float(self.sizes[run.index])

    def scale_of(self, run: MicrobatchRun) -> float:
        """What the microbatch's loss is multiplied by: its weight over a total that is guessed from the first one.

        The total itself is known only after the last; ``finish`` corrects by one factor. The guess depends on nothing
        but the batch, so that results do not depend on what runs when.
        """
        if self._provisional is None:
            samples = sum(self.sizes)
            known = run.weight / self.sizes[run.index] * samples if samples else run.weight
            self._provisional = known or float(samples)
        return run.weight / self._provisional

    def finish(self) -> Any:
        """The merged output of ``training_step``, its loss carrying the gradients; issues what was logged."""
        outputs = [run.output for run in self.runs]
        missing = [m for m, output in enumerate(outputs) if output is None]
        if missing and len(missing) < len(outputs):
            raise RoundPipeError(
                f"training_step returned None for microbatch {missing[0]} but not for all of this batch: skip whole "
                "batches, or set num_microbatches=1."
            )
        if self._given is None and not missing:
            check_counts([run.mode for run in self.runs])
        weights = [run.weight for run in self.runs]
        if not any(weights):
            weights = [float(size) for size in self.sizes]
        issue(self.engine.module, [run.logs for run in self.runs], self.sizes, weights)
        if missing:
            return None
        merged = merge(outputs, self.sizes, weights)
        losses = [_loss(output) for output in outputs]
        if not all(isinstance(loss, Tensor) for loss in losses):
            return merged
        self.has_loss = True
        differentiable = any(run.differentiable for run in self.runs)
        gradients = self._gradients()
        loss = gradients.loss(weighted_mean(losses, weights), differentiable=differentiable)
        self.gradients = gradients
        if isinstance(merged, Mapping):
            return {**merged, "loss": loss}
        return loss

    def let_go(self) -> None:
        """Part from the microbatches, which know the step: in a circle, all of them would live on until a gc run.

        And from sums that nobody is going to ask for.
        """
        self.runs = []
        if self.gradients is None:
            for sums in self._sums.values():
                sums.consumed.wake()

    def _gradients(self) -> StepGradients:
        total = sum(run.weight for run in self.runs)
        factor = (self._provisional or total) / total if total else 1.0
        glue = [pair for run in self.runs for pair in run.mode.proxies.gradients()]
        sums = [self._sums[key] for key in sorted(self._sums)]  # in an order that no plan changes
        return StepGradients(sums, glue, factor, by_unit=self.engine.updates is not None)


def _loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output
