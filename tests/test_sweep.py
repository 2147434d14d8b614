"""What a sweep leaves, from folders of runs made by hand: the table, the file, and the picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from omegaconf import OmegaConf

from lightning_roundpipe.pictures import setting_names
from lightning_roundpipe.sweep import make_plans_static, present, read_runs, varied_settings
from lightning_roundpipe.sweep_picture import figure_of

NUMBERS = {"bubble_pct": 50.0, "peak_host_gib": 2.0, "train_loss": 1.0, "val_loss_after": 1.5}


def sweep(folder: Path, *runs: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a sweep that left these overrides and summaries."""
    for number, (overrides, summary) in enumerate(runs):
        (folder / str(number) / ".hydra").mkdir(parents=True)
        (folder / str(number) / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides.split()))
        (folder / str(number) / "summary.json").write_text(json.dumps(summary))
    return read_runs(folder)


def finished(step_time: float, device: float | None, microbatches: int | None) -> dict[str, Any]:
    return NUMBERS | {"step_time_s": step_time, "peak_device_gib": device, "microbatches": microbatches}


def lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The lines of a panel by their labels: what the ticks below say, and the value."""
    ticks = [float(tick.get_text()) for tick in axes.figure.axes[-1].get_xticklabels()]  # type: ignore[union-attr]
    found = {}
    for line in axes.get_lines():
        points = zip(line.get_xdata(), line.get_ydata(), strict=True)  # type: ignore[arg-type]
        found[str(line.get_label())] = [(ticks[int(x)], float(y)) for x, y in points]
    return found


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Microbatches of 1 and 4 samples of 8, twice, the last one failed, and trainer.max_steps the same for all."""
    return sweep(
        tmp_path,
        ("strategy.microbatch_size=4 strategy.staleness=0 trainer.max_steps=3", finished(0.5, 0.25, 2)),
        ("strategy.microbatch_size=1 strategy.staleness=0 trainer.max_steps=3", finished(0.25, 0.125, 8)),
        ("strategy.microbatch_size=4 strategy.staleness=1 trainer.max_steps=3", finished(0.4, 0.5, 2)),
        ("strategy.microbatch_size=1 strategy.staleness=1 trainer.max_steps=3", {"error": "ValueError: too [small]"}),
    )


def test_the_picture_has_a_line_for_each_way_to_set_the_rest(rows: list[dict[str, Any]]) -> None:
    figure = figure_of(rows, varied_settings(rows))
    assert figure is not None
    time, device, host = figure.axes
    assert lines(time) == {"staleness 0": [(2, 500), (8, 250)], "staleness 1": [(2, 400)]}
    assert lines(device) == {"staleness 0": [(2, 256), (8, 128)], "staleness 1": [(2, 512)]}
    assert lines(host) == {"staleness 0": [(2, 2), (8, 2)], "staleness 1": [(2, 2)]}
    assert [axes.get_title("left") for axes in figure.axes] == [
        *("step time (ms)", "device memory, peak (MiB)", "host memory, peak (GiB)")
    ]
    assert host.get_xlabel() == "microbatches"
    assert figure.get_supxlabel() == "run 3 (microbatch size 1, staleness 1) failed: ValueError: too [small]"


def test_another_setting_is_the_axis_where_microbatches_stay_the_same(tmp_path: Path) -> None:
    made = sweep(
        tmp_path,
        ("lora.r=16", finished(3.0, None, 4)),
        ("lora.r=4", finished(2.0, None, 4)),
    )
    figure = figure_of(made, varied_settings(made))
    assert figure is not None
    assert [axes.get_title("left") for axes in figure.axes] == ["step time (s)", "host memory, peak (GiB)"]
    assert list(lines(figure.axes[0]).values()) == [[(4, 2.0), (16, 3.0)]]
    assert figure.axes[-1].get_xlabel() == "lora r"


