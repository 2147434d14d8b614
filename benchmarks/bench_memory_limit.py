"""What a worker's memory costs: tokens a second that are planned within 24 GiB, over those that are without a limit.

    .venv/bin/python benchmarks/bench_memory_limit.py

Part of that is the arena's, where copies wait for places. The rest is that of activations: a shorter fused stage, which
leaves more to recompute, and no recomputation ahead. Both plans have stages: with memory for the whole model, rounds
side by side would recompute nothing.

The models and batches are the paper's (`measured.json`), on eight RTX 4090 with sequences of 2,048 tokens. Plans are
those of the default search, which counts its work, so the figures are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bench_validation import LENGTH, MACHINES, NO_LIMIT, read_rows, shape_at
from rich.console import Console
from rich.table import Table

from lightning_roundpipe.commands.plan_model import look_at
from lightning_roundpipe.commands.plan_shape import Wish
from lightning_roundpipe.planning.memory import arena_bytes, reserved_within

DEVICES, MACHINE = 8, "rtx4090"
GIB = 2**30
HEADINGS = (
    "model", "mode", "without a limit", "within 24 GiB", "ratio", "of the arena", "largest stage", "arena", "of use",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A model's plans with and without a limit.

    Attributes:
        name: the model.
        mode: ``"sync"`` or ``"async"``.
        free: tokens a second without a limit, in stages.
        within: tokens a second with one.
        unhurried: tokens a second of the plan within the limit, with the largest arena that is of use.
        least, arena, most: bytes of the largest stage, of the arena, and of the largest arena that is of use.
    """

    name: str
    mode: str
    free: float
    within: float
    unhurried: float
    least: int
    arena: int
    most: int

    def cells(self) -> tuple[str, ...]:
        sizes = (f"{size / GIB:.1f} GiB" for size in (self.least, self.arena, self.most))
        ratios = (f"{self.within / other:.3f}" for other in (self.free, self.unhurried))
        return (self.name, self.mode, f"{self.free:,.0f}", f"{self.within:,.0f}", *ratios, *sizes)


def compare(row: dict[str, Any]) -> Row:
    """Plan a row of `measured.json` without a limit, and within the memory of its devices."""
    microbatches = row["microbatches"] * row["passes"]
    wish = Wish(
        model=row["model"].removesuffix("-lora").replace("-", "_").replace(".", "_"),
        hardware=MACHINES[MACHINE],
        lora="attention" if row["model"].endswith("-lora") else "none",
        precision="16-true",
        sequence_length=LENGTH,
        microbatch_size=max(1, round(row["batch"] / microbatches)),
        microbatches=microbatches,
        max_round=row["microbatches"],
        workers=DEVICES,
        staleness=1 if row["mode"] == "async" else 0,
        memory=NO_LIMIT,
        host_memory=NO_LIMIT,
    )
    shape = shape_at(replace(wish, sequence_length=None, microbatch_size=None, microbatches=None, max_round=None))
    stages = replace(wish, min_round=min(DEVICES, microbatches))
    free, within = (look_at(shape, one, longest=False) for one in (stages, replace(wish, memory=None)))
    least, most = arena_bytes(within.plan, within.costs, DEVICES)
    arena = reserved_within(within.plan, within.costs, DEVICES, within.memory).arena
    unhurried = look_at(shape, replace(wish, plan=str(within.plan)), longest=False)
    speeds = (outlook.tokens_per_s for outlook in (free, within, unhurried))
    return Row(row["model"], row["mode"], *speeds, least, arena, most)


def rows() -> list[dict[str, Any]]:
    """Return the rows of `measured.json` that are compared."""
    return [row for row in read_rows() if (row["gpus"], row["hardware"], row["sequence"]) == (DEVICES, MACHINE, LENGTH)]


def main() -> None:
    table = Table(*HEADINGS)
    for row in rows():
        table.add_row(*compare(row).cells())
    Console().print(table)


if __name__ == "__main__":
    main()
