"""Takes batches from Lightning's data fetcher before its loop asks for them.

A loop asks its fetcher for one batch at a time. `look_ahead` changes the class of that fetcher in place, so that it
keeps its iterator and what it has fetched, and survives reloaded data loaders. `LookAhead.take` then gives the next
batches; the loop receives them later, in order, as if they had just been fetched.

    take ── fetch ── the transfer hooks, once ── the position of stateful loaders ── [1]
    the loop's next() ── the batch ── its transfer hooks pass it through ── [2]

A data set may run the model, as one that collects episodes does. What the loader runs in this process finds whole
updates [3].

``done`` says whether the batch that the loop has received last is the last one, and checkpoints store the position of
the loaders as of that batch.

These names of Lightning are private: ``_PrefetchDataFetcher``, ``_data_fetcher`` of its loops,
``LightningModule._on_before_batch_transfer`` and ``._current_fx_name``, ``CombinedLoader._state_dicts`` and
``call._call_strategy_hook``.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import CombinedLoader
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_roundpipe.engine.engine import Engine

TRANSFER = "_on_before_batch_transfer"
"""Attribute of a module's instance that `transfer_once` sets."""


class TakenBatch:
    """A batch that was taken ahead and has passed the transfer hooks. No collection: Lightning would look into it."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class WholeUpdates(TorchFunctionMode):
    """Finishes pending updates before a torch function takes one of the model's weights [3].

    Args:
        engine: has these updates, and the weights. The loader may outlive it.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine, self._process = weakref.ref(engine), os.getpid()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        engine = self._engine() if os.getpid() == self._process else None  # a worker of a loader has no updates
        if engine is not None and _have_any((*args, *kwargs.values()), engine.model.bucket_of.keys()):
            engine.settle()
        return func(*args, **kwargs)

    @override
    def __reduce__(self) -> Any:
        return nullcontext, ()  # copies of what holds it have no updates

    @override
    def __enter__(self) -> Self:
        """Enter below other modes: a generator of the loader may enter one, and leave it at a later batch.

        The mode of the default device stays the lowest one, where torch looks for it.
        """
        default, modes = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), _popped()
        lowest = int(default in modes)
        _push((*modes[:lowest], self, *modes[lowest:]))
        return self

    @override
    def __exit__(self, *_: object) -> None:
        _push([mode for mode in _popped() if mode is not self])


def _have_any(values: Iterable[Any], ids: Set[int]) -> bool:
    """Return whether one of ``values``, or of lists among them, has one of ``ids``."""
    return any(id(v) in ids or (type(v) in (list, tuple) and not ids.isdisjoint(map(id, v))) for v in values)


def _popped() -> list[Any]:
    """Take all torch function modes off the stack, and return them from the lowest one up."""
    return [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())][::-1]


def _push(modes: Iterable[Any]) -> None:
    for mode in modes:
        _push_on_torch_function_stack(mode)


class LookAhead(_PrefetchDataFetcher):
    """Lightning's fetcher, with batches that were taken ahead. `look_ahead` makes it.

    Attributes:
        taken: what the loop has not received: batch, index and loader, and the state of stateful loaders behind it.
        position: the state of stateful loaders after the last batch that the loop has received; None before the first.
        exhausted: whether the last batch has been fetched.
        error: what fetching the batch behind ``taken`` has raised. The loop gets it when it comes to that batch.
        waited_s: seconds of the main thread in the data loader, since the fetcher looks ahead.
        whole: context in which batches are fetched.
    """

    taken: deque[tuple[tuple[TakenBatch, int, int], list[dict[str, Any]]]]
    position: list[dict[str, Any]] | None
    exhausted: bool
    error: Exception | None = None
    waited_s: float = 0.0
    whole: AbstractContextManager[Any] = nullcontext()

    @property
    def done(self) -> bool:
        """Whether the loop has received the last batch, as far as it would know without a look ahead."""
        return self.exhausted and not self.taken and self.error is None

    @done.setter
    def done(self, value: bool) -> None:
        self.exhausted = value

    def take(
        self, trainer: Trainer, number: int, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[tuple[Any, int, int]]:
        """Yield the next ``number`` batches, or as many as there are, with their index and that of their loader [1].

        ``around``: context of the transfer hooks.
        """
        for i in range(number):
            if i == len(self.taken):
                if self.exhausted or self.error is not None:
                    return
                module = trainer.lightning_module
                hook = module._current_fx_name
                try:
                    (batch, index, loader), position = self._fetch()
                    with around():
                        batch = TakenBatch(_transferred(trainer, batch, loader))
                except Exception as error:
                    module._current_fx_name = hook  # a transfer hook that fails leaves its own, and the loop goes on
                    self.error = error
                    return
                self.taken.append(((batch, index, loader), position))
            taken, index, loader = self.taken[i][0]
            yield taken.batch, index, loader

    def show_updates(self, engine: Engine) -> None:
        """Let the loader find whole updates of ``engine``, if it updates weights [3]."""
        if engine.updates is not None:
            self.whole = WholeUpdates(engine)
        else:
            self.whole = nullcontext()

    @override
    def __next__(self) -> Any:
        if not self.taken and self.error is not None:
            error, self.error = self.error, None
            raise error
        item, self.position = self.taken.popleft() if self.taken else self._fetch()
        return item

    def _fetch(self) -> Any:
        began = time.perf_counter()
        try:
            with self.whole:
                return super().__next__(), CombinedLoader._state_dicts(self.combined_loader)
        finally:
            self.waited_s += time.perf_counter() - began

    @override
    def reset(self) -> None:
        super().reset()
        self.taken, self.position, self.error = deque(), None, None


def look_ahead(fetcher: Any) -> LookAhead | None:
    """Return ``fetcher`` as one that looks ahead; None if it gives its iterator to the user's step."""
    if type(fetcher) is _PrefetchDataFetcher:
        exhausted = fetcher.__dict__.pop("done")
        fetcher.__class__ = LookAhead
        fetcher.taken, fetcher.exhausted = deque(), exhausted  # type: ignore[attr-defined]
        fetcher.position = CombinedLoader._state_dicts(fetcher.combined_loader)  # type: ignore[attr-defined]
    if not isinstance(fetcher, LookAhead):
        return None
    vars(fetcher.combined_loader)["_state_dicts"] = functools.partial(_position, fetcher)
    return fetcher


def _position(fetcher: LookAhead) -> list[dict[str, Any]]:
    """Stand in for ``CombinedLoader._state_dicts``: the position of the batch that the loop has received."""
    return CombinedLoader._state_dicts(fetcher.combined_loader) if fetcher.position is None else fetcher.position


def _transferred(trainer: Trainer, batch: Any, loader: int) -> Any:
    """Return ``batch`` as Lightning's loops transfer it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=loader)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=loader)


def transfer_once(module: LightningModule) -> None:
    """Let the transfer hooks of ``module`` pass over a `TakenBatch` [2], also those of a copy."""
    vars(module)[TRANSFER] = functools.partial(_unless_taken, module)


def _unless_taken(module: LightningModule, batch: Any, dataloader_idx: int = 0) -> Any:
    if isinstance(batch, TakenBatch):
        return batch
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)
