"""Each wait of the runtime, taken out: the checks of `stress` notice.

A wait that can be left out unnoticed is either not needed or not tested. `test_every_wait_is_listed` finds every line
of the runtime that waits, so that a new one has to be entered here, with the way in which its loss shows:

* ``numbers``: other bits, NaN, an error, or a hang, with delays that make the thing waited for late;
* ``order``: two accesses to the same memory without a chain of events between them (`ordering`). An emulated device
  computes in the calling thread, so the loss of a wait *for its compute stream* can show in no other way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import harness
import lightning.pytorch as pl
import pytest
import stress
import torch
import torchmetrics
from harness import ours
from ordering import Ordering
from stress import CALLS, LAYERS, Case, StressModule
from torch import Tensor, nn
from without import take_out, waits

from lightning_roundpipe.devices import Device, emulated
from lightning_roundpipe.devices.emulated_link import Delays
from lightning_roundpipe.planning.memory import Reserved
from lightning_roundpipe.runtime.core.microbatch import MicrobatchTask
from lightning_roundpipe.runtime.core.step import Step
from lightning_roundpipe.runtime.core.worker import Worker
from lightning_roundpipe.runtime.modes.evaluation_pipeline import PipelinedBatch
from lightning_roundpipe.runtime.optimizer import async_optimizer
from lightning_roundpipe.runtime.optimizer.async_optimizer import AsyncOptimizer
from lightning_roundpipe.runtime.threads.sync import CancelScope, UserLock

CUT = Case(harness.per_call(CALLS, 2), 2, 4, (6, 6))
"""Two rounds, a cut at every call: gradients travel up and down, and boundaries between the workers."""
WIDE = Case("forward 0-4; fused 5; backward 3-4 0-2; round 2", 3, 3, (6, 6))
"""The next round's stage is on another worker. The second round is one microbatch."""
FUSED = Case(harness.single(CALLS, 2), 2, 3, (6, 6))
BESIDE = Case(harness.single(CALLS, 1), 3, 3, (6, 6))
"""Rounds of one microbatch, side by side."""
BUSY = Case(harness.per_call(CALLS, 4), 4, 4, (8, 8))
NOBODY = replace(WIDE, plan=WIDE.plan.replace("round 2", "round 1"), empty=(1, 0))
"""The first microbatch of the planned step has no backward: slots that nobody enters."""
TAIL = Case("forward 0-4; fused 5; backward 3-4 1-2 0; round 1", 1, 3, (6, 6), empty=(1, 2), blocking=True)
"""So has the last one: slots that come after all microbatches are done; then gradients are handed to ``.grad``."""
STALE = Case(harness.per_call(CALLS, 4), 2, 4, (6, 6, 6, 6), drops=False, staleness=1)
"""A step does not wait for the update before it: nothing else holds its sums back."""
ON = replace(CUT, sizes=(6, 6, 6, 6), drops=False)
"""Steps go on when the next one begins."""
UNTOUCHED = replace(WIDE, empty=(1, 2))
"""The last microbatch has no backward: the sums of the rounds before come up for it, and go down again."""
ALONE = replace(CUT, arena=0.0)
"""The smallest arena: the sums of an earlier round come up where others have just left."""
ARRIVAL = Case(None, 2, 1, (6, 6, 6))


@dataclass(frozen=True)
class Wait:
    """One line that waits.

    Attributes:
        where: ``module:function``.
        line: the line as it stands there.
        by: how its loss shows.
        case: in which run.
        slow: the stream or hand-off whose work comes late, or what else takes longer, so that the loss shows.
    """

    where: str
    line: str
    by: str
    case: Case = CUT
    slow: str = ""

    def __str__(self) -> str:
        return f"{self.where.split(':')[1]}: {self.line}"


