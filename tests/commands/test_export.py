"""``roundpipe-export``: what it prints, writes and refuses."""

import sys

import pytest
import torch
from export_runs import logits, train
from transformers import AutoModelForCausalLM

from lightning_roundpipe.commands.export import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with adapters on the strategy's emulated devices, and its logits."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    module = train(folder, "lora=all_linear", "strategy=roundpipe", "trainer.devices=2")
    return folder, logits(module.model)


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["roundpipe-export", *map(str, arguments)])
    return main()


@pytest.mark.slow
def test_a_run(run, tmp_path, monkeypatch, capfd):
    folder, wanted = run
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, f"run={folder}", "to=out", "max_shard_size=300KB") == 0
    out, err = capfd.readouterr()
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 4
    assert "adapters of 42 modules, merged into the base model, in float32; " in out
    assert "checkpoint step-2.ckpt" in out
    assert out.splitlines()[-1] == f'AutoModelForCausalLM.from_pretrained({str(tmp_path / "out")!r}, dtype="auto")'
    assert not err
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(found), wanted, atol=1e-5, rtol=1e-5)
    mode = (tmp_path / "out").stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {mode}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run={run}"], "to= is missing: write run=FOLDER to=FOLDER"),
        (["rn={run}"], "There is no option 'rn'. Did you mean run=?"),
        (["run={run}", "to=out", "dtype=fp16"], "dtype=fp16 must be one of auto, float32"),
        (["run={run}", "to=out", "shards=2"], "There is no option 'shards'."),
        (["run={run}", "to={run}"], "to={run} is there and not empty: name a new folder."),
        (["run={run}", "to=out", "ckpt=last.ckpt"], "ckpt=last.ckpt is not there: name a file of {run}/checkpoints."),
    ],
)
def test_mistakes(arguments, message, run, tmp_path, monkeypatch, capfd):
    """One line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *(text.format(run=run[0]) for text in arguments)) == 2
    out, err = capfd.readouterr()
    assert not out and err.count("\n") == 1
    assert err.startswith(f"roundpipe-export: {message.format(run=run[0])}")
    assert not list(tmp_path.iterdir())
