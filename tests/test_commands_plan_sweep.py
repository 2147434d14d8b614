"""``roundpipe-plan`` with several values: a table, CSV, JSON and a picture of all combinations."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.commands import plan, plan_sweep
from lightning_roundpipe.commands.plan_pictures import figure_of
from lightning_roundpipe.commands.plan_sweep import Cell

TINY = ("model=tiny_llama,tiny_smollm2_135m", "search_seconds=0", "sequence_length=64", "microbatches=2")

TINY_4090 = ("model=tiny_llama", "hardware=rtx4090x2", "microbatch_size=1", "sequence_length=64", "microbatches=2")


@pytest.fixture
def command(plan_command: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In this process, as starting others takes longer than such plans."""
    monkeypatch.setattr(plan_sweep, "cores", lambda: 1)
    return plan_command


@pytest.mark.slow
def test_a_row_has_the_figures_of_the_same_command_alone(command: Any) -> None:
    given = (*TINY[1:], "gpu=rtx4090", "format=json")
    code, out, err = command(TINY[0], *given, "lora=none,attention", "gpus=1,2")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 8
    assert err == ""
    assert rows[6]["given"] == {"model": "tiny_smollm2_135m", "lora": "attention", "gpus": "1"}
    for row in (rows[1], rows[6]):
        alone = json.loads(command(*given, *(f"{name}={text}" for name, text in row["given"].items()))[1])
        del alone["would_fit"]
        own = {"given": row["given"], "machine": f"rtx4090x{row['given']['gpus']}", "too_small": [], "error": None}
        assert row == own | alone


