"""A model of a billion weights under LoRA, on workers smaller than it, in a host memory that is stated beforehand.

The weights are random and lie in bf16; the shape is that of the usual small Llamas. Two emulated devices have a budget
of 600 MiB each, a bit more than a quarter of the weights. What the host may take is said before anything is built, with
its parts counted from the shape; then the model is built and trained for a few steps, and the operating system's peak
of the whole process (so building it counts) is held against that. It ends with an error if it is more, or if the losses
do not fall.

    .venv/bin/python benchmarks/bench_large.py [--host 5GiB] [--steps 4] [--quantization nf4]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from common import BatchEnds, Stopwatch, parser_of, quiet, show
from hydra import compose, initialize_config_module

import lightning_roundpipe.train  # noqa: F401  (names that configurations use)
from lightning_roundpipe.config import parse_bytes
from lightning_roundpipe.devices.host_memory import peak_bytes
from lightning_roundpipe.estimates.packing import PackedFormat, pack
from lightning_roundpipe.tasks.fine_tuning import build

MIB, GIB = 2**20, 2**30
HIDDEN, INNER, LAYERS, VOCABULARY, KEYS = 2048, 8192, 16, 32_000, 8 * 64
SEQUENCES, TOKENS, DEVICES, RANK = 4, 64, 2, 8
MODEL = f"""model=llama3_1_8b model.hidden_size={HIDDEN} model.intermediate_size={INNER}
    model.num_hidden_layers={LAYERS} model.vocab_size={VOCABULARY} model.dtype=bfloat16
    lora=all_linear lora.r={RANK} prompt=null optimizer.lr=0.003
    data=random_tokens data.sequence_length={TOKENS} data.sequences={SEQUENCES} data.batch_size={SEQUENCES}
    trainer=cpu trainer.devices={DEVICES} trainer.precision=bf16-true strategy.num_microbatches=4"""


MATRICES = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, KEYS)] * 2 + [(HIDDEN, INNER)] * 3
"""Linear layers of one layer of the model."""


def weights() -> tuple[int, int, int]:
    """Frozen ones of linear layers, other frozen ones, and trained ones, counted by hand."""
    linear = LAYERS * sum(a * b for a, b in MATRICES)
    others = LAYERS * 2 * HIDDEN + 2 * VOCABULARY * HIDDEN + HIDDEN
    return linear, others, LAYERS * sum(RANK * (a + b) for a, b in MATRICES)


def frozen_bytes(quantization: PackedFormat | None) -> list[tuple[str, int]]:
    linear, others, _ = weights()
    if quantization is None:
        return [(f"{(linear + others) / 1e6:,.0f} M frozen weights, 2 bytes each", 2 * (linear + others))]
    packed = LAYERS * sum(pack((b, a), quantization, double=True, copy_itemsize=2).nbytes for a, b in MATRICES)
    text = f"{linear / 1e6:,.0f} M frozen weights in {quantization}, {8 * packed / linear:.2f} bits each"
    return [(text, packed), (f"{others / 1e6:,.0f} M others, 2 bytes each", 2 * others)]


def stated(
    before: int, budget: int, quantization: PackedFormat | None
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What the host has to hold: by design, and because this process is also the devices."""
    *_, trained = weights()
    boundary = SEQUENCES * TOKENS * HIDDEN * 2  # of all microbatches, at one layer
    design = [
        *frozen_bytes(quantization),
        (f"{trained / 1e6:.1f} M trained ones, 16 bytes each and 2 of a working copy", 18 * trained),
        ("boundary tensors of a step", (LAYERS + 2) * boundary),
    ]
    return design, [("process before the model", before), (f"{DEVICES} emulated devices", DEVICES * budget)]


def train(options: argparse.Namespace, folder: str, budget: int) -> tuple[Any, BatchEnds, Stopwatch]:
    overrides = [*MODEL.split(), f"strategy.memory_budget={budget}", f"trainer.max_steps={options.steps}"]
    overrides += ["scheduler=constant", f"run_folder={folder}", "callbacks=none", "logger=none"]
    overrides += ["+trainer.enable_progress_bar=false"]
    overrides += [f"model.quantization={options.quantization}"] if options.quantization else []
    with initialize_config_module("lightning_roundpipe.conf", version_base="1.3"):
        job = build(compose("train", overrides), Path(folder))
    assert sum(p.numel() for p in job.task.parameters() if p.requires_grad) == weights()[2]
    if options.quantization is None:
        assert sum(p.numel() for p in job.task.parameters()) == sum(weights())
    losses, watch = BatchEnds(), Stopwatch()
    job.trainer.callbacks += [losses, watch]
    job.trainer.limit_val_batches = 0
    job.trainer.fit(job.task, datamodule=job.data)
    return job.trainer.strategy.report(), losses, watch


def show_memory(title: str, design: list[tuple[str, int]], apart: list[tuple[str, int]], most: int) -> None:
    """Print what there is by design, what comes on top of it here, and what was measured."""
    by_design = sum(size for _, size in design)
    should = by_design + sum(size for _, size in apart)
    sums = [("with these", should), ("measured at the peak", most)]
    rows = [(name, f"{size / MIB:,.0f}") for name, size in (*design, ("by design", by_design), *apart, *sums)]
    show(f"Host memory of {title}, MiB", ("", "MiB"), [*rows, ("ratio", f"{most / should:.2f}")])


def main() -> int:
    parser = parser_of(__doc__, steps=4)
    parser.add_argument("--host", default="5GiB", help="what the process may take at its peak")
    parser.add_argument("--device", default="600MiB", help="memory of each emulated device")
    parser.add_argument("--quantization", choices=["nf4", "fp4", "int8"], help="of the frozen linear layers")
    options = parser.parse_args()
    quiet()
    host, budget = parse_bytes(options.host, "--host"), parse_bytes(options.device, "--device")
    design, apart = stated(int(psutil.Process().memory_info().rss), budget, options.quantization)
    print(
        f"Stated beforehand: {host / GIB:.2f} GiB of host memory, the {DEVICES} emulated devices of "
        f"{budget / GIB:.2f} GiB included. Counted: {sum(size for _, size in [*design, *apart]) / GIB:.2f} GiB."
    )
    with tempfile.TemporaryDirectory() as folder:
        report, losses, watch = train(options, folder, budget)
    most, devices = peak_bytes(), report["peak_device_bytes"]
    show_memory("a billion weights under LoRA", design, apart, most)
    steps = enumerate(zip(watch.seconds, losses.losses, strict=True))
    show("", ("step", "seconds", "loss"), [(str(n), f"{seconds:.1f}", f"{loss:.3f}") for n, (seconds, loss) in steps])
    print(f"plan: {report['plan']}\ndevices at their peak: {' '.join(f'{n / 2**20:,.0f}' for n in devices)} MiB")
    falls = all(map(math.isfinite, losses.losses)) and losses.losses[-1] < losses.losses[0]
    kept = most <= host and max(devices) <= budget
    verdict = "kept" if kept else "NOT KEPT"
    print(f"{verdict}: {most / GIB:.2f} of {host / GIB:.2f} GiB; losses {'fall' if falls else 'DO NOT FALL'}.")
    return 0 if kept and falls else 1


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
