"""``RoundPipeMonitor``: how fast training is, how much memory it takes, and what steps wait for.

Batches cost two readings of a clock. What a report costs grows with the step's events, so it is read for logs only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_roundpipe.config import is_whole
from lightning_roundpipe.devices.core_semaphore import concurrent_devices
from lightning_roundpipe.messages import PREFIX
from lightning_roundpipe.reports.diagnosis import Diagnosis, diagnose, figures
from lightning_roundpipe.reports.planned import plan_and_costs, planned_seconds
from lightning_roundpipe.reports.step_times import StepTimes, TimedSteps

_GIB = 2**30


class RoundPipeMonitor(TimedSteps):
    """Logs how fast training is, how much memory it takes, and what steps wait for.

    The figures go to all loggers of the Trainer under ``roundpipe/``. Under another strategy than ``roundpipe``, only
    times, speed and host memory are logged, and a message says so.

    ==========================  ====================================================================================
    ``step_time_s``             seconds of an optimizer step, end to end, without validation; mean since the last log
    ``planned_step_time_s``     seconds that its computations take by the plan; not with ``plan="static"``
    ``tokens_per_s``            tokens of ``input_ids`` per second; ``samples_per_s`` for batches without them
    ``bubble_pct``              percent of the workers' time without computation, in the last finished step
    ``stall_KIND_pct``          percent of the workers' time in that step in which they wait for copies of KIND:
                                ``weights``, ``activations``, ``gradients``
    ``loader_pct``              percent of the time in which the main thread waits for the data loader
    ``device_peak_gib``         peak memory of a device in that step, the most of all devices; GiB
    ``device_planned_gib``      the same as planned; GiB
    ``host_gib``                memory of this process; GiB
    ``host_planned_gib``        what weights, gradients and optimizer state take of it; GiB
    ``optimizer_lag_s``         seconds from the last gradient's arrival on the host to the end of the update
    ``loss_scale``              factor of the loss in fp16 precisions
    ==========================  ====================================================================================

    On GPUs, one message at the first log names what steps wait for longest, and the setting that shortens it. Emulated
    devices wait for the cores that they share, which says nothing of a pipeline, so there is no such message.

    Args:
        every_n_steps: optimizer steps between two logs. Default: the Trainer's ``log_every_n_steps``.

    Attributes:
        diagnosis: what steps waited for at the last log; None on emulated devices and before there is one.

    Raises:
        ValueError: ``every_n_steps`` is not a whole number of at least 1.
    """

    roundpipe_passive_hooks = True

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and not (is_whole(every_n_steps) and every_n_steps >= 1):
            raise ValueError(f"every_n_steps={every_n_steps!r} must be a whole number of at least 1, or None.")
        self.every_n_steps = every_n_steps
        self.diagnosis: Diagnosis | None = None
        self._times = StepTimes()
        """Since the last log."""
        self._waited_s = 0.0
        """Seconds in which the main thread had waited for the data loader at the last log."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._times, self._waited_s = StepTimes(), 0.0
        if not _reports(trainer):
            rank_zero_info(
                f"{PREFIX}RoundPipeMonitor logs times and host memory only: the plan, stalls, links and devices need "
                f"Trainer(strategy='roundpipe'), and the strategy is {type(trainer.strategy).__name__}."
            )

    @override
    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: StepTimes) -> None:
        self._times.add(step)
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._log(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.diagnosis is None and _reports(trainer):  # a run without a log
            self._diagnose(trainer, trainer.strategy.report(), self._new_waits(trainer))  # type: ignore[attr-defined]

    def _log(self, trainer: Trainer) -> None:
        times = self._times
        values = {"step_time_s": times.seconds / times.steps}
        if times.tokens or times.samples:
            name = "tokens" if times.tokens else "samples"
            values[f"{name}_per_s"] = (times.tokens or times.samples) / times.seconds
        values["host_gib"] = psutil.Process().memory_info().rss / _GIB
        report: Mapping[str, Any] = trainer.strategy.report() if _reports(trainer) else {}  # type: ignore[attr-defined]
        if report:
            waited_s = self._new_waits(trainer)
            values |= figures(report) | {"loader_pct": 100 * waited_s / times.seconds}
            if report["plan_policy"] != "static" and (followed := plan_and_costs(report)) is not None:
                cores = concurrent_devices() if _emulated(trainer) else None
                planned_s = planned_seconds(*followed, report["workers"], report["microbatches"], cores)
                values["planned_step_time_s"] = planned_s
            self._diagnose(trainer, report, waited_s)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            values["loss_scale"] = scaler.get_scale()
        named = {f"roundpipe/{name}": value for name, value in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._times = StepTimes()

    def _new_waits(self, trainer: Trainer) -> float:
        """Return the seconds in which the main thread waited for the data loader since the last log."""
        before, self._waited_s = self._waited_s, getattr(trainer.fit_loop._data_fetcher, "waited_s", 0.0)
        return max(0.0, self._waited_s - before)

    def _diagnose(self, trainer: Trainer, report: Mapping[str, Any], waited_s: float) -> None:
        if not report or _emulated(trainer) or (found := diagnose(report, self._times, waited_s)) is None:
            return
        if self.diagnosis is None:
            rank_zero_info(f"{PREFIX}{found}")
        self.diagnosis = found


def _reports(trainer: Trainer) -> bool:
    return callable(getattr(trainer.strategy, "report", None))


def _emulated(trainer: Trainer) -> bool:
    return trainer.strategy.root_device.type == "cpu"
