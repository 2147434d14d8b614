"""The shipped configuration: every choice composes, every target exists, and ``roundpipe-train`` runs it."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import OmegaConf
from patience import PATIENCE_S

from lightning_roundpipe import train
from lightning_roundpipe.planning import Costs, Plan

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
OTHER = {"experiment", "hardware"}
"""Folders that are no groups of ``roundpipe-train``'s choices, or are tested by themselves."""
CHOICES = sorted((file.parent.name, file.stem) for file in CONF.glob("*/*.yaml") if file.parent.name not in OTHER)
SUMMARY = [
    "val_loss_before", "val_loss_after", "step_time_s", "tokens_per_s", "bubble_pct", "peak_host_gib", "plan",
    "workers", "forward_stages", "backward_stages", "microbatches", "weights_uploaded_gib", "wall_s",
    "completion_before", "completion_after",
]  # fmt: skip
NEEDED = {
    "folder": "model.folder=/models/x",
    "hub": "model.name=some/model",
    "by_hand": "partition.plan=forward none fused 0-8 backward none round 4",
    "by_memory": "partition.memory_budget=20GiB",
    "by_seconds": "partition.stage_seconds=0.5",
    "texts": "data.path=/texts",
    "completions": "data.path=/chats",
}


pytestmark = pytest.mark.usefixtures("working_folder")


def of_an_experiment(arguments):
    """With the one that takes no time, unless another one is chosen, or a model and data."""
    groups = {argument.partition("=")[0] for argument in arguments}
    return (
        arguments if "experiment" in groups or {"model", "data"} <= groups else ("experiment=random_tokens", *arguments)
    )


