"""Named texts as sequences of one length: tokenised with the model's own tokenizer, joined, and cut without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_roundpipe.data.sequences import InMemory, check_sizes
from lightning_roundpipe.data.split import split_texts


def pydoc_topics() -> dict[str, str]:
    """Return name and text of each topic that ``help("topics")`` lists in this Python, 465,000 characters in all."""
    from pydoc_data.topics import topics

    return dict(topics)


class PackedText(InMemory):
    """Causal language modelling on named texts. Whole texts go either to training or to validation.

    Args:
        texts: the texts by name.
        tokenizer: the model's. Its end-of-text token separates texts.
        sequence_length: tokens of each sequence. Remaining tokens at the end are dropped.
        batch_size: sequences of a microbatch.
        validation_fraction: the held-out fraction of all characters; see ``split_texts``.
        max_validation_sequences: validate on at most this many, spread evenly over the held-out text. ``None``: on all.
        seed: seed of the split and of the order of training sequences.
        num_workers: processes that load data. The sequences are in memory, so 0 is best.
    """

    def __init__(
        self,
        texts: Mapping[str, str],
        tokenizer: PreTrainedTokenizerBase | None,
        sequence_length: int,
        batch_size: int,
        validation_fraction: float = 0.1,
        max_validation_sequences: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        if tokenizer is None:
            raise ValueError(
                "data=topics needs the model's tokenizer, and this model has none. Choose a pretrained model "
                "(model=smollm2) or data=random_tokens."
            )
        check_sizes(sequence_length, batch_size, num_workers, max_validation_sequences=max_validation_sequences)
        self.tokenizer = tokenizer
        training, validation = split_texts(texts, validation_fraction, seed)
        self.training = pack([self._tokens(texts[name]) for name in training], sequence_length)
        self.validation = pack([self._tokens(texts[name]) for name in validation], sequence_length)
        if max_validation_sequences is not None and max_validation_sequences < len(self.validation):
            chosen = torch.linspace(0, len(self.validation) - 1, max_validation_sequences).round().long()
            self.validation = self.validation[chosen]
        for name, sequences in (("training", self.training), ("validation", self.validation)):
            if not len(sequences):
                raise ValueError(f"data.sequence_length={sequence_length} is longer than all text for {name}.")

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return tokens if end is None else [*tokens, end]


def pack(texts: Sequence[Sequence[int]], length: int) -> Tensor:
    """Return the texts' tokens one after another, cut into rows: shape (rows, ``length``)."""
    joined = torch.tensor([token for text in texts for token in text], dtype=torch.long)
    return joined[: len(joined) // length * length].view(-1, length)
