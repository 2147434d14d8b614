"""``RoundPipeMonitor``: how fast training is, beside what was planned, and one warning that names what slows it down.

    every batch ── times on the main thread: between two batches, in the data loader, in the optimizer's step ── [1]
    the last batch of an accumulation window ── their sums are those of a step
    every n optimizer steps ── the strategy's report of the last finished step, its figures to all loggers ── [2]
    once, and again at some of [2] ── times and reports, compared with the plan (`diagnosis`) ── one warning ── [3]

Batches cost two readings of a clock. What a report costs grows with the step's events, so it is read at [2] and [3].
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_roundpipe.config import is_whole
from lightning_roundpipe.devices.core_semaphore import concurrent_devices
from lightning_roundpipe.diagnosis import (
    Diagnosis,
    PlannedStep,
    StepTimes,
    diagnose,
    link_use,
    planned_step,
    stall_seconds,
)
from lightning_roundpipe.messages import PREFIX, warn

FIRST = 2
"""Steps before the first one that counts: the first is measured, and in the second one buffers are allocated."""
ENOUGH = 5
"""Steps that a diagnosis needs."""
AGAIN = 50
"""Least number of steps between two diagnoses: each takes some milliseconds for each report."""
SAMPLES = 3
"""Reports that a diagnosis is made from."""
LEAST_S = 0.05
"""Shortest planned step that a warning is about: below it, most of a step is what every call takes beside computing."""
MOST_RECORDS = 4096
"""Records kept for the report page. Beyond that, every second one is dropped."""

_GIB = 2**30


class RoundPipeMonitor(Callback):
    """Logs how fast training is beside its plan, and warns once if steps are slower and names the cause.

    The figures go to all loggers of the Trainer under ``roundpipe/``. Under another strategy than ``roundpipe``, only
    those that need no plan are logged, and a message says so.

    ==========================  ====================================================================================
    ``step_time_s``             seconds of an optimizer step, end to end, without validation; mean since the last log
    ``planned_step_time_s``     seconds that its computations take by the plan
    ``tokens_per_s``            tokens of ``input_ids`` per second; ``samples_per_s`` for batches without them
    ``bubble_pct``              percent of the workers' time without computation, in the last finished step
    ``stall_KIND_pct``          percent of the workers' time in that step in which they wait for copies of KIND:
                                ``weights``, ``activations``, ``gradients``
    ``link_WAY_pct``            percent of that step in which the link ``up`` to a device, or ``down`` from it, is in
                                use; the mean of all devices
    ``loader_pct``              percent of the time in which the main thread waits for the data loader
    ``device_peak_gib``         peak memory of a device in that step, the most of all devices; GiB
    ``device_planned_gib``      the same as planned; GiB
    ``host_gib``                memory of this process; GiB
    ``host_planned_gib``        what weights, gradients and optimizer state take of it; GiB
    ``optimizer_lag_s``         seconds from the last gradient's arrival on the host to the end of the update
    ``loss_scale``              factor of the loss in fp16 precisions
    ==========================  ====================================================================================

    If the median of several steps takes more than 1.2 times what was planned, one `RoundPipeWarning` names the cause
    (link, host, data loader, user code or imbalance) and the setting that helps. Planned steps below 50 ms are not
    compared.

    Args:
        every_n_steps: optimizer steps between two logs. Default: the Trainer's ``log_every_n_steps``.

    Attributes:
        history: what was logged, with ``step``, ``elapsed_s``, ``loss`` and the peak of each device; for the page that
            ``RoundPipeStrategy.save_report`` writes.
        diagnosis: the last comparison with the plan; None before there is one.

    Raises:
        ValueError: ``every_n_steps`` is not a whole number of at least 1.
    """

    roundpipe_passive_hooks = True

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and not (is_whole(every_n_steps) and every_n_steps >= 1):
            raise ValueError(f"every_n_steps={every_n_steps!r} must be a whole number of at least 1, or None.")
        self.every_n_steps = every_n_steps
        self.history: list[dict[str, Any]] = []
        self.diagnosis: Diagnosis | None = None
        self._stride = 1
        self._records = 0
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        self._began = time.perf_counter()
        self._mark: float | None = None
        self._fetching = self._stepping = 0.0
        self._fetched_s = 0.0
        self._interval = _Interval()
        self._running = _RunningStep(1)
        self._steps = 0
        self._plan: tuple[str, int] | None = None
        self._planned: PlannedStep | None = None
        self._diagnosed = 0
        """The step of the last diagnosis."""
        self._times: deque[StepTimes] = deque(maxlen=50)
        self._reports: deque[Mapping[str, Any]] = deque(maxlen=SAMPLES)

    @property
    def _finished(self) -> int:
        """Steps of this run."""
        return self._running.number - 1

    # -- every batch [1] ----------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._steps = trainer.global_step
        if not _reports(trainer):
            rank_zero_info(
                f"{PREFIX}RoundPipeMonitor logs times and host memory only: the plan, stalls, links and devices need "
                f"Trainer(strategy='roundpipe'), and the strategy is {type(trainer.strategy).__name__}."
            )

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._time_the_loader(trainer)
        if self._mark is None:
            self._mark, self._fetched_s = time.perf_counter(), 0.0
            self._running.whole = False

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._stepping = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        began, self._mark = self._mark, now
        if began is None:
            return
        taken, fetched, self._fetched_s = now - began, self._fetched_s, 0.0
        updated, self._stepping = now - self._stepping if self._stepping > began else 0.0, 0.0
        interval, running = self._interval, self._running
        interval.add(taken, fetched, batch)
        running.add(StepTimes(taken, fetched, updated), loss_in(outputs))
        if trainer.global_step == self._steps:
            return  # the window continues
        self._running = _RunningStep(running.number + 1)
        if running.whole and running.number > FIRST:
            self._times.append(running.times)
        self._sample(trainer)
        interval.steps += trainer.global_step - self._steps
        self._steps = trainer.global_step
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and self._steps % every == 0:
            self._log(trainer, running.losses)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.diagnosis is None and _reports(trainer):  # a short run
            self._reports.append(trainer.strategy.report())  # type: ignore[attr-defined]
            self._diagnose(trainer)

    def _time_the_loader(self, trainer: Trainer) -> None:
        """Time how long Lightning's fetcher waits for batches. An epoch's first batch is not timed."""
        fetcher: Any = getattr(trainer.fit_loop, "_data_fetcher", None)
        start, stop = (getattr(fetcher, name, None) for name in ("_start_profiler", "_stop_profiler"))
        if start is None or stop is None or getattr(start, "__self__", None) is self:
            return
        self._inner = start, stop
        fetcher._start_profiler, fetcher._stop_profiler = self._begin_fetch, self._end_fetch

    def _begin_fetch(self) -> None:
        self._inner[0]()
        self._fetching = time.perf_counter()

    def _end_fetch(self) -> None:
        self._fetched_s += time.perf_counter() - self._fetching
        self._inner[1]()

    # -- every n steps [2] --------------------------------------------------------------------------------------------

    def _log(self, trainer: Trainer, losses: Sequence[Tensor]) -> None:
        interval, self._interval = self._interval, _Interval()
        values = interval.values()
        values["host_gib"] = psutil.Process().memory_info().rss / _GIB
        report = trainer.strategy.report() if _reports(trainer) else {}  # type: ignore[attr-defined]
        if report:
            values |= figures(report)
            self._add(report)
            if self._planned is None:
                self._planned = planned_step(report, _cores(trainer))
            if self._planned is not None:
                values["planned_step_time_s"] = self._planned.seconds
            if self._finished - self._diagnosed >= AGAIN:
                self._diagnose(trainer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            values["loss_scale"] = scaler.get_scale()
        named = {f"roundpipe/{name}": value for name, value in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._record(trainer, values, report, losses)

    def _record(
        self, trainer: Trainer, values: dict[str, float], report: Mapping[str, Any], losses: Sequence[Tensor]
    ) -> None:
        if self._records % self._stride == 0:
            peaks = [peak / _GIB for peak in report.get("peak_device_bytes", ())]
            elapsed = time.perf_counter() - self._began
            self.history.append(
                {
                    "step": trainer.global_step,
                    "elapsed_s": elapsed,
                    "loss": step_loss(losses, trainer.accumulate_grad_batches),
                    "device_gib": peaks,
                    **values,
                }
            )
            if len(self.history) >= MOST_RECORDS:
                self.history = self.history[::2]
                self._stride *= 2
        self._records += 1

    # -- the diagnosis [3] --------------------------------------------------------------------------------------------

    def _sample(self, trainer: Trainer) -> None:
        """Read the reports of the steps that the first diagnosis is made from."""
        last = FIRST + ENOUGH
        if last - SAMPLES < self._finished <= last and _reports(trainer):
            self._add(trainer.strategy.report())  # type: ignore[attr-defined]
            if self._finished == last:
                self._diagnose(trainer)

    def _add(self, report: Mapping[str, Any]) -> None:
        plan = report.get("plan", ""), report.get("microbatches", 0)
        if plan != self._plan:
            self._plan, self._planned = plan, None
            self._reports.clear()
        self._reports.append(report)

    def _diagnose(self, trainer: Trainer) -> None:
        if len(self._times) < min(ENOUGH, SAMPLES) or not self._reports:
            return
        self._diagnosed = self._finished
        found = diagnose(list(self._reports), list(self._times)[-ENOUGH:], _cores(trainer))
        if found is None:
            return
        self.diagnosis = found
        if found.slow and found.planned_s >= LEAST_S and not self._warned:
            self._warned = True
            if found.remedy:
                warn(PREFIX + str(found))
            else:
                rank_zero_info(PREFIX + str(found))


class _RunningStep:
    """Sums over the batches of an accumulation window that have ended.

    Args:
        number: that of the step in the run, from 1 on.

    Attributes:
        whole: whether each batch is timed from the end of the one before it.
        losses: of the batches, as Lightning divides them.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.times, self.whole = StepTimes(0.0, 0.0, 0.0), True
        self.losses: list[Tensor] = []

    def add(self, times: StepTimes, loss: Tensor | None) -> None:
        had = self.times
        self.times = StepTimes(had.step_s + times.step_s, had.fetch_s + times.fetch_s, had.update_s + times.update_s)
        self.losses += [] if loss is None else [loss]


