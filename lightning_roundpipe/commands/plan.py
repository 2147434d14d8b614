"""``roundpipe-plan``: whether a model fits a machine, under which plan, and how fast it trains."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lightning_roundpipe.commands.answer import Answer
from lightning_roundpipe.commands.command_line import (
    Combination,
    Parser,
    Reader,
    add_option,
    one_of,
    positive,
    run,
    seconds,
    whole,
)
from lightning_roundpipe.commands.console import console_command, waiting
from lightning_roundpipe.commands.machines import AUTO
from lightning_roundpipe.config import (
    PRECISION_ALIASES,
    optimizer_state_of,
    parse_bytes,
    reduce_dtype_of,
    refuse_unscaled,
)
from lightning_roundpipe.extras import is_installed, remedy
from lightning_roundpipe.planning.network import parse_rate
from lightning_roundpipe.planning.profile import Precision
from lightning_roundpipe.planning.search import SEARCH_SECONDS

if TYPE_CHECKING:
    from lightning_roundpipe.commands.plan_shape import Wish  # imports torch

TABLE_SEARCH_SECONDS = 2.0
"""Longest search for each row of a table in seconds, unless ``search_seconds`` is set."""

_EXAMPLES = (
    "model=llama3_1_8b gpu=rtx4090 gpus=4 host_memory=256GiB",
    "model=qwen3_32b hardware=rtx4090x8 lora=all_linear lora.r=16",
    "model=my-model/config.json hardware=machine.yaml format=json",
    "model=llama3_1_8b,qwen3_32b hardware=rtx4090x4,rtx4090x8",
    "hardware=auto",
)

_PURPOSE = """\
Says whether a model fits a machine, and how fast it trains. Options with ,..
take several values, which give a table of all combinations. Exits with 0 if
the model fits (of a table: all do), 1 if not, and 2 for a wrong command line."""


def read_precision(text: str, name: str) -> str:
    """Return Lightning's precision, for any of its spellings."""
    found: str = one_of(*get_args(Precision))(PRECISION_ALIASES.get(text, text), name)
    return found


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


def parser() -> Parser:
    """Return the parser of the command's options."""
    made = Parser("roundpipe-plan", _PURPOSE, _EXAMPLES, ("model", "lora"))

    def add(group: Any, name: str, help_text: str, read: Reader | None, shown: str, many: bool = True) -> None:
        add_option(group, name, help_text, read, shown, many=many)

    group = made.add_argument_group("model (model.NAME= and lora.NAME= change its settings)")
    add(group, "model", "choice of conf/model, or a config.json", None, "NAME")
    add(group, "lora", "adapters: choice of conf/lora", None, "NAME")
    add(group, "precision", "default: bf16-mixed", read_precision, "NAME")
    add(group, "max_positions", "tokens, beyond the model's", whole(1, 2**24), "N", False)
    group = made.add_argument_group("machine")
    add(group, "gpu", "as rtx4090; a wrong one lists all", None, "NAME")
    add(group, "gpus", "how many of them (default: 1)", whole(), "N")
    add(group, "host_memory", "of the host, as 256GiB", parse_bytes, "SIZE")
    add(group, "hardware", "rtx4090x4, cpu, auto (this one), a file", None, "NAME")
    add(group, "hardware_file", "that auto writes (default: HOSTNAME.yaml)", _path, "FILE", False)
    add(group, "machines", "that share the work of a step", whole(1, 1024), "N", False)
    add(group, "network", "between them, as 25Gbit", parse_rate, "RATE", False)
    group = made.add_argument_group("step")
    add(group, "sequence_length", "in tokens (default: 2048)", whole(1, 2**24), "N")
    add(group, "microbatch_size", "in sequences (default: the fastest)", whole(1, 65536), "N")
    add(group, "microbatches", "of a step (default: two a worker)", whole(1, 4096), "N")
    add(group, "workers", "devices that take stages (default: all)", whole(1, 1024), "N")
    add(group, "staleness", "1: updates one step late (default: 0)", whole(0, 1), "N")
    add(group, "memory", "of a worker (default: 90 %% of a GPU's)", parse_bytes, "SIZE")
    add(group, "token_tiles", "tokens of a tile, or as mlp:1024 (default: none)", read_tiles, "N")
    add(group, "reduce_dtype", "gradients travel in (default: float32)", reduce_dtype_of, "NAME")
    add(group, "optimizer_state", "Adam's moments: fp32, bf16 or int8 (default: fp32)", optimizer_state_of, "NAME")
    add(group, "gradient_clip_val", "norm that gradients are clipped to", positive, "N", False)
    group = made.add_argument_group("plan")
    add(group, "plan", "judge this one: 'forward 0-3; ...'", None, "TEXT", False)
    add(group, "min_round", "least microbatches of a round", whole(), "N", False)
    add(group, "max_round", "most microbatches of a round", whole(), "N", False)
    add(group, "max_fused", "most layers in the fused stage", whole(0), "N", False)
    add(group, "partitioner", "search, or paper: predict the paper's library", one_of("search", "paper"), "NAME", False)
    add(group, "search_seconds", f"longest (default: {SEARCH_SECONDS:g}; in a table, 2)", seconds, "N", False)
    group = made.add_argument_group("output")
    add(group, "format", "table, json or csv", one_of("table", "json", "csv"), "NAME", False)
    add(group, "picture", "of the steps, or of a table", _path, "FILE", False)
    add(group, "trace", "of the steps, for ui.perfetto.dev", _path, "FILE", False)
    return made


