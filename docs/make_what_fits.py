"""The table "What fits on my machine" in README.md: what `roundpipe-plan` says of usual machines.

    .venv/bin/python docs/make_what_fits.py          (about fifteen minutes on two cores)

Nothing between the marks in README.md is written by hand. Plans are those of `search_seconds=0`, which are the same on
every machine, so a test computes some of the cells again.
"""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from lightning_roundpipe.estimates.hardware import choose_machine
from lightning_roundpipe.estimates.model_shape import ModelShape
from lightning_roundpipe.estimates.outlook import Outlook, look_at, shape_of
from lightning_roundpipe.estimates.request import PlanRequest

PAGE = Path(__file__).parent.with_name("README.md")
BEGIN, END = "<!-- figures: docs/make_what_fits.py -->\n", "<!-- end of figures -->\n"
GIB = 2**30
SEQUENCES = 64
"""Of a step, each of 2048 tokens."""
SIZES = (4, 2, 1)
"""Sequences of a microbatch."""
GPUS = (1, 2, 4, 8)
KINDS = {"rtx4090": "RTX 4090", "rtx3090": "RTX 3090"}


@dataclass(frozen=True)
class Row:
    """A model and how it is trained.

    Args:
        name: the choice of conf/model.
        title: as people call it.
        how: ``"full"``, ``"LoRA"`` or ``"QLoRA"``, and what is unusual.
        host: GiB of the host's memory.
        lora: the choice of conf/lora.
        optimizer_state: form of AdamW's moments.
    """

    name: str
    title: str
    how: str
    host: int
    lora: str = "none"
    optimizer_state: str = "fp32"

    def request(self, kind: str, gpus: int, size: int) -> PlanRequest:
        return PlanRequest(
            model=self.name,
            model_settings=(("quantization", "nf4"),) if self.how == "QLoRA" else (),
            hardware=None,
            gpu=kind,
            gpus=gpus,
            host_memory=self.host * GIB,
            lora=self.lora,
            optimizer_state=self.optimizer_state,
            precision="bf16-mixed" if self.how.startswith("full") else "bf16-true",
            sequence_length=2048,
            microbatch_size=size,
            microbatches=SEQUENCES // size,
            workers=None,
            staleness=0,
            memory=None,
            search_seconds=0,
        )


ROWS = (
    Row("llama3_1_8b", "Llama-3.1-8B", "full", 192),
    Row("llama3_1_8b", "Llama-3.1-8B", "full, int8 moments", 128, optimizer_state="int8"),
    Row("llama3_1_8b", "Llama-3.1-8B", "LoRA", 64, "all_linear"),
    Row("qwen3_32b", "Qwen3-32B", "full", 512),
    Row("qwen3_32b", "Qwen3-32B", "full, int8 moments", 384, optimizer_state="int8"),
    Row("qwen3_32b", "Qwen3-32B", "LoRA", 128, "all_linear"),
    Row("qwen3_32b", "Qwen3-32B", "QLoRA", 64, "all_linear"),
    Row("llama3_1_70b", "Llama-3.1-70B", "LoRA", 192, "all_linear"),
    Row("llama3_1_70b", "Llama-3.1-70B", "QLoRA", 64, "all_linear"),
    Row("qwen3_235b_a22b", "Qwen3-235B-A22B", "LoRA", 512, "attention"),
    Row("qwen3_235b_a22b", "Qwen3-235B-A22B", "QLoRA", 192, "attention"),
)


def shape(row: Row, kind: str) -> ModelShape:
    """The model on one GPU of a kind; the costs of its calls are the same on several."""
    return shape_of(row.request(kind, 1, SIZES[0]), choose_machine(None, kind, 1, None, row.host * GIB)[0])


def best(row: Row, kind: str, gpus: int, one: ModelShape) -> Outlook | None:
    """With the fastest size of microbatches that fits; None: none does."""
    own = copy(one)
    own.hardware = choose_machine(None, kind, gpus, None, row.host * GIB)[0]
    outlooks = [look_at(own, row.request(kind, gpus, size), longest=False) for size in SIZES]
    return max(
        (outlook for outlook in outlooks if outlook.fits), key=lambda outlook: outlook.tokens_per_s, default=None
    )


def cell(found: Outlook | None) -> str:
    return "–" if found is None else f"{found.tokens_per_s:,.0f}"


def line(row: Row, cells: list[str]) -> str:
    return f"| {row.title} | {row.how} | {row.host} GiB | {' | '.join(cells)} |\n"


def table() -> str:
    head = "".join(f" {gpus} x {title.removeprefix('RTX ')} |" for title in KINDS.values() for gpus in GPUS)
    text = f"| model | training | host |{head}\n| --- | --- | ---: |{' ---: |' * len(GPUS) * len(KINDS)}\n"
    for row in ROWS:
        cells = []
        for kind in KINDS:
            one = shape(row, kind)
            cells += [cell(best(row, kind, gpus, one)) for gpus in GPUS]
        text += line(row, cells)
        print(line(row, cells), end="", file=sys.stderr, flush=True)
    return text


def between(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def main() -> None:
    figures = table()
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{figures}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
