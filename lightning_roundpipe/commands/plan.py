"""``roundpipe-plan``: which layers run together on a worker, and in which order; for measured times or for a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, get_args

from lightning_roundpipe.commands.case_files import find_cases
from lightning_roundpipe.commands.console import console_command
from lightning_roundpipe.commands.machines import AUTO
from lightning_roundpipe.commands.options import Reply, Settings, as_json, did_you_mean, option, run
from lightning_roundpipe.commands.plan_costs import Partitioner, answer, does_not_fit, read_question, show
from lightning_roundpipe.commands.targets import check_targets
from lightning_roundpipe.config import PRECISION_ALIASES, parse_bytes, reduce_dtype_of, refuse_unscaled
from lightning_roundpipe.planning.profile import Precision
from lightning_roundpipe.planning.search import SEARCH_SECONDS

_OF_MODELS = (
    "hardware", "hardware_file", "gpu", "gpus", "host_memory", "lora", "lora_settings", "model_settings", "precision",
    "sequence_length", "microbatch_size", "reduce_dtype",
)  # fmt: skip
_MOST = {"workers": 1024, "microbatches": 4096, "microbatch_size": 65536, "sequence_length": 2**24}


def read_precision(text: str, name: str) -> Precision:
    """Lightning's flag, in any of its spellings."""
    precision = PRECISION_ALIASES.get(text, text)
    known: tuple[Precision, ...] = get_args(Precision)
    for one in known:
        if one == precision:
            return one
    raise ValueError(f"{name}={text!r} must be one of {', '.join(known)}.{did_you_mean(text, known)}")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Says whether a model fits a machine, and how fast it trains; or, with costs=,
    finds the fastest plan for measured times. Exits with 0 if it fits, 1 if not,
    and 2 if the command line is wrong. --name value means name=value."""

    examples: ClassVar = (
        "model=llama3_1_8b gpu=rtx4090 gpus=4 host_memory=256GiB",
        "model=qwen3_32b hardware=rtx4090x8 lora=all_linear lora.r=16",
        "model=my-model/config.json hardware=machine.yaml format=json",
        "costs=run/costs.json workers=4 microbatches=8 memory=24GB",
        "costs=paper case=llama3.1-8b picture=plan.png",
    )

    model: str | None = option(
        "choice of conf/model, or a config.json",
        default=None,
        section="Model and machine (times and memory are estimated)",
    )
    model_settings: Settings = option("change the configuration, as num_hidden_layers", below="model")
    gpu: str | None = option("GPU: a800, h200, rtx3090, rtx4090", default=None)
    gpus: int | None = option("how many of them; by default 1", default=None, at_least=1)
    host_memory: int | None = option("of the host, as 256GiB", default=None, read=parse_bytes, shown="SIZE")
    hardware: str | None = option("instead: rtx4090x4, cpu, auto (this one), or a file", default=None)
    hardware_file: Path | None = option("that auto writes; by default HOSTNAME.yaml", default=None)
    lora: str = option("adapters: choice of conf/lora", default="none")
    lora_settings: Settings = option("change the adapters, as lora.r=16", below="lora")
    precision: Precision | None = option("by default bf16-mixed", default=None, read=read_precision, shown="NAME")
    reduce_dtype: str | None = option(
        "gradients travel in; by default fp32", default=None, read=reduce_dtype_of, shown="NAME"
    )
    sequence_length: int | None = option("in tokens; by default 2048", default=None, at_least=1)
    microbatch_size: int | None = option("in sequences; by default the fastest", default=None, at_least=1)

    costs: str | None = option(
        "JSON file that a run left, or paper", default=None, shown="FILE", section="Measured times instead"
    )
    case: str | None = option("model to take from a file of several", default=None)

    workers: int | None = option("devices that take stages; by default all", default=None, at_least=1, section="Both")
    microbatches: int | None = option("of a step; by default two a worker", default=None, at_least=1)
    staleness: int | None = option("1: updates one step late (default: 0)", default=None, shown="0|1")
    memory: int | None = option(
        "of each worker; by default 90 % of a GPU's", default=None, read=parse_bytes, shown="SIZE"
    )
    min_round: int | None = option("least microbatches of a round", default=None, at_least=1)
    max_round: int | None = option("most microbatches of a round", default=None, at_least=1)
    max_fused: int | None = option("most layers in the fused stage", default=None, at_least=0)
    partitioner: Partitioner = option("search, or the paper's system", default="search")
    search_seconds: float = option("longest search", default=SEARCH_SECONDS, at_least=0)
    stage_seconds: float | None = option("longest stage, instead of a search", default=None)
    plan: str | None = option("judge this one: 'forward 0-3; ...'", default=None, shown="TEXT")
    format: Literal["table", "json"] = option("how to print it", default="table")
    picture: Path | None = option("draw the steps: .png, .pdf or .svg", default=None)
    trace: Path | None = option("write them for ui.perfetto.dev", default=None)


@console_command
def main() -> int:
    return run("roundpipe-plan", PlanOptions, plan)


def plan(options: PlanOptions) -> Reply:
    """The answer to the command line; writes the picture and the trace if they are asked for."""
    if options.model is not None and (options.costs is not None or options.case is not None):
        name = "costs" if options.costs is not None else "case"
        raise ValueError(f"model= is estimated, and {name}= was measured: leave one out; --help explains both.")
    if options.hardware_file is not None and options.hardware != AUTO:
        raise ValueError("hardware_file= is what hardware=auto writes: give that, too, or leave hardware_file= out.")
    if options.model is None and options.costs is None and options.case is None:
        if options.hardware == AUTO:
            return _write_machine(options)
        raise ValueError(
            "Say what to plan for: model=NAME gpu=NAME gpus=NUMBER, as in model=llama3_1_8b gpu=rtx4090 gpus=4, or "
            "costs=FILE; --help explains both. hardware=auto alone measures this machine."
        )
    if options.plan is not None or options.stage_seconds is not None:
        _refuse_search(options)
    return _plan_costs(options) if options.model is None else _plan_model(options)


def _write_machine(options: PlanOptions) -> Reply:
    """The file that says what this machine can do."""
    for item in fields(options):
        if item.name not in ("hardware", "hardware_file", "workers") and getattr(options, item.name) != item.default:
            name = item.name.replace("_settings", ".")
            raise ValueError(f"{name}= is about a plan: say for which model=NAME, or leave it out.")
    from lightning_roundpipe.commands.this_machine import measure_to_file

    return Reply(measure_to_file(options.hardware_file, options.workers)[1])


def _plan_costs(options: PlanOptions) -> Reply:
    for name in _OF_MODELS:
        if getattr(options, name) not in (None, "none", ()):
            shown = name.replace("_settings", ".")
            raise ValueError(f"{shown}= is about model=NAME, and costs= has no model: leave it out.")
    path, case = find_cases(*((options.costs, "costs") if options.costs is not None else (options.case or "", "case")))
    check_targets({"costs": path}, {"picture": options.picture, "trace": options.trace})
    names = ("workers", "microbatches", "staleness", "min_round", "max_round", "max_fused")
    given = {name: getattr(options, name) for name in names}
    question = read_question(path, case or options.case, options.memory, given)
    if (reply := does_not_fit(question, options.plan, options.format)) is not None:
        return reply
    found = answer(question, options.search_seconds, options.partitioner, options.stage_seconds, options.plan)
    if options.picture or options.trace:
        from lightning_roundpipe.commands.plan_charts import draw  # matplotlib takes longer to import than most plans

        draw(question, found, options.picture, options.trace)
    return Reply(show(question, found, options.format))


def _refuse_search(options: PlanOptions) -> None:
    """What is about finding a plan, where its stages are given."""
    usual = {"partitioner": "search", "search_seconds": SEARCH_SECONDS}
    given = "stage_seconds="
    if options.plan is not None:
        usual, given = usual | {"min_round": None, "max_round": None, "max_fused": None, "stage_seconds": None}, "plan="
    for name, default in usual.items():
        if getattr(options, name) != default:
            raise ValueError(f"{name}= is about finding a plan, and {given} gives its stages: leave one of them out.")
    if options.stage_seconds is not None and options.stage_seconds <= 0:
        raise ValueError(f"stage_seconds={options.stage_seconds:g} must be a number of more than 0 seconds.")


def _plan_model(options: PlanOptions) -> Reply:
    if options.staleness not in (None, 0, 1):
        raise ValueError(f"staleness={options.staleness} must be 0 or 1.")
    for name, most in _MOST.items():
        if (getattr(options, name) or 1) > most:
            raise ValueError(f"{name}={getattr(options, name)} is more than the {most:,} that can be planned for.")
    check_targets({}, {"picture": options.picture, "trace": options.trace})
    if options.hardware == AUTO:
        assert options.model is not None
        if options.gpu is not None or options.gpus is not None:
            raise ValueError("hardware=auto is this machine with its GPUs: leave gpu= and gpus= out.")
        from lightning_roundpipe.commands.choices import read_config
        from lightning_roundpipe.commands.this_machine import measure_to_file

        read_config(options.model, options.model_settings)  # before what takes seconds and leaves a file
        path, _ = measure_to_file(options.hardware_file, options.workers)
        options = replace(options, hardware=str(path))
    # Imports that take longer than all else that costs= needs.
    from lightning_roundpipe.commands.plan_model import look
    from lightning_roundpipe.commands.plan_model_table import as_dict, as_table
    from lightning_roundpipe.commands.plan_shape import Wish
    from lightning_roundpipe.commands.remedies import find_remedies

    assert options.model is not None
    wish = Wish(
        model=options.model,
        hardware=options.hardware,
        gpu=options.gpu,
        gpus=options.gpus,
        host_memory=options.host_memory,
        lora=options.lora,
        lora_settings=options.lora_settings,
        model_settings=options.model_settings,
        precision=options.precision or "bf16-mixed",
        sequence_length=options.sequence_length,
        microbatch_size=options.microbatch_size,
        microbatches=options.microbatches,
        workers=options.workers,
        staleness=1 if options.staleness else 0,
        memory=options.memory,
        min_round=options.min_round,
        max_round=options.max_round,
        max_fused=options.max_fused,
        search_seconds=options.search_seconds,
        search=options.partitioner == "search",
        like_paper=options.partitioner == "paper",
        plan=options.plan,
        stage_seconds=options.stage_seconds,
        reduce_dtype=options.reduce_dtype,
    )
    refuse_unscaled(wish.reduce_dtype, wish.precision)
    found = look(wish)
    if not found.fits and (options.picture or options.trace):
        print("roundpipe-plan: picture= and trace= have no steps to draw, as it does not fit.", file=sys.stderr)
    elif options.picture or options.trace:
        from lightning_roundpipe.commands.plan_charts import draw_model

        draw_model(found, options.picture, options.trace)
    remedies = None if found.fits else find_remedies(found)
    shown = as_json(as_dict(found, remedies)) if options.format == "json" else as_table(found, remedies)
    return Reply(shown, 0 if found.fits else 1)
