"""The optimizer on a thread of its own: steps each bucket as its gradients arrive, and the next forward follows it.

    main thread: begin ── losses ── submit ── [1]             the window ends in an optimizer step; backward goes on
    optimizer thread: `BucketStepper` takes complete gradients, steps their masters and publishes a version of them
    worker: uploads of the next step wait for the version of their own layer only

A window is followed by an optimizer step, or its gradients are accumulated; `submit`, or the `begin` of the next
window, decides which. `submit` takes a snapshot of the hyperparameters, as schedulers change them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from lightning_roundpipe.devices.errors import StreamAborted
from lightning_roundpipe.faults.interrupts import interrupts_deferred
from lightning_roundpipe.optim.clipping import Clip
from lightning_roundpipe.optim.hyperparameters import Hyperparameters
from lightning_roundpipe.threads.cancel_scope import CancelScope
from lightning_roundpipe.threads.task_thread import TaskThread
from lightning_roundpipe.updates.bucket_stepper import BucketStepper, OptimizerStep
from lightning_roundpipe.updates.grad_readiness import Dropped
from lightning_roundpipe.updates.loss_handle import StepGradients

TORN = "which has changed some layers and not others; go on from a checkpoint."


class AsyncOptimizer:
    """Applies gradients to masters, in the order of the windows.

    Args:
        stepper: what the thread does.
        around: returns a context that the thread enters for as long as it lives.

    Attributes:
        gradients: those of the stepper. Call `settle` before its methods for the main thread.
        submitted: the number of optimizer steps submitted, which is the version of the newest weights.
        torn: whether the last update was cut short, by a failing backward, after some buckets had been stepped.
        whole: whether no submitted update has failed or was left out.
    """

    def __init__(
        self, stepper: BucketStepper, around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.stepper, self.optimizer, self.staleness = stepper, stepper.optimizer, stepper.staleness
        self.gradients, self._scales = stepper.gradients, stepper.scales
        self._first = self.submitted = max(bucket.version for bucket in stepper.buckets)  # an earlier instance's, or 0
        self.torn, self.whole = False, True
        self._cancel_scopes: list[CancelScope] = []
        self._error: BaseException | None = None
        self._window: StepGradients | None = None
        self._thread = TaskThread("roundpipe-optimizer", around)
        self._scales.fix(self.wanted, self.submitted)

    def begin(self, *, zero_grad: bool) -> None:
        """Prepare for a window, and raise what an update has raised.

        If no step has followed the window before it, that one is accumulated; ``zero_grad`` drops what was accumulated.
        """
        self._raise_error()
        self.gradients.hide()
        self._accumulate()
        if zero_grad:
            self.gradients.is_open = False
            outside = self.stepper.outside()
            self._post(lambda: self.gradients.forget(outside))

    def attach(self, cancel_scope: CancelScope) -> None:
        """Fail a running step when an update fails: it would wait for a version that is never published."""
        self._cancel_scopes = [*self._cancel_scopes, cancel_scope]
        # An update may have failed since `begin` looked. Each thread writes its own field (this list, or the error)
        # before it reads the other's, so at least one of them sees both.
        if (error := self._error) is not None:
            cancel_scope.fail(error)

    def detach(self, cancel_scope: CancelScope) -> None:
        """Undo `attach`: the step is over."""
        self._cancel_scopes = [other for other in self._cancel_scopes if other is not cancel_scope]

    def offer(self, gradients: StepGradients) -> None:
        """Take the gradients of a window, whose loss may be differentiated later or not at all."""
        self._window = gradients

    @interrupts_deferred()
    def submit(self, clip: Clip | None) -> None:
        """Submit the optimizer step that follows the window [1].

        Waits for the first one: an optimizer compiles in it, and compilers put back the process's generators.
        """
        window, is_first = self._take_window(), not self.begun
        self.submitted += 1
        optimizer = self.optimizer.get()
        assert optimizer is not None, "a step has an optimizer"
        self.gradients.is_open = False
        step = OptimizerStep(
            self.submitted, window, Hyperparameters.of(optimizer), clip, self.optimizer.partial(optimizer),
            self._scales.last, self.stepper.outside(), self.gradients.keeps,
        )  # fmt: skip
        self._post(lambda: self.stepper.run(step))
        if is_first:
            self._wait_until_idle()

    @property
    def begun(self) -> bool:
        """Whether an optimizer step was submitted."""
        return self.submitted > self._first

    @property
    def wanted(self) -> int:
        """The version of the weights that the next step computes with."""
        return max(0, self.submitted - self.staleness)

    def publish_all(self) -> None:
        """Let the next step see all updates, whatever the staleness, and user code's writes. Call `settle` first."""
        factor = self._scales.fix(self.wanted, self.submitted)
        self.gradients.multiply(factor)
        if self._window is not None:
            self._window.multiply(factor, losses=not self._scales.outer)
        for bucket in self.stepper.buckets:
            bucket.refresh()
            bucket.publish(self.submitted)

    def settle(self, *, within_window: bool = False) -> None:
        """Wait until everything submitted has been applied, and raise what an update has raised; once.

        ``within_window``: whether the last window goes on, and its loss may still be differentiated: its gradients stay
        apart from those of earlier windows.
        """
        if not within_window:
            self._accumulate()
        self._wait_until_idle()
        self._raise_error()

    def drop(self, error: BaseException) -> None:
        """After a failed step, finish what was submitted and drop the gradients of its window.

        ``error``: the error of the step. It gets a note if some layers had been stepped already.
        """
        window, self._window = self._window, None
        if window is not None:
            window.release()
        self._wait_until_idle()
        if self._error is error:  # an update has failed the step, which raises it
            self._error = None
        if self.torn:
            error.add_note(f"roundpipe: the backward pass was running and its optimizer step had begun, {TORN}")

    def _raise_error(self) -> None:
        """Raise what an update has raised, once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def retire(self) -> None:
        """Settle, publish all updates and stop the thread. From here on the caller steps."""
        self.settle()
        self.publish_all()
        self.close()

    def close(self) -> None:
        """Finish what was submitted, and join the thread."""
        self._thread.stop()
        self._thread.join()

    def _accumulate(self) -> None:
        if (window := self._take_window()) is not None:
            self.gradients.is_open = True
            self._post(lambda: self.stepper.add(window))

    def _take_window(self) -> StepGradients | None:
        """Return the last window's gradients, once; None if there are none, as when its loss was not differentiated."""
        window, self._window = self._window, None
        if window is not None and window.scale is None:
            window.release()
            return None
        return window

    def _wait_until_idle(self) -> None:
        """Wait until the thread has done all that was submitted."""
        self._thread.watch(self._thread.submit(lambda: None).waiter.wait_for)

    def _post(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._error is not None:
                return
            try:
                work()
            except (Dropped, StreamAborted):  # the step has failed, before or during the download of its gradients
                self.torn, self.whole = self.stepper.applying, False  # the step raises the error
            except BaseException as error:
                error.add_note(f"roundpipe: this happened in an optimizer step, {TORN}")
                self._error, self.whole = error, False
                for cancel_scope in self._cancel_scopes:
                    cancel_scope.fail(error)

        self._thread.submit(guarded)
