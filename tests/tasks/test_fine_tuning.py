"""What `roundpipe-train` does by itself: its first lines, and a demonstration that lives."""

import json
import re
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from lightning_roundpipe import train
from lightning_roundpipe.tasks.demonstration import prose, train_tokenizer

pytestmark = pytest.mark.usefixtures("working_folder")


def run(monkeypatch, capfd, *arguments):
    """What ``roundpipe-train`` prints, and its summary."""
    monkeypatch.setattr(sys, "argv", ["roundpipe-train", *arguments])
    train.main()
    out = capfd.readouterr().out
    return out, json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())


@pytest.mark.slow
def test_the_first_lines_say_what_will_happen(monkeypatch, capfd):
    """All but the parameters stand there before the weights are made, which may take minutes."""
    given = ["experiment=random_tokens", "lora=all_linear", "lora.r=2", "trainer.max_steps=1", "prompt=null"]
    make, before = AutoModelForCausalLM.from_config, []

    def reading_first(*args, **kwargs):
        before.append(capfd.readouterr().out)
        return make(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", reading_first)
    after, _ = run(monkeypatch, capfd, *given)
    assert [line.split()[0] for line in "".join(before).splitlines()] == ["run", "model", "folder"]
    out = "".join(before) + after
    said = dict(re.findall(r"^(\w+) +(.*)$", out.partition("Validation")[0], re.MULTILINE))
    assert said["run"] == "random_tokens"
    assert said["model"] == "a random llama"
    found = re.fullmatch(r"([\d,]+) of ([\d,]+) trained \(([\d.]+) %\): LoRA, rank 2", said["parameters"])
    assert found is not None
    trained, total = (int(found[number].replace(",", "")) for number in (1, 2))
    assert 100 * trained / total == pytest.approx(float(found[3]), rel=0.05)
    assert said["folder"] == out.splitlines()[-1]
    assert max(12 + len(value) for label, value in said.items() if label != "folder") <= 80


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demonstration_learns_words(monkeypatch, capfd):
    _, summary = run(monkeypatch, capfd, "experiment=tiny")
    assert summary["val_loss_after"] < 0.6 * summary["val_loss_before"]
    known = set(re.findall(r"[a-z]+", " ".join(prose().values()).lower()))
    completed = re.findall(r"[a-z]+", summary["completion_after"].lower())
    assert len(completed) >= 5
    assert sum(word in known for word in completed) >= 0.8 * len(completed)
    guessed = re.findall(r"[a-z]+", summary["completion_before"].lower())
    assert sum(word in known for word in guessed) < 0.8 * len(guessed)


def test_the_demonstrations_text_is_plain_english():
    texts = prose()
    assert 100_000 < sum(map(len, texts.values())) < 300_000
    lines = [line for text in texts.values() for line in text.splitlines()]
    assert all(line[0].isupper() and line.endswith(".") and "  " not in line for line in lines)
    tokenizer = train_tokenizer(texts, 512)
    assert len(tokenizer) == 512
    assert tokenizer.decode(tokenizer(lines[0])["input_ids"]) == lines[0]
    assert tokenizer("Straße")["input_ids"]  # every byte has a token
    assert tokenizer.decode(tokenizer("Straße")["input_ids"]) == "Straße"
