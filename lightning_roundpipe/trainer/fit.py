"""The training of one ``Trainer.fit``: windows of batches, and the optimizer's steps.

training_step of a window's first batch ── all microbatches of the window run ── `trainer.windows`
training_step of each batch ── the window's result for it
optimizer_step ── the update, on a thread of its own where that is possible ── `trainer.stepping`
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_roundpipe.config import RoundPipeError
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.precision import RoundPipePrecision
from lightning_roundpipe.reports.announcements import Announcements
from lightning_roundpipe.trainer.stepping import Stepping
from lightning_roundpipe.trainer.windows import Window


class Fit:
    """See above.

    Args:
        trainer, module, optimizers: those of the run.
        engine: runs the windows.
        precision: the strategy's plugin.
        carried: of the fit until user code replaced parts of the model, what `carried` returned.

    Attributes:
        stepping: how the optimizer is stepped.
        announcements: what the run reports about itself.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        engine: Engine,
        precision: RoundPipePrecision,
        carried: tuple[int, int] | None = None,
    ) -> None:
        self._trainer, self._module, self._engine, self._precision = trainer, module, engine, precision
        self._seed, engine.reports.weights_uploaded = carried or (torch.initial_seed(), 0)
        self._window: Window | None = None
        self.announcements = Announcements(trainer, module, engine, str(precision.precision), rank_zero_info)
        self.stepping = Stepping(trainer, module, optimizers, engine, rank_zero_info)
        engine.planner.windows_left = functools.partial(_windows_left, trainer)
        engine.planner.clips = functools.partial(_clips_by_norm, trainer)
        engine.within_window = self.stepping.is_within_window
        precision.after_backward = None if engine.context.exchange is None else self._sum_gradients

    def carried(self) -> tuple[int, int]:
        """Return what goes on where the run is set up again: the seed, and the bytes of weights uploaded so far."""
        return self._seed, self._engine.reports.weights_uploaded

    @property
    def between_windows(self) -> bool:
        """Whether Lightning's loop has come to all batches of the window that began last."""
        return self._window is None or self._window.ended

    def training_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what ``training_step`` returns for the batch that Lightning's loop has come to."""
        if not self._module.automatic_optimization:
            output = self._train_manually(args, kwargs)
        else:
            if self._window is None or self._window.ended:
                self._window = self._begin_window((*args, *kwargs.values()))
            with self._precision.train_step_context():  # logged numbers become tensors of its dtype
                output = self._window.next()
        self.announcements.after()
        self.stepping.refuse_late_hooks()
        if not self.stepping.asynchronous:  # the batch may have switched to that
            self._precision.clipping = None
        return output

    def _begin_window(self, args: tuple[Any, ...]) -> Window:
        """Run the microbatches of the window of which Lightning's loop has come to the first batch."""
        window = Window(self._module, self._engine.context.options, args, self.stepping.sees_each_batch())
        zero_grad = self.stepping.begin(window.span)
        self.announcements.before(window.samples)
        with self._precision.train_step_context():
            window.run(self._engine, (self._seed, self.stepping.batch_number()), zero_grad=zero_grad)
        return window

    def _train_manually(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.stepping.begin(1)
        self.announcements.before(None)
        step = functools.partial(self._module.training_step, *args, **kwargs)
        with self._precision.train_step_context():
            return self._engine.train_manually(step, (self._seed, self.stepping.batch_number()))

    def optimizer_step(self, run: Callable[[], Any]) -> Any:
        """Run one optimizer step. ``run`` is Lightning's part of it."""
        return self.stepping.step(self._precision, run)

    def _sum_gradients(self) -> None:
        """Sum the gradients in ``.grad`` over several machines, when a window of accumulated batches ends."""
        exchange = self._engine.context.exchange
        if exchange is None or self.stepping.asynchronous or self._trainer.fit_loop._should_accumulate():
            return
        masters = self._engine.model.masters
        sums = dict(exchange.summed({id(p): p.grad for p in masters if p.grad is not None}))
        for parameter in masters:
            if (gradient := sums.get(id(parameter))) is not None:
                parameter.grad = gradient

    def ended(self) -> None:
        """Finish pending updates at the end of training.

        Raises:
            RoundPipeError: the loop has not come to all batches of a window.
        """
        window, self._window = self._window, None
        if window is not None and not window.ended and not self._trainer.should_stop:
            raise RoundPipeError(window.skipped())
        self.stepping.ended()

    def close(self) -> None:
        """Remove what is registered with the trainer, the module, its optimizers and the precision plugin."""
        self.stepping.close()
        self._window = self._precision.after_backward = None


# -- what a run takes from Lightning's Trainer -------------------------------------------------------------------------


def profile_all_threads(module: LightningModule) -> None:
    """Let the ``PyTorchProfiler`` of the module's trainer, if there is one, record the workers' threads.

    Call it before the run's first profiled action. It keeps an ``experimental_config`` that the user has set.
    """
    profiler = getattr(module._trainer, "profiler", None)
    if isinstance(profiler, PyTorchProfiler):
        with contextlib.suppress(TypeError, AttributeError):  # older versions of torch cannot
            everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            profiler._profiler_kwargs.setdefault("experimental_config", everywhere)


def _windows_left(trainer: Trainer) -> float:
    """Return how many windows the trainer will still train on; infinite if no setting says so. Its loops are set up."""
    steps, of_all = trainer.max_steps, trainer.num_training_batches
    by_steps = math.inf if steps == -1 else steps - trainer.global_step
    epochs = trainer.max_epochs
    by_epochs = math.inf if epochs in (None, -1) else (epochs - trainer.current_epoch) * of_all
    return max(0.0, min(by_steps, by_epochs / trainer.accumulate_grad_batches))


def _clips_by_norm(trainer: Trainer) -> bool:
    """Return whether the trainer clips gradients by their common norm."""
    algorithm = trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM  # Lightning's default
    return bool(trainer.gradient_clip_val) and GradClipAlgorithmType(algorithm) is GradClipAlgorithmType.NORM
