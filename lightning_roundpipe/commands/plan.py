"""``roundpipe-plan``: which layers run together on a worker, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import RenderableType

from lightning_roundpipe.commands.options import option, run
from lightning_roundpipe.commands.plan_costs import Partitioner, answer, read_question, show
from lightning_roundpipe.commands.targets import check_targets
from lightning_roundpipe.config import parse_bytes
from lightning_roundpipe.planning.search import SEARCH_SECONDS


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Finds a plan and simulates it. The file gives the times of a layer and of the head, and may give whatever else
    is not on the command line."""

    costs: Path = option("a JSON file with layers, forward_ms, backward_ms, head_forward_ms, head_backward_ms, hop_ms")
    case: str | None = option("the model of the case to take, where the file is a list of cases", default=None)
    workers: int | None = option("how many devices take stages", default=None, at_least=1)
    microbatches: int | None = option("how many microbatches a step has", default=None, at_least=1)
    staleness: int | None = option("0: each step sees the last one's weights; 1: the one before's", default=None)
    memory: int | None = option("bytes that each worker has, as 24GB", default=None, read=parse_bytes)
    min_round: int | None = option(
        "least microbatches of a round; by default as many as workers", default=None, at_least=1
    )
    max_fused: int | None = option(
        "most layers in the fused stage besides the head; by default an eighth of them", default=None, at_least=0
    )
    partitioner: Partitioner = option("search, or the paper's algorithm", default="search")
    search_seconds: float = option("how long to search at most", default=SEARCH_SECONDS, at_least=0)
    format: Literal["table", "json"] = option("how to print it", default="table")
    picture: Path | None = option("a picture to draw the steps into, beside those of the paper's plan", default=None)
    trace: Path | None = option("a Chrome trace of the same to write, which ui.perfetto.dev opens", default=None)


def main() -> int:
    return run("roundpipe-plan", PlanOptions, plan)


def plan(options: PlanOptions) -> RenderableType:
    """The answer to the command line; writes the picture and the trace if they are asked for."""
    check_targets({"costs": options.costs}, {"picture": options.picture, "trace": options.trace})
    names = ("workers", "microbatches", "staleness", "min_round", "max_fused")
    given = {name: getattr(options, name) for name in names}
    question = read_question(options.costs, options.case, options.memory, given)
    found = answer(question, options.search_seconds, options.partitioner)
    if options.picture or options.trace:
        from lightning_roundpipe.commands.plan_charts import draw  # matplotlib takes longer to import than most plans

        draw(question, found, options.picture, options.trace)
    return show(question, found, options.format)
