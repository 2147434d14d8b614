"""Writes checkpoints at an interval, at the end, on Ctrl-C, SIGTERM and SIGHUP, and when training fails.

Training continues bit for bit only from a checkpoint of the moment between two optimizer steps. So the first signal
only sets a mark: the running step finishes, the checkpoint is written where all others are, and then the run ends. An
error cannot wait. The callback keeps the state of the loops and the data loader at the end of each step, and a
checkpoint after an error has that state instead of the one within the next step. That is correct only if the weights
are those of the same moment. If the strategy says that they are not, or cannot say so while a batch is running, no
checkpoint is written (see ``RoundPipeStrategy.whole``).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import signal
import termios
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTICE = b"\nStopping after this step, with a checkpoint. Once more to stop at once, without.\n"


class Interrupted(SystemExit):
    """Training was interrupted and is saved. The exit status is that of a process that the signal has ended."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Checkpoints(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint`` that also saves at time intervals beside steps, on signals and after failures.

    Args:
        every_n_minutes: write a checkpoint at the end of the first step that ends this many minutes after the last
            checkpoint. ``None``: not by time.
        every_n_train_steps: also write one every so many optimizer steps. ``None``: after each validation.
        save_top_k: how many to keep: the newest (1), or the best by ``monitor``; -1: all; 0: write none.
        save_on_exception: whether to write one when training fails or is interrupted.

    Attributes:
        newest: path of the last checkpoint written.
        interrupted_by: number of the signal that came.
    """

    roundpipe_passive_hooks = True

    def __init__(
        self,
        dirpath: str | Path,
        filename: str = "step-{step}",
        every_n_minutes: float | None = 10,
        every_n_train_steps: int | None = None,
        save_top_k: int = 1,
        monitor: str | None = None,
        mode: str = "min",
        save_last: bool | None = None,
        save_weights_only: bool = False,
        save_on_exception: bool = True,
        verbose: bool = False,
    ) -> None:
        if every_n_minutes is not None and every_n_minutes <= 0:
            raise ValueError(f"every_n_minutes={every_n_minutes!r} must be more than 0, or null: not by time.")
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps={every_n_train_steps!r} must be at least 1, or null.")
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_last=save_last,
            save_top_k=save_top_k,
            save_weights_only=save_weights_only,
            save_on_exception=save_on_exception,
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=None if every_n_train_steps else 1,
            verbose=verbose,
        )
        self.keep = save_top_k
        if every_n_minutes is not None:  # in addition to steps: the constructor accepts only one of them
            self._train_time_interval = timedelta(minutes=every_n_minutes)
        self.newest: Path | None = None
        self.interrupted_by: int | None = None
        self._handlers: dict[int, Any] = {}
        self._loops: dict[str, Any] | None = None
        """The state of Lightning's loops, with the position in the data, at the end of the last step."""
        self._batch = self._step = self._saved_batch = 0
        self._as_they_were = False

    # -- when to save -------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._loops, self._saved_batch = None, _batches(trainer)
        self._step = trainer.global_step
        self._listen()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # within an accumulation window, whose gradients no checkpoint holds
        self._snapshot_loops(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._stop_if_asked(trainer)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._loops is not None and trainer.state.fn == TrainerFn.FITTING:
            with self._rewound():
                self._stop_if_asked(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is None and self._is_unsaved():
            with self._rewound():
                self._save(trainer)
        super().on_train_end(trainer, pl_module)
        self._ignore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._ignore()
        if isinstance(exception, (Interrupted, KeyboardInterrupt)) or not self._is_whole(trainer):
            return
        try:
            with self._rewound():
                self._save(trainer)
        except Exception as error:
            exception.add_note(f"No checkpoint could be written after this: {type(error).__name__}: {error}")

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if self.interrupted_by is not None:
            if self.save_on_exception and self._is_unsaved():
                self._save(trainer)
            raise Interrupted(self.interrupted_by)

    def _snapshot_loops(self, trainer: Trainer) -> None:
        self._loops = copy.deepcopy(trainer.fit_loop.state_dict())
        self._batch, self._step = _batches(trainer), trainer.global_step

    def _is_unsaved(self) -> bool:
        return self.keep != 0 and self._loops is not None and self._saved_batch != self._batch

    def _is_whole(self, trainer: Trainer) -> bool:
        """Return, after an error, whether the weights are those after the last finished step, and not saved yet."""
        if not self.save_on_exception or trainer.state.fn != TrainerFn.FITTING or self._loops is None:
            return False
        whole: bool | None = getattr(trainer.strategy, "whole", None)
        total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        running = total.ready > total.processed
        if trainer.global_step != self._step:
            if whole is False or running:
                return False
            self._snapshot_loops(trainer)  # a callback failed after the step
        return self._is_unsaved() and (whole is True or (whole is None and not running))

    # -- saving -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _rewound(self) -> Iterator[None]:
        """Give checkpoints that are written inside the loops' state of the end of the last step."""
        self._as_they_were = True
        try:
            yield
        finally:
            self._as_they_were = False

    def _save(self, trainer: Trainer) -> None:
        metrics: dict[str, Tensor] = self._monitor_candidates(trainer)
        if self.monitor is None:
            self._save_topk_checkpoint(trainer, metrics)
        else:  # save it whether it is one of the best or not
            self._save_checkpoint(trainer, self.format_checkpoint_name(metrics))
        self._save_last_checkpoint(trainer, metrics)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._as_they_were and self._loops is not None:
            checkpoint["loops"]["fit_loop"] = self._loops

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.newest, self._saved_batch = Path(filepath), self._batch

    # -- signals ------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Make the first signal a request. Only the main thread can set handlers; ignored signals stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.interrupted_by = None
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                self._handlers[number] = handler
                signal.signal(number, self._asked)

    def _ignore(self) -> None:
        while self._handlers:
            number, handler = self._handlers.popitem()
            if signal.getsignal(number) == self._asked:
                signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _outlive_terminal()
            if self.interrupted_by is not None:  # it comes twice, from the system and from the shell
                return
        if self.interrupted_by is not None:
            raise KeyboardInterrupt
        self.interrupted_by = number
        with contextlib.suppress(OSError):
            os.write(2, _NOTICE)  # a signal handler must not print: it may have interrupted a print


def _outlive_terminal() -> None:
    """Drop all output from here on if the terminal is gone. A print would fail before the checkpoint is written."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _batches(trainer: Trainer) -> int:
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)
