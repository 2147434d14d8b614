"""The optimizer on a thread of its own: each unit is stepped when its turn comes, and the next forward follows it.

    main thread: begin ── backward ── submit ── [1]           a batch's fate is known
    optimizer thread, unit by unit, first layer first:
        gradients taken from the host buffers ── accumulated with earlier batches' ── [2]
        norms, if they are clipped: nothing is stepped before all are known ── [3]
        stepped ── buffers free ── version published ── [4]
    worker: uploads of the next step wait for the version of their own layer ── [5]

A batch is either followed by an optimizer step or accumulated; which one is known when the step is submitted or the
next batch begins. Hyperparameters are those of the moment when the step was submitted: schedulers go on.

With staleness 1 a step computes with working copies, and what its gradients change is published after the next step's
last upload: in front of [2], once that one's update is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.optim.clipping import Clip, clamp, coefficient, norms, scale
from lightning_roundpipe.optim.shadow import Hyperparameters, Shadow
from lightning_roundpipe.runtime.control import Control
from lightning_roundpipe.runtime.gradients import StepGradients
from lightning_roundpipe.runtime.threads import TaskThread
from lightning_roundpipe.runtime.units import Unit

LOOK = 0.25
"""Seconds between two looks whether the thread is alive."""


@dataclass(frozen=True)
class _Step:
    """One optimizer step.

    Attributes:
        number: of the version that it makes.
        batch: the last batch's gradients; None if it has none.
    """

    number: int
    batch: StepGradients | None
    hyperparameters: Hyperparameters
    clip: Clip | None
    shadows: dict[Unit, Shadow]

    def held(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Of ``gradients``, those of the optimizer's parameters, in its order: they alone are clipped."""
        return {key: gradients[key] for key in self.hyperparameters.group_of if key in gradients}


class _Accumulated:
    """What earlier batches gave to the next optimizer step, for one unit. Its memory is used again by every step."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self._present: set[int] = set()

    def add(self, gradients: dict[int, Tensor]) -> None:
        for key, gradient in gradients.items():
            if key in self._present:
                self._memory[key].add_(gradient)
            elif key in self._memory:
                self._memory[key].copy_(gradient)
            else:
                self._memory[key] = gradient.clone()
        self._present |= gradients.keys()

    def with_last(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """The sum with the last batch's ``gradients``, in their memory where nothing was accumulated."""
        if not self._present:
            return gradients
        self.add(gradients)
        return {key: self._memory[key] for key in self._present}

    def forget(self) -> None:
        self._present = set()


