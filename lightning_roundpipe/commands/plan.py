"""``roundpipe-plan``: which layers run together on a worker, and in which order; for measured times or for a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from lightning_roundpipe.commands.conf_files import find_cases
from lightning_roundpipe.commands.console import console_command, waiting
from lightning_roundpipe.commands.machines import AUTO
from lightning_roundpipe.commands.options import Combination, Reply, Settings, as_json, option, run
from lightning_roundpipe.commands.plan_costs import Partitioner, answer, as_dict, as_table, does_not_fit, read_question
from lightning_roundpipe.commands.targets import check_targets
from lightning_roundpipe.config import PRECISION_ALIASES, parse_bytes, reduce_dtype_of, refuse_unscaled
from lightning_roundpipe.messages import did_you_mean
from lightning_roundpipe.planning.network import parse_rate
from lightning_roundpipe.planning.profile import Precision
from lightning_roundpipe.planning.search import SEARCH_SECONDS

if TYPE_CHECKING:  # these import torch
    from lightning_roundpipe.commands.explain import Explained
    from lightning_roundpipe.commands.plan_model import Outlook
    from lightning_roundpipe.commands.plan_shape import Wish

_OF_MODELS = (
    "hardware", "hardware_file", "gpu", "gpus", "host_memory", "lora", "lora_settings", "model_settings", "precision",
    "sequence_length", "max_positions", "microbatch_size", "reduce_dtype", "explain",
    "network", "token_tiles",
)  # fmt: skip
"""Options that need ``model=``."""
TABLE_SEARCH_SECONDS = 2.0
"""Longest search for each row of a table in seconds, unless ``search_seconds`` is set."""

_MOST = {
    "workers": 1024,
    "microbatches": 4096,
    "microbatch_size": 65536,
    "sequence_length": 2**24,
    "max_positions": 2**24,
    "machines": 1024,
}
"""Largest numbers that can be planned for."""


def read_precision(text: str, name: str) -> Precision:
    """Return Lightning's precision, for any of its spellings.

    Raises:
        ValueError: there is no such precision. The message names the option ``name``.
    """
    precision = PRECISION_ALIASES.get(text, text)
    known: tuple[Precision, ...] = get_args(Precision)
    for one in known:
        if one == precision:
            return one
    raise ValueError(f"{name}={text!r} must be one of {', '.join(known)}.{did_you_mean(text, known)}")


def read_tiles(text: str, name: str) -> int | tuple[tuple[str, int], ...]:
    """Return the tokens of a tile, alone or with names of modules, as the strategy takes them.

    Raises:
        ValueError: the text is neither. The message names the option ``name``.
    """
    pairs = [part.rpartition(":") for part in text.split("+")]
    named = all(module for module, _, _ in pairs)
    if not all(n.isdecimal() and int(n) >= 1 for _, _, n in pairs) or not (named or text.isdecimal()):
        raise ValueError(
            f"{name}={text!r} must be a whole number of tokens of at least 1, or such numbers with names of modules, "
            "as mlp:1024 or mlp:1024+experts:512."
        )
    return tuple((module, int(n)) for module, _, n in pairs) if named else int(text)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Says whether a model fits a machine, and how fast it trains; or, with costs=,
    finds the fastest plan for measured times. Several values where ,.. is shown
    give a table of all combinations. Exits with 0 if it fits (of a table: all do),
    1 if not, and 2 if the command line is wrong. --name value means name=value."""

    examples: ClassVar = (
        "model=llama3_1_8b gpu=rtx4090 gpus=4 host_memory=256GiB",
        "model=qwen3_32b hardware=rtx4090x8 lora=all_linear lora.r=16",
        "model=my-model/config.json hardware=machine.yaml format=json",
        "model=llama3_1_8b,qwen3_32b hardware=rtx4090x4,rtx4090x8",
        "costs=run/costs.json workers=4 microbatches=8 memory=24GB",
        "costs=paper case=llama3.1-8b picture=plan.png",
    )

    model: str | None = option(
        "choice of conf/model, or a config.json",
        default=None,
        many=True,
        section="Model and machine (times and memory are estimated)",
    )
    model_settings: Settings = option("change the configuration, as num_hidden_layers", below="model")
    gpu: str | None = option("GPU: a800, h100, h200, rtx3090, rtx4090", default=None, many=True)
    gpus: int | None = option("how many of them; by default 1", default=None, at_least=1, many=True)
    host_memory: int | None = option("of the host, as 256GiB", default=None, read=parse_bytes, shown="SIZE", many=True)
    hardware: str | None = option("instead: rtx4090x4, cpu, auto (this one), or a file", default=None, many=True)
    hardware_file: Path | None = option("that auto writes; by default HOSTNAME.yaml", default=None)
    machines: int = option("that share the work of a step", default=1, at_least=1)
    network: float | None = option("between them, as 25Gbit", default=None, read=parse_rate, shown="RATE")
    lora: str = option("adapters: choice of conf/lora", default="none", many=True)
    lora_settings: Settings = option("change the adapters, as lora.r=16", below="lora")
    precision: Precision | None = option(
        "by default bf16-mixed", default=None, read=read_precision, shown="NAME", many=True
    )
    reduce_dtype: str | None = option(
        "gradients travel in; by default fp32", default=None, read=reduce_dtype_of, shown="NAME", many=True
    )
    sequence_length: int | None = option("in tokens; by default 2048", default=None, at_least=1, many=True)
    max_positions: int | None = option("tokens, beyond those of the model", default=None, at_least=1)
    token_tiles: int | tuple[tuple[str, int], ...] | None = option(
        "tokens of a tile, or as mlp:1024", default=None, read=read_tiles, shown="NUMBER", many=True
    )
    microbatch_size: int | None = option("in sequences; by default the fastest", default=None, at_least=1, many=True)

    costs: str | None = option(
        "JSON file that a run left, or paper", default=None, shown="FILE", section="Measured times instead"
    )
    case: str | None = option("model to take from a file of several", default=None)

    workers: int | None = option(
        "devices that take stages; by default all", default=None, at_least=1, many=True, section="Both"
    )
    microbatches: int | None = option("of a step; by default two a worker", default=None, at_least=1, many=True)
    staleness: int | None = option("1: updates one step late (default: 0)", default=None, shown="0|1", many=True)
    memory: int | None = option(
        "of each worker; by default 90 % of a GPU's", default=None, read=parse_bytes, shown="SIZE", many=True
    )
    min_round: int | None = option("least microbatches of a round", default=None, at_least=1)
    max_round: int | None = option("most microbatches of a round", default=None, at_least=1)
    max_fused: int | None = option("most layers in the fused stage", default=None, at_least=0)
    partitioner: Partitioner = option("search, or the paper's system", default="search")
    search_seconds: float | None = option(
        f"longest search; by default {SEARCH_SECONDS:g}, in a table {TABLE_SEARCH_SECONDS:g}", default=None, at_least=0
    )
    stage_seconds: float | None = option("longest stage, instead of a search", default=None)
    plan: str | None = option("judge this one: 'forward 0-3; ...'", default=None, shown="TEXT")
    explain: Literal["memory"] | None = option("list each tensor at a worker's worst moment", default=None)
    format: Literal["table", "json", "csv"] = option("how to print it", default="table")
    picture: Path | None = option("steps, tokens/s of all, or what is explained", default=None)
    trace: Path | None = option("write the steps for ui.perfetto.dev", default=None)


