"""The list of models: what each is built from, and how it is compared."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zoo.batches import Batch
from zoo.modules import ZooModule

WIDTH = 32
BLOCKS = 3

MakeBatch = Callable[[torch.Generator, int, int], Batch]
"""(generator, samples, length) -> batch"""


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        lora: whether it has a variant with adapters.
        coupled: what it computes for a sample depends on the others of its batch, so that parts of a batch equal the
            same parts one after another, not the whole batch.
        other: compared in one run only.
    """

    build: Callable[[], nn.Module]
    batch: MakeBatch
    module: type[ZooModule]
    lora: bool = False
    coupled: bool = False
    other: bool = False


ENTRIES = {}


def entry(name, batch, module, **options):
    """Put a function that builds a model into the zoo."""

    def put(build):
        ENTRIES[name] = Entry(build, batch, module, **options)
        return build

    return put


LORA_SEED = 11


def make_module(name, lora=False, seed=7):
    """The module ``name``; the same call gives the same weights."""
    found = ENTRIES[name]
    if lora and not found.lora:
        raise ValueError(f"{name} has no LoRA variant")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = found.build()
        model.train()
        if lora:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(LORA_SEED)
            # init_lora_weights=False: with the usual B = 0 the first step gives A no gradient to compare.
            config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
            model = get_peft_model(model, config)
        return found.module(model)


def make_batches(name, count=3, samples=6, seed=3):
    """``count`` different batches; every other one is shorter, as padding to the longest sample gives."""
    generator = torch.Generator().manual_seed(seed)
    return [ENTRIES[name].batch(generator, samples, 12 if i % 2 == 0 else 9) for i in range(count)]
