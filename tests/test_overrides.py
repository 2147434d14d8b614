"""The command line of `roundpipe-train`: help, what was meant, and the command that goes on with a run."""

import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_roundpipe import train
from lightning_roundpipe.overrides import GROUPS, choices, command, quoted

CONF = Path(__file__).resolve().parent.parent / "conf"
MODEL = ["model=folder", "model.folder=/m", "data=topics"]


def composed(*overrides):
    with initialize_config_module("lightning_roundpipe.conf", version_base="1.3"):
        return compose("train", ["hydra.runtime.output_dir=/run", *overrides])


def said(arguments, monkeypatch, capsys):
    """The exit status, and what was printed."""
    monkeypatch.setattr(sys, "argv", ["roundpipe-train", *arguments])
    code = 0
    try:
        train.main()
    except SystemExit as error:
        code = error.code
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_no_experiment_is_applied_unless_it_is_asked_for():
    """What a run takes that names a model and data is for fine-tuning, whether all weights are trained or adapters."""
    full, adapters = composed(*MODEL), composed(*MODEL, "lora=all_linear")
    assert full.name == adapters.name == "run"
    assert (full.optimizer.lr, adapters.optimizer.lr) == (2e-5, 2e-4)
    assert (
        composed(*MODEL, "lora=attention", "optimizer=sgd").optimizer.lr
        > composed(*MODEL, "optimizer=sgd").optimizer.lr
    )
    assert composed(*MODEL, "lora=all_linear", "optimizer.lr=1e-3").optimizer.lr == 1e-3
    for cfg in (full, adapters):
        assert cfg.scheduler._target_ == "transformers.get_cosine_schedule_with_warmup"
    assert composed(*MODEL, "trainer.max_steps=300").scheduler.num_warmup_steps == 30


@pytest.mark.parametrize(("given", "missing"), [(["model=smollm2"], "data"), (["data=topics"], "model")])
def test_model_and_data_are_chosen_by_the_user(given, missing, monkeypatch, capsys):
    code, text = said(given, monkeypatch, capsys)
    assert code == 2
    assert text.startswith(f"roundpipe-train: {missing} must be chosen: {missing}=CHOICE, one of ")
    assert text.count("\n") == 1


def test_without_arguments_it_says_what_can_be_done(monkeypatch, capsys):
    code, text = said([], monkeypatch, capsys)
    assert code == 2
    assert text.startswith("usage: roundpipe-train ")
    assert text.count("\n  roundpipe-train ") == 3
    assert max(map(len, text.splitlines())) <= 80
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("  roundpipe-train "):
            composed(*shlex.split(line)[1:])


def test_help_has_every_group_and_choice(monkeypatch, capsys):
    code, text = said(["--help"], monkeypatch, capsys)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    defaults = OmegaConf.load(CONF / "train.yaml").defaults
    groups = [str(next(iter(entry))) for entry in defaults if entry != "_self_"]
    assert set(GROUPS) == {group for group in groups if not group.startswith("override")}
    words = text.replace(",", " ").split()
    for group in GROUPS:
        assert f"{group}:" in words
        assert choices(group) == sorted(file.stem for file in (CONF / group).glob("*.yaml"))
        assert set(choices(group)) <= set(words)
    assert said(["--version"], monkeypatch, capsys) == (0, f"lightning-roundpipe {version('lightning-roundpipe')}\n")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["modle=smollm2"], "model="),
        (["model=smolm2", "data=topics"], "smollm2"),
        (["experiment=tiny", "optimizer.lrr=1"], "optimizer.lr="),
        (["experiment=tiny", "batch_size=8"], "data.batch_size="),
        (["experiment=tiny", "callbacks.checkpoint.every_n_steps=4"], "callbacks.checkpoint.every_n_train_steps="),
        (["--lr", "3"], "optimizer.lr="),
        (["smollm2_lora"], "experiment=smollm2_lora"),
        (["experiment=tiny", "optimizer=adam"], "adamw"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_did_you_mean(arguments, meant, monkeypatch, capsys):
    code, text = said(arguments, monkeypatch, capsys)
    assert code == 2
    assert text.count("\n") == 1 and text.startswith("roundpipe-train: ")
    assert f"Did you mean {meant}?" in text


@pytest.mark.parametrize("path", ["/my work/x.ckpt", "/it's/x (1).ckpt", "/a=b,c/[x]{y}.ckpt"])
def test_any_path_survives_the_shell_and_hydra(path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/roundpipe-train"])
    given = ["experiment=tiny", "ckpt_path=old.ckpt", "hydra.run.dir=here", "prompt='What is it?'", "~logger"]
    line = command(given, ["-m", "--config-dir", "my conf", *given], path)
    program, *words = shlex.split(line)
    assert program == "/somewhere/roundpipe-train"  # it is on no PATH
    assert words[:2] == ["--config-dir", "my conf"]
    assert words[2:-1] == ["experiment=tiny", "prompt='What is it?'", "~logger"]
    assert words[-1] == f"ckpt_path={quoted(path)}"
    assert composed(*words[2:]).ckpt_path == path