@console_command
def main() -> int:
    return run("roundpipe-plan", PlanOptions, plan, answer_all=plan_all)


def plan(options: PlanOptions) -> Reply:
    """Answer a command line for one plan, and write the picture and the trace if the options name them.

    ``hardware=auto`` alone has no plan: its answer is the text of the file that describes this machine.

    Raises:
        ValueError: an option is wrong, is missing, or contradicts another one.
    """
    _check_subject(options)
    if options.model is None and options.costs is None and options.case is None:
        return _write_machine(options)
    if options.plan is not None or options.stage_seconds is not None:
        _refuse_search(options)
    return _plan_costs(options) if options.model is None else _plan_model(options)


def plan_all(combinations: Sequence[Combination[PlanOptions]]) -> Reply:
    """Return the table of all combinations of models, machines and settings, and draw it if ``picture`` is set.

    The exit code is 0 if all combinations fit, 1 if one does not, and 2 if something is wrong with one.

    Raises:
        ValueError: an option is wrong, or allows no table.
    """
    combinations = _adapters_apart(combinations)
    first = combinations[0].options
    _check_subject(first)
    if any(one.options.hardware == AUTO for one in combinations):
        raise ValueError(
            "hardware=auto measures this machine into a file: run roundpipe-plan hardware=auto, and give a table that "
            "file, as hardware=FILE."
        )
    if first.model is None:
        what = ", ".join(f"{name}=" for name in combinations[0].given)
        raise ValueError(
            f"{what} with several values makes a table of models, and costs= has no model: give one value."
        )
    for name in ("plan", "trace", "explain"):
        if getattr(first, name) is not None:
            raise ValueError(f"{name}= is about one plan, and this is a table of many: leave it out, or ask for one.")
    if first.stage_seconds is not None:
        _refuse_search(first)
    check_targets({}, {"picture": first.picture})
    from lightning_roundpipe.commands.plan_several import Cell, plan_cells
    from lightning_roundpipe.commands.plan_several_table import as_csv, as_list, as_table

    asked = [Cell(one.given, _wish(one.options, TABLE_SEARCH_SECONDS), one.arguments) for one in combinations]
    cells = plan_cells(asked)
    if first.picture:
        from lightning_roundpipe.commands.plan_several_chart import draw_cells

        draw_cells(cells, first.picture)
    code = 2 if any(cell.error for cell in cells) else 0 if all(cell.fits for cell in cells) else 1
    if first.format == "csv":
        return Reply(as_csv(cells), code)
    return Reply(as_json(as_list(cells)) if first.format == "json" else as_table(cells), code)


