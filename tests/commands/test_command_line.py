"""What console commands share: name=value, one-line errors, exit codes, formats, and a clean standard output."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

import lightning_roundpipe
from lightning_roundpipe.commands import export, plan
from lightning_roundpipe.commands.answer import Answer, table
from lightning_roundpipe.commands.command_line import Parser, add_option, one_of, run, seconds, whole
from lightning_roundpipe.commands.console import CLOSED_PIPE, console_command
from lightning_roundpipe.config import parse_bytes


def parser():
    made = Parser("roundpipe-probe", "Tries every kind of option.", ["file=a.json"], ["lora"])
    add_option(made, "file", "what to read")
    add_option(made, "workers", "how many", whole(1, 8), "N")
    add_option(made, "rate", "how fast", seconds)
    add_option(made, "format", "how to print it", one_of("table", "json"))
    add_option(made, "memory", "how much", parse_bytes, "SIZE")
    return made


def test_values_are_read_whichever_way_they_are_written():
    values, settings = parser().read(
        ["file=a=b", "--workers", "2", "--rate=1e-3", "memory=2GiB", "lora.r=[1, 2]", "--lora.x=3"]
    )
    assert values == {"file": "a=b", "workers": 2, "rate": 0.001, "memory": 2 * 2**30}
    assert settings == {"lora": (("r", "[1, 2]"), ("x", "3"))}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["file=a", "worker=2"], "There is no option 'worker'. Did you mean workers=?"),
        (["file=a", "--worker", "2"], "There is no option 'worker'. Did you mean workers=?"),
        (["file=a", "nothing=2"], "There are file=, workers=, rate=, format=, memory=."),
        (["file=a", "lora.r="], "lora.r= has no value: write lora.r=VALUE."),
        (["file=a", "workers"], "workers has no value: write workers=VALUE."),
        (["file=a", "workers=0"], "workers=0 must be a whole number of 1 to 8"),
        (["file=a", "rate=fast"], "rate=fast must be a number of seconds"),
        (["file=a", "format=jason"], "format=jason must be one of table, json. Did you mean json?"),
        (["file=a", "memory=lots"], "memory='lots' is not a size"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["roundpipe-probe", *arguments])
    assert run("roundpipe-probe", lambda given: Answer(data=parser().read(given))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("roundpipe-probe: ") and message in captured.err
    assert captured.err.count("\n") == 1


LONG = f"plan='{'forward [b]0-3[/b]; ' * 20}'"
ANSWER = Answer(
    verdict="Fits: 3 tokens/s.",
    facts=["words " * 20],
    remedies=["What would fit:", "  " + LONG],
    notes=["Assumed something."],
    tables=[table(["a long heading " * 9], ["GiB", "MiB"], [["a name " * 20, "1,234,567.00", "8"]])],
    paste=[LONG],
)


def test_text_has_all_parts_and_breaks_neither_numbers_nor_what_is_pasted(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = ANSWER.printed().splitlines()
    assert lines[0] == "Fits: 3 tokens/s." and lines[-1] == LONG
    assert [line for line in lines if len(line) > 40] == [f"  {LONG}", LONG]
    assert any("1,234,567.00" in line for line in lines)
    assert lines.index("What would fit:") < lines.index("Assumed something.")


def test_only_the_answer_is_on_standard_output(monkeypatch, capsys):
    def answer(arguments):
        print("a library talks")
        return Answer(data={"name": "x" * 200}, form="json", code=1)

    monkeypatch.setattr(sys, "argv", ["roundpipe-probe"])
    assert run("roundpipe-probe", answer) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"name": "x" * 200}
    assert captured.err == "a library talks\n"


def test_csv_has_a_column_for_each_value():
    data = {"fits": True, "model": "a, b", "stages": [1], "host_memory": {"needed_bytes": 3, "items": []}, "lora": None}
    assert Answer(data=data, form="csv").printed() == 'fits,model,host_memory.needed_bytes,lora\nTrue,"a, b",3,\n'


def _raise(error):
    raise error


def test_a_bug_keeps_its_traceback_and_a_mistake_does_not(monkeypatch, capsys):
    """What was raised by this package is about the user's input; what a library or a test raised is not."""
    monkeypatch.setattr(sys, "argv", ["roundpipe-probe"])
    for error in (ValueError("not ours"), KeyError("bug")):
        with pytest.raises(type(error)):
            run("roundpipe-probe", lambda arguments, error=error: _raise(error))
    with pytest.raises(ValueError, match="JSON"):
        run("roundpipe-probe", lambda arguments: Answer(data=float("nan"), form="json"))
    assert run("roundpipe-probe", lambda arguments: Answer(verdict=Path("no/such").read_text())) == 2
    assert "no/such" in capsys.readouterr().err


def test_ctrl_c_before_training_is_one_line(monkeypatch, capsys):
    """While libraries are imported or a model is loaded, no traceback of theirs follows."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/roundpipe-probe"])
    with pytest.raises(SystemExit) as ended:
        console_command(lambda: _raise(KeyboardInterrupt()))()
    assert ended.value.code == 130 and capsys.readouterr().err == "roundpipe-probe: interrupted.\n"


def test_a_reader_that_stops_early_is_no_error():
    """Without a word: neither a traceback, nor what Python says when it flushes at exit."""
    code = (
        "import sys\n"
        "from lightning_roundpipe.commands.answer import Answer\n"
        "from lightning_roundpipe.commands.console import console_command\n"
        "from lightning_roundpipe.commands.command_line import run\n"
        "@console_command\ndef main():\n    return run('p', lambda given: Answer(verdict='line\\n' * 20000))\n"
        "sys.stdin.read()\nsys.exit(main())"
    )
    read, write = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=write,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
    )
    os.close(write)
    os.close(read)
    texts = process.communicate(timeout=PATIENCE_S)
    assert not any(texts) and process.returncode == CLOSED_PIPE


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("plan", ["modle=qwen3_8b"]),
        ("plan", ["model=qwen3_9b", "gpu=rtx4090"]),
        ("plan", ["model=qwen3_8b", "gpu=rtx4091"]),
        ("plan", ["model=qwen3_8b", "gpu=rtx4090", "lora=al_linear"]),
        ("export", ["rn=runs"]),
        ("export", ["run=no/such", "to=out"]),
    ],
)
def test_mistyped_names_are_reported_before_torch_is_imported(command, arguments):
    code = (
        f"import sys; from lightning_roundpipe.commands.{command} import main; code = main(); "
        "sys.exit(3 if 'torch' in sys.modules else code)"
    )
    assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True).returncode == 2


@pytest.mark.parametrize("program", ["roundpipe-plan", "roundpipe-export", "roundpipe-train"])
def test_every_command_says_its_version(program):
    script = Path(sys.executable).with_name(program)
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"lightning-roundpipe {lightning_roundpipe.__version__}\n"


@pytest.mark.parametrize("command", [plan, export])
def test_help_is_short_and_its_examples_are_right(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["roundpipe", "--help"])
    with pytest.raises(SystemExit, match="0"):
        command.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 60
    examples = [shlex.split(line)[1:] for line in lines if line.startswith("  roundpipe-")]
    assert len(examples) >= 3
    for example in examples:
        assert command.parser().read(example)
