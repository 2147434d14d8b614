"""Tiny models that the strategy is compared on, with batches that would show a wrong weighting.

Everything is random, seeded and built offline. Dropout is off, so that plain training is the one true answer.

A new model is one function: ``@entry("name", make_batch, LightningModule class)`` on something that builds it.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from zoo import language, others, plain, stateful, user_code, vision  # noqa: F401  (they fill the registry)
from zoo.batches import VOCAB, Batch
from zoo.modules import CausalLM, Classifier, HuggingFace, PlainClassifier, Seq2SeqLM, Voting, ZooModule, sgd
from zoo.plain import MLP, ResidualBlock
from zoo.registry import BLOCKS, ENTRIES, LORA_SEED, WIDTH, Entry, make_batches, make_module

__all__ = [
    "BLOCKS", "ENTRIES", "LORA_SEED", "MLP", "VOCAB", "WIDTH", "Batch", "CausalLM", "Classifier", "Entry",
    "HuggingFace", "PlainClassifier", "ResidualBlock", "Seq2SeqLM", "Voting", "ZooModule", "make_batches",
    "make_module", "sgd",
]  # fmt: skip