def _adapters_apart(combinations: Sequence[Combination[PlanOptions]]) -> Sequence[Combination[PlanOptions]]:
    """Remove ``lora.NAME=`` from combinations without adapters, if others have adapters."""
    if all(one.options.lora == "none" for one in combinations):
        return combinations

    def without(one: Combination[PlanOptions]) -> Combination[PlanOptions]:
        arguments = tuple(text for text in one.arguments if not text.startswith("lora."))
        return replace(one, options=replace(one.options, lora_settings=()), arguments=arguments)

    return [without(one) if one.options.lora == "none" else one for one in combinations]


def _check_subject(options: PlanOptions) -> None:
    """Check that the options name one subject: a model, measured times, or this machine."""
    if options.model is not None and (options.costs is not None or options.case is not None):
        name = "costs" if options.costs is not None else "case"
        raise ValueError(f"model= is estimated, and {name}= was measured: leave one out; --help explains both.")
    if options.hardware_file is not None and options.hardware != AUTO:
        raise ValueError("hardware_file= is what hardware=auto writes: give that, too, or leave hardware_file= out.")
    if options.model is None and options.costs is None and options.case is None:
        if options.hardware == AUTO:
            return
        raise ValueError(
            "Say what to plan for: model=NAME gpu=NAME gpus=NUMBER, as in model=llama3_1_8b gpu=rtx4090 gpus=4, or "
            "costs=FILE; --help explains both. hardware=auto alone measures this machine."
        )


def _write_machine(options: PlanOptions) -> Reply:
    """Measure this machine into a file, and answer with its text."""
    for item in fields(options):
        if item.name not in ("hardware", "hardware_file", "workers") and getattr(options, item.name) != item.default:
            name = item.name.replace("_settings", ".")
            raise ValueError(f"{name}= is about a plan: say for which model=NAME, or leave it out.")
    from lightning_roundpipe.commands.this_machine import measure_to_file, refuse_missing

    refuse_missing(options.workers)
    return Reply(measure_to_file(options.hardware_file, options.workers)[1])


def _plan_costs(options: PlanOptions) -> Reply:
    if options.machines > 1:
        raise ValueError("machines= is about model=NAME, and costs= has no model: leave it out.")
    for name in _OF_MODELS:
        if getattr(options, name) not in (None, "none", ()):
            shown = name.replace("_settings", ".")
            raise ValueError(f"{shown}= is about model=NAME, and costs= has no model: leave it out.")
    if options.format == "csv":
        raise ValueError("format=csv is a table of models, and costs= has no model: take format=json.")
    path, case = find_cases(*((options.costs, "costs") if options.costs is not None else (options.case or "", "case")))
    check_targets({"costs": path}, {"picture": options.picture, "trace": options.trace})
    names = ("workers", "microbatches", "staleness", "min_round", "max_round", "max_fused")
    given = {name: getattr(options, name) for name in names}
    question = read_question(path, case or options.case, options.memory, given)
    form: Literal["table", "json"] = options.format
    if (reply := does_not_fit(question, options.plan, form)) is not None:
        return reply
    search_seconds = SEARCH_SECONDS if options.search_seconds is None else options.search_seconds
    found = answer(question, search_seconds, options.partitioner, options.stage_seconds, options.plan)
    if options.picture or options.trace:
        from lightning_roundpipe.commands.plan_charts import draw  # matplotlib takes longer to import than most plans

        draw(question, found, options.picture, options.trace)
    return Reply(as_json(as_dict(found)) if form == "json" else as_table(question, found))


def _refuse_search(options: PlanOptions) -> None:
    """Refuse options of the search, because ``plan=`` or ``stage_seconds=`` replaces it."""
    usual = {"partitioner": "search", "search_seconds": None}
    given = "stage_seconds="
    if options.plan is not None:
        usual, given = usual | {"min_round": None, "max_round": None, "max_fused": None, "stage_seconds": None}, "plan="
    for name, default in usual.items():
        if getattr(options, name) != default:
            raise ValueError(f"{name}= is about finding a plan, and {given} gives its stages: leave one of them out.")
    if options.stage_seconds is not None and options.stage_seconds <= 0:
        raise ValueError(f"stage_seconds={options.stage_seconds:g} must be a number of more than 0 seconds.")


