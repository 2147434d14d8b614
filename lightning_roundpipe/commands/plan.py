"""``roundpipe-plan``: whether a model fits a machine, under which plan, and how fast it trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lightning_roundpipe.commands.answer import Answer, Form
from lightning_roundpipe.commands.command_line import (
    Parser,
    Settings,
    add_option,
    one_of,
    positive,
    run,
    seconds,
    whole,
    yes_or_no,
)
from lightning_roundpipe.commands.conf_files import read_choice, read_model
from lightning_roundpipe.commands.console import console_command, waiting
from lightning_roundpipe.commands.machines import AUTO, choose_machine
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

_EXAMPLES = (
    "model=llama3_1_8b gpu=rtx4090 gpus=4 host_memory=256GiB",
    "model=qwen3_32b hardware=rtx4090x8 lora=all_linear lora.r=16",
    "model=my-model/config.json hardware=machine.yaml format=json",
    "hardware=auto",
)

_PURPOSE = """\
Says whether a model fits a machine, and how fast it trains. Exits with 0 if
the model fits, 1 if not, and 2 for a wrong command line."""


def read_precision(text: str, name: str) -> str:
    """Return Lightning's precision, for any of its spellings."""
    found: str = one_of(*get_args(Precision))(PRECISION_ALIASES.get(text, text), name)
    return found


def read_tiles(text: str, name: str) -> int | tuple[tuple[str, int], ...]:
    """Return the tokens of a tile, alone or with names of modules, as the strategy takes them."""
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

    group = made.add_argument_group("model (model.NAME= and lora.NAME= change its settings)")
    add_option(group, "model", "choice of conf/model, or a config.json", None, "NAME")
    add_option(group, "lora", "adapters: choice of conf/lora", None, "NAME")
    add_option(group, "precision", "default: bf16-mixed", read_precision, "NAME")
    add_option(group, "max_positions", "tokens, beyond the model's", whole(1, 2**24), "N")
    group = made.add_argument_group("machine")
    add_option(group, "gpu", "as rtx4090; a wrong one lists all", None, "NAME")
    add_option(group, "gpus", "how many of them (default: 1)", whole(), "N")
    add_option(group, "host_memory", "of the host, as 256GiB", parse_bytes, "SIZE")
    add_option(group, "hardware", "rtx4090x4, cpu, auto (this one), a file", None, "NAME")
    add_option(group, "hardware_file", "that auto writes (default: HOSTNAME.yaml)", _path, "FILE")
    add_option(group, "machines", "that share the work of a step", whole(1, 1024), "N")
    add_option(group, "network", "between them, as 25Gbit", parse_rate, "RATE")
    group = made.add_argument_group("step")
    add_option(group, "sequence_length", "in tokens (default: 2048)", whole(1, 2**24), "N")
    add_option(group, "microbatch_size", "in sequences (default: the fastest)", whole(1, 65536), "N")
    add_option(group, "microbatches", "of a step (default: two a worker)", whole(1, 4096), "N")
    add_option(group, "workers", "devices that take stages (default: all)", whole(1, 1024), "N")
    add_option(group, "staleness", "1: updates one step late (default: 0)", whole(0, 1), "N")
    add_option(group, "memory", "of a worker (default: 90 %% of a GPU's)", parse_bytes, "SIZE")
    add_option(group, "token_tiles", "tokens of a tile, or as mlp:1024 (default: none)", read_tiles, "N")
    add_option(group, "reduce_dtype", "gradients travel in (default: float32)", reduce_dtype_of, "NAME")
    add_option(
        group, "optimizer_state", "Adam's moments: fp32, bf16 or int8 (default: fp32)", optimizer_state_of, "NAME"
    )
    add_option(group, "carry_products", "true: to the host and back (default: false)", yes_or_no, "BOOL")
    add_option(group, "gradient_clip_val", "norm that gradients are clipped to", positive, "N")
    group = made.add_argument_group("plan")
    add_option(group, "plan", "judge this one: 'forward 0-3; ...'", None, "TEXT")
    add_option(group, "partitioner", "search, or paper: predict the paper's library", one_of("search", "paper"), "NAME")
    add_option(group, "search_seconds", f"longest (default: {SEARCH_SECONDS:g})", seconds, "N")
    group = made.add_argument_group("output")
    add_option(group, "format", "table, json or csv (default: table)", one_of(*get_args(Form)), "NAME")
    add_option(group, "picture", "of the steps", _path, "FILE")
    add_option(group, "trace", "of the steps, for ui.perfetto.dev", _path, "FILE")
    return made


def _path(text: str, name: str) -> Path:
    return Path(text).expanduser()


@console_command
def main() -> int:
    return run("roundpipe-plan", plan)


