"""``roundpipe-plan``: which layers run together on a worker, and in which order; for measured times or for a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import RenderableType

from lightning_roundpipe.commands.options import as_json, option, run
from lightning_roundpipe.commands.plan_costs import Partitioner, answer, judge, read_question, show
from lightning_roundpipe.commands.targets import check_targets
from lightning_roundpipe.config import parse_bytes
from lightning_roundpipe.planning.profile import Precision
from lightning_roundpipe.planning.search import SEARCH_SECONDS

_OF_MODELS = ("hardware", "lora", "precision", "sequence_length", "microbatch_size")
_MOST = {"workers": 1024, "microbatches": 4096, "microbatch_size": 65536, "sequence_length": 2**24}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Finds a plan and simulates it: for the times in a file, costs=FILE, which may give whatever else is not on the
    command line; or for a model on a machine, model=NAME hardware=NAME, whose times and memory are estimated."""

    costs: Path | None = option(
        "a JSON file with layers, forward_ms, backward_ms, head_forward_ms, head_backward_ms, hop_ms", default=None
    )
    model: str | None = option("a choice of conf/model, or a config.json of Hugging Face", default=None)
    hardware: str | None = option("a choice of conf/hardware, or a YAML file like those", default=None)
    lora: str = option("of a model: adapters, a choice of conf/lora or a YAML file like those", default="none")
    precision: Precision | None = option("of a model: by default bf16-mixed", default=None)
    sequence_length: int | None = option("of a model: tokens; by default 2048", default=None, at_least=1)
    microbatch_size: int | None = option(
        "of a model: sequences; by default 8, 4, 2 or 1, whatever fits", default=None, at_least=1
    )
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
    plan: str | None = option("a plan to judge instead, as plan='forward 0-3; fused 4-7; ...'", default=None)
    stage_seconds: float | None = option(
        "the longest that a stage may take for a microbatch, instead of searching", default=None
    )
    search_seconds: float = option("how long to search at most", default=SEARCH_SECONDS, at_least=0)
    format: Literal["table", "json"] = option("how to print it", default="table")
    picture: Path | None = option("a picture to draw the steps into, beside those of the paper's plan", default=None)
    trace: Path | None = option("a Chrome trace of the same to write, which ui.perfetto.dev opens", default=None)


def main() -> int:
    return run("roundpipe-plan", PlanOptions, plan)


def plan(options: PlanOptions) -> RenderableType:
    """The answer to the command line; writes the picture and the trace if they are asked for."""
    if (options.costs is None) == (options.model is None):
        raise ValueError("Give either costs=FILE.json, or model=NAME with hardware=NAME; --help explains both.")
    if options.plan is not None or options.stage_seconds is not None:
        _refuse_search(options)
    if options.costs is None:
        return _plan_model(options)
    for name in _OF_MODELS:
        if getattr(options, name) not in (None, "none"):
            raise ValueError(f"{name}= is about model=NAME, and costs= has no model: leave it out.")
    check_targets({"costs": options.costs}, {"picture": options.picture, "trace": options.trace})
    names = ("workers", "microbatches", "staleness", "min_round", "max_fused")
    given = {name: getattr(options, name) for name in names}
    question = read_question(options.costs, options.case, options.memory, given)
    if options.plan is None:
        found = answer(question, options.search_seconds, options.partitioner, options.stage_seconds)
    else:
        found = judge(question, options.plan)
    if options.picture or options.trace:
        from lightning_roundpipe.commands.plan_charts import draw  # matplotlib takes longer to import than most plans

        draw(question, found, options.picture, options.trace)
    return show(question, found, options.format)


def _refuse_search(options: PlanOptions) -> None:
    """What is about finding a plan, where its stages are given."""
    usual = {"partitioner": "search", "search_seconds": SEARCH_SECONDS}
    given = "stage_seconds="
    if options.plan is not None:
        usual, given = usual | {"min_round": None, "max_fused": None, "stage_seconds": None}, "plan="
    for name, default in usual.items():
        if getattr(options, name) != default:
            raise ValueError(f"{name}= is about finding a plan, and {given} gives its stages: leave one of them out.")
    if options.stage_seconds is not None and options.stage_seconds <= 0:
        raise ValueError(f"stage_seconds={options.stage_seconds:g} must be a number of more than 0 seconds.")


def _plan_model(options: PlanOptions) -> RenderableType:
    if options.hardware is None:
        raise ValueError("hardware= is missing: it names the machine, such as hardware=rtx4090x8.")
    if options.case is not None:
        raise ValueError("case= is about costs=FILE.json, and model= needs no file: leave it out.")
    if options.staleness not in (None, 0, 1):
        raise ValueError(f"staleness={options.staleness} must be 0 or 1.")
    for name, most in _MOST.items():
        if (getattr(options, name) or 1) > most:
            raise ValueError(f"{name}={getattr(options, name)} is more than the {most:,} that can be planned for.")
    check_targets({}, {"picture": options.picture, "trace": options.trace})
    # Imports that take longer than all else that costs= needs.
    from lightning_roundpipe.commands.plan_model import Wish, as_dict, look
    from lightning_roundpipe.commands.plan_model_table import as_table

    assert options.model is not None
    wish = Wish(
        model=options.model,
        hardware=options.hardware,
        lora=options.lora,
        precision=options.precision or "bf16-mixed",
        sequence_length=options.sequence_length or 2048,
        microbatch_size=options.microbatch_size,
        microbatches=options.microbatches,
        workers=options.workers,
        staleness=1 if options.staleness else 0,
        memory=options.memory,
        min_round=options.min_round,
        max_fused=options.max_fused,
        search_seconds=options.search_seconds,
        search=options.partitioner == "search",
        plan=options.plan,
        stage_seconds=options.stage_seconds,
    )
    found = look(wish)
    if options.picture or options.trace:
        from lightning_roundpipe.commands.plan_charts import draw_model

        draw_model(found, options.picture, options.trace)
    return as_json(as_dict(found)) if options.format == "json" else as_table(found)
