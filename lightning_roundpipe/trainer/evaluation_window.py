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
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_roundpipe.config import Options
from lightning_roundpipe.devices.process_context import replaced
from lightning_roundpipe.engine.engine import Engine
from lightning_roundpipe.engine.evaluation import Batch
from lightning_roundpipe.trainer.lookahead import LookAhead, look_ahead


class _Logged(NamedTuple):
    """One call of ``log``. A metric object is kept with the value of its last call, which ``on_step`` shows."""

    module: LightningModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[tuple[Metric, Any]]


class _Flight(NamedTuple):
    """A batch in flight, and what its step has logged."""

    batch: Any
    run: Batch
    logged: list[_Logged]


class EvaluationWindow:
    """The batches of an evaluation that are in flight.

    Args:
        module: the user's module.
        engine: the engine.
        options: the strategy's options.
    """

    def __init__(self, module: LightningModule, engine: Engine, options: Options) -> None:
        self._module, self._engine, self._pipeline = module, engine, engine.evaluations
        devices = len(engine.worker_pool.devices)
        self._size = options.evaluation_batches * devices if getattr(options, "overlap", True) else 1
        self._flights: deque[_Flight] = deque()
        self._fetcher: LookAhead | None = None
        self._rolls = True
        """Whether hooks run while batches are in flight: not where a precision sets torch's default dtype, which is the
        process's, nor while masters are split, so that hooks would not find their values."""
        self._kind: tuple[Any, ...] = ()
        """The name of the step, and the number of the loader if the step gets it; empty if batches run alone."""
        self._given = 0
        """How many arguments the step gets."""
        self._thread = threading.local()
        self._own_log: Callable[..., None] = LightningModule.log
        self._around = ExitStack()

    def step(self, name: str, context: Callable[[], AbstractContextManager[Any]], args: tuple[Any, ...]) -> Any:
        """Return what the step ``name`` returns for a batch, when Lightning comes to it. ``args`` are the step's."""
        try:
            with context():
                flight = self._flights.popleft() if self._flights and self._flights[0].batch is args[0] else None
                flight = flight or self._begin(name, args)
                if flight is None:
                    return self._engine.evaluate(getattr(self._module, name), *args, kind=self._kind)
                return self._come_to(flight)
        except BaseException:
            self.end()
            raise

    def _come_to(self, flight: _Flight) -> Any:
        self._pipeline.wait_for(flight.run)  # [2]
        if self._rolls and flight.run.error is None:
            self._fill(self._size)
        self._pipeline.show(flight.run)
        if not self._flights:
            self.end()
        for logged in flight.logged:  # [3]
            self._log_again(logged)
        return self._pipeline.result(flight.run)

    def end(self) -> None:
        """End the window. Batches in flight are given up."""
        self._flights.clear()
        self._pipeline.end()
        self._around.close()

    def _begin(self, name: str, args: tuple[Any, ...]) -> _Flight | None:
        """Begin with a batch that is not in flight, and those behind it [1]. Return None if it runs alone."""
        self.end()
        self._kind, self._given = (name, *args[2:]) if self._size > 1 else (), len(args)
        if not self._kind or not self._pipeline.knows(self._kind):
            return None
        self._fetcher = look_ahead(getattr(self._module.trainer._active_loop, "_data_fetcher", None))
        if self._fetcher is None:
            return None
        self._engine.begin_evaluations(self._kind, self._size)
        formats = self._engine.formats
        self._rolls = not (formats.sets_default or formats.hidden)
        self._around.enter_context(replaced(LightningModule, log=self._recording()))
        flight = self._start(args)
        self._fill(self._size - 1)
        for other in () if self._rolls else self._flights:
            self._pipeline.wait_for(other.run)
        return flight

    def _fill(self, number: int) -> None:
        """Start batches until there are ``number`` behind the one that Lightning has come to."""
        assert self._fetcher is not None
        taken = self._fetcher.take(self._module.trainer, number, self._pipeline.hooks)
        for batch, index, loader in islice(taken, len(self._flights), None):
            args = (batch, index, loader)[: self._given]
            flight = self._start(args) if args[2:] == self._kind[1:] else None
            if flight is None:
                break
            self._flights.append(flight)
        if len(self._flights) < number:
            self._pipeline.close_round()

    def _start(self, args: tuple[Any, ...]) -> _Flight | None:
        logged: list[_Logged] = []
        run = self._pipeline.start(functools.partial(self._run, logged, args))
        return None if run is None else _Flight(args[0], run, logged)

    def _run(self, logged: list[_Logged], args: tuple[Any, ...]) -> Any:
        """Run the step on a batch's thread."""
        self._thread.logged = logged
        try:
            return getattr(self._module, self._kind[0])(*args)
        finally:
            del self._thread.logged

    # -- logs ---------------------------------------------------------------------------------------------------------

    def _recording(self) -> Callable[..., None]:
        """Return a function that replaces `LightningModule.log` on the threads of batches."""

        @functools.wraps(self._own_log)
        def log(module: LightningModule, *args: Any, **kwargs: Any) -> None:
            logged: list[_Logged] | None = getattr(self._thread, "logged", None)
            if logged is None:
                return self._own_log(module, *args, **kwargs)
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
            metrics = [value for value in (*args, *kwargs.values()) if isinstance(value, Metric)]
            logged.append(_Logged(module, args, kwargs, [(metric, metric._forward_cache) for metric in metrics]))

        return log

    def _log_again(self, logged: _Logged) -> None:
        """Log on Lightning's thread what a step has logged [3]."""
        now = [(metric, metric._forward_cache) for metric, _ in logged.values]
        for metric, value in logged.values:
            metric._forward_cache = value
        self._own_log(logged.module, *logged.args, **logged.kwargs)
        for metric, value in now:
            metric._forward_cache = value