def _plan_model(options: PlanOptions) -> Reply:
    check_targets({}, {"picture": options.picture, "trace": options.trace})
    if options.explain is not None and options.format == "csv":
        raise ValueError("format=csv has no place for explain=: take format=json, or leave one of them out.")
    wish = _wish(options, SEARCH_SECONDS)
    if options.hardware == AUTO:
        wish = replace(wish, hardware=str(_measured(options, wish)))
    # Imported here, because these imports take longer than a whole answer for costs=.
    from lightning_roundpipe.commands import plan_model_table
    from lightning_roundpipe.commands.explain import as_list, in_tiles
    from lightning_roundpipe.commands.explain_table import as_parts
    from lightning_roundpipe.commands.plan_model import look
    from lightning_roundpipe.commands.remedies import find_remedies

    with waiting("planning"):
        found = look(wish)
    explained = _explained(found, options)
    tiles = in_tiles(found) if explained else None
    steps = None if explained else options.picture
    if not found.fits and (steps or options.trace):
        print("roundpipe-plan: picture= and trace= have no steps to draw, as it does not fit.", file=sys.stderr)
    elif steps or options.trace:
        from lightning_roundpipe.commands.plan_charts import draw_model

        draw_model(found, steps, options.trace)
    code = 0 if found.fits else 1
    if options.format == "csv":  # without remedies, for which CSV has no columns
        from lightning_roundpipe.commands.plan_several import Cell
        from lightning_roundpipe.commands.plan_several_table import as_csv

        return Reply(as_csv([Cell({}, wish, found=plan_model_table.as_dict(found))]), code)
    with waiting("it does not fit: looking for what would"):
        remedies = None if found.fits else find_remedies(found)
    if options.format == "json":
        memory = {"memory": as_list(explained), "in_tiles": tiles and asdict(tiles)} if explained else {}
        return Reply(as_json({**plan_model_table.as_dict(found, remedies), **memory}), code)
    return Reply(plan_model_table.as_table(found, remedies, as_parts(explained, tiles)), code)


def _explained(found: Outlook, options: PlanOptions) -> list[Explained]:
    """Return the peaks that ``explain=`` lists, and draw them if ``picture`` is set; empty without ``explain=``."""
    if options.explain is None:
        return []
    from lightning_roundpipe.commands.explain import explain

    explained = explain(found)
    if options.picture:
        from lightning_roundpipe.commands.explain_chart import draw_explained

        draw_explained(explained, options.picture)
    return explained


def _measured(options: PlanOptions, wish: Wish) -> Path:
    """Measure this machine and return its file. The wish is checked first, because measuring takes longer."""
    if options.gpu is not None or options.gpus is not None:
        raise ValueError("hardware=auto is this machine with its GPUs: leave gpu= and gpus= out.")
    from lightning_roundpipe.commands.plan_model import check
    from lightning_roundpipe.commands.this_machine import measure_to_file

    check(wish)
    return measure_to_file(options.hardware_file, options.workers)[0]


def _check_machines(options: PlanOptions) -> None:
    if options.machines > 1 and options.network is None:
        raise ValueError(
            f"machines={options.machines} exchange gradients and weights: say over what, as network=25Gbit."
        )
    if options.network is not None and options.machines == 1:
        raise ValueError("network= is between several machines: say how many, as machines=2, or leave it out.")
    if options.machines > 1 and options.partitioner == "paper":
        raise ValueError(
            "partitioner=paper predicts the paper's library, which trains on one machine: leave machines= or it out."
        )


def _wish(options: PlanOptions, search_seconds: float) -> Wish:
    """Return the options as a wish. ``search_seconds``: the longest search, unless the options set it."""
    if options.staleness not in (None, 0, 1):
        raise ValueError(f"staleness={options.staleness} must be 0 or 1.")
    for name, most in _MOST.items():
        if (getattr(options, name) or 1) > most:
            raise ValueError(f"{name}={getattr(options, name)} is more than the {most:,} that can be planned for.")
    from lightning_roundpipe.commands.plan_shape import Wish  # imports torch

    assert options.model is not None
    _check_machines(options)
    same = {item.name: getattr(options, item.name) for item in fields(Wish) if hasattr(options, item.name)}
    decided = {
        "precision": options.precision or "bf16-mixed",
        "staleness": options.staleness or 0,
        "search_seconds": search_seconds if options.search_seconds is None else options.search_seconds,
        "search": options.partitioner == "search",
        "like_paper": options.partitioner == "paper",
    }
    wish = Wish(**same | decided)
    refuse_unscaled(wish.reduce_dtype, wish.precision)
    return wish
