"""The figures in docs/quantization.md: what `roundpipe-plan` says of packed base weights, beside 16 bits.

    .venv/bin/python docs/make_quantization_plans.py          (about five minutes on two cores)

Nothing between the marks on that page is written by hand. Plans are those of `search_seconds=0`, which are the same on
every machine, so a test computes some of the rows again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from lightning_roundpipe.commands.machines import choose_machine
from lightning_roundpipe.commands.plan_model import Outlook, find_longest, look_at, memory_of, shape_of
from lightning_roundpipe.commands.plan_shape import ModelShape
from lightning_roundpipe.commands.wish import Wish
from lightning_roundpipe.planning.memory import total

PAGE = Path(__file__).with_name("quantization.md")
BEGIN, END = "<!-- figures: docs/make_quantization_plans.py -->\n", "<!-- end of figures -->\n"
GIB = 2**30
SEQUENCES = 64
"""Of a step, each of 2048 tokens."""
SIZES = (4, 2, 1)
"""Sequences of a microbatch."""
GPUS = (1, 4)
HOSTS = (64, 128)
"""GiB. What is planned for a smaller host fits a larger one, too."""
BASES = {"16 bits": (), "nf4": (("quantization", "nf4"),)}


@dataclass(frozen=True)
class Row:
    """A model: the choice of conf/model, its name, and the choice of conf/lora."""

    name: str
    title: str
    lora: str

    def wish(self, base: str, gpus: int, host: int, size: int) -> Wish:
        return Wish(
            model=self.name,
            model_settings=BASES[base],
            hardware=None,
            gpu="rtx4090",
            gpus=gpus,
            host_memory=host * GIB,
            lora=self.lora,
            precision="bf16-true",
            sequence_length=2048,
            microbatch_size=size,
            microbatches=SEQUENCES // size,
            workers=None,
            staleness=0,
            memory=None,
            search_seconds=0,
        )

    @property
    def command(self) -> str:
        return (
            f"roundpipe-plan model={self.name} model.quantization=nf4 lora={self.lora} gpu=rtx4090 gpus=4 "
            "host_memory=256GiB precision=bf16-true microbatch_size=4 microbatches=16 search_seconds=0"
        )


ROWS = (
    Row("llama3_1_70b", "Llama-3.1-70B", "all_linear"),
    Row("qwen3_32b", "Qwen3-32B", "all_linear"),
    Row("qwen3_235b_a22b", "Qwen3-235B-A22B", "attention"),
)


@dataclass(frozen=True)
class Found:
    """What is planned for a machine.

    Args:
        best: with the fastest size of microbatches that fits; None: none does.
        longest: tokens of the longest sequence.
        needs: bytes of the host, with the size that needs the least.
    """

    best: Outlook | None
    longest: int
    needs: int


def shapes(row: Row) -> dict[str, ModelShape]:
    """The model with each kind of base weights."""
    found = {}
    for base in BASES:
        wish = row.wish(base, 1, HOSTS[0], 1)
        found[base] = shape_of(wish, choose_machine(None, "rtx4090", 1, None, wish.host_memory)[0])
    return found


def on_machine(shape: ModelShape, gpus: int, host: int) -> ModelShape:
    """The same model on so many of the same GPUs: the costs of its calls are the same."""
    other = copy(shape)
    other.hardware = choose_machine(None, "rtx4090", gpus, None, host * GIB)[0]
    return other


def find(row: Row, base: str, shape: ModelShape, gpus: int, host: int, before: Outlook | None = None) -> Found:
    """``before`` is what was planned for less host memory."""
    own = on_machine(shape, gpus, host)
    outlooks = [look_at(own, row.wish(base, gpus, host, size), longest=False) for size in SIZES]
    fitting = [outlook for outlook in (*outlooks, before) if outlook is not None and outlook.fits]
    best = max(fitting, key=lambda outlook: outlook.tokens_per_s, default=None)
    longest = find_longest(own, gpus, SEQUENCES // SIZES[0], memory_of(outlooks[0].wish, own.hardware))
    return Found(best, longest.tokens, min(total(outlook.host_items) for outlook in outlooks))


def machines(row: Row, found: dict[str, ModelShape]) -> Iterator[tuple[int, int, dict[str, Found]]]:
    """Every machine, the smallest first, with what is planned for it."""
    for gpus in GPUS:
        before: dict[str, Outlook | None] = {}
        for host in HOSTS:
            planned = {base: find(row, base, shape, gpus, host, before.get(base)) for base, shape in found.items()}
            before = {base: one.best for base, one in planned.items()}
            yield gpus, host, planned


def cells(row: Row, gpus: int, host: int, found: dict[str, Found]) -> list[str]:
    """A line of the table."""
    line = [row.title, str(gpus), str(host)]
    for one in found.values():
        longest = f"{one.longest:,}" if one.longest else "–"
        speed = f"needs {one.needs / GIB:,.0f} GiB" if one.best is None else f"{one.best.tokens_per_s:,.0f}"
        line += [speed, longest]
    return line


def table() -> str:
    head = ["model", "GPUs", "host GiB"]
    for base in BASES:
        head += [f"{base}: tokens/s", "longest"]
    lines = [head, ["---", *("---:" for _ in head[1:])]]
    for row in ROWS:
        for gpus, host, planned in machines(row, shapes(row)):
            lines.append(cells(row, gpus, host, planned))
            print(lines[-1], file=sys.stderr)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def between(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n```\n{ROWS[0].command}\n```\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
