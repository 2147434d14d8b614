"""Tokens that fit into memory: named texts, joined and cut into rows without padding, and random tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_roundpipe.data.sequences import TokenRows

SHARED_PARAGRAPH = 120
"""Least characters of a paragraph that ties the texts it occurs in. Shorter ones are headings and phrases."""


class RandomTokens(TokenRows):
    """A few random sequences, repeated, so that a model's loss falls as it learns them by heart.

    ``sequences`` defaults to four batches. Validation uses the first ``validation_sequences`` of them (default: a
    batch), which are not held out.
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
        counts = {"vocab_size": vocab_size, "sequences": sequences, "validation_sequences": validation_sequences}
        super().__init__(sequence_length, batch_size, seed, num_workers, **counts)
        generator = torch.Generator().manual_seed(seed)
        number = 4 * batch_size if sequences is None else sequences
        self.training = torch.randint(vocab_size, (number, sequence_length), generator=generator)
        self.validation = self.training[: validation_sequences or batch_size]


def pydoc_topics() -> dict[str, str]:
    """Return name and text of each topic that ``help("topics")`` lists in this Python, 465,000 characters in all."""
    from pydoc_data.topics import topics

    return dict(topics)


class PackedText(TokenRows):
    """Causal language modelling on named texts, which the model's ``tokenizer`` joins by its end-of-text token.

    Whole texts go either to training or to validation, ``validation_fraction`` of all characters to the latter; see
    ``split_texts``. Validation is on at most ``max_validation_sequences``, spread evenly over the held-out text.
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
        if tokenizer is None:
            raise ValueError(
                "data=topics needs the model's tokenizer, and this model has none. Choose a pretrained model "
                "(model=smollm2) or data=random_tokens."
            )
        most = max_validation_sequences
        super().__init__(sequence_length, batch_size, seed, num_workers, max_validation_sequences=most)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        parts: list[Tensor] = []
        for purpose, names in zip(
            ("training", "validation"), split_texts(texts, validation_fraction, seed), strict=True
        ):
            tokens = [tokenizer(texts[name], add_special_tokens=False, verbose=False)["input_ids"] for name in names]
            parts.append(_rows([[*part, *end] for part in tokens], sequence_length))
            if not len(parts[-1]):
                raise ValueError(f"data.sequence_length={sequence_length} is longer than all text for {purpose}.")
        self.training, held_out = parts
        spread = torch.linspace(0, len(held_out) - 1, min(most or len(held_out), len(held_out)))
        self.validation = held_out[spread.round().long()]


def _rows(texts: Sequence[Sequence[int]], length: int) -> Tensor:
    """Return the texts' tokens one after another, cut into rows: shape (rows, ``length``)."""
    joined = torch.tensor([token for text in texts for token in text], dtype=torch.long)
    return joined[: len(joined) // length * length].view(-1, length)


def split_texts(texts: Mapping[str, str], fraction: float, seed: int = 0) -> tuple[list[str], list[str]]:
    """Return the names for training and for validation. They depend only on the texts and ``seed``, no random state.

    Texts are divided whole: the end of a text whose beginning was trained on is not held out. That is not enough where
    texts quote each other, as Python's help topics do (whole sections of one are in another), so texts that share a
    paragraph stay together. Such groups are added to validation as long as they fit into its ``fraction`` of all
    characters.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"data.validation_fraction={fraction!r} must lie between 0 and 1.")
    allowed = fraction * sum(map(len, texts.values()))
    training: list[str] = []
    validation: list[str] = []
    used = 0
    for group in sorted(_related(texts), key=lambda names: hashlib.sha256(f"{seed} {names[0]}".encode()).digest()):
        size = sum(len(texts[name]) for name in group)
        if used + size <= allowed:
            validation += group
            used += size
        else:
            training += group
    if not validation or not training:
        raise ValueError(
            f"data.validation_fraction={fraction!r} leaves no text for {'training' if validation else 'validation'}: "
            f"texts that share paragraphs stay together, and there are too few ({len(texts)}). Choose another fraction."
        )
    return training, validation


def _related(texts: Mapping[str, str]) -> list[list[str]]:
    """Return the names in groups of texts that share paragraphs, directly or through others. Names are sorted."""
    groups: list[tuple[list[str], set[str]]] = []
    for name in texts:
        blocks = (" ".join(block.split()) for block in texts[name].split("\n\n"))
        names, paragraphs = [name], {block for block in blocks if len(block) >= SHARED_PARAGRAPH}
        for group in [group for group in groups if not paragraphs.isdisjoint(group[1])]:
            groups.remove(group)
            names, paragraphs = names + group[0], paragraphs | group[1]
        groups.append((names, paragraphs))
    return [sorted(names) for names, _ in groups]