class _Interval:
    """Sums since the last log."""

    def __init__(self) -> None:
        self.seconds = self.fetched_s = 0.0
        self.steps = self.tokens = self.samples = 0

    def add(self, taken: float, fetched: float, batch: Any) -> None:
        self.seconds += taken
        self.fetched_s += fetched
        self.tokens += count_tokens(batch)
        self.samples += count_samples(batch)

    def values(self) -> dict[str, float]:
        values = {"step_time_s": self.seconds / self.steps, "loader_pct": 100 * self.fetched_s / self.seconds}
        if self.tokens:
            values["tokens_per_s"] = self.tokens / self.seconds
        elif self.samples:
            values["samples_per_s"] = self.samples / self.seconds
        return values


def figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one step that `RoundPipeMonitor` logs, by name, as far as the report has them."""
    workers, step = report["workers"], report["step_time_s"]
    values: dict[str, float] = {"bubble_pct": report["bubble_pct"]}
    for kind, stalled in stall_seconds(report).items():
        values[f"stall_{kind}_pct"] = 100 * stalled / (workers * step) if step > 0 else 0.0
    for way, share in link_use(report).items():
        values[f"link_{way}_pct"] = 100 * share
    values["device_peak_gib"] = max(report["peak_device_bytes"]) / _GIB
    for name, key in (("device_planned_gib", "planned_device_bytes"), ("host_planned_gib", "planned_host_bytes")):
        if report.get(key) is not None:
            values[name] = report[key] / _GIB
    if report.get("optimizer_lag_s") is not None:
        values["optimizer_lag_s"] = report["optimizer_lag_s"]
    return values


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch with ``input_ids``; 0 for other batches."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return tokens.numel() if isinstance(tokens, Tensor) else 0


def count_samples(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in a batch; 0 without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else ()
    return 0 if isinstance(batch, str) else next((found for part in parts if (found := count_samples(part))), 0)


def _reports(trainer: Trainer) -> bool:
    return callable(getattr(trainer.strategy, "report", None))


def _cores(trainer: Trainer) -> int | None:
    """Return how many emulated devices compute at once; None for GPUs."""
    return concurrent_devices() if trainer.strategy.root_device.type == "cpu" else None


def loss_in(outputs: Any) -> Tensor | None:
    """Return the loss in what ``on_train_batch_end`` receives; None without one."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def step_loss(losses: Sequence[Tensor], accumulated: int) -> float | None:
    """Return the mean loss of the batches of a window, each of which Lightning has divided by ``accumulated``."""
    return accumulated * sum(map(float, losses)) / len(losses) if losses else None