def _path(text: str, name: str) -> Path:
    return Path(text).expanduser()


@console_command
def main() -> int:
    return run("roundpipe-plan", plan)


def plan(arguments: Sequence[str]) -> Answer:
    """Answer a command line, and write the picture and the trace if it names them.

    Raises:
        ValueError: an option is wrong, is missing, or contradicts another one.
    """
    combinations = parser().read(arguments)
    first = combinations[0].values
    if first.get("hardware_file") and first.get("hardware") != AUTO:
        raise ValueError("hardware_file= is what hardware=auto writes: give that, too, or leave hardware_file= out.")
    if "model" not in first:
        return _write_machine(combinations[0])
    for name in ("picture", "trace"):
        if path := first.get(name):
            _check_target(name, path)
    made = _plan_table(combinations) if len(combinations) > 1 else _plan_one(combinations[0])
    return replace(made, form=first.get("format", "table"))


def _check_target(name: str, path: Path) -> None:
    """Refuse a file that cannot be written, before planning."""
    if not path.parent.is_dir():
        raise ValueError(f"{name}={path} cannot be written: there is no folder {path.parent}.")
    if name == "picture" and path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"picture={path} must be the name of a file that ends in .png, .pdf or .svg.")
    if name == "picture" and not is_installed("matplotlib"):
        raise ValueError(f"picture={path} cannot be drawn, as {remedy('matplotlib')}")


def _write_machine(asked: Combination) -> Answer:
    """Measure this machine into a file, and answer with its text."""
    if asked.values.get("hardware") != AUTO:
        raise ValueError(
            "Say what to plan for: model=NAME gpu=NAME gpus=NUMBER, as in model=llama3_1_8b gpu=rtx4090 gpus=4. "
            "hardware=auto alone measures this machine."
        )
    for name in asked.texts:
        if name not in ("hardware", "hardware_file", "workers"):
            raise ValueError(f"{name}= is about a plan: say for which model=NAME, or leave it out.")
    from lightning_roundpipe.commands.this_machine import measure_to_file, refuse_missing

    refuse_missing(asked.values.get("workers"))
    return Answer(paste=(measure_to_file(asked.values.get("hardware_file"), asked.values.get("workers"))[1],))


