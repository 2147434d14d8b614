"""The first half hour on a GPU, as far as it goes without one: its pieces on the CPU, resuming, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # its files import each other by their names

import gpu_first_run  # noqa: E402
import gpu_semantics  # noqa: E402
from gpu_pieces import PIECES, Piece  # noqa: E402


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_first_run.main(["--out", str(tmp_path)]) == gpu_first_run.NO_DEVICE == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_piece_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"--only probes: there is no such one\. Known: .*probe-copies"):
        gpu_first_run.main(["--only", "probes"])


def test_every_piece_fits_into_one_call() -> None:
    assert max(piece.about_s for piece in PIECES.values()) < gpu_first_run.WITHIN
    assert {piece.group for piece in PIECES.values()} == {"probe", "semantics", "tests", "speed"}


class TestCalls:
    """Pieces that take 100 s each, of which the second one fails."""

    @pytest.fixture(autouse=True)
    def pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = ["a-one", "a-two", "b-three", "b-four"]
        made = {
            name: Piece(name, name[0], "summary", 100, lambda *_: {}, cuda=name == "b-four", limit_s=300)
            for name in names
        }
        monkeypatch.setattr(gpu_first_run, "PIECES", made)
        self.ran: list[str] = []
        self.limits: list[float] = []
        self.now = 0.0
        monkeypatch.setattr(gpu_first_run.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(gpu_first_run, "run_one", self.run_one)

    def run_one(self, what: str, script: Path, stem: Path, seconds: float, environment: Any) -> dict[str, Any]:
        name, *_ = json.loads(what)
        self.ran.append(name)
        self.limits.append(seconds)
        self.now += 100
        return {"reason": "CUDA error | sticky"} if name == "a-two" else {"rate_gb_per_s": 12.3456, "list": [1]}

    def test_go_on_where_the_last_one_ended(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        call = ["--device", "cpu", "--out", str(tmp_path), "--within", "250"]
        assert gpu_first_run.main(call) == 0
        assert self.ran == ["a-one", "a-two"]
        assert "No time was left for b-three: call it again." in capsys.readouterr().out
        assert gpu_first_run.main(call) == 0
        assert self.ran == ["a-one", "a-two", "b-three"], "what is known is not measured again; b-four needs a GPU"
        assert gpu_first_run.main([*call, "--only", "a-two", "--again"]) == 0
        assert self.ran[3:] == ["a-two"]

    def test_leave_a_file_and_a_table(self, tmp_path: Path) -> None:
        gpu_first_run.main(["--device", "cpu", "--out", str(tmp_path)])
        known = json.loads((tmp_path / "results.json").read_text())
        assert known["a-one"] == {"rate_gb_per_s": 12.3456, "list": [1], "piece_s": 100.0}
        table = (tmp_path / "table.md").read_text()
        assert "| a-one | rate_gb_per_s | 12.35 |" in table and "list" not in table
        assert "| a-two | failed | CUDA error / sticky |" in table

    def test_a_piece_that_had_too_little_time_is_not_known(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(gpu_first_run, "run_one", lambda *_: {"reason": "not done", "timed_out": True})
        gpu_first_run.main(["--device", "cpu", "--out", str(tmp_path), "--within", "150", "--only", "a-one"])
        assert not (tmp_path / "results.json").exists()
        assert "No time was left for a-one" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["plain", "masks", "lengths"])
def test_semantics(kind: str) -> None:
    assert gpu_semantics.compare("cpu", kind, workers=2)["worst_relative_difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failure_and_draws() -> None:
    assert gpu_semantics.failure("cpu")["said"] == "a layer that fails"
    assert gpu_semantics.dropout("cpu")["same_bits"]
    assert gpu_semantics.two_fits("cpu")["mib_after_run_3"] == 0


@pytest.mark.slow
def test_semantics_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_semantics, "CLOSE", {"32-true": 0.0})
    with pytest.raises(AssertionError, match="where plain training has"):
        gpu_semantics.compare("cpu")
