"""Documents of a packed row have the losses that they have alone."""

import copy
import itertools

import harness
import pytest
import torch
from harness import Learner, assert_plain, ours, run
from torch import nn
from torch.optim import SGD
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    MambaConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_roundpipe.model.packed_rows import check_packed_rows
from lightning_roundpipe.tasks.causal_lm import CausalLM

SIZES = {"vocab_size": 64, "hidden_size": 16, "initializer_range": 0.3}
USUAL = SIZES | {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "num_hidden_layers": 4}
MODELS = {
    "gpt2": GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3),
    "qwen3": Qwen3Config(**USUAL, num_hidden_layers=3),
    "qwen3_moe": Qwen3MoeConfig(**USUAL, **EXPERTS, num_hidden_layers=2),
    "gemma2": Gemma2Config(**USUAL, sliding_window=4, num_hidden_layers=4),
    "gpt_oss": GptOssConfig(**USUAL, **OSS),
    "opt": OPTConfig(vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
                      word_embed_proj_dim=16, max_position_embeddings=64, init_std=0.3, dropout=0.0),
    "falcon": FalconConfig(**SIZES, num_hidden_layers=2, num_attention_heads=2),
    "windows": Qwen3Config(**USUAL, num_hidden_layers=2, use_sliding_window=True, sliding_window=4,
                           layer_types=["sliding_attention", "full_attention"]),
}  # fmt: skip


def module(name, implementation=None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), attn_implementation=implementation)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return CausalLM(model, lambda parameters: SGD(parameters, lr=0.1))


def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (length,), generator=generator) for length in (5, 9, 2, 7, 3, 6)]


def batch(rows):
    """One row of 16 tokens for each list."""
    ids, labels = torch.zeros(len(rows), 16, dtype=torch.long), torch.full((len(rows), 16), -100)
    positions = torch.arange(16).repeat(len(rows), 1)
    for row, found in enumerate(rows):
        used = 0
        for document in found:
            part = slice(used, used + len(document))
            ids[row, part] = labels[row, part] = document
            labels[row, used] = -100
            positions[row, part] = torch.arange(len(document))
            used = part.stop
        positions[row, used:] = torch.arange(16 - used)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


KINDS = [*((name, None) for name in MODELS), *itertools.product(["qwen3", "qwen3_moe", "windows"], ["eager", "sdpa"])]


@pytest.mark.parametrize(("name", "implementation"), KINDS)
def test_a_row_is_its_documents(name, implementation):
    """Its loss and gradients are theirs. (`flex_attention` has no backward on a CPU.)"""
    task, found, results = module(name, implementation), documents(), []
    task.keep_documents_apart()
    for rows in ([found[:3], found[3:]], *([[document]] for document in found)):
        loss = task.loss_of(batch(rows)) * sum(len(document) - 1 for row in rows for document in row)
        results.append((loss, *torch.autograd.grad(loss, list(task.parameters()), allow_unused=True)))
    losses = [float(loss) for loss, *_ in results]
    assert losses[0] == pytest.approx(sum(losses[1:]), rel=1e-5)
    for packed, *alone in zip(*results, strict=True):
        parts = [part for part in alone if part is not None]
        torch.testing.assert_close(packed, torch.stack(parts).sum(0), rtol=1e-4, atol=1e-5)


def test_flash_attention_is_refused_where_rows_are_packed():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**USUAL, num_hidden_layers=1))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2 takes no masks .*Set attn_implementation=flex_attention"):
        check_packed_rows(model)


MIXED = ["conv", "full_attention"]
REFUSED = {
    "bloom": (BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2), "it takes no position_ids. Set data"),
    "mamba": (MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2), "layers of kind linear_attention. Set"),
    "lfm2": (
        Lfm2Config(**USUAL, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        "it has layers of kind conv",
    ),
    "routers' loss": (Qwen3MoeConfig(**USUAL, **EXPERTS, output_router_logits=True), "Set output_router_logits=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_are_refused(name):
    config, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        check_packed_rows(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("name", ["gpt_oss", "opt"])
@pytest.mark.parametrize("devices", [1, 2])
def test_training_equals_plain_training(name, devices):
    """Masks are made in the step, from each microbatch's own rows."""
    found = documents()
    given = [batch([found[:3], found[3:], found[1:3], found[4:]]) for _ in range(2)]

    task = module(name)
    task.keep_documents_apart()
    plain, _ = assert_plain(task, given, {"num_microbatches": 2, "loss_weight": "targets"}, devices=devices)
    task.document_masks = False  # and the masks are what makes these numbers
    assert float(run("auto", task, given).losses[0]) != pytest.approx(float(plain.losses[0]), rel=1e-4)


class OwnStep(Learner):
    """Calls the model as a user does who has packed the rows."""

    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(Qwen3Config(**USUAL, num_hidden_layers=3))
        self.settings = settings

    def training_step(self, batch, batch_idx):
        return self.model(
            input_ids=batch["tokens"], position_ids=batch["positions"], labels=batch["tokens"], **self.settings
        ).loss


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_cache_that_is_off_keeps_documents_apart(microbatches):
    """transformers looks for documents only where a model has no cache, and a configuration asks for one."""
    tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    packed = {"tokens": tokens, "positions": torch.arange(6).repeat(2).expand(4, 12)}
    usual = packed | {"positions": torch.arange(12).expand(4, 12)}
    apart = run("auto", OwnStep(use_cache=False), packed)
    for settings in ({}, {"use_cache": False}):
        harness.assert_same(apart, run(ours(num_microbatches=microbatches), OwnStep(**settings), packed, devices=2))
    assert_plain(OwnStep(), usual, {"num_microbatches": microbatches})


def test_a_cache_that_the_call_asks_for_is_as_in_plain_training():
    """The prompt's keys and values reach the rest of the row, and gradients the prompt."""

    class Continues(OwnStep):
        def training_step(self, batch, batch_idx):
            prompt, rest = batch["tokens"][:, :5], batch["tokens"][:, 5:]
            cache = self.model(input_ids=prompt, use_cache=True).past_key_values
            return self.model(input_ids=rest, labels=rest, past_key_values=cache, use_cache=True).loss

    batch = {"tokens": torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))}
    assert_plain(Continues(), batch, {"num_microbatches": 2})
