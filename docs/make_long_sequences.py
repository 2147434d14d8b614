"""The figures in docs/long-sequences.md: the longest sequences that `roundpipe-plan` plans, and with tiles of tokens.

    .venv/bin/python docs/make_long_sequences.py          (about three minutes on two cores)

Nothing between the marks on that page is written by hand; a test computes some of the rows again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_roundpipe.estimates.hardware import choose_machine
from lightning_roundpipe.estimates.outlook import Longest, Outlook, find_longest, look_at, shape_of
from lightning_roundpipe.estimates.request import PlanRequest

PAGE = Path(__file__).with_name("long-sequences.md")
BEGIN, END = "<!-- figures: docs/make_long_sequences.py -->\n", "<!-- end of figures -->\n"
POSITIONS = 2**19
GPUS = (1, 8)


@dataclass(frozen=True)
class Row:
    """One of the paper's models: its choice in conf/model, its name, its longest sequence there, its adapters."""

    name: str
    title: str
    paper: int
    lora: str = "none"

    def request(self, gpus: int) -> PlanRequest:
        return PlanRequest(
            model=self.name,
            hardware=f"rtx4090x{gpus}",
            lora=self.lora,
            precision="bf16-true",
            sequence_length=128,
            microbatch_size=1,
            microbatches=2 if gpus == 1 else gpus,
            workers=None,
            staleness=0,
            memory=None,
            search_seconds=0,
            host_memory=2**42,
            max_positions=POSITIONS,
        )

    @property
    def command(self) -> str:
        lora = "" if self.lora == "none" else f" lora={self.lora}"
        return (
            f"roundpipe-plan model={self.name} hardware=rtx4090x1{lora} precision=bf16-true sequence_length=128 "
            f"microbatch_size=1 host_memory=4096GiB max_positions={POSITIONS} search_seconds=0"
        )


ROWS = (
    Row("qwen3_1_7b", "Qwen3-1.7B", 73_000),
    Row("llama3_1_8b", "Llama-3.1-8B", 49_000),
    Row("gpt_oss_20b", "GPT-OSS-20B", 39_000),
    Row("qwen3_32b", "Qwen3-32B", 28_000),
    Row("qwen3_235b_a22b", "Qwen3-235B-A22B, LoRA", 31_000, "attention"),
)


@dataclass(frozen=True)
class Found:
    """What is planned for so many GPUs.

    Attributes:
        gpus: number of GPUs.
        outlook: the estimate without tiles.
        longest: the longest sequence with tiles.
        slowdown: additional time of the longest sequence without tiles, computed in tiles; 0.1 is 10 %.
    """

    gpus: int
    outlook: Outlook
    longest: Longest
    slowdown: float


def find(row: Row, gpus: int) -> Found:
    request = row.request(gpus)
    machine, _ = choose_machine(request.hardware, None, None, None, request.host_memory)
    whole = shape_of(request, machine)
    tiled, outlook = whole.in_tiles(), look_at(whole, request)
    assert outlook.longest is not None and outlook.longest.tokens, "some sequence fits"
    calls = (shape.costs(1, outlook.longest.tokens) for shape in (whole, tiled))
    before, after = (sum(call.time_s("forward") + call.time_s("backward") for call in costs) for costs in calls)
    longest = find_longest(tiled, outlook.workers, outlook.microbatches, outlook.memory)
    return Found(gpus, outlook, longest, after / before - 1)


def cells(row: Row, found: Found) -> list[str]:
    longest = found.outlook.longest
    assert longest is not None
    return [
        row.title,
        str(found.gpus),
        f"{longest.tokens:,}",
        f"{row.paper:,}" if found.gpus == 8 else "",
        f"{found.longest.tokens:,}",
        f"{100 * found.slowdown:.0f} %",
    ]


HEAD = ("model", "GPUs", "longest", "the paper's", "in tiles, planned", "computes longer")
RULER = ("---", *("---:" for _ in HEAD[1:]))


def table(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (HEAD, RULER, *rows))


def between(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def main() -> None:
    rows = []
    for row in ROWS:
        for gpus in GPUS:
            rows.append(cells(row, find(row, gpus)))
            print(rows[-1], file=sys.stderr)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n```\n{ROWS[1].command}\n```\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