def _plan_one(asked: Combination) -> Answer:
    wish = wish_of(asked, SEARCH_SECONDS)
    if wish.hardware == AUTO:
        wish = replace(wish, hardware=str(_measured(asked, wish)))
    # These imports take longer than a mistake of the command line may take to be found.
    from lightning_roundpipe.commands.plan_answer import answer
    from lightning_roundpipe.commands.plan_model import look
    from lightning_roundpipe.commands.remedies import find_remedies

    with waiting("planning"):
        found = look(wish)
    picture, trace = asked.values.get("picture"), asked.values.get("trace")
    if not found.fits and (picture or trace):
        print("roundpipe-plan: picture= and trace= have no steps to draw, as it does not fit.", file=sys.stderr)
    elif picture or trace:
        from lightning_roundpipe.commands.plan_pictures import draw_plan

        draw_plan(found, picture, trace)
    with waiting("it does not fit: looking for what would"):
        remedies = None if found.fits or asked.values.get("format") == "csv" else find_remedies(found)
    return answer(found, remedies)


def _plan_table(combinations: Sequence[Combination]) -> Answer:
    for name in ("plan", "trace"):
        if name in combinations[0].values:
            raise ValueError(f"{name}= is about one plan, and this is a table of many: leave it out, or ask for one.")
    if any(one.values.get("hardware") == AUTO for one in combinations):
        raise ValueError(
            "hardware=auto measures this machine into a file: run roundpipe-plan hardware=auto, and give a table that "
            "file, as hardware=FILE."
        )
    with_adapters = any(one.values.get("lora", "none") != "none" for one in combinations)
    rows = [_without_adapters(one) if with_adapters else one for one in combinations]
    from lightning_roundpipe.commands.plan_sweep import Cell, answer, plan_cells

    cells = plan_cells([Cell(one.given, one.texts, wish_of(one, TABLE_SEARCH_SECONDS)) for one in rows])
    if picture := rows[0].values.get("picture"):
        from lightning_roundpipe.commands.plan_pictures import draw_cells

        draw_cells(cells, picture)
    return answer(cells)


def _without_adapters(one: Combination) -> Combination:
    """Remove ``lora.NAME=`` from a row without adapters, as other rows have some."""
    if one.values.get("lora", "none") != "none":
        return one
    texts = {name: text for name, text in one.texts.items() if not name.startswith("lora.")}
    return replace(one, settings={**one.settings, "lora": ()}, texts=texts)


def _measured(asked: Combination, wish: Wish) -> Path:
    """Measure this machine and return its file. The wish is checked first, because measuring takes longer."""
    if wish.gpu is not None or wish.gpus is not None:
        raise ValueError("hardware=auto is this machine with its GPUs: leave gpu= and gpus= out.")
    from lightning_roundpipe.commands.plan_model import check
    from lightning_roundpipe.commands.this_machine import measure_to_file

    check(wish)
    return measure_to_file(asked.values.get("hardware_file"), wish.workers)[0]


def wish_of(asked: Combination, search_seconds: float) -> Wish:
    """Return what the options ask for.

    Args:
        asked: the options.
        search_seconds: the longest search, unless the options set it.

    Raises:
        ValueError: options contradict each other.
    """
    from lightning_roundpipe.commands.plan_shape import Wish  # imports torch

    known = {item.name for item in fields(Wish)}
    paper = asked.values.get("partitioner") == "paper"
    given = {name: value for name, value in asked.values.items() if name in known and value is not None}
    wish = Wish(
        **{"search_seconds": search_seconds} | given,
        model_settings=asked.settings["model"],
        lora_settings=asked.settings["lora"],
        search=not paper,
        like_paper=paper,
    )
    if wish.plan is not None:
        for name in ("min_round", "max_round", "max_fused", "partitioner", "search_seconds"):
            if name in asked.values:
                raise ValueError(f"{name}= is about finding a plan, and plan= gives its stages: leave one of them out.")
    if wish.machines > 1 and wish.network is None:
        raise ValueError(f"machines={wish.machines} exchange gradients and weights: say over what: network=25Gbit.")
    if wish.network is not None and wish.machines == 1:
        raise ValueError("network= is between several machines: say how many, as machines=2, or leave it out.")
    if wish.machines > 1 and paper:
        raise ValueError("partitioner=paper predicts a library that trains on one machine: leave machines= or it out.")
    refuse_unscaled(wish.reduce_dtype, wish.precision)
    return wish
