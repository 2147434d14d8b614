"""The pictures in docs/how-it-works.md, drawn from steps that really ran.

A small random Llama is trained for a few steps on emulated devices, one thread a layer, and the step with the smallest
bubble is drawn: other programs on the machine can only make a step look worse than it is. Nothing else is chosen or
retouched; the plan is the engine's own.

    .venv/bin/python docs/make_pictures.py [--out docs/images]          (about two minutes on two cores)
"""

from __future__ import annotations

import argparse
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.callbacks.plan_table import plan_table
from lightning_roundpipe.timeline import draw_timeline

VOCABULARY, TOKENS, MICROBATCHES, STEPS = 2048, 256, 8, 9
BANDWIDTH = "4GB"
"""Of each direction of a device's link, so that copies have a width in the picture."""


class TinyLlama(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=10,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).train()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class BestStep(pl.Callback):
    """Keeps the report of the step with the smallest bubble, of those that followed a plan."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        report = trainer.strategy.report()
        if report["profiled"]:  # the first step: each call by itself
            return
        if not self.report or _rank(report) < _rank(self.report):
            self.report = report


def _rank(report: dict[str, Any]) -> tuple[bool, float]:
    """A step begins on whichever worker is next; one that begins on worker 0 reads best."""
    return report["slots"][0]["worker"] != 0, report["bubble_pct"]


def train(workers: int) -> tuple[dict[str, Any], TinyLlama]:
    """A few steps on ``workers`` emulated devices: the report of the best one, and the model."""
    best, module = BestStep(), TinyLlama()
    trainer = pl.Trainer(
        strategy=RoundPipeStrategy(num_microbatches=MICROBATCHES, emulation={"bandwidth": BANDWIDTH}),
        accelerator="cpu",
        devices=workers,
        max_epochs=1,
        callbacks=best,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(VOCABULARY, (STEPS * MICROBATCHES, TOKENS))
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=MICROBATCHES))
    return best.report, module


def draw_table(report: dict[str, Any], module: TinyLlama, path: Path) -> None:
    """The plan as the console shows it, as a picture."""
    console = Console(file=io.StringIO(), width=100)
    table = plan_table(report, module)
    table.title, table.caption = None, None  # the document says both
    console.print(table)
    lines = [line.rstrip() for line in console.file.getvalue().rstrip().splitlines()]  # type: ignore[attr-defined]
    # A character of a monospaced 10 point font is 6 points wide; lines stand close enough for the frame to join.
    figure = Figure(figsize=(0.0842 * max(map(len, lines)) + 0.2, 0.1617 * len(lines) + 0.2), dpi=160)
    figure.text(0.1 / figure.get_figwidth(), 0.5, "\n".join(lines), family="DejaVu Sans Mono", size=10, va="center",
                linespacing=1.0)  # fmt: skip
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images", help="folder of the pictures")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # a worker computes on one core
    for workers in (4, 2):
        report, module = train(workers)
        path = out / f"step-{workers}-workers.png"
        draw_timeline(report, path)
        print(f"{path}  bubble {report['bubble_pct']:.1f} %  plan {report['plan']}")
        if workers == 4:
            draw_table(report, module, out / "plan.png")
            print(out / "plan.png")


if __name__ == "__main__":
    main()
