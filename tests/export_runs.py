"""Runs of ``roundpipe-train`` in this process, whose trained module stays at hand."""

import torch
from harness import quiet
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import lightning_roundpipe.train  # noqa: F401  (its resolvers)
from lightning_roundpipe.tasks.fine_tuning import build, run

TOKENS = torch.arange(2, 26).reshape(2, 12)
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
"""Of small base models."""


def train(folder, *overrides):
    """Train in ``folder``, as ``roundpipe-train experiment=random_tokens`` does, and return the module."""
    folder.mkdir(parents=True)
    settings = [
        "experiment=random_tokens",
        f"run_folder={folder}",
        "strategy=auto",
        "trainer.max_steps=2",
        "+trainer.enable_progress_bar=false",
        "callbacks.progress=null",
        "prompt=null",
    ]
    with initialize_config_module("lightning_roundpipe.conf", version_base="1.3"):
        cfg = compose("train", [*settings, *overrides])
    OmegaConf.set_struct(cfg, False)
    with quiet():
        job = build(cfg, folder)
        run(job)
    return job.task


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits
