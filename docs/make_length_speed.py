"""Tokens a second over the length of sequences, planned, beside what the paper measured: docs/long-sequences.md.

    .venv/bin/python docs/make_length_speed.py          (a minute or two)

Nothing between the marks on that page is written by hand; a test computes some of the rows again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_roundpipe.commands.machines import choose_machine
from lightning_roundpipe.commands.plan_model import Outlook, look_at, shape_of
from lightning_roundpipe.commands.plan_shape import USUAL_TILE
from lightning_roundpipe.commands.wish import Wish
from lightning_roundpipe.reports.pictures import save

HERE = Path(__file__).parent
PAGE, PICTURE = HERE / "long-sequences.md", HERE / "images" / "length-speed.png"
MEASURED = HERE.parent / "benchmarks" / "measured.json"
BEGIN, END = "<!-- figures: docs/make_length_speed.py -->\n", "<!-- end of speeds -->\n"
LENGTHS = tuple(2**n for n in range(9, 18))
STEP_TOKENS = 2**20
MICROBATCH_TOKENS = 8192
"""Of short sequences, as many as make about as many as in the paper."""


@dataclass(frozen=True)
class Speed:
    """What is planned for sequences of ``tokens``."""

    tokens: int
    found: Outlook
    measured: float | None

    @property
    def tiles(self) -> bool:
        return self.found.wish.token_tiles is not None


def wish(tokens: int) -> Wish:
    size = max(1, MICROBATCH_TOKENS // tokens)
    return Wish(
        model="qwen3_1_7b", hardware="rtx4090x8", lora="none", precision="16-mixed", sequence_length=tokens,
        microbatch_size=size, microbatches=STEP_TOKENS // (size * tokens), workers=None, staleness=1, memory=None,
        search_seconds=0, max_positions=2**18,
    )  # fmt: skip


def measured() -> dict[int, float]:
    """The paper's, by length."""
    rows = json.loads(MEASURED.read_text())["rows"]
    return {
        row["sequence"]: row["tokens_per_s"]
        for row in rows
        if (row["model"], row["hardware"], row["gpus"], row["mode"]) == ("qwen3-1.7b", "rtx4090", 8, "async")
    }


def speed(tokens: int) -> Speed:
    asked = wish(tokens)
    machine, _ = choose_machine(asked.hardware, None, None, None, None)
    found = look_at(shape_of(asked, machine), asked, longest=False)
    if not found.fits:
        asked = replace(asked, token_tiles=USUAL_TILE)
        found = look_at(shape_of(asked, machine), asked, longest=False)
    return Speed(tokens, found, measured().get(tokens))


def cells(one: Speed) -> list[str]:
    found = one.found
    paper = "" if one.measured is None else f"{one.measured:,.0f}"
    tiles = f"{found.wish.token_tiles:,}" if one.tiles else "none"
    return [f"{one.tokens:,}", f"{found.tokens_per_s:,.0f}", paper, tiles]


HEAD = ("tokens", "planned", "the paper's", "tiles")


def table(rows: list[Speed]) -> str:
    ruler = ["---:"] * len(HEAD)
    return "".join(f"| {' | '.join(line)} |\n" for line in (HEAD, ruler, *map(cells, rows)))


def between(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def draw(rows: list[Speed], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot([r.tokens for r in rows], [r.found.tokens_per_s / 1e3 for r in rows], "o-", label="planned")
    papers = [r for r in rows if r.measured is not None]
    axes.plot([r.tokens for r in papers], [(r.measured or 0) / 1e3 for r in papers], "s--", label="the paper, measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks([r.tokens for r in rows], [f"{r.tokens:,}" for r in rows], rotation=30)
    axes.set_ylim(0)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("thousand tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)


def main() -> None:
    rows = []
    for tokens in LENGTHS:
        rows.append(speed(tokens))
        print(cells(rows[-1]), file=sys.stderr)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}")
    draw(rows, PICTURE)


if __name__ == "__main__":
    main()