WAITS = [
    # Memory of the weights: an upload over a stage that is still running, a call before its weights are there.
    Wait("runtime.core.weight_uploads:WeightUploads.proceed", "stream.wait(region.last_use)", "order"),
    Wait("runtime.core.worker:Worker.ready", "self.device.compute.wait(upload)", "numbers", CUT, "weights_up"),
    Wait(
        "runtime.core.worker:Worker.close_slot",
        "self.device.compute.wait(self._upload_of(slot, layer))",
        "order",
        NOBODY,
    ),
    # Versions: an upload that waits for an update, user code that reads a weight itself, a sum that is to be
    # accumulated.
    Wait("runtime.core.worker:Worker._upload_of", "slot.cancel_scope.wait(waiter)", "numbers", CUT, "updating"),
    Wait("runtime.memory.version_waits:Versioned.wait", "cancel_scope.wait(waiter)", "numbers", CUT, "updating"),
    Wait(
        "runtime.memory.grad_buffers:HostGradSums.make_room",
        "cancel_scope.wait(before.consumed)",
        "numbers",
        STALE,
        "updating",
    ),
    Wait("runtime.core.arenas:Arena.release", "event.wait()", "numbers", FUSED, "gradients_down"),
    # Memory of the gradients: an arena is used again, a sum is continued, a sum is read.
    Wait(
        "runtime.core.worker:Worker._wait_for_gradients",
        "self.device.compute.wait(event)",
        "numbers",
        ALONE,
        "gradients_down",
    ),
    Wait("runtime.core.worker:Worker._open_gradients", "stream.wait(event)", "numbers", ALONE, "gradients_down"),
    Wait("runtime.core.worker:Worker._open_gradients", "stream.wait(host.arrived)", "numbers", WIDE, "gradients_down"),
    Wait("runtime.core.worker:Worker.gradients_of", "self._wait_for_gradients()", "numbers", ALONE, "gradients_down"),
    Wait("runtime.core.worker:Worker._send_gradients", "self._wait_for_gradients()", "order", UNTOUCHED),
    Wait(
        "runtime.core.worker:Worker._send_gradients",
        "stream.wait(self.device.compute.record())",
        "order",
        stress.NO_GRADIENTS,
    ),
    Wait("runtime.core.worker:Worker._send", "stream.wait(end)", "order"),
    Wait("runtime.memory.grad_buffers:HostGradSums._wait_for", "part.wait()", "numbers", CUT, "gradients_down"),
    Wait("runtime.memory.grad_buffers:HostGradSums.take", "self.wait()", "numbers", CUT, "gradients_down"),
    # ActivationStore: from a worker to the host, from the host to a worker; and user code or a layer that writes to
    # what is on its way, which it can only where the next call is on the same worker: else that call has waited for the
    # copy.
    Wait("runtime.core.activation_store:ActivationStore._download", "stream.wait(device.compute.record())", "order"),
    Wait(
        "runtime.core.activation_store:ActivationStore._upload",
        "stream.wait(copy.ready)",
        "numbers",
        CUT,
        "activations_down",
    ),
    Wait(
        "runtime.core.activation_store:ActivationStore._used",
        "device.compute.wait(here.end)",
        "numbers",
        CUT,
        "activations_up",
    ),
    Wait(
        "runtime.core.activation_store:ActivationStore.fresh",
        "device.compute.wait(end)",
        "numbers",
        CUT,
        "activations_up",
    ),
    Wait(
        "runtime.core.activation_store:ActivationStore.transfer",
        "copy.ready.wait()",
        "numbers",
        CUT,
        "activations_down",
    ),
    Wait(
        "runtime.core.activation_store:ActivationStore.settle",
        "device.compute.wait(ready)",
        "numbers",
        WIDE,
        "activations_down",
    ),
    Wait(
        "runtime.core.microbatch:MicrobatchTask.call", "self.activations.settle()", "numbers", WIDE, "activations_down"
    ),
    Wait(
        "runtime.core.microbatch:MicrobatchTask._run_forward",
        "self.activations.settle()",
        "numbers",
        WIDE,
        "activations_down",
    ),
    # Turns, rounds, and user code.
    Wait("runtime.core.turns:Slot.enter", "cancel_scope.wait(waiter)", "numbers"),
    Wait("runtime.core.worker:Worker.open", "slot.wait_for_predecessor(slot.cancel_scope)", "numbers", WIDE),
    Wait("runtime.core.turns:Slot._wait_until_sent", "cancel_scope.wait(waiter)", "numbers", BESIDE, "closing early"),
    Wait("runtime.core.turns:MicrobatchOrder.begin", "cancel_scope.wait(waiter)", "numbers", BESIDE),
    Wait(
        "runtime.core.microbatch:MicrobatchTask.run",
        "self._cancel_scope.wait(predecessors[-1].started)  # [1]",
        "numbers",
        FUSED,
        "starting",
    ),
    # The end of a call, of a microbatch, of a step.
    Wait("runtime.threads.sync:CancelScope.wait", "waiter.wait()", "numbers"),
    Wait("runtime.core.worker:Worker.run", "cancel_scope.wait(task.waiter)", "numbers"),
    Wait(
        "runtime.core.step:Step._wait_for_end",
        "worker_pool.wait(self._all_closed, self.cancel_scope, unless_failed=True)",
        "numbers",
        TAIL,
        "closing",
    ),
    Wait(
        "runtime.core.step:Step._wait_for_outputs",
        "self.engine.worker_pool.wait(run.passed, self.cancel_scope)",
        "numbers",
        ON,
    ),
    Wait("runtime.core.step:Step._wait_for_outputs", "run.computed.wait()", "order", ON),
]