def plan(arguments: Sequence[str]) -> Answer:
    """Answer a command line, and write the picture and the trace if it names them."""
    values, settings = parser().read(arguments)
    if values.get("hardware_file") and values.get("hardware") != AUTO:
        raise ValueError("hardware_file= is what hardware=auto writes: give that, too, or leave hardware_file= out.")
    if "model" not in values:
        return _write_machine(values, settings)
    for name in ("picture", "trace"):
        if path := values.get(name):
            _check_target(name, path)
    _check_names(values)
    return replace(_plan(values, wish_of(values, settings)), form=values.get("format", "table"))


def _check_target(name: str, path: Path) -> None:
    """Refuse a file that cannot be written, before planning."""
    if not path.parent.is_dir():
        raise ValueError(f"{name}={path} cannot be written: there is no folder {path.parent}.")
    if name == "picture" and path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"picture={path} must be the name of a file that ends in .png, .pdf or .svg.")
    if name == "picture" and not is_installed("matplotlib"):
        raise ValueError(f"picture={path} cannot be drawn, as {remedy('matplotlib')}")


def _check_names(values: Mapping[str, Any]) -> None:
    """Refuse names of models, adapters and machines that are not known, before torch is imported."""
    read_model(values["model"])
    read_choice("lora", values.get("lora", "none"))
    if values.get("hardware") != AUTO:
        choose_machine(*(values.get(name) for name in ("hardware", "gpu", "gpus", "workers", "host_memory")))


def _write_machine(values: Mapping[str, Any], settings: Mapping[str, Settings]) -> Answer:
    """Measure this machine into a file, and answer with its text."""
    if values.get("hardware") != AUTO:
        raise ValueError(
            "Say what to plan for: model=NAME gpu=NAME gpus=NUMBER, as in model=llama3_1_8b gpu=rtx4090 gpus=4. "
            "hardware=auto alone measures this machine."
        )
    for name in (*values, *(f"{group}.{name}" for group, pairs in settings.items() for name, _ in pairs)):
        if name not in ("hardware", "hardware_file", "workers"):
            raise ValueError(f"{name}= is about a plan: say for which model=NAME, or leave it out.")
    from lightning_roundpipe.commands.this_machine import measure_to_file, refuse_missing

    refuse_missing(values.get("workers"))
    return Answer(paste=(measure_to_file(values.get("hardware_file"), values.get("workers"))[1],))


def _plan(values: Mapping[str, Any], wish: Wish) -> Answer:
    # These imports take longer than a mistake of the command line may take to be found.
    from lightning_roundpipe.commands.plan_answer import answer
    from lightning_roundpipe.commands.plan_model import check, look
    from lightning_roundpipe.commands.remedies import find_remedies

    if wish.hardware == AUTO:
        if wish.gpu is not None or wish.gpus is not None:
            raise ValueError("hardware=auto is this machine with its GPUs: leave gpu= and gpus= out.")
        from lightning_roundpipe.commands.this_machine import measure_to_file

        check(wish)  # measuring takes longer
        wish = replace(wish, hardware=str(measure_to_file(values.get("hardware_file"), wish.workers)[0]))
    with waiting("planning"):
        found = look(wish)
    picture, trace = values.get("picture"), values.get("trace")
    if not found.fits and (picture or trace):
        print("roundpipe-plan: picture= and trace= have no steps to draw, as it does not fit.", file=sys.stderr)
    elif picture or trace:
        from lightning_roundpipe.commands.plan_pictures import draw_plan

        draw_plan(found, picture, trace)
    with waiting("it does not fit: looking for what would"):
        remedies = None if found.fits else find_remedies(found)
    return answer(found, remedies)


def wish_of(values: Mapping[str, Any], settings: Mapping[str, Settings]) -> Wish:
    """Return what the options ask for. Raises ``ValueError`` if they contradict each other."""
    from lightning_roundpipe.commands.plan_shape import Wish  # imports torch

    known = {item.name for item in fields(Wish)}
    wish = Wish(
        **{name: value for name, value in values.items() if name in known},
        model_settings=settings["model"],
        lora_settings=settings["lora"],
    )
    if wish.plan is not None:
        for name in ("partitioner", "search_seconds"):
            if name in values:
                raise ValueError(f"{name}= is about finding a plan, and plan= gives its stages: leave one of them out.")
    if wish.machines > 1 and wish.network is None:
        raise ValueError(f"machines={wish.machines} exchange gradients and weights: say over what: network=25Gbit.")
    if wish.network is not None and wish.machines == 1:
        raise ValueError("network= is between several machines: say how many, as machines=2, or leave it out.")
    if wish.machines > 1 and wish.like_paper:
        raise ValueError("partitioner=paper predicts a library that trains on one machine: leave machines= or it out.")
    refuse_unscaled(wish.reduce_dtype, wish.precision)
    return wish
