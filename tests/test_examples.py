"""The examples run as a user runs them, and print what they promise. `plain_lightning.py` is in `test_configs.py`."""

import ast
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from harness import quiet
from patience import PATIENCE_S

FOLDER = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


def printed(name, folder):
    """What the example says on standard output."""
    command = [sys.executable, FOLDER / f"{name}.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=6 * PATIENCE_S, check=True, cwd=folder)
    assert not list(folder.iterdir()), "it leaves files behind"
    return done.stdout


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_it_says_what_it_shows(file):
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    assert docstring
    assert f"python examples/{file.name}" in docstring
    assert f"## `{file.name}`" in (FOLDER / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_classification(tmp_path):
    said = printed("bert_classification", tmp_path)
    epochs = [float(accuracy) for accuracy in re.findall(r"^epoch \d: accuracy (.*)$", said, re.MULTILINE)]
    assert len(epochs) == 5
    assert max(epochs) > 0.9
    assert f"under plain Lightning: accuracy {max(epochs):.3f}" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vision(tmp_path):
    said = printed("vision_transformer", tmp_path)
    [(before, after)] = re.findall(r"^accuracy before (.*), after (.*)$", said, re.MULTILINE)
    assert float(before) < 0.5 and float(after) > 0.8
    [(needed, limit)] = re.findall(r"AdamW's state: (.*) MiB; memory of a device: (.*)MiB$", said, re.MULTILINE)
    peaks = [float(peak) for peak in re.findall(r"the devices held (.*) MiB, in", said)[0].split(", ")]
    assert len(peaks) == 4
    assert 0 < max(peaks) <= float(limit) < float(needed) / 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lora(tmp_path):
    said = printed("lora_chat", tmp_path)
    [(before, after)] = re.findall(r"^loss on the answers: (.*) before, (.*) after$", said, re.MULTILINE)
    assert float(before) > 4 and float(after) < 0.2
    answers = re.findall(r"^after, of (\w+): '(.*)' \(plain PEFT: the same\)$", said, re.MULTILINE)
    assert len(answers) == 8
    assert sum(answer.endswith(f" is the capital of {country}.") for country, answer in answers) >= 7
    assert ("Peru", "Lima is the capital of Peru.") in answers


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_preferences(tmp_path):
    said = printed("preference_dpo", tmp_path)
    found = re.findall(r"^(\w+): the better list gains in (.*) % of pairs, margin (.*)$", said, re.MULTILINE)
    assert [when for when, _, _ in found] == ["before", "after"]
    assert float(found[0][1]) == 0 and abs(float(found[0][2])) < 1e-6  # it is the reference
    assert float(found[1][1]) > 90 and float(found[1][2]) > 1
    assert "the reference is what it was" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_long_sequence(tmp_path):
    said = printed("long_sequence", tmp_path)
    [limit] = re.findall(r"^65,536 tokens in one sequence, device memory (.*)MiB$", said, re.MULTILINE)
    [plain] = re.findall(r"^plain Lightning +(.*) MiB", said, re.MULTILINE)
    [ours] = re.findall(r"^token_tiles=1024 +(.*) MiB", said, re.MULTILINE)
    assert float(ours) <= float(limit) < float(plain) / 4
    assert re.search(r"^token_tiles=None +does not fit$", said, re.MULTILINE)
    assert "losses of all steps equal those of plain Lightning: yes" in said


def test_the_notebook_shows_equal_losses_the_plan_and_the_step(tmp_path, monkeypatch, capsys):
    """Its cells run in order in one namespace, as Jupyter runs them."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((FOLDER / "quickstart.ipynb").read_text())
    assert "## `quickstart.ipynb`" in (FOLDER / "README.md").read_text()
    found = {"__name__": "__main__"}
    with warnings.catch_warnings(), quiet():
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), found)
                assert not [output for output in cell["outputs"] if output["output_type"] == "error"]
    said = capsys.readouterr().out
    assert len(found["plain"]) == len(found["ours"]) == 8
    assert found["ours"] == pytest.approx(found["plain"], abs=1e-5)
    assert found["report"]["plan"] in said and f"step 7: plain {found['plain'][7]:.6f}, " in said
    assert found["picture"].shape[1] > 1000
    assert not list(tmp_path.iterdir()), "it leaves files behind"
    shown = {output["output_type"] for cell in notebook["cells"] for output in cell.get("outputs", ())}
    assert shown == {"stream", "display_data"}  # what it prints and draws is saved with it