IN_EVALUATION = (
    (
        "runtime.modes.evaluation_pipeline:EvaluationPipeline.wait_for",
        "self.engine.worker_pool.wait(batch.ended, self.cancel_scope)",
    ),
    ("runtime.modes.evaluation_pipeline:PipelinedBatch._wait_for_others", "self._cancel_scope.wait(waiter)"),
)
"""Of batches that are evaluated together."""

ELSEWHERE = {
    # Only what is measured depends on it: test_memory_forecast.py
    ("runtime.core.user_memory:UserCodeMemory.meter", "worker.device.activations_down.synchronize()"),
    ("runtime.core.worker:Worker.land", "self._in_flight.oldest.wait()"),
    ("runtime.memory.peak_memory:PeakMemoryMeter.__init__", "device.activations_up.synchronize()"),
    ("runtime.memory.peak_memory:PeakMemoryMeter.__init__", "device.arrivals_up.synchronize()"),
    # Memory that another stream owns, which only GPUs have: devices/test_happens_before.py
    ("runtime.core.activation_store:ActivationStore._upload", "stream.wait(up.record())"),
    # After an error that user code has caught: test_faults.py
    ("runtime.core.worker:Worker._give_up_open", "self.device.compute.wait(self.device.weights_up.record())"),
    ("runtime.core.worker:Worker._give_up_open", "self.device.gradients_down.wait(self.device.compute.record())"),
    # second_device/test_late.py: test_weights_are_uploaded_when_user_code_goes_on
    ("runtime.modes.evaluation:Evaluation._run_forward.forward", "slot.uploaded[call.layer.index].wait()"),
    # test_off_plan.py; test_turns.py has the rule
    ("runtime.core.off_plan:OffPlan.wait", "cancel_scope.wait(waiter)"),
    (
        "runtime.core.microbatch:MicrobatchTask._leave_plan",
        "off_plan.wait(self.index, self._called, self._left_plan_at, self._cancel_scope)",
    ),
    (
        "runtime.core.step:Step._wait_for_outputs",
        "self._wait_for_end()  # the next step's slots would come between those of these microbatches",
    ),
    # A thread that does not wait tries again: test_a_user_code_lock_that_is_missing_is_noticed
    ("runtime.threads.sync:UserLock.acquire", "cancel_scope.wait(waiter)"),
    # Other machines: `tests/test_several_machines.py`, where gradients or weights that are read too early show.
    *(
        ("runtime.optimizer.gradient_exchange:GradientExchange." + name, line)
        for name, line in (
            ("_land", 'self.peers.wait(flying.work, f"the gradients of bucket {bucket.index}")'),
            ("_arrive", 'self.peers.wait(weights.work, f"the weights of bucket {weights.bucket.index}")'),
        )
    ),
    (
        "runtime.optimizer.grad_readiness:GradReadiness.take",
        "upload.wait()",
    ),  # test_a_unit_is_sent_when_its_uploads_are_over
    (
        "runtime.core.worker_pool:WorkerPool.rest",
        "self.wait(waiter, cancel_scope)  # [2]",
    ),  # test_nothing_of_a_step_runs_when_it_has_ended
    (
        "runtime.core.worker_pool:WorkerPool.rest",
        "device.compute.synchronize()  # [3]",
    ),  # test_outputs_are_computed_when_given
    ("runtime.reporting.events:Recorder.rows", "end.wait()"),  # test_events.py: test_rows_wait_for_what_is_on_its_way
    ("runtime.memory.grad_buffers:HostGradSums.make_room", "before.wait()"),  # test_a_sum_that_nobody_took
    # test_reduction.py: test_each_wait_is_needed
    ("runtime.memory.grad_buffers:_Added.after", "landed.wait()"),
    (
        "runtime.memory.grad_buffers:_Added.wait",
        "while not (self._over.is_set() or interpreter_lease.released(lambda: self._over.wait(LOOK))):",
    ),  # is what HostGradSums waits with
    ("runtime.memory.grad_buffers:HostGradSums.land", "before[part].wait()"),
    # Versioned.wait, above; the first one in front of the lock, the second one for what was not read before.
    ("runtime.core.sections:UserCodeSections.enter", "bucket.wait(step.version, step.cancel_scope)  # [1]"),
    ("runtime.core.sections:UserCodeSections.read_master", "self.wait_for(bucket, step.version)"),
    (
        "runtime.core.sections:UserCodeSections.wait_for",
        "self.aside(lambda: what.wait(version, self._step.cancel_scope))",
    ),
    (
        "runtime.core.microbatch:MicrobatchTask._backward_of_loss",
        "self.segments.wait_for(scales, step.spec.version)",
    ),  # test_precision_scaling.py
    ("runtime.core.step:Step._end_whole", "sums.wait()"),  # test_a_step_that_fails_leaves_whole_updates
    (
        "runtime.optimizer.loss_handle:StepGradients.arrive",
        "total.wait()",
    ),  # test_a_step_that_fails_leaves_whole_updates
    (
        "runtime.memory.module_buffers:ReplicaBuffers._uploaded",
        "self._device.compute.wait(made.ready)",
    ),  # test_running_statistics
    ("runtime.memory.module_buffers:HostBuffers._settle", "made.ready.wait()"),  # test_running_statistics
    ("runtime.engine:Engine.train_window", "self.model.buffers.settle()"),  # test_statistics_are_there_after_a_step
    ("runtime.engine:Engine.train_manually", "self.model.buffers.settle()"),  # test_statistics_are_there_after_a_step
    ("runtime.engine:Engine.evaluate", "self.model.buffers.settle()"),  # test_statistics_are_there_after_a_step
    # test_who_looks_sees_whole_updates
    ("runtime.engine:Engine.settle", "self.updates.settle(within_batch=self.within_window())"),
    ("runtime.optimizer.async_optimizer:AsyncOptimizer.retire", "self.settle()"),  # test_stochastic_weight_averaging
    (
        "runtime.engine:Engine._prepare_evaluation",
        "self.updates.settle(within_batch=self.within_window())",
    ),  # test_evaluation_sees_whole_updates
    ("runtime.engine:Engine._sync_weights", "updates.settle()"),  # settled already: nobody submits in between
    ("runtime.engine:Engine._begin", "self.settle()"),  # test_what_is_trained_may_change
    (
        "runtime.optimizer.async_optimizer:AsyncOptimizer._rest",
        "while not waiter.wait_for(LOOK):",
    ),  # is what all of these wait with
    # So that a peak is the call's own, see test_plan_policy.py.
    ("runtime.memory.peak_memory:PeakMemoryMeter.__init__", "device.activations_down.synchronize()"),
    ("runtime.core.worker:Worker.keep_until_computed", "flying.oldest.wait()"),  # test_the_host_does_not_run_far_ahead
    # test_offloading.py: test_no_call_begins_while_more_tensors_are_leaving_than_planned
    ("runtime.core.microbatch:MicrobatchTask._run_forward", "worker.departures.wait(self._cancel_scope)"),
    ("runtime.core.microbatch:MicrobatchTask._run_backward", "worker.departures.wait(self._cancel_scope)"),
    # test_offloading.py: test_another_thread_reads_the_same_values_at_any_time
    ("runtime.core.activation_store:ActivationStore.offload", "copy.ready.wait()"),
    # Without these, a thread that has to wait looks again at once.
    ("runtime.core.offloading:Departures.wait", "oldest.wait(cancel_scope)"),
    ("runtime.core.offloading:Departure.wait", "cancel_scope.wait(self._known)"),
    ("runtime.core.offloading:Departure.wait", "copy.wait()"),
    # test_window.py: test_exception_in_training_step
    ("runtime.core.microbatch:MicrobatchTask._let_pass", "self._cancel_scope.wait(run.passed)"),
    # test_checkpointed_code.py: the layer that is called in backward has the weights of its forward
    ("runtime.core.sections:UserCodeSections.read_late", "self.wait_for(bucket, self._step.version)"),
    *IN_EVALUATION,  # test_batches_that_are_evaluated_together_end_in_order
    # test_outputs_are_computed_when_given
    ("runtime.modes.evaluation_pipeline:PipelinedBatch.wait_for_devices", "event.wait()"),
    ("runtime.modes.evaluation_pipeline:EvaluationPipeline.end", "self.engine.model.buffers.settle()"),
}
"""Tested below, in a way of its own, or where it says."""

