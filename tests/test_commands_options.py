"""What every console command shares: name=value, one-line errors, exit codes, and a clean standard output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from patience import PATIENCE_S
from rich.table import Table

from lightning_roundpipe.commands.options import as_json, option, parse, run, usage
from lightning_roundpipe.config import parse_bytes


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Tries every kind of option."""

    file: Path = option("what to read")
    workers: int = option("how many", default=8, at_least=1)
    rate: float | None = option("how fast", default=None, at_least=0)
    staleness: Literal[0, 1] = option("how late", default=0)
    format: Literal["table", "json"] = option("how to print it", default="table")
    ahead: bool = option("whether to hurry", default=False)
    memory: int | None = option("how much", default=None, read=parse_bytes)
    name: str = option("whose", default="ours")


def probe(*arguments: str) -> ProbeOptions:
    return parse(ProbeOptions, ["file=a.json", *arguments])


def test_values_are_of_the_annotated_kinds() -> None:
    assert probe() == ProbeOptions(file=Path("a.json"))
    assert probe(
        "workers=2", "rate=1e-3", "staleness=1", "format=json", "ahead=True", "memory=2GiB", "name=a=b"
    ) == ProbeOptions(
        file=Path("a.json"),
        workers=2,
        rate=0.001,
        staleness=1,
        format="json",
        ahead=True,
        memory=2 * 2**30,
        name="a=b",
    )
    assert probe("rate=null", "memory=none") == ProbeOptions(file=Path("a.json"))
    assert probe("name=none").name == "none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "file= is missing. It is what to read: file=FILE"),
        (["file="], "file= has no value"),
        (["file"], "file= has no value"),
        (["file=a", "file=b"], "file= is given twice"),
        (["file=a", "worker=2"], r"no option 'worker'. Did you mean workers=\? Allowed are file, workers, rate, "),
        (["file=a", "zzz=2"], r"no option 'zzz'. Allowed are file, workers"),
        (["a.json"], "'a.json' is no option of the form name=value"),
        (["--file=a"], "write file=VALUE, without dashes"),
        (["file=a", "workers=0"], "workers=0 must be a whole number of at least 1"),
        (["file=a", "workers=2.5"], "workers='2.5' must be a whole number"),
        (["file=a", "workers=null"], "workers='null' must be a whole number"),
        (["file=a", "rate=fast"], "rate='fast' must be a number"),
        (["file=a", "rate=nan"], "rate='nan' must be a number"),
        (["file=a", "rate=inf"], "rate='inf' must be a number"),
        (["file=a", "rate=-1"], "rate=-1 must be a number of at least 0"),
        (["file=a", "staleness=2"], "staleness='2' must be one of 0, 1"),
        (["file=a", "format=yaml"], "format='yaml' must be one of table, json"),
        (["file=a", "ahead=maybe"], "ahead='maybe' must be true or false"),
        (["file=a", "memory=lots"], "memory='lots' is not a size"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        parse(ProbeOptions, arguments)
    assert run("roundpipe-probe", ProbeOptions, lambda options: "answer", arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("roundpipe-probe: ")
    assert captured.err.count("\n") == 1


def test_only_the_answer_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(options: ProbeOptions) -> str:
        print("a library talks")
        return as_json({"workers": options.workers, "name": "x" * 200})

    assert run("roundpipe-probe", ProbeOptions, answer, ["file=a"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"workers": 8, "name": "x" * 200}
    assert captured.err == "a library talks\n"


def test_tables_go_through_rich(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("heading")
    table.add_row("cell")
    assert run("roundpipe-probe", ProbeOptions, lambda options: table, ["file=a"]) == 0
    out = capsys.readouterr().out
    assert "heading" in out and "cell" in out


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("roundpipe-probe", ProbeOptions, lambda options: "answer", ["worker=1", word]) == 0
    out = capsys.readouterr().out
    assert out.rstrip() == usage("roundpipe-probe", ProbeOptions)
    assert out.startswith("roundpipe-probe file=FILE [workers=NUMBER] [rate=NUMBER] [staleness=0|1]")
    assert "Tries every kind of option." in out
    assert "how many (default: 8)" in out


def _raise(error: Exception) -> Any:
    raise error


def test_a_bug_keeps_its_traceback_and_a_mistake_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """What was raised by this package is about the user's input; what a library or a test raised is not."""
    for error in (ValueError("not ours"), KeyError("bug")):
        with pytest.raises(type(error)):
            run("roundpipe-probe", ProbeOptions, lambda options, error=error: _raise(error), ["file=a"])
    with pytest.raises(ValueError, match="JSON"):
        run("roundpipe-probe", ProbeOptions, lambda options: as_json(float("nan")), ["file=a"])
    assert run("roundpipe-probe", ProbeOptions, lambda options: Path("no/such").read_text(), ["file=a"]) == 2
    assert "no/such" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = (
        "import sys; from dataclasses import dataclass\n"
        "from lightning_roundpipe.commands.options import run\n"
        "@dataclass\nclass O:\n    'Long.'\n"
        "sys.exit(run('p', O, lambda options: 'line\\n' * 200000))"
    )
    read, write = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.close(write)
    os.read(read, 10)
    os.close(read)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert errors == "" and process.returncode == 141
