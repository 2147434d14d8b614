"""Rows of tokens as the batches of a causal language model, in an order that a resumed run continues."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from lightning_roundpipe.messages import PREFIX, plural, warn

Batch = dict[str, Tensor]


class TokenRows(LightningDataModule):
    """Rows of tokens as ``input_ids`` and ``labels``, which the model shifts: those of ``training`` in a random order,
    then those of ``validation``. Both are tensors of shape (rows, length), or datasets of batches' items.

    Raises:
        ValueError: rows have no target, or a number cannot be. ``others`` are at least 1, if they are set.
    """

    training: Any
    validation: Any

    def __init__(self, length: int, batch_size: int, seed: int, num_workers: int, **others: int | None) -> None:
        super().__init__()
        if length < 2:
            raise ValueError(
                f"data.sequence_length={length} is too short: the first token of a sequence is not a target."
            )
        for name, value in {"batch_size": batch_size, **others}.items():
            if value is not None and value < 1:
                raise ValueError(f"data.{name}={value} must be at least 1.")
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers} must be at least 0, which loads in this process.")
        self.sequence_length, self.batch_size, self.seed, self.num_workers = length, batch_size, seed, num_workers

    @override
    def train_dataloader(self) -> ShuffledLoader:
        self.setup("fit")
        batches = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        return ShuffledLoader(_items(self.training), self.batch_size, self.seed, self.num_workers, batches)

    @override
    def val_dataloader(self) -> DataLoader[Batch]:
        self.setup("fit")
        return DataLoader(_items(self.validation), self.batch_size, num_workers=self.num_workers)


def _items(rows: Any) -> Any:
    return [{"input_ids": row, "labels": row} for row in rows] if isinstance(rows, Tensor) else rows


class ShuffledLoader(DataLoader[Batch]):
    """Batches in an order that depends only on ``seed`` and the number of the epoch. An epoch has whole steps only.

    A step has ``accumulate`` batches. Rows that do not fill a step are dropped, unless there are only these.

    Lightning saves ``state_dict`` in its checkpoints, so a run resumed within an epoch takes the remaining batches. An
    ordinary shuffled loader would start the epoch again, in another order.
    """

    def __init__(
        self, rows: Dataset[Batch], batch_size: int, seed: int, num_workers: int = 0, accumulate: int = 1
    ) -> None:
        count = len(cast(Sized, rows))
        if count < batch_size:
            raise ValueError(f"data.batch_size={batch_size} is more than there are sequences for training, {count}.")
        step = batch_size * accumulate
        self._order = _Order(count, seed, dropped=count % (step if count >= step else batch_size))
        self._size, self._samples, self._resumed = batch_size, 0, False
        super().__init__(rows, batch_size, sampler=self._order, drop_last=True, num_workers=num_workers)

    @override
    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        if not self._resumed:
            self._order.epoch += 1
            self._samples = 0
        self._resumed = False
        self._order.skip = self._samples
        for batch in super().__iter__():
            self._samples += self._size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        order = self._order
        return {
            "epoch": order.epoch,
            "samples": self._samples,
            "size": self._size,
            "seed": order.seed,
            "rows": order.rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples that were taken, also with another batch size; warn if their order was another."""
        order = self._order
        order.epoch, self._samples = state["epoch"], state["samples"]
        self._resumed = len(order) - self._samples >= self._size  # otherwise the epoch was complete
        rows, seed = state["rows"], state["seed"]
        is_within = 0 < self._samples <= rows - state["size"]
        if is_within and (rows, seed) != (order.rows, order.seed):
            warn(
                f"{PREFIX}the checkpoint was written within an epoch over {plural(rows, 'sequence')} in the order of "
                f"data.seed={seed}, and training goes on over {order.rows:,} in that of data.seed={order.seed}: "
                "samples come twice or not at all in this epoch. Set data as it was, or resume from a checkpoint that "
                "was written at the end of an epoch."
            )


class _Order(Sampler[int]):
    def __init__(self, rows: int, seed: int, dropped: int) -> None:
        self.rows, self.seed, self.dropped = rows, seed, dropped
        self.epoch, self.skip = -1, 0

    def __len__(self) -> int:
        return self.rows - self.dropped

    @override
    def __iter__(self) -> Iterator[int]:
        # A generator of its own: the order does not depend on other random draws.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        # Convert in pieces: a list of all numbers takes four times their memory.
        order = torch.randperm(self.rows, generator=generator).numpy()[: len(self)]
        for start in range(self.skip, len(order), 65536):
            yield from order[start : start + 65536].tolist()