ENDS = {
    ("runtime.modes.evaluation_pipeline:_Caller.wait", "self._pool.wait(waiter, self._scope, unless_failed=True)"),
    ("runtime.core.step:Step._join", "worker_pool.wait(self._tasks[-1].waiter, self.cancel_scope)"),
    ("runtime.core.step:Step._wait_for_end", "worker_pool.wait(task.waiter, self.cancel_scope)"),
    ("runtime.core.step:Step._wait_for_outputs", "self.before._wait_for_end()"),
    ("runtime.core.step:Step._join", "self._wait_for_end()"),
    ("runtime.core.step:Step.drain", "self._wait_for_end()"),
    ("runtime.core.step:Step._end_whole", "self._wait_for_end()"),
    (
        "runtime.core.worker_pool:WorkerPool.wait",
        "while not (unless_failed and cancel_scope.failed) and not waiter.wait_for(min(LOOK, self._limit)):",
    ),
    ("runtime.core.worker_pool:WorkerPool._returns", "while not waiter.wait_for(LOOK):"),
    ("runtime.core.worker_pool:WatchedCancelScope.wait", "self._worker_pool.wait(waiter, self)"),
    ("runtime.threads.task_thread:within", "if not task.waiter.wait_for(seconds):"),
}
"""How threads come to rest, above all when one fails, which tests/test_faults.py looks at. Without them there is no run
to look at (the main thread goes on while microbatches are running), or, where nothing fails, others wait as well."""

