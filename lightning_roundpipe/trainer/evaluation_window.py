"""Evaluation by looking ahead: validation, test and prediction batches that are in flight together.

    Lightning comes to a batch ── others are taken from its fetcher and started, so that all devices are busy ── [1]
                               ── its result is there, or is waited for ── [2]
                               ── what its step has logged is logged, and what it has raised is raised ── [3]
                               ── hooks find what it has set on modules

Each step runs whole, once, on its own batch (`engine.evaluation`). Batches of another loader wait until those of this
one are over. A batch whose calls are not known yet runs alone, on Lightning's thread.

These names of Lightning are private: ``Trainer._active_loop``, ``_data_fetcher`` and
``_build_step_args_from_hook_kwargs`` of its loops.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from typing import Any

from lightning.pytorch import LightningModule

from lightning_roundpipe.batches.logs import recorded_logs, repeat_logs
from lightning_roundpipe.config import Options
from lightning_roundpipe.devices.thread_owner import context_of_thread
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.engine.evaluation_batches import Batch
from lightning_roundpipe.trainer.lookahead import LookAhead, look_ahead
from lightning_roundpipe.user_code.module_state import unobserved


class EvaluationWindow:
    """The batches of an evaluation that are in flight.

    Args:
        module: the user's module.
        engine: the engine.
        options: the strategy's options.
    """

    def __init__(self, module: LightningModule, engine: Engine, options: Options) -> None:
        self._module, self._engine, self._pipeline = module, engine, engine.evaluations
        devices = len(engine.context.pool.devices)
        self._size = options.evaluation_batches * devices if options.overlap else 1
        self._flights: deque[tuple[Any, Batch]] = deque()
        """Batches of the loader, in order, and what runs their steps."""
        self._fetcher: LookAhead | None = None
        self._rolls = True
        """Whether hooks run while batches are in flight: not where a precision sets torch's default dtype, which is the
        process's, nor while masters are split, so that hooks would not find their values."""
        self._context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._kind: tuple[Any, ...] = ()
        """The name of the step, and the number of the loader if the step gets it; empty if batches run alone."""
        self._given = 0
        """How many arguments the step gets."""
        self._thread = threading.local()
        self._around = ExitStack()

    def step(self, name: str, context: Callable[[], AbstractContextManager[Any]], args: tuple[Any, ...]) -> Any:
        """Return what the step ``name`` returns for a batch, when Lightning comes to it.

        Args:
            name: of the step.
            context: the precision's context of the step. What the loop does between steps runs outside of it.
            args: the step's.
        """
        self._context = context
        try:
            known = self._flights and self._flights[0][0] is args[0]
            run = self._flights.popleft()[1] if known else self._begin(name, args)
            if run is None:
                with context():
                    return self._engine.evaluate(getattr(self._module, name), *args, kind=self._kind)
            self._pipeline.wait_for(run)  # [2]
            if self._rolls and run.result.error is None:
                self._fill(self._size)
            with context():
                self._pipeline.show(run)
                if not self._flights:
                    self.end()
                with unobserved():  # Lightning copies the lists of a metric, as if to another device
                    repeat_logs([run.logs])  # [3]
                return self._pipeline.result(run)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the window. Batches in flight are given up."""
        self._flights.clear()
        self._pipeline.end()
        self._around.close()

    def _begin(self, name: str, args: tuple[Any, ...]) -> Batch | None:
        """Begin with a batch that is not in flight, and those behind it [1]. Return None if it runs alone."""
        self.end()
        self._kind, self._given = (name, *args[2:]) if self._size > 1 else (), len(args)
        trainer = self._module.trainer
        self._fetcher = look_ahead(getattr(trainer._active_loop, "_data_fetcher", None))
        if self._fetcher is None:
            return None
        self._fetcher.show_updates(self._engine)
        if not self._kind or not self._pipeline.knows(self._kind):
            return None
        deque(self._fetcher.take(trainer, self._size - 1), 0)  # the loader may read weights, which begins below hide
        with self._context():
            self._engine.begin_evaluations(self._kind, self._size)
            formats = self._engine.model.formats
            self._rolls = not (formats.sets_default or formats.hidden)
            self._around.enter_context(recorded_logs(LightningModule, lambda: getattr(self._thread, "logs", None)))
            run = self._start(args)
            self._fill(self._size - 1)
            for other in () if self._rolls else (run, *(other for _, other in self._flights)):
                if other is not None:
                    self._pipeline.wait_for(other)
        return run

    def _fill(self, number: int) -> None:
        """Start batches until there are ``number`` behind the one that Lightning has come to."""
        assert self._fetcher is not None
        taken = self._fetcher.take(self._module.trainer, number, self._pipeline.hooks)
        for batch, index, loader in islice(taken, len(self._flights), None):
            args = (batch, index, loader)[: self._given]
            run = self._start(args) if args[2:] == self._kind[1:] else None
            if run is None:
                break
            self._flights.append((batch, run))
        if len(self._flights) < number:
            self._pipeline.close_round()

    def _start(self, args: tuple[Any, ...]) -> Batch | None:
        with self._context():
            return self._pipeline.start(functools.partial(self._run, args))

    def _run(self, args: tuple[Any, ...]) -> Any:
        self._thread.logs = context_of_thread().logs
        try:
            return getattr(self._module, self._kind[0])(*args)
        finally:
            del self._thread.logs
