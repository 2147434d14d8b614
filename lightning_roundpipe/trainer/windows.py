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
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_roundpipe.batches.cutting import Microbatches, cut, samples_in
from lightning_roundpipe.batches.logs import recorded_logs, repeat_logs
from lightning_roundpipe.batches.outputs import joined, joined_loss
from lightning_roundpipe.batches.weights import LossWeights, given_weights
from lightning_roundpipe.config import Options, RoundPipeError
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.engine.step import WindowResult
from lightning_roundpipe.trainer.lookahead import LookAhead, WholeUpdates, look_ahead


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
        self._module, self._trainer = module, module.trainer
        epoch, self._accumulated = self._trainer.fit_loop.epoch_loop, self._trainer.accumulate_grad_batches
        to_come = -epoch.batch_progress.current.ready % self._accumulated
        self._fetcher = fetcher = look_ahead(self._trainer.fit_loop._data_fetcher)
        batches: list[Any] = [args[0]]
        self._serial = serial
        statistics = epoch.automatic_optimization._skip_backward  # a pass for those of BatchNorm
        if fetcher is not None and not (self._serial or statistics):
            batches += [batch for batch, *_ in fetcher.take(self._trainer, to_come)]
        if fetcher is None and (options.num_microbatches or options.microbatch_size):
            raise ValueError(
                "training_step takes dataloader_iter, so the strategy has no batch to cut: leave out num_microbatches "
                "and microbatch_size, or let training_step take the batch."
            )
        self.span = len(batches)
        self._progress = _ProgressOfBatches(epoch.batch_progress, self.span, fetcher)
        self.samples: list[int] = []
        self._functions: list[Callable[[], Any]] = []
        self._stops: dict[int, bool] = {}
        """Whether ``trainer.should_stop`` was set when a microbatch had ended."""
        self._batches: list[tuple[int, list[int]]] = []
        """Those to come: by their place in the epoch, their microbatches."""
        parts: list[Any] = []
        self._of_batch = of_batch = list[int]()
        for i, batch in enumerate(batches):
            if batch is None and i:
                continue  # the loop skips it
            number, size = options.num_microbatches, options.microbatch_size
            mine = [batch] if fetcher is None else cut(batch, number, size)
            rest = (args[1] + i, *args[2:]) if len(args) > 1 else ()
            self._functions += [functools.partial(module.training_step, part, *rest) for part in mine]
            self._batches.append((epoch.batch_progress.current.ready + i, [*range(len(parts), len(parts) + len(mine))]))
            parts += mine
            of_batch += [i] * len(mine)
        self.samples = [samples_in(part) for part in parts]
        own: Any = getattr(module, "loss_weight", None)
        by = options.loss_weight or (own if callable(own) else None)
        given = given_weights(by, parts) if callable(by) else ()
        self._weights = LossWeights(by, self.samples, of_batch, self._accumulated, given)
        self._result = WindowResult()
        self._losses: dict[int, Tensor] = {}
        self._all = [microbatches for _, microbatches in self._batches]
        self._begins_epoch = epoch.batch_progress.current.ready == 1 and not isinstance(args[0], Microbatches)
        self._next_batch = 0

    @property
    def ended(self) -> bool:
        """Whether the loop has come to all batches."""
        return not self._batches

    def run(self, engine: Engine, seed: tuple[int, ...], *, zero_grad: bool) -> None:
        """Run all microbatches [1]."""
        hints, options = engine.context.hints, engine.context.options
        if self._serial and self._accumulated > 1:
            hints.say("one", f"the batches of a window run one at a time, on one device: {self._serial}.")
        stopping, epoch = self._trainer.should_stop, self._trainer.fit_loop.epoch_loop
        functions = [functools.partial(self._step, m) for m in range(len(self._functions))]
        before, epoch.batch_progress = epoch.batch_progress, self._progress  # type: ignore[assignment]
        try:
            with recorded_logs(LightningModule, engine.current_log, self._trainer._results):
                self._result = result = engine.train_window(functions, self._weights, seed, zero_grad=zero_grad)
        finally:
            epoch.batch_progress = before
        self._trainer.should_stop = stopping
        if self._fetcher is not None:
            masters = engine.model.bucket_of.keys()
            self._fetcher.whole = WholeUpdates(engine.settle, masters) if engine.updates is not None else nullcontext()
        workers = len(engine.context.pool.workers)
        asked = options.num_microbatches or 1
        if self._begins_epoch and len(self._all[0]) < asked:
            hints.of_few_samples(asked, len(self._all[0]))
        elif len(functions) == self._accumulated == 1 < workers:  # not a short window, nor a closure's second call
            hints.of_one_microbatch(workers)
        self._functions = []
        losses: dict[int, tuple[Tensor, bool]] = {}
        for batch, microbatches in enumerate(self._all):
            runs = [result.microbatches[m] for m in microbatches if m < len(result.microbatches)]
            found = [(run.loss, run.weight) for run in runs if run.loss is not None]
            if found and len(runs) == len(microbatches):
                value = joined_loss([loss for loss, _ in found], [w for _, w in found], adds=self._weights.adds)
                losses[batch] = value, any(run.differentiable for run in runs)
        if result.gradients is not None:
            self._losses = dict(zip(losses, result.gradients.losses([*losses.values()]), strict=True))
        else:  # a later batch has failed, and no optimizer step follows
            self._losses = {
                batch: value.requires_grad_(differentiable) for batch, (value, differentiable) in losses.items()
            }

    def _step(self, microbatch: int) -> Any:
        self._progress.show(self._of_batch[microbatch])
        output = self._functions[microbatch]()
        self._stops[microbatch] = self._trainer.should_stop
        return output

    def next(self) -> Any:
        """Return what ``training_step`` has returned for the batch that the loop has come to [2].

        Raises:
            RoundPipeError: the loop has skipped a batch of the window, or the window's length was changed within it.
            Exception: what ``training_step`` has raised for this batch [3].
        """
        expected, microbatches = self._batches.pop(0)
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        if expected != self._trainer.fit_loop.epoch_loop.batch_progress.current.ready:
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
            self._batches = []
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