SPARE = {
    # As at the end of the evaluation step, and early so that a layer that runs in place finds its buffers.
    ("runtime.modes.evaluation:Evaluation._runs_in_place", "self._engine.model.buffers.settle()"),
    # In evaluation every copy is for the call that is about to run, which waits for it.
    ("runtime.modes.evaluation:Evaluation.call", "self._activations.settle()"),
}
"""Not needed for the order; each says why."""


def test_every_wait_is_listed() -> None:
    assert waits("runtime") == {(w.where, w.line) for w in WAITS} | ELSEWHERE | ENDS | SPARE


# --------------------------------------------------------------------------------------------------------- taken out


@contextlib.contextmanager
def late(slow: str, times: float = 1.0) -> Iterator[None]:
    """One kind of copy, one hand-off between threads, or user code takes much longer than all others.

    Args:
        slow: which.
        times: how many times longer than usually. On a machine that is busy with other things, everything takes longer.
    """

    copies = "gradients_down" if slow == "closing early" else slow  # or nothing is left to be sent at the close

    class Late(Delays):
        def __init__(self, seed: int, name: str) -> None:
            super().__init__(seed, name)
            self.late = name.endswith(f"/{copies}")

        def next(self) -> float:
            return 0.02 * times if self.late else super().next() / 10

    real_run, real_close = MicrobatchTask.run, Worker.close_slot
    real_apply = AsyncOptimizer._apply

    def apply(self: AsyncOptimizer, *args: Any) -> None:
        time.sleep(0.02 * times)
        real_apply(self, *args)

    def run(self: MicrobatchTask, *args: Any) -> None:
        time.sleep((0.03 - 0.01 * self.index) * times)
        real_run(self, *args)

    def close_slot(self: Worker, slot: Any) -> None:
        time.sleep((0.03 - 0.01 * slot.round * (slow == "closing early")) * times)
        real_close(self, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_optimizer, "PIECE", 0)
        if slow == "starting":
            patch.setattr(MicrobatchTask, "run", run)
        elif slow.startswith("closing"):
            patch.setattr(Worker, "close_slot", close_slot)
            if slow == "closing early":
                patch.setattr(emulated, "Delays", Late)
        elif slow == "updating":
            patch.setattr(AsyncOptimizer, "_apply", apply)
        elif slow == "user code":
            patch.setattr(stress, "GLUE_S", 0.01 * times)
        elif slow:
            patch.setattr(emulated, "Delays", Late)
        yield


