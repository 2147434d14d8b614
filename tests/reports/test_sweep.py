"""What a sweep leaves, from folders of runs made by hand: the table and the file."""

import csv
import json

import pytest
from omegaconf import OmegaConf

from lightning_roundpipe.reports.sweep import make_plans_static, present, read_runs

NUMBERS = {"bubble_pct": 50.0, "peak_host_gib": 2.0, "train_loss": 1.0, "val_loss_after": 1.5}


def sweep(folder, *runs):
    """The rows of a sweep that left these overrides and summaries."""
    for number, (overrides, summary) in enumerate(runs):
        (folder / str(number) / ".hydra").mkdir(parents=True)
        (folder / str(number) / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides.split()))
        (folder / str(number) / "summary.json").write_text(json.dumps(summary))
    return read_runs(folder)


def finished(step_time, device, microbatches):
    return NUMBERS | {"step_time_s": step_time, "peak_device_gib": device, "microbatches": microbatches}


@pytest.fixture
def rows(tmp_path):
    """Microbatches of 1 and 4 samples of 8, twice, the last one failed, and trainer.max_steps the same for all."""
    return sweep(
        tmp_path,
        ("strategy.microbatch_size=4 strategy.staleness=0 trainer.max_steps=3", finished(0.5, 0.25, 2)),
        ("strategy.microbatch_size=1 strategy.staleness=0 trainer.max_steps=3", finished(0.25, 0.125, 8)),
        ("strategy.microbatch_size=4 strategy.staleness=1 trainer.max_steps=3", finished(0.4, 0.5, 2)),
        ("strategy.microbatch_size=1 strategy.staleness=1 trainer.max_steps=3", {"error": "ValueError: too [small]"}),
    )


def test_everything_is_left_and_shown(rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    present(rows, tmp_path)
    said = capsys.readouterr().out
    assert "Sweep: 4 runs" in said and "run 3 failed: ValueError: too [small]" in said
    assert "max steps" not in said  # it is the same for all
    assert ["failed" in line for line in said.splitlines() if line.split()[:1] == ["3"]] == [True]
    with (tmp_path / "sweep.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["microbatches"] for row in written] == ["2", "8", "2", ""]
    assert [row["trainer.max_steps"] for row in written] == ["3"] * 4


@pytest.mark.parametrize(
    ("partition", "plan"),
    [
        ({"plan": None, "stage_seconds": None}, "static"),
        ({"plan": None, "stage_seconds": 0.5}, None),
        ({"plan": "measured", "stage_seconds": None}, "measured"),
        ({"plan": "forward none; fused 0; backward none; round 1"}, "forward none; fused 0; backward none; round 1"),
    ],
)
def test_what_a_sweeps_runs_plan_by(partition, plan):
    config = OmegaConf.create({"partition": partition, "strategy": {"plan": "${partition.plan}"}})
    make_plans_static(config)
    assert config.strategy.plan == plan


def names(*settings):
    """Runs of two models whose names differ at their ends, one of which failed."""
    rest = " ".join(settings)
    reason = "DoesNotFit: memory_budget: " + "workers may use less than that, and more is needed. " * 4 + "Raise it."
    return [
        (f"model=tiny_qwen3_235b_a22b {rest}", finished(0.5, 0.25, 2)),
        (f"model=tiny_qwen3_235b_a22c {rest} lora.r=16", finished(2.5, 1.25, 4)),
        (f"model=tiny_gpt_oss_20b {rest} strategy.num_microbatches=16", {"error": reason}),
    ]


def test_nothing_of_a_table_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    present(sweep(tmp_path, *names("partition.round_microbatches=4")), tmp_path)
    said = capsys.readouterr().out
    table, reasons = said[: said.index("run 2 failed")], said[said.index("run 2 failed") :]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80
    for text in ("tiny_qwen3_235b_a22b", "tiny_qwen3_235b_a22c", "2.5 s", "1.2 GiB", "1.5000", "failed"):
        assert text in table, text
    assert "num microbatches 16" in " ".join(table.split()) and "Raise it." in reasons
