"""How a batch is cut according to the engine's options, unless only calls of the model are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_roundpipe.config import Options
from lightning_roundpipe.runtime.batch import microbatches
from lightning_roundpipe.runtime.batch.loss_weights import Weights
from lightning_roundpipe.runtime.batch.samples import NoSamples, batch_size
from lightning_roundpipe.runtime.faults.interrupts import interrupts_allowed
from lightning_roundpipe.runtime.reporting.hints import Hints


@dataclass(frozen=True)
class Cut:
    """What training_step is called with.

    Attributes:
        parts: parts of the batch; the batch itself if only calls of the model are cut.
        sizes: samples per part; None if only calls of the model are cut.
        weights: the user's loss weights of the parts; None if the losses are to show them.
    """

    parts: list[Any]
    sizes: list[int] | None
    weights: Weights = None

    @property
    def several(self) -> bool:
        """Whether there may be several microbatches."""
        return self.sizes is None or len(self.sizes) > 1


class Cutter:
    """Cuts batches according to the options.

    Args:
        options: the engine's options.
        module: the user's LightningModule, which may define ``loss_weight``.
        workers: the number of workers.
        hints: told why a batch stays whole.
        alone: whether no other machine has a part of the batch, so that a single part needs no weight.
    """

    def __init__(self, options: Options, module: nn.Module, workers: int, hints: Hints, *, alone: bool = True) -> None:
        self._alone = alone
        self._options, self._module, self._workers, self._hints = options, module, workers, hints
        self._columns = microbatches.Columns()
        batch_statistics = any(isinstance(m, _BatchNorm) for m in module.modules())
        self._fewest = 2 if batch_statistics else 1
        """Least samples of a microbatch by default: batch norm needs two for a variance."""

    def cut(self, batch: Any, *, calls: bool) -> Cut:
        """Cut ``batch`` into parts. If ``calls``, it stays whole, and the calls of the model are cut instead."""
        if calls and self._options.num_microbatches != 1:
            return Cut([batch], None)
        sizes = self.sizes_for(batch)
        parts = self._columns.split(batch, sizes)
        return Cut(parts, sizes, self.given_weights_of(parts))

    def part(self, batch: Any, rows: microbatches.Rows, samples: int) -> Any:
        """Return a part of ``batch``, which has ``samples``, in memory of its own."""
        return self._columns.part(batch, rows, samples, copied=True)

    def sizes_for(self, batch: Any) -> list[int]:
        """Return how many samples each microbatch of ``batch`` gets."""
        is_cut = self._options.num_microbatches != 1
        try:
            samples = batch_size(batch)
        except ValueError as error:
            if is_cut and self._options.asks_for_parts:
                raise
            if is_cut and not isinstance(error, NoSamples):
                self._hints.of_a_whole_batch(str(error))
            return [1]
        return self.sizes_of(samples) if is_cut else [samples]

    def sizes_of(self, samples: int) -> list[int]:
        """Return how many of ``samples`` each microbatch gets."""
        count, size = self._options.num_microbatches, self._options.microbatch_size
        return microbatches.sizes_of(samples, count, size, self._workers, self._fewest)

    @property
    def weighs(self) -> bool:
        """Whether the user says how the losses of microbatches combine."""
        return self._options.loss_weight is not None or callable(getattr(self._module, "loss_weight", None))

    def given_weights_of(self, parts: Sequence[Any]) -> Weights:
        """Return how the losses of ``parts`` combine according to the user; None if the user does not say."""
        if self._options.loss_weight == "sum":
            return "sum"
        function = self._options.loss_weight or getattr(self._module, "loss_weight", None)
        if not callable(function) or (len(parts) == 1 and self._alone):
            return None
        with interrupts_allowed():
            return microbatches.given_weights(function, parts)
