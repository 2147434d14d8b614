"""Tiny models that the strategy is compared on, with batches that would show a wrong weighting.

Everything is random, seeded and built offline. Dropout is off, so that plain training is the one true answer. The
batches are unkind on purpose: they are padded, one sample has no padding at all (Hugging Face models then take another
mask path), and the number of targets differs much between samples, so weighing microbatches by samples gives wrong
numbers.

A new model is one function: ``@entry("name")`` on something that returns ``(LightningModule, make_batch)``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 96
WIDTH = 32
BLOCKS = 3

Batch = dict[str, Tensor]
MakeBatch = Callable[[torch.Generator, int, int], Batch]
"""(generator, samples, length) -> batch"""


@dataclass(frozen=True)
class Entry:
    """One model of the zoo."""

    build: Callable[[], nn.Module]
    batch: MakeBatch
    module: type[ZooModule]
    lora: bool


ENTRIES: dict[str, Entry] = {}


# ----------------------------------------------------------------------------------------------------- LightningModules


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The zoo's optimizer: steps large enough that a stale weight shows, and linear in the gradient.

    Adam would divide gradients that are zero but for rounding (a key's bias) by themselves, and compare noise.
    """
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class ZooModule(pl.LightningModule):
    """What the models of the zoo share: an ordinary LightningModule that logs with several reductions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd

    def loss_and_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def targets(self, batch: Batch) -> int:
        """How many targets the mean of the loss is over: what a microbatch weighs."""
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, logits = self.loss_and_logits(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/targets", float(self.targets(batch)), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log_dict({"train/highest": logits.detach().max()}, reduce_fx="max")
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, _ = self.loss_and_logits(batch)
        self.log("val/loss", loss)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss, logits = self.loss_and_logits(batch)
        self.log("test/loss", loss)
        self.log("test/lowest", logits.min(), reduce_fx="min")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss_and_logits(batch)[1]

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class HuggingFace(ZooModule):
    """A Hugging Face model that computes its own loss."""

    def loss_and_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self.model(**batch)
        return output.loss, output.logits


class CausalLM(HuggingFace):
    def targets(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())


class Seq2SeqLM(HuggingFace):
    def targets(self, batch: Batch) -> int:
        return int((batch["labels"] != -100).sum())


class Classifier(HuggingFace):
    def targets(self, batch: Batch) -> int:
        return len(batch["labels"])


class PlainClassifier(ZooModule):
    """A plain PyTorch model; the loss is computed in ``training_step``."""

    def loss_and_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["x"])
        return F.cross_entropy(logits, batch["y"]), logits

    def targets(self, batch: Batch) -> int:
        return len(batch["y"])


# -------------------------------------------------------------------------------------------------------------- batches


def _padding(generator: torch.Generator, samples: int, length: int) -> Tensor:
    """A right-padded attention mask; sample 0 has no padding."""
    lengths = torch.randint(length // 2, length + 1, (samples,), generator=generator)
    lengths[0] = length
    return (torch.arange(length)[None, :] < lengths[:, None]).long()


def causal_batch(generator: torch.Generator, samples: int, length: int) -> Batch:
    """Prompts of unequal length are not learned (-100), so each sample has its own number of targets."""
    mask = _padding(generator, samples, length)
    ids = torch.randint(2, VOCAB, (samples, length), generator=generator) * mask
    ends = mask.sum(1)
    prompts = (torch.rand(samples, generator=generator) * (ends - 2)).long()  # leaves one target at least
    prompts[0] = length - 3  # the sample without padding has few targets: samples and targets weigh differently
    learned = (mask == 1) & (torch.arange(length)[None, :] >= prompts[:, None])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~learned, -100)}


def seq2seq_batch(generator: torch.Generator, samples: int, length: int) -> Batch:
    mask = _padding(generator, samples, length)
    ids = torch.randint(2, VOCAB, (samples, length), generator=generator) * mask
    target_length = length - 4
    labels = torch.randint(2, VOCAB, (samples, target_length), generator=generator)
    keep = torch.randint(1, target_length + 1, (samples,), generator=generator)
    keep[0] = 1
    labels = labels.masked_fill(torch.arange(target_length)[None, :] >= keep[:, None], -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classification_batch(generator: torch.Generator, samples: int, length: int) -> Batch:
    mask = _padding(generator, samples, length)
    ids = torch.randint(2, VOCAB, (samples, length), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (samples,), generator=generator)}


def vector_batch(generator: torch.Generator, samples: int, length: int) -> Batch:
    x = torch.randn(samples, 8, generator=generator)
    return {"x": x, "y": torch.randint(0, 5, (samples,), generator=generator)}


# --------------------------------------------------------------------------------------------------------------- models


def entry(name: str, batch: MakeBatch, module: type[ZooModule], lora: bool = False) -> Callable[[Any], Any]:
    """Put a function that builds a model into the zoo."""

    def put(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ENTRIES[name] = Entry(build, batch, module, lora)
        return build

    return put


@entry("llama", causal_batch, CausalLM, lora=True)
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
            pad_token_id=0,
        )
    )


@entry("qwen3", causal_batch, CausalLM, lora=True)
def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.1,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
    )


@entry("gpt2", causal_batch, CausalLM, lora=True)
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=WIDTH,
            n_layer=BLOCKS,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.1,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


@entry("t5", seq2seq_batch, Seq2SeqLM)
def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


@entry("bert", classification_batch, Classifier)
def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=BLOCKS,
            num_attention_heads=4,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.1,
            num_labels=3,
            pad_token_id=0,
        )
    )


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


entry("mlp", vector_batch, PlainClassifier)(MLP)


class Branch(nn.Module):
    """A branch that does not save its own input, so plain autograd allows ``h += branch(h)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(x))


class InPlace(nn.Module):
    """Residuals, scales and biases added in place: on a layer's output, on a layer's input, on a slice of one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Branch(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h *= 1.5  # an output, before anyone has taken it
        for i, block in enumerate(self.blocks):
            if i % 2:
                branch = block(h)
                branch.mul_(0.5).add_(0.1)  # an output
                h = h + branch
            else:
                h += block(h)  # an input, after the call; for i > 0 it is not a layer's output
        h[:, :4] += 0.25
        return self.head(h)


entry("inplace", vector_batch, PlainClassifier)(InPlace)


class GlueParameters(nn.Module):
    """Parameters that no layer owns: read by the code between the layers, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.token = nn.Parameter(torch.randn(WIDTH))
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x) + self.token
        for block in self.blocks:
            h = block(h * self.gain)
        return self.head(F.linear(h, self.mixing) * self.gain)


class GlueParameterModule(PlainClassifier):
    """A LightningModule that has a bare parameter itself, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def loss_and_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["x"]) / self.temperature
        return F.cross_entropy(logits, batch["y"]), logits


entry("glue_parameters", vector_batch, GlueParameterModule)(GlueParameters)


# ----------------------------------------------------------------------------------------------------------- the way in


LORA_SEED = 11


def make_module(name: str, lora: bool = False, seed: int = 7) -> ZooModule:
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


def make_batches(name: str, count: int = 3, samples: int = 6, seed: int = 3) -> list[Batch]:
    """``count`` different batches; every other one is shorter, as padding to the longest sample gives."""
    generator = torch.Generator().manual_seed(seed)
    return [ENTRIES[name].batch(generator, samples, 12 if i % 2 == 0 else 9) for i in range(count)]


def make(name: str, lora: bool = False, samples: int = 6) -> tuple[ZooModule, Batch]:
    """A module and one batch of ``samples``."""
    return make_module(name, lora), make_batches(name, 1, samples)[0]