TRIES = 8
LATER = 1.5
"""What comes late comes this many times later with each try: the last one takes 17 times what the first one takes."""


def noticed(wait: Wait, seed: int) -> str:
    """What the checks say of a run without ``wait``; empty if nothing."""
    times = LATER**seed
    case = replace(wait.case, emulation={"poison": True, "delay_seed": seed})
    expected = stress.reference(case)
    ordering = Ordering() if wait.by == "order" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stress, "WATCHDOG", 2.0 + times)
        take_out(patch, wait.where, wait.line)
        try:
            with late(wait.slow, times), ordering or contextlib.nullcontext():
                run = stress.train(case)
        except Exception as error:
            return repr(error)
        return "\n".join(ordering.faults if ordering else stress.wrong(run, expected))


@pytest.mark.parametrize(
    "wait",
    [wait if i % 3 == 0 else pytest.param(wait, marks=pytest.mark.slow) for i, wait in enumerate(WAITS)],
    ids=str,
)
def test_a_wait_that_is_missing_is_noticed(wait: Wait) -> None:
    assert any(noticed(wait, seed) for seed in range(TRIES)), f"nothing shows without {wait.line!r}"


@pytest.mark.slow
def test_a_user_code_lock_that_is_missing_is_noticed() -> None:
    def wrong(seed: int) -> str:
        case = replace(BUSY, emulation={"poison": True, "delay_seed": seed})
        expected = stress.reference(case)
        with pytest.MonkeyPatch.context() as patch, late("user code", LATER**seed):
            patch.setattr(UserLock, "acquire", lambda *_: None)
            try:
                return "\n".join(stress.wrong(stress.train(case), expected))
            except Exception as error:
                return repr(error)

    assert any(wrong(seed) for seed in range(TRIES))


