"""The figures in docs/several-machines.md: what `roundpipe-plan` says of several machines with a network between.

    .venv/bin/python docs/make_several_machines_plans.py          (about a minute on two cores)

Nothing between the marks on that page is written by hand. Plans are those of `search_seconds=0`, which are the same on
every machine, so a test computes some of the rows again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_roundpipe.estimates.hardware import choose_machine
from lightning_roundpipe.estimates.model_shape import ModelShape
from lightning_roundpipe.estimates.outlook import Outlook, look_at, shape_of
from lightning_roundpipe.estimates.request import PlanRequest
from lightning_roundpipe.planning.memory import total
from lightning_roundpipe.planning.network import parse_rate
from lightning_roundpipe.planning.pipeline import Staleness

PAGE = Path(__file__).with_name("several-machines.md")
BEGIN, END = "<!-- figures: docs/make_several_machines_plans.py -->\n", "<!-- end of figures -->\n"
GIB = 2**30
MACHINES = (1, 2, 4)
NETWORKS = ("10Gbit", "25Gbit", "100Gbit")
STALENESS: tuple[Staleness, ...] = (0, 1)


@dataclass(frozen=True)
class Row:
    """A model: the choice of conf/model, its name, sequences of a step of each machine."""

    name: str
    title: str
    sequences: int
    host: int
    """GiB of each machine."""

    def request(self, machines: int, network: str | None, staleness: Staleness) -> PlanRequest:
        return PlanRequest(
            model=self.name,
            hardware="rtx4090x4",
            lora="none",
            precision="bf16-true",
            sequence_length=2048,
            microbatch_size=4,
            microbatches=self.sequences // 4,
            workers=None,
            staleness=staleness,
            memory=None,
            search_seconds=0,
            host_memory=self.host * GIB,
            machines=machines,
            network=None if network is None else parse_rate(network, "network"),
        )

    @property
    def command(self) -> str:
        return (
            f"roundpipe-plan model={self.name} hardware=rtx4090x4 host_memory={self.host}GiB "
            f"precision=bf16-true microbatch_size=4 microbatches={self.sequences // 4} search_seconds=0 "
            "machines=2 network=25Gbit"
        )


ROWS = (Row("llama3_1_8b", "Llama-3.1-8B", 64, 256),)


def shape_for(row: Row, machines: int, staleness: Staleness) -> ModelShape:
    request = row.request(machines, None if machines == 1 else NETWORKS[0], staleness)
    machine = choose_machine(request.hardware, None, None, None, request.host_memory)[0]
    return shape_of(request, machine)


def look(row: Row, shape: ModelShape, machines: int, network: str | None, staleness: Staleness) -> Outlook:
    request = row.request(machines, network, staleness)
    return look_at(shape.under(request), request, longest=False)


def outlooks(row: Row, shape: ModelShape) -> Iterator[tuple[int, str | None, dict[Staleness, Outlook]]]:
    """Every number of machines, on every network."""
    for machines in MACHINES:
        for network in NETWORKS if machines > 1 else (None,):
            yield machines, network, {late: look(row, shape, machines, network, late) for late in STALENESS}


def cells(machines: int, network: str | None, found: dict[Staleness, Outlook]) -> list[str]:
    """A row of a table."""
    row = [str(machines), "–" if network is None else network.removesuffix("bit") + "bit/s"]
    exchanged = found[0].communication
    row.append("–" if exchanged is None else f"{exchanged.nbytes / 1e9:.2f}")
    for outlook in found.values():
        if outlook.run is None:
            needs = total(outlook.host_items) / GIB
            row += [f"needs {needs:,.0f} GiB", "–"]
        else:
            cost = outlook.communication
            row += [
                f"{outlook.tokens_per_s:,.0f}",
                "–" if cost is None else f"{100 * cost.cost_s / outlook.period_s:.0f} %",
            ]
    return row


HEAD = ("machines", "network", "GB a step", "tokens/s", "not hidden", "one step late: tokens/s", "not hidden")


def table(rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---:" for _ in HEAD]
    return "".join(f"| {' | '.join(row)} |\n" for row in (HEAD, ruler, *rows))


def section(row: Row) -> str:
    """A model's heading, table and command."""
    shape = shape_for(row, 1, 0)
    rows = []
    for machines, network, found in outlooks(row, shape):
        rows.append(cells(machines, network, found))
        print(row.title, rows[-1], file=sys.stderr)
    about = f"{row.sequences} sequences a step and machine, {row.host} GiB of memory in each host."
    return f"\n### {row.title}\n\n{about}\n\n{table(rows)}\n```\n{row.command}\n```\n"


def between(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def main() -> None:
    figures = "".join(section(row) for row in ROWS)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{figures}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