def composed(*overrides):
    """What ``roundpipe-train`` would run with these overrides, with all interpolations resolved."""
    overrides = of_an_experiment(overrides)
    with initialize_config_module("lightning_roundpipe.conf", version_base="1.3"):
        cfg = compose("train", ["hydra.runtime.output_dir=/run", *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
    OmegaConf.set_readonly(cfg, False)
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    OmegaConf.resolve(cfg)
    return cfg


def targets(node):
    if isinstance(node, dict):
        yield from ([node["_target_"]] if "_target_" in node else [])
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from targets(value)


def run(monkeypatch, *arguments):
    """``roundpipe-train`` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["roundpipe-train", *of_an_experiment(arguments)])
    train.main()


def last_line(text):
    assert text.endswith("\n")
    return text.splitlines()[-1]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    cfg = composed(f"experiment={experiment}")
    assert cfg.name == experiment
    found = list(targets(OmegaConf.to_container(cfg)))
    assert len(found) > 8
    for target in found:
        assert callable(get_object(target)), target


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes(group, choice):
    cfg = composed(f"{group}={choice}", *([NEEDED[choice]] if choice in NEEDED else []))
    for target in targets(OmegaConf.to_container(cfg)):
        assert callable(get_object(target)), target


def test_every_option_of_the_strategy_is_configured():
    import inspect

    from lightning_roundpipe import RoundPipeStrategy

    settings = set(composed().strategy) - {"_target_"}
    options = [
        p.name for p in inspect.signature(RoundPipeStrategy).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert settings == set(options)


def test_a_run_leaves_everything(working_folder, monkeypatch, capfd):
    run(monkeypatch, "experiment=random_tokens", "lora=all_linear", "trainer.max_steps=2")
    out, err = capfd.readouterr()
    folder = Path(last_line(out))
    assert folder.parent == working_folder / "runs"
    assert "Error" not in err
    for text in ("validation loss", "tokens/s", "Training   2/2"):
        assert text in out

    summary = json.loads((folder / "summary.json").read_text())
    assert not [key for key in SUMMARY if summary.get(key) is None]
    assert summary["workers"] == 4
    assert summary["microbatches"] == 4
    assert summary["steps"] == 2
    assert summary["plan"] == (folder / "plan.txt").read_text().strip()
    assert len(summary["completion_after"].split()) == 32
    assert OmegaConf.load(folder / "config.yaml").trainer.max_steps == 2
    costs = Costs.from_dict(json.loads((folder / "costs.json").read_text()))  # what was measured, for a search
    assert Plan.parse(summary["plan"]).fused.last == len(costs) - 1
    for picture in ("timeline.png", "replay.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    # Both bubbles, and what each is: the devices take turns on this machine's cores, and would not on their own.
    assert 0 <= summary["replay_bubble_pct"] < 100 and summary["replay_step_time_s"] > 0
    for kind, means in (
        ("bubble_pct", "as 4 emulated devices share"),
        ("replay_bubble_pct", "the same times on devices of their own"),
    ):
        assert re.search(rf"bubble.* {summary[kind]:.1f} %, {means}", out), kind
    assert (folder / "adapters" / "adapter_model.safetensors").is_file()
    rows = list(csv.DictReader((folder / "csv" / "metrics.csv").open()))
    steps = [row for row in rows if row["tokens_per_s"]]
    assert [row["tokens"] for row in steps] == ["128.0", "128.0"]
    assert all(row["train_loss"] and float(row["step_loss"]) > 0 for row in steps)
    assert [float(row["val_loss"]) for row in rows if row["val_loss"]] == pytest.approx(
        [summary["val_loss_before"], summary["val_loss_after"]]
    )


@pytest.mark.slow
def test_a_checkpoint_of_adapters_holds_no_frozen_weights_and_resumes(monkeypatch, capfd):
    options = ["lora=all_linear", "prompt=null"]
    run(
        monkeypatch,
        *options,
        "trainer.max_steps=3",
        "callbacks.checkpoint.every_n_train_steps=2",
        "callbacks.checkpoint.save_top_k=-1",
    )
    whole = Path(last_line(capfd.readouterr().out))
    assert sorted(file.name for file in (whole / "checkpoints").iterdir()) == ["step-2.ckpt", "step-3.ckpt"]
    checkpoint = whole / "checkpoints" / "step-3.ckpt"
    names = torch.load(checkpoint, weights_only=False)["state_dict"].keys()
    assert names
    assert all("lora_" in name for name in names)

    half = whole / "checkpoints" / "step-2.ckpt"
    run(monkeypatch, *options, "trainer.max_steps=3", "hydra.run.dir=second", f"ckpt_path={half}")
    resumed = Path(last_line(capfd.readouterr().out))
    losses = [json.loads((run / "summary.json").read_text())["val_loss_after"] for run in (whole, resumed)]
    assert losses[0] == losses[1]

    with pytest.raises(ValueError, match="The checkpoint does not fit"):
        other = torch.load(half, weights_only=False)
        del other["state_dict"][next(iter(other["state_dict"]))]
        torch.save(other, "broken.ckpt")
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        run(monkeypatch, *options, "trainer.max_steps=3", "ckpt_path=broken.ckpt")


@pytest.mark.slow
def test_plain_lightning_is_a_choice(monkeypatch, capfd):
    """The comparison: same losses, on one device, and null for what only roundpipe knows."""
    summaries = []
    for strategy in ("roundpipe", "auto"):
        run(monkeypatch, f"strategy={strategy}", "trainer.max_steps=2")
        folder = Path(last_line(capfd.readouterr().out))
        summaries.append(json.loads((folder / "summary.json").read_text()))
    ours, plain = summaries
    assert ours["val_loss_before"] == pytest.approx(plain["val_loss_before"], rel=1e-5)
    assert ours["val_loss_after"] == pytest.approx(plain["val_loss_after"], rel=1e-5)
    assert ours["completion_after"] == plain["completion_after"]
    assert {key for key in SUMMARY if plain[key] is None} == {
        *("bubble_pct", "plan", "workers", "forward_stages", "backward_stages", "microbatches", "weights_uploaded_gib")
    }


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_in_fp8(recipe, monkeypatch, capfd):
    run(monkeypatch, f"float8={recipe}", "trainer.max_steps=2", "trainer.precision=bf16-true", "prompt=null")
    summary = json.loads((Path(last_line(capfd.readouterr().out)) / "summary.json").read_text())
    assert 4 < summary["val_loss_after"] < 5


TINY_SWEEP = ("experiment=random_tokens", "prompt=null")


@pytest.mark.slow
def test_a_sweep_leaves_a_table(working_folder, monkeypatch, capfd):
    run(monkeypatch, "-m", *TINY_SWEEP, "data.batch_size=1,4", "trainer.max_steps=2")
    out, _ = capfd.readouterr()
    folder = Path(last_line(out))
    assert folder.parent == working_folder / "runs"
    rows = list(csv.DictReader((folder / "sweep.csv").open()))
    assert [row["data.batch_size"] for row in rows] == ["1", "4"]
    for row in rows:
        for key in ("step_time_s", "bubble_pct", "peak_device_gib", "peak_host_gib", "train_loss", "val_loss_after"):
            assert float(row[key]) > 0, key
    losses = [float(row["val_loss_after"]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-5)  # microbatches change rounding only
    microbatches = [json.loads((folder / name / "summary.json").read_text())["microbatches"] for name in "01"]
    assert microbatches == [4, 1]
    table = out[out.index("Sweep: 2 runs") : out.rindex(str(folder))]
    for heading in ("batch", "step time", "bubble", "device", "host", "train loss", "val loss"):
        assert all(word in table for word in heading.split()), heading
    assert "…" not in table
    assert max(len(line) for line in table.splitlines()) <= 80


@pytest.mark.slow
def test_a_run_that_fails_has_its_row(monkeypatch, capfd):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, "-m", *TINY_SWEEP, "strategy.emulation.memory=2KB,1GB", "trainer.max_steps=1")
    assert exit_.value.code == 1
    out, _ = capfd.readouterr()
    failed, finished = csv.DictReader((Path(last_line(out)) / "sweep.csv").open())
    assert "workers may use 2,000 bytes" in failed["error"]
    assert not finished["error"]
    assert float(finished["step_time_s"]) > 0
    assert "run 0 failed: ValueError: layer" in out
    assert re.search(r"^ *0 +memory 2KB +failed +–", out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_folder_is_the_last_thing_said(working_folder):
    """On neither stream does anything follow, not even from what runs when the interpreter ends."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_roundpipe.train", "experiment=random_tokens", "trainer.max_steps=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=6 * PATIENCE_S,
        check=True,
    )
    assert Path(last_line(done.stdout)).parent == working_folder / "runs"


EXAMPLE = ROOT / "examples" / "plain_lightning.py"


def test_the_example_trains_as_plain_lightning_does(capsys):
    """`examples/plain_lightning.py` with fewer steps, in this process. No worker is idle."""
    code = EXAMPLE.read_text()
    shorter = code.replace("STEPS, WINDOW = 24", "STEPS, WINDOW = 5")
    assert shorter != code
    exec(compile(shorter, EXAMPLE, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    rows = re.findall(r"^ *\S+ +(\d\.\d+) +(\d\.\d+) +\S+$", printed, re.MULTILINE)
    assert len(rows) == 4
    assert [float(ours) for _, ours in rows] == pytest.approx([float(plain) for plain, _ in rows], rel=1e-4)
    assert all(f"worker {worker}" in printed for worker in range(4))


@pytest.mark.parametrize(
    ("settings", "batches", "weight"),
    [
        ([], 4, None),
        (["data.batch_size=2"], 2, None),
        (["trainer.accumulate_grad_batches=3", "step_samples=8"], 3, None),
        (["data=texts", "data.path=/texts"], 4, None),
        (["data=completions", "data.path=/chats"], 4, "targets"),
        (["data=completions", "data.path=/chats", "strategy.loss_weight=sum"], 4, "sum"),
    ],
)
def test_a_step_has_as_many_samples_whatever_the_microbatch(settings, batches, weight):
    cfg = composed(*settings)
    assert cfg.trainer.accumulate_grad_batches == batches
    assert cfg.trainer.val_check_interval == batches * cfg.trainer.max_steps
    assert cfg.strategy.loss_weight == weight
    if cfg.data.get("sequences"):
        assert cfg.data.sequences == 4 * cfg.step_samples
        assert cfg.data.validation_sequences == cfg.step_samples


@pytest.mark.parametrize("setting", ["step_samples=0", "step_samples=many", "data.batch_size=3"])
def test_a_step_that_cannot_be_is_refused(setting, monkeypatch, capfd):
    with pytest.raises(SystemExit) as exit_:
        run(monkeypatch, setting)
    assert exit_.value.code == 2
    assert "step_samples=" in capfd.readouterr().err