@pytest.mark.parametrize("times", [1.0, pytest.param(LATER ** (TRIES - 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("case", "slow"),
    [
        pytest.param(CUT, "gradients_down", id="cut"),
        pytest.param(WIDE, "activations_down", id="wide"),
        pytest.param(FUSED, "starting", id="fused"),
        pytest.param(BESIDE, "closing early", id="beside"),
        pytest.param(TAIL, "closing", id="tail"),
        pytest.param(ARRIVAL, "closing", id="arrival"),
        pytest.param(CUT, "updating", id="updates"),
        pytest.param(STALE, "updating", id="stale"),
        pytest.param(ON, "closing", id="on"),
    ],
)
def test_nothing_is_noticed_while_all_are_there(case: Case, slow: str, times: float) -> None:
    """Or the tests above would say nothing."""
    expected = stress.reference(case)
    with late(slow, times):
        found = stress.train(case)
    assert not stress.wrong(found, expected)


# ------------------------------------------------------------------------------------------------ in ways of their own


class Normed(pl.LightningModule):
    """Layers with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.train()
        self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


COMPUTED = (
    ("runtime.core.worker_pool:WorkerPool.rest", "device.compute.synchronize()  # [3]"),
    ("runtime.modes.evaluation_pipeline:PipelinedBatch.wait_for_devices", "event.wait()"),
)
"""Of a batch that runs alone, and of those that are in flight together."""


class Predicting(Normed):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).softmax(-1)  # type: ignore[no-any-return]


class Looking(pl.Callback):
    """Looks at what a step gives, on the main thread."""

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Tensor, *_: Any) -> None:
        outputs.clone()


@pytest.mark.parametrize("missing", [None, *COMPUTED])
def test_outputs_are_computed_when_given(missing: tuple[str, str] | None) -> None:
    """The caller looks at them from another stream than those that they were computed in.

    Another wait may come between by chance, so a missing one has a few runs in which to show.
    """
    faults = [_faults_in_predictions(missing) for _ in range(8 if missing else 1)]
    assert any(faults) is (missing is not None), faults


def _faults_in_predictions(missing: tuple[str, str] | None) -> list[Any]:
    trainer = harness.trainer_of(ours(layers=["Sequential"]), devices=2, callbacks=[Looking()])
    with pytest.MonkeyPatch.context() as patch, Ordering() as ordering:
        if missing:
            take_out(patch, *missing)
        trainer.predict(Predicting(), harness.loader(torch.randn(4, 8, 8).unbind()))
    return list(ordering.faults)


class Scoring(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.scores = torchmetrics.CatMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.scores.update(self(batch).sum() * (1 + batch_idx))
        self.log("so far", torch.as_tensor(self.scores.compute()).cumsum(0).square().sum())


@pytest.mark.parametrize("missing", [None, *IN_EVALUATION])
def test_batches_that_are_evaluated_together_end_in_order(missing: tuple[str, str] | None) -> None:
    """One of them comes late to its user code, each time."""
    found: list[Any] = []
    real = PipelinedBatch._enter_user_code

    def enter(self: PipelinedBatch) -> None:
        time.sleep(0.1 * (self.index == 1))
        real(self)

    for devices in (1, 3):
        torch.manual_seed(3)
        strategy, module = ours(layers=["Sequential"], overlap=devices > 1), Scoring()
        trainer = harness.trainer_of(strategy, devices=devices)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PipelinedBatch, "_enter_user_code", enter)
            if missing and devices > 1:
                take_out(patch, *missing)
            try:
                found.append(trainer.validate(module, harness.loader(torch.ones(5, 8, 8).unbind()), verbose=False))
            except Exception as error:
                found.append([{"so far": error}])
    assert (found[0][0]["so far"] == pytest.approx(found[1][0]["so far"])) is (missing is None), found


class Resting(pl.Callback):
    """Counts the slots that are being closed while user code runs between two batches."""

    def __init__(self) -> None:
        self.closing, self.found = 0, 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.found += self.closing


@pytest.mark.parametrize("missing", [False, True])
def test_nothing_of_a_step_runs_when_it_has_ended(missing: bool) -> None:
    """Gradients have left before their slot is closed, so a step does not need that for its numbers."""
    resting, real = Resting(), Worker.close_slot

    def close_slot(self: Worker, slot: Any) -> None:
        resting.closing += 1
        time.sleep(0.05)
        real(self, slot)
        resting.closing -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "close_slot", close_slot)
        if missing:
            take_out(patch, "runtime.core.worker_pool:WorkerPool.rest", "self.wait(waiter, cancel_scope)  # [2]")
        strategy = ours(num_microbatches=1, layers=LAYERS)
        harness.run(strategy, StressModule(), stress.batches(ARRIVAL), devices=2, watch=False, callbacks=[resting])
    assert bool(resting.found) is missing


class Careless(StressModule):
    """Does not ask for the gradients of its first two batches."""

    def backward(self, loss: Tensor, *args: Any) -> None:
        if self.trainer.fit_loop.batch_idx > 1:
            super().backward(loss, *args)
        else:
            (loss.detach().requires_grad_() * 1).backward()


@pytest.mark.slow
@pytest.mark.parametrize("missing", [False, True])
def test_a_sum_that_nobody_took(missing: bool) -> None:
    """It is on its way to the buffer that the next step's sum is sent to, by another worker."""
    strategy = ours(num_microbatches=4, layers=LAYERS, plan=WIDE.plan, emulation={"delay_seed": 0})
    with pytest.MonkeyPatch.context() as patch, Ordering() as ordering:
        if missing:
            take_out(patch, "runtime.memory.grad_buffers:HostGradSums.make_room", "before.wait()")
        harness.run(strategy, Careless(), stress.batches(replace(WIDE, sizes=(6, 6, 6))), devices=3, watch=False)
    assert bool(ordering.faults) is missing, ordering.faults


class NormedAndRead(Normed):
    """User code reads a statistic that a later microbatch may have moved already."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0 * self.layers[0][1].running_mean.sum()  # type: ignore[index,union-attr,operator,no-any-return]


MADE = {
    ("ReplicaBuffers._uploaded", "self._device.compute.wait(made.ready)"): Normed,
    ("HostBuffers._settle", "made.ready.wait()"): NormedAndRead,
}


@pytest.mark.parametrize("missing", [None, *MADE])
@pytest.mark.parametrize("kind", [Normed, NormedAndRead])
def test_running_statistics(missing: tuple[str, str] | None, kind: type[Normed]) -> None:
    """They go from call to call, and from worker to worker."""
    if missing is not None and MADE[missing] is not kind:
        pytest.skip("shows in the other one")
    plan = "forward 0; fused 1-2; backward 0; round 2"
    strategy = ours(num_microbatches=4, layers=["Sequential"], plan=plan)
    with pytest.MonkeyPatch.context() as patch, Ordering() as ordering:
        if missing is not None:
            take_out(patch, f"runtime.memory.module_buffers:{missing[0]}", missing[1])
        patch.setattr(Step, "met_buffer", "")  # or microbatches would run one after another
        harness.run(strategy, kind(), list(torch.randn(4, 8, 8)), devices=4, watch=False)
    # The user's buffers are host memory, which user code of one microbatch at a time reads and settles. The lock that
    # says so is no stream's, and which microbatch comes first is left to chance.
    faults = [fault for fault in ordering.faults if fault.count("aten::") < 2]
    assert bool(faults) is (missing is not None), ordering.faults


class ByHand(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        return loss


@pytest.mark.parametrize("kind", [Normed, ByHand])
def test_statistics_are_there_after_a_step(kind: type[Normed]) -> None:
    """And after a step of validation, that trains them on."""
    seen: list[list[Tensor]] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen[-1].append(module.layers[0][1].running_mean.clone())

        def on_validation_batch_end(self, *args: Any) -> None:
            self.on_train_batch_end(*args)

    batches = list(torch.randn(3, 8, 8))
    for strategy in ("auto", ours(num_microbatches=1, layers=["Sequential"])):
        torch.manual_seed(0)
        seen.append([])
        module, options = kind(), {"num_sanity_val_steps": 0, "val_batches": batches[:2]}
        harness.run(strategy, module, batches, callbacks=[Looks()], watch=False, **options)
    assert len(seen[0]) == 5
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize(
    ("lead", "waited"),
    [
        (0, [0, 1, 2]),  # two calls in any case
        (200, [0, 1, 2]),
        (300, [0, 1]),
        (499, [0]),
        (500, []),
    ],
)
def test_the_host_does_not_run_far_ahead(lead: int, waited: list[int], device: Device) -> None:
    """Nothing else would hold it back on a GPU, and boundary tensors would pile up there. This orders nothing."""
    found, most = calls_of(device, lead, [[torch.zeros(100, dtype=torch.uint8)] for _ in range(5)])
    assert found == waited
    assert most <= max(200, lead)


def test_what_several_calls_hold_counts_once(device: Device) -> None:
    """A mask, of which others may be views. What has no storage counts nothing."""
    mask = torch.zeros(250, dtype=torch.uint8)
    calls: list[Any] = [[mask[n:], None, ([torch.zeros(10, dtype=torch.uint8)], 3)] for n in range(5)]
    assert calls_of(device, 300, calls) == ([], 300)
    assert calls_of(device, 299, calls)[0] == [0]
    sparse = torch.eye(300).to_sparse()
    assert calls_of(device, 300, [[sparse]] * 5) == ([], 0)


def calls_of(device: Device, lead: int, calls: list[Any]) -> tuple[list[int], int]:
    """Which of ``calls`` that never end are waited for, and the most bytes that were in flight afterwards."""
    worker, waited, most = Worker(device), list[int](), 0
    worker.reserve(Reserved(0, lead=lead))

    class Far:
        def __init__(self, number: int) -> None:
            self.number = number

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            waited.append(self.number)

    with pytest.MonkeyPatch.context() as patch:
        numbers = iter(range(len(calls)))
        patch.setattr(device.compute, "record", lambda: Far(next(numbers)))
        for call in calls:
            worker.keep_until_computed(*call)
            most = max(most, worker._in_flight.nbytes)
    worker.close()
    return waited, most


@pytest.mark.parametrize("asked", ["run", "post"])
def test_a_device_that_does_not_warm_up(device: Device, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """Nobody waits for that, so the first to ask for something is told, and what it asked for does not happen."""

    def fail() -> None:
        raise RuntimeError("no room for cuBLAS")

    monkeypatch.setattr(device, "warm_up", fail)
    worker, cancel_scope, done = Worker(device), CancelScope(), list[bool]()
    try:
        if asked == "run":
            with pytest.raises(RuntimeError, match="no room for cuBLAS"):
                worker.run(lambda: done.append(True), cancel_scope)
        else:
            worker.post(lambda: done.append(True), cancel_scope)
            worker.fence().wait()
            assert "no room for cuBLAS" in str(cancel_scope.error)
        assert done == []
    finally:
        worker.close()
