"""Models with ``attn_implementation="flex_attention"``, which torch makes for GPUs: on a CPU it has no backward."""

import shutil

import pytest
import torch
import torch._inductor.config
from harness import Learner, ours, quiet, trainer_of
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, MistralConfig

LENGTH = 16
CONFIG = MistralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    num_hidden_layers=2, initializer_range=0.3, sliding_window=8,
)  # fmt: skip


@pytest.fixture(autouse=True)
def compiled_here():
    """Not on a pool of threads, which PyTorch keeps until the process ends."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


class Task(Learner):
    def __init__(self, implementation="flex_attention"):
        super().__init__()
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation=implementation)

    def training_step(self, batch, batch_idx):
        return self.model(**batch, use_cache=False).loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.model(**batch, use_cache=False).loss)


def batch():
    ids = torch.randint(64, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    padded = torch.arange(LENGTH) < torch.tensor([[LENGTH], [12], [9], [14]])
    return {"input_ids": ids, "labels": ids, "attention_mask": padded.long()}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles the attention")
def test_evaluation_is_that_of_eager_attention():
    """Of padded rows: torch 2.13's code for packed ones does not compile on a CPU, in plain evaluation neither."""
    found = []
    for implementation in ("eager", "flex_attention"):
        trainer = trainer_of(ours(num_microbatches=2), devices=2)
        with quiet():
            found.append(trainer.validate(Task(implementation), DataLoader([batch()] * 2, batch_size=None)))
    assert found[1][0]["loss"] == pytest.approx(found[0][0]["loss"], rel=1e-5)
