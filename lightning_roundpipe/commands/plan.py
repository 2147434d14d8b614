"""``roundpipe-plan``: whether a model fits a machine, under which plan, and how fast it trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lightning_roundpipe.commands.answer import Answer, Form
from lightning_roundpipe.commands.command_line import Parser, Settings, add_option, one_of, run
from lightning_roundpipe.commands.conf_files import read_choice, read_model
from lightning_roundpipe.commands.console import console_command, waiting
from lightning_roundpipe.commands.machines import AUTO, choose_machine
from lightning_roundpipe.commands.wish import Wish, options
from lightning_roundpipe.extras import is_installed, remedy

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
    """Return the parser of the command's options."""
    made = Parser("roundpipe-plan", _PURPOSE, _EXAMPLES, ("model", "lora"))
    group: Any = made
    for name, heading, how in options():
        group = made.add_argument_group(heading) if heading else group
        add_option(group, name, *how)
    group = made.add_argument_group("output")
    add_option(group, "format", "table, json or csv (default: table)", one_of(*get_args(Form)), "NAME")
    add_option(group, "picture", "of the steps", _path, "FILE")
    add_option(group, "trace", "of the steps, for ui.perfetto.dev", _path, "FILE")
    add_option(group, "hardware_file", "of hardware=auto (default: HOSTNAME.yaml)", _path, "FILE")
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
    return replace(_plan(values, Wish.of(values, settings)), form=values.get("format", "table"))


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
