"""``roundpipe-simulate``: what it prints, draws and refuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S
from rich.console import Console

from lightning_roundpipe.commands import simulate
from lightning_roundpipe.commands.options import parse_all
from lightning_roundpipe.planning.cases import FIGURES, read_cases

PAPER = Path(__file__).parents[1] / "conf" / "cases" / "paper.json"
CASES: list[dict[str, Any]] = json.loads(PAPER.read_text())


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["roundpipe-simulate", *arguments])
    code = simulate.main()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *arguments: command(capsys, monkeypatch, *arguments)


def test_json_has_the_papers_figures_in_the_order_of_the_file(call: Any) -> None:
    code, out, err = call(f"case={PAPER}", "format=json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [(row["model"], row["schedule"]) for row in rows] == [(case["model"], case["schedule"]) for case in CASES]
    for row, case in zip(rows, CASES, strict=True):
        assert row["fill_pct"] + row["switch_pct"] + row["drain_pct"] + row["intra_pct"] == pytest.approx(
            row["bubble_pct"]
        )
        for name, value in (case["expected"] or {}).items():
            assert abs(row[name] - value) <= (1e-3 if name == "makespan_ms" else 1e-4), (row, name)
        assert ("asynchronous_pct" in row) == (row["schedule"] == "roundpipe")


def test_one_case_is_a_list_of_one(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps(CASES[0]))
    code, out, _ = call("format=json", f"case={file}")
    [row] = json.loads(out)
    assert code == 0 and set(FIGURES) < set(row)
    assert call("format=json", f"case={file}")[1] == out, "not the same twice"


@pytest.mark.parametrize(("columns", "makespan", "bubble"), [(80, "39,716.5", "31.21"), (120, "39,716.460", "31.2119")])
def test_table_fits_the_terminal(columns: int, makespan: str, bubble: str) -> None:
    table = simulate.simulate(simulate.SimulateOptions(case=str(PAPER))).shown
    console = Console(width=columns, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the process
    console.print(table)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= columns
    [row] = [line for line in lines if "qwen3-235b-a22b-lora" in line and " 1f1b" in line]
    assert makespan in row and bubble in row, "a row is broken over lines"
    assert sum(any(case["model"] in line for case in CASES) for line in lines) == len(CASES)
    assert "…" not in "".join(lines)
    assert any("15 cases have expected figures" in line for line in lines)
    assert any("8 workers, 16 microbatches" in line for line in lines)


def test_cases_that_come_with_the_package_have_names(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no checkout
    assert call("case=paper", "format=json")[1] == call(f"case={PAPER}", "format=json")[1]
    rows = json.loads(call("case=qwen3-32b", "format=json")[1])
    assert [row["model"] for row in rows] == 5 * ["qwen3-32b"]
    for given, message in (
        ("papr", "There is no case=papr. Did you mean paper? It is a JSON file, or one of paper, qwen3-1.7b"),
        ("conf/cases/paper.json", "conf/cases/paper.json is not there. The package's own cases are case=paper"),
        ("qwen3-31b", "Did you mean qwen3-32b?"),
    ):
        code, out, err = call(f"case={given}")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_table_of_different_sizes_and_odd_names(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    small = CASES[0] | {"model": "[red]x[/red] " + 40 * "y", "workers": 9, "microbatches": 3, "expected": None}
    file.write_text(json.dumps([CASES[0], small]))
    code, out, err = call(f"case={file}")
    assert (code, err) == (0, "")
    assert " N " in out and " M " in out and "[red]x[/red]" in out
    assert "1 case has expected figures" in out


def test_picture_and_trace(call: Any, tmp_path: Path) -> None:
    file, picture, trace = tmp_path / "cases.json", tmp_path / "picture.png", tmp_path / "trace.json"
    chosen = [case for case in CASES if case["model"] == "qwen3-1.7b"]
    file.write_text(json.dumps(chosen))
    code, out, err = call(f"case={file}", f"picture={picture}", f"trace={trace}", "format=json")
    assert (code, err, len(json.loads(out))) == (0, "", 5)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    records = json.loads(trace.read_text())["traceEvents"]
    for number, case in enumerate(read_cases(file)):
        ends = [r["ts"] + r["dur"] for r in records if r["ph"] == "X" and r["pid"] == number + 1]
        assert case.expected is not None
        assert max(ends) == pytest.approx(1e3 * case.expected["makespan_ms"], abs=1)
        assert len({r["tid"] for r in records if r["ph"] == "X" and r["pid"] == number + 1}) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "case= is missing"),
        (("case=no/such.json",), "no/such.json cannot be read: No such file or directory"),
        (("case={paper}", "format=yaml"), "format='yaml' must be one of table, json"),
        (("case={paper}", "pictures=a.png"), "no option 'pictures'. Did you mean picture=?"),
        (("case={paper}", "picture=a.jpg"), "picture=a.jpg must be the name of a file that ends in .png, .pdf, .svg"),
        (("case={paper}", "picture=no/such/a.png"), "there is no folder no/such"),
        (("case={paper}", "trace={folder}"), "is a folder"),
        (("case={paper}", "trace={paper}"), "would overwrite case"),
        (("case={folder}/bad.json",), "bad.json, case 1: microbatches=0 must be a whole number of at least 1"),
        (("case={folder}/stages.json",), "stages.json, case 0: 1f1b runs one stage on each worker"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    call: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "bad.json").write_text(json.dumps([CASES[0], CASES[1] | {"microbatches": 0}]))
    (tmp_path / "stages.json").write_text(json.dumps(CASES[0] | {"workers": 7}))
    code, out, err = call(*(text.format(paper=PAPER, folder=tmp_path) for text in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("roundpipe-simulate: ") and message in err and err.count("\n") == 1


def test_it_needs_neither_torch_nor_matplotlib_to_print() -> None:
    """It answers at once on a laptop; importing either takes longer than the whole paper."""
    code = (
        "import sys; from lightning_roundpipe.commands.simulate import main\n"
        f"sys.argv = ['roundpipe-simulate', {f'case={PAPER}'!r}, 'format=json']\n"
        "assert main() == 0 and not {'torch', 'matplotlib', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=PATIENCE_S)


def test_commands_in_the_documents_are_right() -> None:
    root = PAPER.parents[2]
    text = "\n".join(file.read_text() for file in [root / "README.md", *(root / "docs").rglob("*.md")])
    lines = re.findall(r"^roundpipe-simulate (.*)$", text, flags=re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        parse_all(simulate.SimulateOptions, shlex.split(line))


def test_the_case_in_the_documents_runs(tmp_path: Path) -> None:
    [case] = re.findall(r"```json\n(.*?)```", (PAPER.parents[2] / "docs" / "schedules.md").read_text(), flags=re.DOTALL)
    file = tmp_path / "case.json"
    file.write_text(case)
    reply = simulate.simulate(simulate.SimulateOptions(case=str(file), format="json"))
    assert json.loads(str(reply.shown))[0]["model"] == "tiny"