@pytest.mark.parametrize(
    ("given", "code", "small"),
    [
        (("memory=1GiB,30KB",), 1, ["", "", "worker", "worker"]),
        (("host_memory=1MB", "memory=1GiB,30KB"), 1, ["host", "host", "worker host", "worker host"]),
    ],
)
def test_what_is_too_small_is_said_and_the_exit_code_says_whether_all_fit(
    command: Any, given: tuple[str, ...], code: int, small: list[str]
) -> None:
    options = ("model=tiny_llama", "hardware=rtx4090x1,rtx4090x2", *TINY[1:])
    made, out, _ = command(*given, *options, "format=csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert made == code
    assert [row["too_small"] for row in rows] == small
    assert [row["machine"] for row in rows] == ["rtx4090x1", "rtx4090x2"] * (len(small) // 2)
    for row in rows:
        assert row["fits"] == str(not row["too_small"])
        assert bool(row["tokens_per_s"]) == bool(row["plan"]) == (not row["too_small"])
        assert (float(row["host_gib"]) > float(row["host_limit_gib"])) == ("host" in row["too_small"])


@pytest.mark.slow
def test_the_table(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = ("model=tiny_llama", "hardware=rtx4090x1", "memory=1GiB,30KB", "lora=none,attention", *TINY[1:])
    code, out, _ = command(*options)
    *lines, last = out.splitlines()
    assert code == 1 and lines[0] == "2 of 4 fit (estimated)."
    assert max(map(len, lines)) <= 80 and "…" not in out
    assert sum("no fit" in line for line in lines) == 2
    assert (
        "All with model=tiny_llama, hardware=rtx4090x1, sequence_length=64, microbatches=2, precision=bf16-mixed, "
        "staleness=0." in " ".join(lines)
    )
    program, *arguments = shlex.split(last)
    assert program == "roundpipe-plan"
    assert set(TINY[2:]) < set(arguments) and "search_seconds=0" not in arguments
    assert command(*arguments)[0] == 1, "the one of which it says so"


@pytest.mark.slow
def test_the_picture_has_a_bar_for_each(command: Any, tmp_path: Path) -> None:
    picture = tmp_path / "table.png"
    options = (*TINY, "gpu=rtx4090", "memory=1GiB,30KB", "format=json", f"picture={picture}")
    rows = json.loads(command(*options)[1])
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert [row["fits"] for row in rows] == [True, False] * 2
    combinations = plan.parser().read(options)
    cells = [
        Cell(one.given, one.texts, plan.wish_of(one, 0.0), row) for one, row in zip(combinations, rows, strict=True)
    ]
    [axes] = figure_of(cells).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[:2] == ["tiny_llama, 1GiB", "tiny_llama, 30KB (does not fit: worker too small)"] and len(names) == 4
    assert [bar.get_width() for bar in axes.patches] == [row["tokens_per_s"] or 0.0 for row in rows]  # type: ignore[attr-defined]


def test_what_is_wrong_with_one_is_an_error_of_its_row(command: Any) -> None:
    options = ("model=tiny_llama", "hardware=cpu", "search_seconds=0", "microbatches=2", "sequence_length=64,300")
    code, out, _ = command(*options)
    assert code == 2
    assert "1 of 2 fits (estimated); something is wrong with 1." in out and "mistake" in out
    assert "300: sequence_length=300 is longer than the 256 tokens" in " ".join(out.split())
    code, out, _ = command(*options, "format=json")
    rows = json.loads(out)
    assert [row["fits"] for row in rows] == [True, None]
    assert rows[0]["error"] is None and rows[1]["error"].startswith("sequence_length=300 is longer")
    assert list(csv.DictReader(io.StringIO(command(*options, "format=csv")[1])))[1]["error"] == rows[1]["error"]


def test_one_combination_as_csv_is_the_answer_of_it_alone(command: Any, tmp_path: Path) -> None:
    """With the search, the plan and the trace that one has."""
    trace, plan_text = tmp_path / "steps.json", "forward 0-2 3-5; fused 6-8; backward 3-5 0-2; round 2"
    options = (*TINY_4090, f"plan={plan_text}", "host_memory=64GiB")
    code, out, err = command(*options, "format=csv", f"trace={trace}")
    [row] = csv.DictReader(io.StringIO(out))
    alone = json.loads(command(*options, "format=json")[1])
    assert (code, err, row["plan"]) == (0, "", plan_text) and trace.stat().st_size > 0
    assert row["tokens_per_s"] == str(round(alone["tokens_per_s"], 1))
    assert command(*options, "format=csv", "memory=30KB")[0] == 1
    code, out, err = command(*TINY_4090[:3], "format=csv", "sequence_length=300")
    assert (code, out) == (2, "") and "sequence_length=300 is longer" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model=tiny_llama,,x", "hardware=cpu"), "model=tiny_llama,,x has an empty place"),
        (("model=tiny_llama", "hardware=cpu,auto"), "run roundpipe-plan hardware=auto, and give a table that file"),
        (("model=tiny_llama", "hardware=cpu", "lora=none,al_linear"), "There is no lora=al_linear. Did you mean"),
        (("model=tiny_llama", "hardware=cpu", "staleness=0,1", "lora.r=8"), "lora.r= is about adapters"),
        (("model=tiny_llama", "hardware=cpu", "format=json,csv"), "format=json,csv must be one of table"),
        (("model=tiny_llama", "hardware=cpu", "memory=1GiB,lots"), "memory='lots' is not a size"),
        (("model=tiny_llama", "hardware=cpu", "staleness=0,1", "trace=x.json"), "trace= is about one plan"),
        (
            ("model=tiny_llama", "hardware=cpu", f"microbatches={','.join(map(str, range(1, 1002)))}"),
            "These are 1,001 combinations, more than the 1,000 of a table",
        ),
    ],
)
def test_mistakes_are_one_line_before_anything_is_planned(
    command: Any, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and message in err


@pytest.mark.slow
def test_processes_give_the_same_rows_in_the_same_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*TINY, "hardware=rtx4090x1,rtx4090x2", "memory=1GiB,30KB", "format=json"]
    monkeypatch.setattr(sys, "argv", ["roundpipe-plan", *given])
    tables = []
    for processes in (2, 1):
        monkeypatch.setattr(plan_sweep, "cores", lambda processes=processes: processes)
        assert plan.main() == 1
        tables.append(json.loads(capsys.readouterr().out))
    assert tables[0] == tables[1] and len(tables[0]) == 8
