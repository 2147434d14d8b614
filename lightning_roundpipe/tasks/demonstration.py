"""A model for demonstrations: small enough to learn some English from random weights in a minute or less.

Nothing is downloaded: the tokenizer is trained on the texts that the model is to learn, in less than a second. Its
tokens are whole words where those are frequent, so that even a model of half a million weights completes prompts in
words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_roundpipe.data import pydoc_topics
from lightning_roundpipe.model.loading import Pretrained, from_config

END = "<end>"

_PROSE = re.compile(r"[A-Z][a-z]*,? [\w ,;:'’()\"*.-]{80,}\.")
"""A paragraph of whole sentences."""


def prose() -> dict[str, str]:
    """Return the prose of Python's help topics, one line per paragraph, without tables, grammars or examples."""
    found = {}
    for name, text in pydoc_topics().items():
        paragraphs = (" ".join(block.split()) for block in text.split("\n\n"))
        if kept := [paragraph for paragraph in paragraphs if _PROSE.fullmatch(paragraph)]:
            found[name] = "\n".join(kept)
    return found


def from_texts(texts: Mapping[str, str], model_type: str, vocab_size: int, **settings: Any) -> Pretrained:
    """Return a random model with a tokenizer for ``texts`` of ``vocab_size`` tokens: bytes, and their frequent
    sequences.
    """
    tokenizer = train_tokenizer(texts, vocab_size)
    made = from_config(model_type, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **settings)
    return Pretrained(made.config, tokenizer, f"a small {model_type} with random weights", made.load)


def train_tokenizer(texts: Mapping[str, str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most ``vocab_size`` tokens. ``<end>`` ends a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator((texts[name] for name in sorted(texts)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)  # type: ignore[no-untyped-call]
