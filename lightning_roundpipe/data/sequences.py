"""Rows of tokens as the batches of a causal language model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override


class Sequences(Dataset[dict[str, Tensor]]):
    """Each row of ``tokens``, shape (rows, length), as ``input_ids`` and ``labels`` (the model shifts the labels)."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def sequence_loader(
    tokens: Tensor, batch_size: int, shuffle_seed: int | None = None, num_workers: int = 0
) -> DataLoader[dict[str, Tensor]]:
    """Batches of ``Sequences``; with a ``shuffle_seed`` in random order and without a smaller batch at the end."""
    if shuffle_seed is None:
        return DataLoader(Sequences(tokens), batch_size, num_workers=num_workers)
    if len(tokens) < batch_size:
        raise ValueError(f"data.batch_size={batch_size} is more than the {len(tokens)} training sequences there are.")
    # Its own generator: the order is the same whatever else draws random numbers.
    generator = torch.Generator().manual_seed(shuffle_seed)
    return DataLoader(
        Sequences(tokens), batch_size, shuffle=True, drop_last=True, generator=generator, num_workers=num_workers
    )
