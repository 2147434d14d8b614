"""What every console command shares: name=value, one-line errors, exit codes, and a clean standard output."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from patience import PATIENCE_S
from rich.console import Group
from rich.table import Table

import lightning_roundpipe
from lightning_roundpipe.commands.console import CLOSED_PIPE, console_command
from lightning_roundpipe.commands.export import ExportOptions
from lightning_roundpipe.commands.options import Reply, Settings, as_json, option, parse_all, pasted, run, usage
from lightning_roundpipe.commands.plan import PlanOptions
from lightning_roundpipe.config import parse_bytes


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Tries every kind of option."""

    examples: ClassVar = ("file=a.json", "file=b.json workers=2")

    file: Path = option("what to read")
    workers: int = option("how many", default=8, at_least=1)
    rate: float | None = option("how fast", default=None, at_least=0)
    staleness: Literal[0, 1] = option("how late", default=0)
    format: Literal["table", "json"] = option("how to print it", default="table")
    ahead: bool = option("whether to hurry", default=False)
    memory: int | None = option("how much", default=None, read=parse_bytes)
    name: str = option("whose", default="ours", section="Of names")
    name_settings: Settings = option("more of it, as name.size=3", below="name")


def probe(*arguments: str) -> ProbeOptions:
    return parse_all(ProbeOptions, ["file=a.json", *arguments])[0].options


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
        (["file=a", "worker=2"], r"no option 'worker'. Did you mean workers=\? All are in --help"),
        (["file=a", "--worker", "2"], r"no option 'worker'. Did you mean workers=\?"),
        (["file=a", "zzz=2"], r"no option 'zzz'. Allowed are file, workers, .*name.NAME; see --help"),
        (["a.json"], "'a.json' is no option of the form name=value"),
        (["--file"], "file= has no value: write file=VALUE"),
        (["--file", "workers=2"], "file= has no value"),
        (["--file", "--workers", "2"], "file= has no value"),
        (["file=a", "name.size=1", "name.size=2"], "name.size= is given twice"),
        (["file=a", "rate.size=1"], "There is no option 'rate.size'"),
        (["file=a", "workers=0"], "workers=0 must be a whole number of at least 1"),
        (["file=a", "workers=2.5"], "workers='2.5' must be a whole number"),
        (["file=a", "workers=null"], "workers='null' must be a whole number"),
        (["file=a", "rate=fast"], "rate='fast' must be a number"),
        (["file=a", "rate=nan"], "rate='nan' must be a number"),
        (["file=a", "rate=inf"], "rate='inf' must be a number"),
        (["file=a", "rate=-1"], "rate=-1 must be a number of at least 0"),
        (["file=a", "staleness=2"], "staleness='2' must be one of 0, 1"),
        (["file=a", "format=yaml"], "format='yaml' must be one of table, json"),
        (["file=a", "format=jason"], r"must be one of table, json. Did you mean json\?"),
        (["file=a", "ahead=maybe"], "ahead='maybe' must be true or false"),
        (["file=a", "memory=lots"], "memory='lots' is not a size"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_all(ProbeOptions, arguments)
    assert run("roundpipe-probe", ProbeOptions, lambda options: Reply("answer"), arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("roundpipe-probe: ")
    assert captured.err.count("\n") == 1


def test_only_the_answer_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(options: ProbeOptions) -> Reply:
        print("a library talks")
        return Reply(as_json({"workers": options.workers, "name": "x" * 200}))

    assert run("roundpipe-probe", ProbeOptions, answer, ["file=a"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"workers": 8, "name": "x" * 200}
    assert captured.err == "a library talks\n"


def test_tables_go_through_rich(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("heading")
    table.add_row("cell")
    assert run("roundpipe-probe", ProbeOptions, lambda options: Reply(table, code=1), ["file=a"]) == 1
    out = capsys.readouterr().out
    assert "heading" in out and "cell" in out


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("roundpipe-probe", ProbeOptions, lambda options: Reply("answer"), ["worker=1", word]) == 0
    out = capsys.readouterr().out
    assert out.rstrip() == usage("roundpipe-probe", ProbeOptions)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:4] == ["roundpipe-probe NAME=VALUE ...", "", "Tries every kind of option.", ""]
    assert lines[4:7] == ["Examples:", "roundpipe-probe file=a.json", "roundpipe-probe file=b.json workers=2"]
    assert "workers=NUMBER how many (default: 8)" in lines
    assert lines[-3:] == [
        "Of names:",
        "name=NAME whose (default: ours)",
        "name.NAME=VALUE more of it, as name.size=3",
    ]


@pytest.mark.parametrize("given", [["--file=b.json"], ["--file", "b.json"], ["file=b.json"]])
def test_dashes_are_allowed(given: list[str]) -> None:
    found = parse_all(ProbeOptions, [*given, "--workers", "3", "--name.size", "4", "name.colour=[a=b, c]"])[0].options
    assert (found.file, found.workers) == (Path("b.json"), 3)
    assert found.name_settings == (("size", "4"), ("colour", "[a=b, c]"))


def test_what_is_pasted_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = f"plan='{'forward [b]0-3[/b]; ' * 20}'"
    group = Group("words " * 20, pasted(text))
    assert run("roundpipe-probe", ProbeOptions, lambda options: Reply(group), ["file=a"]) == 0
    *others, last = capsys.readouterr().out.splitlines()
    assert last == text
    assert len(others) > 2 and max(map(len, others)) <= 40


def _raise(error: Exception) -> Any:
    raise error


def test_a_bug_keeps_its_traceback_and_a_mistake_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """What was raised by this package is about the user's input; what a library or a test raised is not."""
    for error in (ValueError("not ours"), KeyError("bug")):
        with pytest.raises(type(error)):
            run("roundpipe-probe", ProbeOptions, lambda options, error=error: _raise(error), ["file=a"])
    with pytest.raises(ValueError, match="JSON"):
        run("roundpipe-probe", ProbeOptions, lambda options: Reply(as_json(float("nan"))), ["file=a"])
    assert run("roundpipe-probe", ProbeOptions, lambda options: Reply(Path("no/such").read_text()), ["file=a"]) == 2
    assert "no/such" in capsys.readouterr().err


ANSWERS = {
    "text": "return run('p', O, lambda options: Reply('line\\n' * 200000), [])",
    "a table": "return run('p', O, lambda options: Reply(Text('line\\n' * 200000)), [])",
    "a little": "return run('p', O, lambda options: Reply('line'), [])",
    "little, and the exit is elsewhere": "print('line'); sys.exit(0)",
    "errors": "print('line\\n' * 200000, file=sys.stderr)",
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_reader_that_stops_early_is_no_error(kind: str) -> None:
    """Without a word: neither a traceback, nor what Python says when it flushes at exit."""
    code = (
        "import sys; from dataclasses import dataclass\n"
        "from rich.text import Text\n"
        "from lightning_roundpipe.commands.console import console_command\n"
        "from lightning_roundpipe.commands.options import Reply, run\n"
        "@dataclass\nclass O:\n    'Long.'\n"
        f"@console_command\ndef main():\n    {ANSWERS[kind]}\n"
        "sys.stdin.read()\nsys.exit(main())"
    )
    read, write = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    out, errors = (subprocess.PIPE, write) if kind == "errors" else (write, subprocess.PIPE)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=out, stderr=errors, stdin=subprocess.PIPE, text=True, env=environment
    )
    os.close(write)
    os.close(read)
    texts = process.communicate(timeout=PATIENCE_S)
    assert not any(texts) and process.returncode == CLOSED_PIPE


@pytest.mark.parametrize("program", ["roundpipe-plan", "roundpipe-export", "roundpipe-train"])
def test_every_command_says_its_version(program: str) -> None:
    script = Path(sys.executable).with_name(program)
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"lightning-roundpipe {lightning_roundpipe.__version__}\n"


@pytest.mark.parametrize("options", [PlanOptions, ExportOptions])
def test_help_is_short_and_its_examples_are_right(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = usage("roundpipe-command", options).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 54
    assert len(options.examples) >= 3
    for example in options.examples:
        parse_all(options, shlex.split(example))


def test_only_the_line_about_a_kernel_is_silenced(caplog: pytest.LogCaptureFixture) -> None:
    """PEFT imports bitsandbytes, which logs it on some processors."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def main() -> None:
        logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please ...", "offline")
        logger.warning("something else")

    console_command(main)()
    assert caplog.messages == ["something else"]


def test_a_command_returns_what_its_function_does() -> None:
    assert console_command(lambda: 3)() == 3
