"""The figures in docs/estimates.md: what `roundpipe-plan` says of the models of the paper, beside its own figures.

    .venv/bin/python docs/make_paper_models.py          (about two minutes on two cores)

Nothing between the marks on that page is written by hand. The plans are in docs/paper-plans.txt: a test takes
them from there and computes all else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_roundpipe.estimates.outlook import Outlook, look
from lightning_roundpipe.estimates.request import PlanRequest

PAGE = Path(__file__).with_name("estimates.md")
PLANS = PAGE.with_name("paper-plans.txt")
BEGIN, END = "<!-- figures: docs/make_paper_models.py -->\n", "<!-- end of figures -->\n"
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One of the paper's models, as arXiv 2604.27085 measured it on eight RTX 4090.

    Args:
        name: the choice of conf/model.
        title: as people call it.
        sequences: of a step, each of 2048 tokens; four of them are a microbatch.
        late: tokens a second, with updates one step late.
        lora: the choice of conf/lora.
    """

    name: str
    title: str
    sequences: int
    late: int
    lora: str = "none"

    @property
    def request(self) -> PlanRequest:
        return PlanRequest(
            model=self.name,
            hardware="rtx4090x8",
            lora=self.lora,
            precision="16-mixed",
            sequence_length=2048,
            microbatch_size=4,
            microbatches=self.sequences // 4,
            workers=None,
            staleness=1,
            memory=None,
        )

    @property
    def command(self) -> str:
        lora = "" if self.lora == "none" else f" lora={self.lora}"
        return (
            f"roundpipe-plan model={self.name} hardware=rtx4090x8{lora} precision=16-mixed staleness=1 "
            f"microbatch_size=4 microbatches={self.sequences // 4}"
        )


ROWS = (
    Row("qwen3_1_7b", "Qwen3-1.7B", 512, 65_417),
    Row("llama3_1_8b", "Llama-3.1-8B", 256, 24_275),
    Row("gpt_oss_20b", "GPT-OSS-20B", 128, 18_122),
    Row("qwen3_32b", "Qwen3-32B", 128, 5_516),
    Row("qwen3_235b_a22b", "Qwen3-235B-A22B, LoRA", 64, 1_820, "attention"),
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ruler, *rows))


HEAD = ("model", "tokens/s", "paper", "ratio", "GiB of a worker", "GiB of the host", "page-locked")


def cells(row: Row, found: Outlook) -> list[str]:
    """A row of the table."""
    device, host = sum(i.nbytes for i in found.device_items), sum(i.nbytes for i in found.host_items)
    locked = sum(i.nbytes for i in found.host_items if i.locked)
    return [
        row.title,
        f"{found.tokens_per_s:,.0f}",
        f"{row.late:,}",
        f"{found.tokens_per_s / row.late:.2f}",
        f"{device / GIB:.1f}",
        f"{host / GIB:,.0f}",
        f"{locked / GIB:,.0f}",
    ]


def figures(outlooks: Sequence[Outlook]) -> str:
    """All that is between the marks."""
    rows = [cells(row, outlook) for row, outlook in zip(ROWS, outlooks, strict=True)]
    return f"\n{table(HEAD, rows)}\n```\n{ROWS[3].command}\n```\n\n"


def plans() -> list[str]:
    """Those that the page's figures are of, in the order of `ROWS`."""
    return PLANS.read_text().splitlines()


def between(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def main() -> None:
    found = []
    for row in ROWS:
        print(row.command, file=sys.stderr)
        found.append(look(row.request))
    PLANS.write_text("".join(f"{outlook.plan}\n" for outlook in found))
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{figures(found)}{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
