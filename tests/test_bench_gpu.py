"""The benchmark that needs a GPU, as far as it goes without one: its rows on the CPU, its processes and its table."""

import json
import subprocess
import sys
from pathlib import Path

import bench_gpu
import pytest
import torch
from gpu_rows import MENDS, ROWS, TINY, losses_of, measure

ROOT = Path(__file__).resolve().parents[1]
CPU = ["--device", "cpu", "--out"]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("ours", "plain"),
        pytest.param("nf4_ours_24gib", "nf4_plain_24gib", marks=pytest.mark.slow),
        pytest.param("fsdp2", "plain_24gib", marks=pytest.mark.slow),
    ],
)
def test_every_row_takes_the_same_steps(name, plain):
    expected, found = measure(ROWS[plain], TINY), measure(ROWS[name], TINY)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=1e-5)
    assert len(found["losses"]) == TINY.warmup + TINY.steps
    tokens = (ROWS[name].microbatches or TINY.microbatches) * TINY.rows * TINY.sequence
    assert found["tokens_per_s"] * found["step_s"] == pytest.approx(tokens)
    assert found["host_bytes"] > 0 and ("fused" in found["plan"] if "ours" in name else True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_from_end_to_end(tmp_path, capfd):
    """Every piece, as on a GPU: those whose packages are missing say so, and all others have their figures."""
    assert bench_gpu.main([*CPU, str(tmp_path), "--within", "1700"]) == 0
    known = json.loads((tmp_path / "results.json").read_text())
    assert set(known) == set(bench_gpu.PIECES)
    unknown = {name for name, found in known.items() if "reason" in found}
    assert unknown <= {"roundpipe", "roundpipe_24gib"}, {name: known[name] for name in unknown}
    assert known["tests"]["exit_code"] == known["ordinary_tests"]["exit_code"] == 0
    assert all(known[name]["tokens_per_s"] > 0 for name in {*ROWS} - unknown)
    assert known["longest_ours"]["longest"] == known["longest_plain"]["longest"] == max(TINY.lengths)
    assert len(known["trace"]["largest_losses"]) == 3
    assert (tmp_path / "table.md").read_text() in capfd.readouterr().out


@pytest.mark.slow
def test_a_row_imports_neither_hydra_nor_datasets():
    """The machines that have a GPU may lack them."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('hydra', 'omegaconf', 'datasets')))\n"
        "from gpu_rows import ROWS, TINY, measure; measure(ROWS['lora_ours_24gib'], TINY)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", check=True)


def test_losses_of_a_traced_step():
    """Each pause of the kernels counts for what goes on in it; a short one is the time between two launches."""

    def event(kind, name, start, end):
        return {"cat": kind, "name": name, "ts": 1e6 * start, "dur": 1e6 * (end - start)}

    kernels = [(0, 1), (0.5, 2), (2.00001, 3), (4, 5), (7, 8), (12, 13)]
    events = [event("kernel", "gemm", *span) for span in kernels]
    events += [event("gpu_memcpy", "Memcpy HtoD", 3.1, 4), event("user_annotation", "Optimizer.step#AdamW.step", 5, 7)]
    lost = {row["loss"]: row["seconds"] for row in losses_of(events, recomputed_s=3.0, cuda=True)}
    assert list(lost) == ["waits for the host", "recomputation", "waits for the optimizer", "waits for copies",
                          "gaps between kernels"]  # fmt: skip
    assert [round(seconds, 5) for seconds in lost.values()] == [4, 3, 2, 1, 0.00001] and set(lost) == set(MENDS)


def test_what_a_piece_has_found_stays_if_its_time_ends(tmp_path, monkeypatch):
    (tmp_path / "longest_ours.json").write_text('{"longest": 64}')
    (slow := tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(bench_gpu, "SCRIPT", slow)
    found = bench_gpu.run_apart("longest_ours", "cpu", tmp_path, 0.5)
    assert found["longest"] == 64 and "not done" in found["stopped"]


class TestCalls:
    """Pieces that take 100 s each."""

    @pytest.fixture(autouse=True)
    def played(self, monkeypatch):
        self.ran = []
        self.now = 0.0
        monkeypatch.setattr(bench_gpu.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(bench_gpu, "run_apart", self.run_apart)
        monkeypatch.setattr(bench_gpu, "SLOWER", 1)

    def run_apart(self, name, device, folder, seconds):
        self.ran.append(name)
        self.now += 100
        figures = {"tokens_per_s": 960.0, "step_s": 0.25, "losses": [2.5, 2.25], "host_bytes": 2**30}
        return {"reason": "CUDA error | sticky"} if name == "ours" else figures

    def test_a_call_goes_on_where_the_last_one_ended(self, tmp_path, capsys):
        call = [*CPU, str(tmp_path), "--only", "plain,ours,roundpipe,fsdp2", "--within", "210"]
        assert bench_gpu.main(call) == 0
        assert self.ran == ["plain", "ours"]
        assert "No time was left for fsdp2: call it again." in capsys.readouterr().out
        bench_gpu.main(call)
        bench_gpu.main([*CPU, str(tmp_path), "--only", "ours", "--again"])
        assert self.ran == ["plain", "ours", "fsdp2", "ours"]


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("here is one")
    assert bench_gpu.main(["--out", str(tmp_path / "out")]) == bench_gpu.NO_DEVICE
    assert "no CUDA device" in capsys.readouterr().err and not (tmp_path / "out").exists()