def test_everything_is_left_and_shown(
    rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    present(rows, tmp_path)
    said = capsys.readouterr().out
    assert "Sweep: 4 runs" in said and "run 3 failed: ValueError: too [small]" in said
    assert "max steps" not in said  # it is the same for all
    assert [line.split()[3] for line in said.splitlines() if line.split()[:1] == ["3"]] == ["failed"]
    with (tmp_path / "sweep.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["microbatches"] for row in written] == ["2", "8", "2", ""]
    assert [row["trainer.max_steps"] for row in written] == ["3"] * 4
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("partition", "plan"),
    [
        ({"plan": None, "stage_seconds": None}, "static"),
        ({"plan": None, "stage_seconds": 0.5}, None),
        ({"plan": "measured", "stage_seconds": None}, "measured"),
        ({"plan": "forward none; fused 0; backward none; round 1"}, "forward none; fused 0; backward none; round 1"),
    ],
)
def test_what_a_sweeps_runs_plan_by(partition: dict[str, Any], plan: str | None) -> None:
    config = OmegaConf.create({"partition": partition, "strategy": {"plan": "${partition.plan}"}})
    make_plans_static(config)
    assert config.strategy.plan == plan


def test_a_sweep_without_a_partition_or_a_plan_stays_as_it_is() -> None:
    for settings in ({}, {"partition": None}, {"partition": {"plan": "???"}}):
        config = OmegaConf.create(settings)
        make_plans_static(config)
        assert OmegaConf.to_container(config) == settings


def names(*settings: str) -> list[tuple[str, dict[str, Any]]]:
    """Runs of two models whose names differ at their ends, one of which failed."""
    rest = " ".join(settings)
    reason = "DoesNotFit: memory_budget: " + "workers may use less than that, and more is needed. " * 4 + "Raise it."
    return [
        (f"model=tiny_qwen3_235b_a22b {rest}", finished(0.5, 0.25, 2)),
        (f"model=tiny_qwen3_235b_a22c {rest} lora.r=16", finished(2.5, 1.25, 4)),
        (f"model=tiny_gpt_oss_20b {rest} strategy.num_microbatches=16", {"error": reason}),
    ]


@pytest.mark.parametrize("width", [80, 110, 200])
def test_nothing_of_a_table_is_left_out(
    width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On narrow screens settings are below each other."""
    monkeypatch.setenv("COLUMNS", str(width))
    present(sweep(tmp_path, *names("partition.round_microbatches=4")), tmp_path)
    said = capsys.readouterr().out
    table, reasons = said[: said.index("run 2 failed")], said[said.index("run 2 failed") :]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= width
    for text in ("tiny_qwen3_235b_a22b", "tiny_qwen3_235b_a22c", "2.500 s", "1.25 GiB", "1.5000", "failed"):
        assert text in table, text
    assert ("num microbatches 16" in table) == (width == 80)
    assert "Raise it." in reasons
    assert not any(line.startswith(" ") for line in reasons.splitlines()[:3])


def test_a_pictures_words_stay_within_it(tmp_path: Path) -> None:
    made = sweep(tmp_path, *names("lora.r=4"))
    for row in made:
        row["partition.round_microbatches"] = row["run"]  # a line each
    figure = figure_of(made, [*varied_settings(made), "partition.round_microbatches"])
    assert figure is not None
    figure.canvas.draw()
    for artist in (*figure.legends, *figure.texts):
        box = artist.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width
    (note,) = (text.get_text() for text in figure.texts if "failed" in text.get_text())
    assert "workers may use less" in note  # the reason, too


def test_nothing_lies_between_two_models(tmp_path: Path) -> None:
    made = sweep(
        tmp_path, ("model=tiny_llama", finished(0.5, 0.25, 4)), ("model=tiny_gpt_oss_20b", finished(0.25, 0.5, 4))
    )
    figure = figure_of(made, varied_settings(made))
    assert figure is not None
    assert {line.get_linestyle() for line in figure.axes[0].get_lines()} == {"None"}


@pytest.mark.parametrize(
    ("setting", "values", "order"),
    [
        ("lora.r", "1 16 2", "1 2 16"),
        ("strategy.emulation.memory", "2GiB 512MB 16MiB 1GB", "16MiB 512MB 1GB 2GiB"),
        ("strategy.memory_budget", "1GiB null 0.5 900MiB", "null 0.5 900MiB 1GiB"),
        ("optimizer.lr", "1e-2 3e-4 0.001", "3e-4 0.001 1e-2"),
        ("strategy.compile_layers", "true false", "false true"),
        ("model", "qwen_32b qwen_4b llama_8b", "llama_8b qwen_4b qwen_32b"),
        ("data.path", "b10 b9 2GiBs a", "2GiBs a b9 b10"),
    ],
)
def test_values_stand_in_their_order(setting: str, values: str, order: str, tmp_path: Path) -> None:
    """Along the axis, and in the legend where another setting is the axis."""
    made = sweep(tmp_path, *((f"{setting}={value}", finished(0.5, 0.25, 4)) for value in values.split()))
    figure = figure_of(made, varied_settings(made))
    assert figure is not None
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == order.split()
    for row in made:
        row["other"] = row["run"]
    figure = figure_of(made, ["other", setting])
    assert figure is not None
    assert [text.get_text().split()[-1] for text in figure.legends[0].get_texts()] == order.split()


def test_one_size_in_two_units_is_one_place(tmp_path: Path) -> None:
    runs = [(f"strategy.memory_budget={size}", finished(0.5, 0.25, 4)) for size in ("1GiB", "1024MiB", "2GiB")]
    figure = figure_of(made := sweep(tmp_path, *runs), varied_settings(made))
    assert figure is not None
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == ["1GiB", "2GiB"]


def test_no_two_lines_look_alike(tmp_path: Path) -> None:
    runs = [(f"lora.r={n // 12} data.seed={n % 12 + 1}", finished(0.5 + n, 0.25, 4)) for n in range(24)]
    figure = figure_of(made := sweep(tmp_path, *runs), varied_settings(made))
    assert figure is not None
    shown = {(line.get_color(), line.get_marker()) for line in figure.axes[0].get_lines()}
    assert len(shown) == len(figure.axes[0].get_lines()) == 12


def test_long_names_do_not_overlap(tmp_path: Path) -> None:
    models = [f"tiny_qwen3_{n}b_a22b" for n in range(1, 8)]
    runs = [(f"model={model} lora.r={r}", finished(0.5, 0.25, 4)) for model in models for r in (4, 8)]
    figure = figure_of(made := sweep(tmp_path, *runs), varied_settings(made))
    assert figure is not None
    figure.canvas.draw()
    labels = figure.axes[-1].get_xticklabels()
    assert [label.get_text() for label in labels] == models
    assert {label.get_rotation() for label in labels} == {30}
    shown = figure.axes[-1].get_tightbbox()
    assert shown is not None and shown.x0 >= 0 and shown.y0 >= 0


def test_names_of_settings_tell_them_apart() -> None:
    assert setting_names(["lora.r", "strategy.emulation.memory", "trainer.max_steps"]) == {
        "lora.r": "lora r",
        "strategy.emulation.memory": "memory",
        "trainer.max_steps": "max steps",
    }
    assert setting_names(["data.seed", "seed", "model"]) == {"data.seed": "data seed", "seed": "seed", "model": "model"}


def test_a_sweep_of_failures_has_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    present(sweep(tmp_path, ("lora.r=0", {"error": "ValueError: no"})), tmp_path)
    assert "run 0 failed: ValueError: no" in capsys.readouterr().out
    assert not (tmp_path / "sweep.png").exists()
