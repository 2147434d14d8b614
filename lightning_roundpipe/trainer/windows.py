"""Lightning's accumulation window as one step of the engine.

Lightning's loop comes to one batch after another. When it comes to the first of a window, the others are taken from its
data fetcher, and the microbatches of all of them run as one step. The loop gets the results batch by batch:

    first batch ── take the others of the window ── cut them, if asked for ── run all microbatches ── [1]
    each batch ── modules as the batch has left them ── what it has logged ── its output and its loss ── [2]
    an error in ``training_step`` of a later batch ── raised when the loop comes to that batch ── [3]

The loop, its hooks and its counts see one batch at a time, as ever. The backward of the losses hands out the gradients
of the window with the last of them. A window is as long as Lightning's: ``accumulate_grad_batches`` as of now, from the
first batch of an epoch on, and shorter at its end. If hooks find the gradients of each batch (``on_after_backward``,
hooks on parameters), each batch is a step of its own.

These names of Lightning are private: ``fit_loop._data_fetcher``, ``epoch_loop.batch_progress`` and its counts,
``automatic_optimization._skip_backward``.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_roundpipe.batches.cutting import Microbatches, cut, samples_in
from lightning_roundpipe.batches.logs import recorded_logs, repeat_logs
from lightning_roundpipe.batches.outputs import joined, joined_loss
from lightning_roundpipe.batches.weights import LossWeights, given_weights
from lightning_roundpipe.config import Options, RoundPipeError
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.engine.step import WindowResult
from lightning_roundpipe.trainer.lookahead import LookAhead, look_ahead


class _Batch(NamedTuple):
    """A batch of a window: its number in the epoch, from 1, and its microbatches."""

    place: int
    microbatches: range


class Window:
    """The batches of an accumulation window.

    Args:
        module: the module in training. Lightning's loop has come to the first batch.
        options: say how batches are cut and weighed.
        args: the arguments of ``training_step`` for the first batch.
        serial: why its batches run one at a time; None if they need not.

    Attributes:
        span: the number of batches that the loop counts until the window ends, with those that it skips.
        samples: samples of each microbatch.
    """

    def __init__(self, module: LightningModule, options: Options, args: tuple[Any, ...], serial: str | None) -> None:
        self._trainer, self._serial, self._accumulated = module.trainer, serial, module.trainer.accumulate_grad_batches
        self._epoch = self._trainer.fit_loop.epoch_loop
        self._fetcher = fetcher = look_ahead(self._trainer.fit_loop._data_fetcher)
        if fetcher is None and (options.num_microbatches or options.microbatch_size):
            raise ValueError(
                "training_step takes dataloader_iter, so the strategy has no batch to cut: leave out num_microbatches "
                "and microbatch_size, or let training_step take the batch."
            )
        place = self._epoch.batch_progress.current.ready
        self._begins_epoch = place == 1 and not isinstance(args[0], Microbatches)
        batches = [args[0], *self._take_others()]
        self.span = len(batches)
        self._progress = _ProgressOfBatches(self._epoch.batch_progress, self.span, fetcher)
        self._batches: list[_Batch] = []
        self._next = 0
        """The index of the batch that the loop comes to next."""
        parts: list[Any] = []
        self._functions: list[Callable[[], Any]] = []
        self._offsets = offsets = list[int]()
        """For each microbatch, how many batches after the first its own is."""
        for offset, batch in enumerate(batches):
            if batch is None and offset:
                continue  # the loop skips it
            mine = [batch] if fetcher is None else cut(batch, options.num_microbatches, options.microbatch_size)
            rest = (args[1] + offset, *args[2:]) if len(args) > 1 else ()
            self._functions += [functools.partial(module.training_step, part, *rest) for part in mine]
            self._batches.append(_Batch(place + offset, range(len(parts), len(parts) + len(mine))))
            parts += mine
            offsets += [offset] * len(mine)
        self.samples = [samples_in(part) for part in parts]
        own: Any = getattr(module, "loss_weight", None)
        by = options.loss_weight or (own if callable(own) else None)
        given = given_weights(by, parts) if callable(by) else ()
        self._weights = LossWeights(by, self.samples, offsets, self._accumulated, given)
        self._stops: dict[int, bool] = {}
        """Whether ``trainer.should_stop`` was set when a microbatch had ended."""
        self._result = WindowResult()
        self._losses: dict[int, Tensor] = {}

    def _take_others(self) -> list[Any]:
        """Take the batches behind the first one from the fetcher; none if batches run one at a time."""
        statistics = self._epoch.automatic_optimization._skip_backward  # a pass for those of BatchNorm
        if self._fetcher is None or self._serial or statistics:
            return []
        to_come = -self._epoch.batch_progress.current.ready % self._accumulated
        return [batch for batch, *_ in self._fetcher.take(self._trainer, to_come)]

    @property
    def ended(self) -> bool:
        """Whether the loop has come to all batches."""
        return self._next == len(self._batches)

    def run(self, engine: Engine, seed: tuple[int, ...], *, zero_grad: bool) -> None:
        """Run all microbatches [1]."""
        hints, options = engine.context.hints, engine.context.options
        if self._serial and self._accumulated > 1:
            hints.say("one", f"the batches of a window run one at a time, on one device: {self._serial}.")
        functions = [functools.partial(self._step, m) for m in range(len(self._functions))]
        stopping, before = self._trainer.should_stop, self._epoch.batch_progress
        self._epoch.batch_progress = self._progress  # type: ignore[assignment]
        try:
            with recorded_logs(LightningModule, engine.current_log, self._trainer._results):
                self._result = engine.train_window(functions, self._weights, seed, zero_grad=zero_grad)
        finally:
            self._epoch.batch_progress = before
        self._trainer.should_stop = stopping
        if self._fetcher is not None:
            self._fetcher.show_updates(engine)
        workers, asked = len(engine.context.pool.workers), options.num_microbatches or 1
        if self._begins_epoch and (parts := len(self._batches[0].microbatches)) < asked:
            hints.of_few_samples(asked, parts)
        elif len(functions) == self._accumulated == 1 < workers:  # not a short window, nor a closure's second call
            hints.of_one_microbatch(workers)
        self._functions = []
        self._losses = self._losses_of(self._result)

    def _losses_of(self, result: WindowResult) -> dict[int, Tensor]:
        """Return the losses that Lightning gets, by the batch's index. A batch has none before all its parts do."""
        found: dict[int, tuple[Tensor, bool]] = {}
        for batch, (_, microbatches) in enumerate(self._batches):
            runs = [result.microbatches[m] for m in microbatches if m < len(result.microbatches)]
            losses = [(run.loss, run.weight) for run in runs if run.loss is not None]
            if losses and len(runs) == len(microbatches):
                value = joined_loss([loss for loss, _ in losses], [w for _, w in losses], adds=self._weights.adds)
                found[batch] = value, any(run.differentiable for run in runs)
        if result.gradients is not None:
            return dict(zip(found, result.gradients.losses([*found.values()]), strict=True))
        # A later batch has failed, and no optimizer step follows.
        return {batch: value.requires_grad_(differentiable) for batch, (value, differentiable) in found.items()}

    def _step(self, microbatch: int) -> Any:
        self._progress.show(self._offsets[microbatch])
        output = self._functions[microbatch]()
        self._stops[microbatch] = self._trainer.should_stop
        return output

    def next(self) -> Any:
        """Return what ``training_step`` has returned for the batch that the loop has come to [2].

        Raises:
            RoundPipeError: the loop has skipped a batch of the window, or the window's length was changed within it.
            Exception: what ``training_step`` has raised for this batch [3].
        """
        batch, self._next = self._next, self._next + 1
        place, microbatches = self._batches[batch]
        if place != self._epoch.batch_progress.current.ready:
            raise RoundPipeError(self.skipped())
        if batch and self._trainer.accumulate_grad_batches != self._accumulated:
            raise RoundPipeError(
                f"accumulate_grad_batches was changed to {self._trainer.accumulate_grad_batches} within a window of "
                f"{self._accumulated}, whose batches have all been trained on: change it behind the last batch of a "
                "window, or between epochs, as GradientAccumulationScheduler does."
            )
        result = self._result
        if microbatches[-1] >= len(result.microbatches):
            assert result.error is not None
            self._next = len(self._batches)
            for microbatch in range(microbatches[0], len(result.microbatches) + 1):
                result.show(microbatch)
            raise result.error
        for microbatch in microbatches:
            result.show(microbatch)
        runs = [result.microbatches[m] for m in microbatches]
        repeat_logs([run.logs for run in runs], [run.weight for run in runs])
        self._trainer.should_stop |= self._stops[microbatches[-1]]
        output = joined([run.output for run in runs], [self.samples[m] for m in microbatches])
        loss = self._losses.pop(batch, None)
        if self.ended:
            self._result = WindowResult()  # keeps nothing until the next window
        if loss is None:
            return output
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def skipped(self) -> str:
        """Return a message about batches of the window that the loop does not come to."""
        return (
            "on_train_batch_start returned -1 within a window of accumulate_grad_batches="
            f"{self._accumulated}, whose batches have all been trained on: return -1 for the first batch of a window, "
            "or set accumulate_grad_batches=1."
        )


class _ProgressOfBatches:
    """Lightning's progress within an epoch. On a microbatch's thread, it is what it will be at the microbatch's batch.

    Args:
        progress: that at the first batch.
        span: the number of batches of the window.
        fetcher: the loop's, which has taken them.
    """

    def __init__(self, progress: Any, span: int, fetcher: LookAhead | None) -> None:
        self._first, self._span, self._thread = progress, span, threading.local()
        self._ends = fetcher is not None and fetcher.exhausted and fetcher.error is None

    def show(self, batch: int) -> None:
        """Show this thread the progress at a batch of the window."""
        if not batch:
            return
        self._thread.progress = progress = copy.deepcopy(self._first)
        progress.is_last_batch = self._ends and batch == self._span - 1
        for counts in (progress.total, progress.current):
            vars(counts).update({name: count + batch for name, count in vars(counts).items()})

    def _here(self) -> Any:
        return getattr(self._thread, "progress", self._first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __reduce__(self) -> Any:
        return self._here().__reduce_ex__(2)
