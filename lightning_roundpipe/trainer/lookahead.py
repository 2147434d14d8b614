"""Takes batches from Lightning's data fetcher before its loop asks for them.

A loop asks its fetcher for one batch at a time. `look_ahead` changes the class of that fetcher in place, so that it
keeps its iterator and what it has fetched, and survives reloaded data loaders. `LookAhead.take` then gives the next
batches; the loop receives them later, in order, as if they had just been fetched.

    take ── fetch ── the transfer hooks, once ── the position of stateful loaders ── [1]
    the loop's next() ── the batch ── its transfer hooks pass it through ── [2]

``done`` says whether the batch that the loop has received last is the last one, and checkpoints store the position of
the loaders as of that batch.

These names of Lightning are private: ``_PrefetchDataFetcher``, ``_data_fetcher`` of its loops,
``LightningModule._on_before_batch_transfer``, ``CombinedLoader._state_dicts`` and ``call._call_strategy_hook``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import CombinedLoader
from typing_extensions import override


class TakenBatch:
    """A batch that was taken ahead and has passed the transfer hooks.

    Attributes:
        batch: what the hooks have returned.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class _Entry(NamedTuple):
    """What the loop receives, and the state of stateful loaders after the batch was fetched."""

    item: tuple[Any, int, int]
    position: list[dict[str, Any]]


class LookAhead(_PrefetchDataFetcher):
    """Lightning's fetcher, with batches that were taken ahead. `look_ahead` makes it.

    Attributes:
        taken: batches that the loop has not received.
        position: the state of stateful loaders after the last batch that the loop has received; None before the first.
        exhausted: whether the last batch has been fetched.
        error: what fetching the batch behind ``taken`` has raised. The loop gets it when it comes to that batch.
        waited_s: seconds of the main thread in the data loader, since the fetcher looks ahead.
    """

    taken: deque[_Entry]
    position: list[dict[str, Any]] | None
    error: Exception | None = None
    waited_s: float = 0.0
    exhausted: bool

    @property
    def done(self) -> bool:
        """Whether the loop has received the last batch."""
        return self.exhausted and not self.taken

    @done.setter
    def done(self, value: bool) -> None:
        self.exhausted = value

    def take(
        self, trainer: Trainer, number: int, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[tuple[Any, int, int]]:
        """Yield the next ``number`` batches, or as many as there are, with their index and that of their loader [1].

        Args:
            trainer: the trainer.
            number: of batches.
            around: context of the transfer hooks.
        """
        for i in range(number):
            if i == len(self.taken):
                if self.exhausted or self.error is not None:
                    return
                try:
                    batch, index, loader = self._fetch()
                    position = CombinedLoader._state_dicts(self.combined_loader)
                    with around():
                        batch = TakenBatch(_transferred(trainer, batch, loader))
                except StopIteration:
                    return
                except Exception as error:
                    self.error = error
                    return
                self.taken.append(_Entry((batch, index, loader), position))
            batch, index, loader = self.taken[i].item
            yield batch.batch, index, loader

    @override
    def __next__(self) -> Any:
        if self.taken:
            item, self.position = self.taken.popleft()
            return item
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        item = self._fetch()
        self.position = CombinedLoader._state_dicts(self.combined_loader)
        return item

    def _fetch(self) -> Any:
        began = time.perf_counter()
        try:
            return super().__next__()
        finally:
            self.waited_s += time.perf_counter() - began

    @override
    def reset(self) -> None:
        super().reset()
        self.taken, self.position, self.error = deque(), None, None


def _transferred(trainer: Trainer, batch: Any, loader: int) -> Any:
    """Return ``batch`` as Lightning's loops transfer it."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=loader)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=loader)


def look_ahead(fetcher: Any) -> LookAhead | None:
    """Return ``fetcher`` as one that looks ahead; None if it gives its iterator to the user's step."""
    if type(fetcher) is _PrefetchDataFetcher:
        exhausted = fetcher.__dict__.pop("done")
        fetcher.__class__ = LookAhead
        fetcher.taken, fetcher.exhausted = deque(), exhausted  # type: ignore[attr-defined]
        fetcher.position = CombinedLoader._state_dicts(fetcher.combined_loader)  # type: ignore[attr-defined]
    if not isinstance(fetcher, LookAhead):
        return None
    vars(fetcher.combined_loader)["_state_dicts"] = _Position(fetcher)
    return fetcher


class _Position:
    """Stands in for ``CombinedLoader._state_dicts``: the position of the batch that the loop has received."""

    def __init__(self, fetcher: LookAhead) -> None:
        self._fetcher = fetcher

    def __call__(self) -> list[dict[str, Any]]:
        fetcher = self._fetcher
        ahead = fetcher.taken or fetcher.position is not None
        if ahead and fetcher.position is not None:
            return fetcher.position
        return CombinedLoader._state_dicts(fetcher.combined_loader)


class TransferOnce:
    """Stands in for a module's ``_on_before_batch_transfer`` during a run: a `TakenBatch` has been transferred [2].

    It is an attribute of the module's instance. A copy of the module has a copy of it.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, TakenBatch):
            return batch
        return type(self._module)._on_before_batch_transfer(self._module, batch, dataloader_idx)

    @staticmethod
    def install(module: LightningModule) -> None:
        vars(module)["_on_before_batch_transfer"] = TransferOnce(module)

    @staticmethod
    def remove(module: LightningModule) -> None:
        vars(module).pop("_on_before_batch_transfer", None)
