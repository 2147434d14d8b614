"""``roundpipe-plan``: whether a model fits a machine, under which plan, and how fast it trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from lightning_roundpipe.commands.answer import Answer, Form
from lightning_roundpipe.commands.command_line import (
    Parser,
    add_option,
    one_of,
    positive,
    run,
    seconds,
    whole,
    yes_or_no,
)
from lightning_roundpipe.commands.console import console_command, waiting
from lightning_roundpipe.config import (
    PRECISION_ALIASES,
    optimizer_state_of,
    parse_bytes,
    reduce_dtype_of,
    refuse_unscaled,
)
from lightning_roundpipe.estimates.conf_files import Settings, read_choice, read_model
from lightning_roundpipe.estimates.hardware import AUTO, choose_machine
from lightning_roundpipe.estimates.request import PlanRequest, Tiles
from lightning_roundpipe.extras import is_installed, remedy
from lightning_roundpipe.planning.network import parse_rate
from lightning_roundpipe.planning.profile import Precision
from lightning_roundpipe.planning.search import SEARCH_SECONDS

_EXAMPLES = (
    "model=llama3_1_8b gpu=rtx4090 gpus=4 host_memory=256GiB",
    "model=qwen3_32b hardware=rtx4090x8 lora=all_linear lora.r=16",
    "model=my-model/config.json hardware=machine.yaml format=json",
    "hardware=auto",
)

_PURPOSE = """\
Says whether a model fits a machine, and how fast it trains. Exits with 0 if
the model fits, 1 if not, and 2 for a wrong command line."""


def parser() -> Parser:
    """Return the parser of the command's options, which `PlanRequest` has the defaults of."""
    made = Parser("roundpipe-plan", _PURPOSE, _EXAMPLES, ("model", "lora"))
    add = partial(add_option, made.add_argument_group("model (model.NAME= and lora.NAME= change its settings)"))
    add("model", "choice of conf/model, or a config.json")
    add("lora", "adapters: choice of conf/lora")
    add("precision", "default: bf16-mixed", _precision)
    add("max_positions", "tokens, beyond the model's", whole(1, 2**24), "N")
    add = partial(add_option, made.add_argument_group("machine"))
    add("gpu", "as rtx4090; a wrong one lists all")
    add("gpus", "how many of them (default: 1)", whole(), "N")
    add("host_memory", "of the host, as 256GiB", parse_bytes, "SIZE")
    add("hardware", "rtx4090x4, cpu, auto (this one), a file")
    add("machines", "that share the work of a step", whole(1, 1024), "N")
    add("network", "between them, as 25Gbit", parse_rate, "RATE")
    add = partial(add_option, made.add_argument_group("step"))
    add("sequence_length", "in tokens (default: 2048)", whole(1, 2**24), "N")
    add("microbatch_size", "in sequences (default: the fastest)", whole(1, 65536), "N")
    add("microbatches", "of a step (default: two a worker)", whole(1, 4096), "N")
    add("workers", "devices that take stages (default: all)", whole(1, 1024), "N")
    add("staleness", "1: updates one step late (default: 0)", whole(0, 1), "N")
    add("memory", "of a worker (default: 90 %% of a GPU's)", parse_bytes, "SIZE")
    add("token_tiles", "tokens of a tile, or as mlp:1024 (default: none)", _tiles, "N")
    add("reduce_dtype", "gradients travel in (default: float32)", reduce_dtype_of)
    add("optimizer_state", "Adam's moments: fp32, bf16 or int8 (default: fp32)", optimizer_state_of)
    add("carry_products", "true: to the host and back (default: false)", yes_or_no, "BOOL")
    add("gradient_clip_val", "norm that gradients are clipped to", positive, "N")
    add = partial(add_option, made.add_argument_group("plan"))
    add("plan", "judge this one: 'forward 0-3; ...'", None, "TEXT")
    add("search_seconds", f"longest (default: {SEARCH_SECONDS:g})", seconds, "N")
    add = partial(add_option, made.add_argument_group("output"))
    add("format", "table, json or csv (default: table)", one_of(*get_args(Form)))
    add("picture", "of the steps", _path, "FILE")
    add("trace", "of the steps, for ui.perfetto.dev", _path, "FILE")
    add("hardware_file", "of hardware=auto (default: HOSTNAME.yaml)", _path, "FILE")
    return made


def _precision(text: str, name: str) -> str:
    """Return Lightning's precision, for any of its spellings."""
    found: str = one_of(*get_args(Precision))(PRECISION_ALIASES.get(text, text), name)
    return found


def _tiles(text: str, name: str) -> Tiles:
    """Return the tokens of a tile, alone or with names of modules, as the strategy takes them."""
    pairs = [part.rpartition(":") for part in text.split("+")]
    named = all(module for module, _, _ in pairs)
    if not all(n.isdecimal() and int(n) >= 1 for _, _, n in pairs) or not (named or text.isdecimal()):
        raise ValueError(
            f"{name}={text!r} must be a whole number of tokens of at least 1, or such numbers with names of modules, "
            "as mlp:1024 or mlp:1024+experts:512."
        )
    return tuple((module, int(n)) for module, _, n in pairs) if named else int(text)


def request_of(values: Mapping[str, Any], settings: Mapping[str, Settings]) -> PlanRequest:
    """Return what the options ask for. Raises ``ValueError`` if they contradict each other."""
    known = {item.name for item in fields(PlanRequest)}
    given = {name: value for name, value in values.items() if name in known}
    request = PlanRequest(**given, model_settings=settings["model"], lora_settings=settings["lora"])
    if request.plan is not None and "search_seconds" in values:
        raise ValueError("search_seconds= is about finding a plan, and plan= gives its stages: leave one out.")
    if request.machines > 1 and request.network is None:
        raise ValueError(f"machines={request.machines} exchange gradients and weights: say over what: network=25Gbit.")
    if request.network is not None and request.machines == 1:
        raise ValueError("network= is between several machines: say how many, as machines=2, or leave it out.")
    refuse_unscaled(request.reduce_dtype, request.precision)
    return request


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
    return replace(_plan(values, request_of(values, settings)), form=values.get("format", "table"))


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


def _plan(values: Mapping[str, Any], request: PlanRequest) -> Answer:
    # These imports take longer than a mistake of the command line may take to be found.
    from lightning_roundpipe.commands.plan_answer import answer
    from lightning_roundpipe.estimates.outlook import check, look
    from lightning_roundpipe.estimates.remedies import find_remedies

    if request.hardware == AUTO:
        if request.gpu is not None or request.gpus is not None:
            raise ValueError("hardware=auto is this machine with its GPUs: leave gpu= and gpus= out.")
        from lightning_roundpipe.commands.this_machine import measure_to_file

        check(request)  # measuring takes longer
        request = replace(request, hardware=str(measure_to_file(values.get("hardware_file"), request.workers)[0]))
    with waiting("planning"):
        found = look(request)
    picture, trace = values.get("picture"), values.get("trace")
    if not found.fits and (picture or trace):
        print("roundpipe-plan: picture= and trace= have no steps to draw, as it does not fit.", file=sys.stderr)
    elif picture or trace:
        from lightning_roundpipe.commands.plan_pictures import draw_plan

        draw_plan(found, picture, trace)
    if found.fits:
        return answer(found)
    with waiting("it does not fit: looking for what would"):
        remedies = find_remedies(found)
    return answer(found, remedies)
