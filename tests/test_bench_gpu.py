"""The benchmark that needs a GPU, as far as it goes without one: its rows on the CPU, its processes and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # its files import each other by their names

import bench_gpu  # noqa: E402
from gpu_rows import ROWS, TINY, measure  # noqa: E402

CPU = ["--device", "cpu", "--out"]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("ours", "plain"),
        pytest.param("nf4_ours", "nf4_plain", marks=pytest.mark.slow),
        pytest.param("fsdp2", "plain_24gib", marks=pytest.mark.slow),
    ],
)
def test_every_row_takes_the_same_steps(name: str, plain: str) -> None:
    expected, found = measure(ROWS[plain], TINY), measure(ROWS[name], TINY)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=1e-5)
    assert len(found["losses"]) == TINY.warmup + TINY.steps
    assert found["tokens_per_s"] * found["step_s"] == pytest.approx(TINY.tokens)
    assert found["host_bytes"] > 0 and ("fused" in found["plan"] if "ours" in name else True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main([*CPU, str(tmp_path), "--only", "tests,plain"]) == 0
    known = json.loads((tmp_path / "results.json").read_text())
    assert known["tests"]["exit_code"] == 0 and known["plain"]["tokens_per_s"] > 0
    assert (tmp_path / "table.md").read_text() in capfd.readouterr().out


class TestCalls:
    """Pieces that take 100 s each."""

    @pytest.fixture(autouse=True)
    def played(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.now = 0.0
        monkeypatch.setattr(bench_gpu.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(bench_gpu, "run_apart", self.run_apart)

    def run_apart(self, name: str, device: str, folder: Path, seconds: float) -> dict[str, Any]:
        self.ran.append(name)
        self.now += 100
        figures = {"tokens_per_s": 960.0, "step_s": 0.25, "losses": [2.5, 2.25], "host_bytes": 2**30}
        return {"reason": "CUDA error | sticky"} if name == "ours" else figures

    def test_a_call_goes_on_where_the_last_one_ended(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        call = [*CPU, str(tmp_path), "--only", "plain,ours,roundpipe,fsdp2", "--within", "210"]
        assert bench_gpu.main(call) == 0
        assert self.ran == ["plain", "ours"]
        assert "No time was left for fsdp2: call it again." in capsys.readouterr().out
        bench_gpu.main(call)
        bench_gpu.main([*CPU, str(tmp_path), "--only", "ours", "--again"])
        assert self.ran == ["plain", "ours", "fsdp2", "ours"]


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("here is one")
    assert bench_gpu.main(["--out", str(tmp_path / "out")]) == bench_gpu.NO_DEVICE
    assert "no CUDA device" in capsys.readouterr().err and not (tmp_path / "out").exists()
