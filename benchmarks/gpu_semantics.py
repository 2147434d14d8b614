"""Whether the numbers are right on a GPU, where the host waits, and what a failure leaves: cases of `gpu_first_run`.

Every case trains a tiny Llama with logging, a metric and validation, and compares each step's loss with plain training
on the CPU. With ``device="cpu"`` the strategy runs on emulated devices.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy

Figures = dict[str, Any]
STEPS, SAMPLES, LENGTH, VOCABULARY = 4, 4, 24, 96
CLOSE = {"32-true": 1e-3, "bf16-mixed": 3e-2}
"""Allowed relative difference of a loss: kernels of a GPU round otherwise."""
CUT: Figures = {"num_microbatches": 2, "loss_weight": "targets"}
"""Parts of padded batches differ in targets, over which plain training takes its mean."""


class Tuned(pl.LightningModule):
    """An ordinary module, as a user writes it."""

    def __init__(self, dropout: float = 0.0, fails_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, attention_dropout=dropout, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.mean_loss = MeanMetric()
        self.fails_at = fails_at
        self.losses: list[float] = []
        if fails_at is not None:
            self.model.model.layers[2].mlp.register_forward_pre_hook(self._fail)

    def _fail(self, *_: Any) -> None:
        if self.global_step == self.fails_at:
            raise RuntimeError("a layer that fails")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        self.mean_loss.update(loss.detach(), weight=(batch["labels"][:, 1:] != -100).sum())  # parts differ in targets
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(kind: str) -> list[dict[str, Tensor]]:
    """Batches on the host: of one length, padded with masks, or each of another length."""
    draw = torch.Generator().manual_seed(2)
    batches = []
    for step in range(STEPS):
        length = LENGTH + 7 * step if kind == "lengths" else LENGTH
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, length), generator=draw)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        if kind == "masks":
            mask = torch.ones_like(tokens)
            for row in range(SAMPLES):
                mask[row, length - 3 * row - 1 :] = 0
            batch["attention_mask"] = mask
            batch["labels"][mask == 0] = -100
        batches.append(batch)
    return batches


def train(module: Tuned, kind: str, precision: str, **trainer: Any) -> Tuned:
    batches = data(kind)
    pl.seed_everything(3, verbose=False)
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    pl.Trainer(
        precision=precision,  # type: ignore[arg-type]
        max_epochs=1,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer,
    ).fit(module, loader, loader)
    return module


def ours(device: str, workers: int) -> dict[str, Any]:
    """The Trainer's options for ``workers`` on one GPU, or on as many emulated devices."""
    if device == "cpu":
        return {"strategy": RoundPipeStrategy(**CUT), "accelerator": "cpu", "devices": workers}
    gpus = [torch.device("cuda", 0)] * workers
    strategy = RoundPipeStrategy(**CUT, parallel_devices=gpus)
    return {"strategy": strategy, "accelerator": "auto", "devices": "auto"}


class Waits:
    """Where the host waited for the GPU, by the line of Python that made it."""

    def __init__(self, device: str) -> None:
        self._on = device == "cuda"
        self.places = Counter[str]()

    def __enter__(self) -> Waits:
        if self._on:
            self._caught = warnings.catch_warnings()
            self._caught.__enter__()
            warnings.simplefilter("always")
            warnings.showwarning = self._note  # type: ignore[assignment]
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def _note(self, message: Any, *_: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [
            f"{f.filename.rsplit('/site-packages/', 1)[-1]}:{f.lineno} {f.name}"
            for f in traceback.extract_stack()[:-1]
            if not f.filename.endswith("/warnings.py")
        ]
        ours_ = [frame for frame in frames if "lightning_roundpipe" in frame or "gpu_semantics" in frame]
        self.places[" < ".join([*frames[-2:][::-1], *ours_[-1:]])] += 1

    def __exit__(self, *error: Any) -> None:
        if self._on:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(*error)


def compare(device: str, kind: str = "plain", precision: str = "32-true", workers: int = 1) -> Figures:
    """The largest relative difference of a step's loss from plain training's on the CPU, and the host's waits.

    Raises:
        AssertionError: it is no rounding.
    """
    expected = train(Tuned(), kind, precision, accelerator="cpu", devices=1)
    with Waits(device) as waits:
        module = train(Tuned(), kind, precision, **ours(device, workers))
    worst = max(abs(a - b) / abs(b) for a, b in zip(module.losses, expected.losses, strict=True))
    assert worst < CLOSE[precision], f"losses {module.losses} where plain training has {expected.losses}"
    mean, plain = float(module.mean_loss.compute()), float(expected.mean_loss.compute())
    assert abs(mean - plain) < CLOSE[precision] * abs(plain), f"the metric has {mean} where plain training has {plain}"
    return {
        "steps": len(module.losses),
        "worst_relative_difference": worst,
        "waits_of_the_host": sum(waits.places.values()),
        "waits": waits.places.most_common(40),
    }


def dropout(device: str) -> Figures:
    """With dropout, one and two workers give the same bits.

    Raises:
        AssertionError: they do not.
    """
    one, two = (train(Tuned(dropout=0.2), "plain", "32-true", **ours(device, workers)) for workers in (1, 2))
    assert one.losses == two.losses, f"{one.losses} with one worker, {two.losses} with two"
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b), f"{name} differs"
    return {"steps": len(one.losses), "same_bits": True}


def failure(device: str) -> Figures:
    """A layer that raises ends the run with its error, and the next run in the process is right.

    Raises:
        AssertionError: it is not.
    """
    try:
        train(Tuned(fails_at=2), "plain", "32-true", **ours(device, 2))
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        notes = [note.splitlines()[0] for note in getattr(error, "__notes__", [])]
        assert "a layer that fails" in said, said
    else:
        raise AssertionError("the layer's error was lost")
    return {"said": said, "notes": notes, **compare(device, workers=2)}


def two_fits(device: str) -> Figures:
    """Two runs in one process: the second leaves no more on the GPU than the first.

    Raises:
        AssertionError: it does.
    """
    left: list[int] = []
    for _ in range(3):
        train(Tuned(), "plain", "32-true", **ours(device, 2))
        gc.collect()
        left.append(torch.cuda.memory_allocated(0) if device == "cuda" else 0)
    assert left[2] <= left[1], f"bytes on the GPU after each run: {left}"
    return {f"mib_after_run_{n + 1}": nbytes / 2**20 for n, nbytes in enumerate(left)}
