"""Case files: what they say, and what is wrong with the ones that are no case files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from lightning_roundpipe.planning.cases import Schedule, read_cases, read_json

PAPER = Path(__file__).parents[2] / "conf" / "cases" / "paper.json"

BASELINE: dict[str, Any] = {
    "model": "m",
    "schedule": "1f1b",
    "workers": 2,
    "microbatches": 4,
    "layers": 3,
    "forward_ms": 1,
    "backward_ms": 2.5,
    "head_forward_ms": 0,
    "head_backward_ms": 0.0,
    "hop_ms": 0.25,
    "stages": [2, 1],
}
ROUNDPIPE = BASELINE | {"schedule": "roundpipe", "stages": {"forward": [2], "backward": [1, 0, 2]}}


def written(folder: Path, data: object) -> Path:
    file = folder / "cases.json"
    file.write_text(json.dumps(data))
    return file


def test_the_papers_cases() -> None:
    cases = read_cases(PAPER)
    assert {case.schedule for case in cases} == set(get_args(Schedule))
    assert len({(case.model, case.schedule) for case in cases}) == len(cases) == 25
    assert sum(case.expected is not None for case in cases) == 15
    costs = cases[0].costs(scale=2)
    assert len(costs) == cases[0].layers + 1
    assert costs.calls[-1].layer == "head"
    assert costs.calls[0].forward_s == pytest.approx(2e-3 * cases[0].forward_ms)


def test_one_case_or_a_list(tmp_path: Path) -> None:
    [case] = read_cases(written(tmp_path, BASELINE))
    assert (case.forward_stages, case.backward_stages, case.expected) == ((2, 1), (), None)
    assert (case.forward_ms, case.backward_ms, case.hop_ms) == (1, 2.5, 0.25)
    again, other = read_cases(written(tmp_path, [BASELINE, ROUNDPIPE | {"expected": {"fill_pct": 3}}]))
    assert again == case
    assert (other.forward_stages, other.backward_stages) == ((2,), (1, 0, 2))
    assert other.expected == {"fill_pct": 3}
    one_stage = {"forward": [], "backward": [3]}
    assert read_cases(written(tmp_path, ROUNDPIPE | {"stages": one_stage}))[0].forward_stages == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"model": "\xff"}', "is not JSON"),
        (b"[" + b"9" * 5000 + b"]", "is not JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"[]", "holds no case"),
        (b"3", "case 0: expected an object with the keys model, schedule"),
        (b'["a"]', 'case 0: expected an object .* not "a"'),
        (b"{}", "case 0: it lacks 'model'"),
        (b'[{"model": "m"}]', "case 0: it lacks 'schedule'; it needs model, schedule, workers"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_cases(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "cases.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"cases.json.*{message}"):
        read_cases(file)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_json(tmp_path)


@pytest.mark.parametrize("key", BASELINE)
def test_every_key_is_needed(tmp_path: Path, key: str) -> None:
    case = {name: value for name, value in BASELINE.items() if name != key}
    with pytest.raises(ValueError, match=f"case 1: it lacks '{key}'"):
        read_cases(written(tmp_path, [BASELINE, case]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hop": 1}, "unknown key 'hop'; it takes model, .*stages, expected"),
        ({"model": 3}, "model=3 must be text"),
        ({"schedule": "1F1B"}, 'schedule="1F1B" must be one of 1f1b, interleaved-1f1b, gpipe, looped-bfs, roundpipe'),
        ({"schedule": ["1f1b"]}, r'schedule=\["1f1b"\] must be one of'),
        ({"workers": 0}, "workers=0 must be a whole number of at least 1"),
        ({"workers": 2.5}, "workers=2.5 must be a whole number"),
        ({"workers": True}, "workers=true must be a whole number"),
        ({"microbatches": "4"}, 'microbatches="4" must be a whole number'),
        ({"layers": 0, "stages": [0]}, "layers=0 must be a whole number of at least 1"),
        ({"layers": 10**400}, "layers=1000.*... must be a whole number of at least 1, and 1,000,000 at most"),
        ({"forward_ms": -1}, "forward_ms=-1 must be a number of 0 to"),
        ({"forward_ms": "1"}, 'forward_ms="1" must be a number'),
        ({"forward_ms": None}, "forward_ms=null must be a number"),
        ({"backward_ms": float("nan")}, "backward_ms=NaN must be a number"),
        ({"head_forward_ms": float("inf")}, "head_forward_ms=Infinity must be a number"),
        ({"head_backward_ms": False}, "head_backward_ms=false must be a number"),
        ({"hop_ms": 1e16}, r"hop_ms=1e\+16 must be a number of 0 to 1e\+15 milliseconds"),
        ({"stages": [1, 1]}, "stages must hold layers=3 together, but they hold 2"),
        ({"stages": []}, "stages is empty"),
        ({"stages": 3}, "stages=3 must be a list"),
        ({"stages": [4, -1]}, r"stages\[1\]=-1 must be a whole number of layers, 0 or more"),
        ({"stages": [2, "1"]}, r'stages\[1\]="1" must be a whole number'),
        ({"stages": {"forward": [3], "backward": [0, 3]}}, "stages of 1f1b must be one list"),
        ({"expected": 3}, "expected must be null or hold numbers for some of makespan_ms"),
        ({"expected": {"bubble": 3}}, "expected must be null or"),
        ({"expected": {"bubble_pct": "3"}}, "expected must be null or"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"cases.json, case 0: .*{message}"):
        read_cases(written(tmp_path, BASELINE | change))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([1, 2], r'stages of roundpipe must be {"forward": \[...\], "backward": \[...\]}, .* not \[1, 2\]'),
        ({"forward": [3]}, "stages of roundpipe must be"),
        ({"forward": [3], "backward": [0, 3], "fused": 1}, "stages of roundpipe must be"),
        ({"forward": [3], "backward": []}, "stages.backward is empty"),
        ({"forward": 3, "backward": [0, 3]}, "stages.forward=3 must be a list"),
        ({"forward": [3], "backward": [0, 2]}, "stages.backward must hold layers=3 together, but they hold 2"),
        ({"forward": [3], "backward": [1, 2]}, r"the fused stage, stages.backward\[0\], must hold layers=3 .* hold 4"),
        ({"forward": [2.0, 1], "backward": [0, 3]}, r"stages.forward\[0\]=2.0 must be a whole number"),
    ],
)
def test_roundpipes_stages(tmp_path: Path, stages: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cases(written(tmp_path, ROUNDPIPE | {"stages": stages}))


def test_a_misspelt_key_is_shown(tmp_path: Path) -> None:
    case = {("hop_msec" if name == "hop_ms" else name): value for name, value in BASELINE.items()}
    with pytest.raises(ValueError, match=r"it lacks 'hop_ms' \('hop_msec' is not known\)"):
        read_cases(written(tmp_path, case))
