"""Case files: what they say, and what is wrong with the ones that are no case files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # its files import each other by their names

import simulate
from paper_cases import read_cases

BASELINE: dict[str, Any] = {
    "model": "m", "schedule": "1f1b", "workers": 2, "microbatches": 4, "layers": 3, "forward_ms": 1,
    "backward_ms": 2.5, "head_forward_ms": 0, "head_backward_ms": 0.0, "hop_ms": 0.25, "stages": [2, 1],
}  # fmt: skip
ROUNDPIPE = BASELINE | {"schedule": "roundpipe", "stages": {"forward": [2], "backward": [1, 0, 2]}}


def written(folder: Path, data: object) -> Path:
    file = folder / "cases.json"
    file.write_text(json.dumps(data))
    return file


def test_a_file_of_cases(tmp_path: Path) -> None:
    one, two = read_cases(written(tmp_path, [BASELINE, ROUNDPIPE]))
    assert (one.forward_stages, one.backward_stages) == ((2, 1), ())
    assert (two.forward_stages, two.backward_stages) == ((2,), (1, 0, 2))
    costs = two.costs(2.0)
    assert [call.forward_s for call in costs] == [2e-3, 2e-3, 2e-3, 0.0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**BASELINE, "schedule": "1F1B"}, "schedule='1F1B' must be one of 1f1b, interleaved"),
        ({**ROUNDPIPE, "stages": {"forward": [3], "backward": [1, 2]}}, "stages must hold layers=3"),
        ({**BASELINE, "hop": 1}, "unexpected keyword argument 'hop'"),
    ],
)
def test_a_wrong_case_is_named(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"cases.json, case 1: .*{message}"):
        read_cases(written(tmp_path, [BASELINE, data]))


def test_the_schedules_of_a_model_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    simulate.main(["llama3.1-8b", "--json", f"--trace={trace}"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["schedule"] for row in rows] == ["1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "roundpipe"]
    assert rows[-1]["makespan_ms"] == pytest.approx(6100.545)
    events = [event for event in json.loads(trace.read_text()) if event["ph"] == "X" and event["pid"] == 4]
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(6100545)
    with pytest.raises(SystemExit):
        simulate.main(["llama4"])
    assert "llama4 is none of the paper's models, " in capsys.readouterr().err