class Updates:
    """Applies gradients to masters, in the order in which batches come.

    Args:
        units: all of them, in forward order.
        staleness: 0: a step sees all updates before it. 1: all but the last one, which is applied meanwhile.

    Attributes:
        submitted: how many optimizer steps there were.
    """

    def __init__(self, units: Sequence[Unit], staleness: int = 0) -> None:
        self.units = list(units)
        self.staleness = staleness
        self.submitted = 0
        self._control: Control | None = None
        self._thread = TaskThread("roundpipe-optimizer")
        self._error: BaseException | None = None
        self._batch: StepGradients | None = None
        self._accumulated: dict[Unit, _Accumulated] = {unit: _Accumulated() for unit in units}
        self._shadows: tuple[Optimizer | None, dict[Unit, Shadow]] = (None, {})

    # -- the main thread ----------------------------------------------------------------------------------------------

    def begin(self, *, anew: bool) -> None:
        """Before a batch: the one before it was accumulated, if it was not followed by a step.

        Args:
            anew: whether what was accumulated is dropped, as ``zero_grad`` would.
        """
        self.raise_error()
        self._accumulate()
        if anew:
            self._post(self._forget)

    def accompany(self, control: Control | None) -> None:
        """A step runs, which fails when an update does, for it would wait for a version that never comes; or none."""
        self._control = control
        # It may have failed since `begin` looked. Whoever of the two threads writes last sees what the other one wrote.
        if control is not None and (error := self._error) is not None:
            control.fail(error)

    def offer(self, gradients: StepGradients) -> None:
        """What the batch gave. Its loss may be differentiated later, or not at all."""
        self._batch = gradients

    def submit(self, optimizer: Optimizer, clip: Clip | None) -> None:
        """The optimizer step that follows the batch [1]."""
        batch, self._batch = self._batch, None
        if batch is not None and batch.scale is None:  # its loss was not differentiated
            batch.let_go()
            batch = None
        self.submitted += 1
        step = _Step(self.submitted, batch, Hyperparameters.of(optimizer), clip, self._shadows_of(optimizer))
        if self.staleness:
            self._post(lambda: self._publish_last(step))
        self._post(lambda: self._run(step))

    @property
    def wanted(self) -> int:
        """The version that the next step is to compute with."""
        return max(0, self.submitted - self.staleness)

    def publish_all(self) -> None:
        """Settled: let the next step see every update, whatever the staleness, and what else was written to masters."""
        for unit in self.units:
            if self.staleness:
                unit.refresh()
            unit.publish(self.submitted)

    def settle(self) -> None:
        """Wait until everything submitted has been applied.

        Raises:
            what an update raised; once.
        """
        self._accumulate()
        self._rest()
        self.raise_error()

    def drop(self) -> None:
        """After a failure: finish what was submitted; the batch that failed gives nothing."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.let_go()
        self._rest()

    def raise_error(self) -> None:
        """Raise what an update raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                error.add_note(
                    "roundpipe: this happened in an optimizer step, which has changed some layers and not others; go "
                    "on from a checkpoint."
                )
                raise error
        finally:
            del error

    def close(self) -> None:
        """Finish what was submitted, and stop the thread."""
        self._thread.stop()
        self._thread.join()

    def _accumulate(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if batch.scale is None:
            batch.let_go()
            return
        for unit in self.units:
            self._post(lambda unit=unit: self._add(unit, batch))  # type: ignore[misc]
        self._post(batch.let_go)

    def _rest(self) -> None:
        waiter = self._thread.submit(lambda: None).waiter
        while not waiter.wait_for(LOOK):
            if not self._thread.alive:
                raise RoundPipeError(f"the optimizer's thread has died ({self._thread.died!r})") from self._thread.died

    def _shadows_of(self, optimizer: Optimizer) -> dict[Unit, Shadow]:
        known, shadows = self._shadows
        if known is not optimizer:
            shadows = {unit: Shadow(optimizer, unit.masters) for unit in self.units}
            self._shadows = optimizer, shadows
        return shadows

    # -- the optimizer's thread ---------------------------------------------------------------------------------------

    def _post(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._error is not None:
                return
            try:
                work()
            except BaseException as error:
                self._error = error
                if (control := self._control) is not None:
                    control.fail(error)

        self._thread.submit(guarded)

    def _forget(self) -> None:
        for accumulated in self._accumulated.values():
            accumulated.forget()

    def _publish_last(self, step: _Step) -> None:
        """The step's uploads are over: its successor sees the update before this one, which may begin then."""
        for unit in self.units:
            unit.refresh()
            unit.publish(step.number - 1)

    def _add(self, unit: Unit, batch: StepGradients) -> None:
        self._accumulated[unit].add(batch.take(unit))
        batch.let_go(unit)

    def _gather(self, unit: Unit, step: _Step) -> dict[int, Tensor]:
        """The unit's gradients, of all batches since the last step [2]."""
        return self._accumulated[unit].with_last(step.batch.take(unit) if step.batch is not None else {})

    def _run(self, step: _Step) -> None:
        if step.clip is None or step.clip.kind != "norm":
            for unit in self.units:
                self._apply(unit, step, self._gather(unit, step))
            return
        gathered = {unit: self._gather(unit, step) for unit in self.units}
        whole = {key: gradient for gradients in gathered.values() for key, gradient in gradients.items()}
        clipped = list(step.held(whole).values())
        if clipped:
            scale(clipped, coefficient(norms(clipped), step.clip))  # [3]
        for unit, gradients in gathered.items():
            self._apply(unit, step, gradients)

    def _apply(self, unit: Unit, step: _Step, gradients: dict[int, Tensor]) -> None:
        """Step the unit and let everybody know [4]."""
        if step.clip is not None and step.clip.kind == "value":
            clamp(list(step.held(gradients).values()), step.clip)
        step.shadows[unit].step(step.hyperparameters, gradients)
        gradients.clear()
        self._accumulated[unit].forget()
        if step.batch is not None:
            step.batch.let_go(unit)
        if not self.staleness:
            unit.publish(step.number)
