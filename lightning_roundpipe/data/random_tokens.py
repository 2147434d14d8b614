"""Sequences of random tokens: no text, no tokenizer, ready at once. For trying configurations, and for tests."""

from __future__ import annotations

import torch

from lightning_roundpipe.data.sequences import InMemory, check_sizes


class RandomTokens(InMemory):
    """A few random sequences, repeated, so that a model's loss falls as it learns them by heart.

    Args:
        vocab_size: tokens are drawn from 0 to this, excluded.
        sequence_length: tokens of each sequence.
        batch_size: sequences of a microbatch.
        sequences: number of sequences. ``None``: four batches.
        validation_sequences: validation uses so many of them, the first ones, which are not held out. ``None``:
            ``batch_size``.
        seed: seed of the tokens and of their order.
        num_workers: processes that load data. The sequences are in memory, so 0 is best.
    """

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        batch_size: int,
        sequences: int | None = None,
        validation_sequences: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        counts = {"vocab_size": vocab_size, "sequences": sequences, "validation_sequences": validation_sequences}
        check_sizes(sequence_length, batch_size, num_workers, **counts)
        generator = torch.Generator().manual_seed(seed)
        number = 4 * batch_size if sequences is None else sequences
        self.training = torch.randint(vocab_size, (number, sequence_length), generator=generator)
        self.validation = self.training[: validation_sequences or batch_size]
