"""Host memory of the main job (SmolLM2-135M with LoRA on four emulated devices) at its peak, against what it should be.

By design: 4 bytes a frozen parameter (fp32: the master is the working copy), 16 bytes a trained one (weight, gradient,
two moments of AdamW), and a step's boundary tensors. On a machine without a GPU three things come on top: the process
itself, what loading left behind, and the memory of the emulated devices. What is measured beyond that sum is glue (the
logits and the loss are computed there) and what the allocator keeps.

    .venv/bin/python benchmarks/bench_memory.py [--steps 6]
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
from common import quiet
from hydra import compose, initialize_config_module
from rich.console import Console
from rich.table import Table

import lightning_roundpipe.train  # noqa: F401  (names that configurations use)
from lightning_roundpipe.callbacks.host_memory import forget_peak, peak_bytes
from lightning_roundpipe.tasks.fine_tuning import build

MIB = 2**20


def resident() -> int:
    """Bytes of the process now."""
    return int(psutil.Process().memory_info().rss)


class Growth(pl.Callback):
    """Resident bytes after each step."""

    roundpipe_looks_away = True

    def __init__(self) -> None:
        self.after: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.after.append(resident())


def items(task: Any, report: dict[str, Any], before: int, loaded: int) -> list[tuple[str, int]]:
    """What is needed and why, in bytes: with the process ``before`` the model and after it was ``loaded``."""
    parameters = list(task.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    boundaries = sum(row["nbytes"] for row in report["events"] if row["kind"] == "download_activations")
    return [
        (f"{frozen / 1e6:.1f} M frozen parameters, 4 bytes each", 4 * frozen),
        (f"{trained / 1e6:.1f} M trained parameters, 16 bytes each", 16 * trained),
        ("boundary tensors of a step", boundaries),
        ("process before the model", before),
        ("left behind by loading the model", max(0, loaded - before - 4 * (frozen + trained))),
        ("memory of the four emulated devices", sum(report["peak_device_bytes"])),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    quiet()
    console = Console()
    before = resident()
    with (
        tempfile.TemporaryDirectory() as folder,
        initialize_config_module("lightning_roundpipe.conf", version_base="1.3"),
    ):
        overrides = ["experiment=smollm2_lora", f"trainer.max_steps={options.steps}", f"run_folder={folder}"]
        overrides += ["callbacks=none", "logger=none"]
        job = build(compose("train", overrides), Path(folder))
        growth = Growth()
        job.trainer.callbacks.append(growth)
        job.trainer.limit_val_batches = 0
        gc.collect()
        loaded = resident()
        forget_peak()
        with console.status(f"{options.steps} steps"):
            job.trainer.fit(job.task, datamodule=job.data)
        most = peak_bytes()
        found = items(job.task, job.trainer.strategy.report(), before, loaded)
    by_design = sum(size for _, size in found[:3])
    should = sum(size for _, size in found)
    table = Table(title="Host memory of the main job, MiB")
    table.add_column("")
    table.add_column("MiB", justify="right")
    for name, size in found[:3]:
        table.add_row(name, f"{size / MIB:,.0f}")
    table.add_row("by design", f"{by_design / MIB:,.0f}", style="bold")
    for name, size in found[3:]:
        table.add_row(name, f"{size / MIB:,.0f}")
    table.add_row("with these", f"{should / MIB:,.0f}", style="bold")
    table.add_row("measured at the peak", f"{most / MIB:,.0f}", style="bold")
    table.add_row("ratio", f"{most / should:.2f}")
    console.print(table)
    console.print("resident after each step (MiB): " + " ".join(f"{size / MIB:,.0f}" for size in growth.after))


if __name__ == "__main__":
    main()
