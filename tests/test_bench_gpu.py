"""The benchmark that needs a GPU, as far as it goes without one: its rows on the CPU, its table, and what fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_roundpipe.devices import DeviceOutOfMemory

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # its files import each other by their names

import bench_gpu  # noqa: E402
import gpu_memory  # noqa: E402
import gpu_rows  # noqa: E402
import gpu_systems  # noqa: E402
import gpu_table  # noqa: E402
from bench_gpu import Bench, job_of, parse, smaller  # noqa: E402
from gpu_rows import Records, run_apart  # noqa: E402
from gpu_task import Job  # noqa: E402

GIB = 2**30
TRY = ["--device", "cpu", "--tiny", "--cap", "none"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The models are too small for more."""
    torch.set_num_threads(1)


def tiny(row: str, model: str = "qwen3_1_7b", **settings: Any) -> Job:
    chosen: dict[str, Any] = {"cap": None, "sequence": 32, "microbatches": 4, "microbatch_size": 2, "steps": 2}
    return Job(row, model, **{**chosen, "warmup": 2, "precision": "32-true", "device": "cpu", "tiny": True, **settings})


def found(tokens_per_s: float = 100.0, **others: Any) -> dict[str, Any]:
    sizes = {"host_bytes": 4 * GIB, "host_fell_bytes": 3 * GIB, "device_bytes": 2 * GIB}
    return {"tokens_per_s": tokens_per_s, **sizes, **others}


class TestRows:
    """Whatever the row, it is the same training."""

    @pytest.mark.parametrize(
        ("model", "row"),
        [
            ("qwen3_1_7b", "ours"),
            pytest.param("llama3_1_8b", "ours_stale", marks=pytest.mark.slow),
        ],
    )
    def test_ours_trains_what_plain_lightning_trains(self, model: str, row: str) -> None:
        plain = gpu_systems.measure(tiny("plain_checkpointed", model))
        ours = gpu_systems.measure(tiny(row, model, workers=2))
        assert len(plain["losses"]) == 4
        late = row == "ours_stale"
        same = 2 if late else 4  # then updates are one step late
        torch.testing.assert_close(ours["losses"][:same], plain["losses"][:same], rtol=1e-5, atol=1e-5)
        assert (ours["losses"] == pytest.approx(plain["losses"], rel=2e-6)) is not late
        for record in (plain, ours):
            assert record["tokens_per_s"] == pytest.approx(2 * 256 / record["seconds"])
            assert record["host_bytes"] > 0
        # Which plan it is follows from what the first batch has cost: rounds of four microbatches or of two.
        assert ours["device_bytes"] > 0 and "fused" in ours["plan"] and "round " in ours["plan"]

    def test_a_cap_on_emulated_devices_is_kept(self) -> None:
        with pytest.raises((ValueError, torch.OutOfMemoryError)) as caught:
            gpu_systems.measure(tiny("ours", cap=100_000))
        assert gpu_rows.out_of_memory(caught.value)
        with pytest.raises(ValueError, match="only emulated devices keep to a cap"):
            gpu_systems.measure(tiny("plain", cap=100_000))

    def test_on_a_gpu_the_rest_is_held(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        fractions: list[float] = []
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100))
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: fractions.append(part))
        told = "import sys; print('ready', flush=True); sys.stdin.read(); open(sys.argv[2], 'w').write(sys.argv[1])"
        real, over = subprocess.Popen, tmp_path / "over"
        monkeypatch.setattr(subprocess, "Popen", lambda command, **how: real([*command, str(over)], **how))
        monkeypatch.setattr(gpu_memory, "BALLAST", told)
        with gpu_memory.capped(24):
            assert fractions == [0.24] and not over.exists()
        assert over.read_text() == "24"
        monkeypatch.setattr(gpu_memory, "BALLAST", "print('no')")
        with pytest.raises(RuntimeError, match="could not be held"), gpu_memory.capped(24):
            pass
        with gpu_memory.capped(None):
            assert len(fractions) == 2

    def test_of_the_seconds_only_those_after_the_warmup_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter([10.0, 16.0])
        monkeypatch.setattr(gpu_systems.time, "perf_counter", lambda: next(now))
        clock = gpu_systems.Clock(warmup=1, steps=2, each=2)
        for batch in range(6):
            clock.batch_ended(torch.tensor(float(batch)))
        assert clock.found() == {"seconds": 6.0, "losses": [1.0, 5.0, 9.0]}


class Played(torch.nn.Module):
    """What the documentation of the paper's library says that a wrapped model does, without a pipeline.

    Args:
        silent: its outputs have no loss.
    """

    def __init__(self, model: Any, use_sequential_preset: bool, model_run_config: Any, optim_dtype: Any, silent: bool):
        super().__init__()
        assert use_sequential_preset and optim_dtype == torch.float32
        self.model, self.parts, self.silent = model, model_run_config.num_microbatch, silent
        self.loss_function, self.vocab_size, self.calls = model.loss_function, model.vocab_size, []

    def forward_backward(self, input_kwargs: Any, label: torch.Tensor, loss_fn: Any) -> torch.Tensor:
        total = torch.zeros(())
        for number, labels in enumerate(label.chunk(self.parts)):
            outputs = self.model(**{name: whole.chunk(self.parts)[number] for name, whole in input_kwargs.items()})
            outputs.loss = None if self.silent else outputs.loss
            loss = loss_fn(outputs, labels)
            loss.backward()
            total += loss.detach()
        return total

    def step(self, step_fn: Any, is_async: bool = True) -> None:
        self.calls.append(is_async)
        step_fn()

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class TestOthers:
    @pytest.mark.parametrize(("silent", "stale"), [(False, True), (True, False)])
    def test_roundpipes_loop(self, monkeypatch: pytest.MonkeyPatch, silent: bool, stale: bool) -> None:
        """Not the library itself, which imports nowhere but on a GPU."""
        wrapped: list[Played] = []

        def wrap(model: Any, **options: Any) -> Played:
            wrapped.append(Played(model, silent=silent, **options))
            return wrapped[0]

        def adam(trained: Any, decoupled_weight_decay: bool, **options: Any) -> Any:
            assert decoupled_weight_decay
            return torch.optim.AdamW(trained, **options)

        interface = SimpleNamespace(
            OptimizerCtx=contextlib.nullcontext, RoundPipeRunConfig=SimpleNamespace, wrap_model_to_roundpipe=wrap
        )
        monkeypatch.setitem(sys.modules, "roundpipe", interface)
        monkeypatch.setitem(sys.modules, "roundpipe.optim", SimpleNamespace(Adam=adam))
        record = gpu_systems.roundpipe(tiny("roundpipe"), stale=stale)
        plain = gpu_systems.measure(tiny("plain"))
        torch.testing.assert_close(record["losses"], plain["losses"], rtol=1e-5, atol=1e-5)
        assert wrapped[0].calls == [stale] * 4 + ["synchronize"]

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ["qwen3_1_7b", "llama3_1_8b"])
    def test_fsdp(self, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
        """On the CPU, which torch's FSDP takes for a GPU here."""
        import torch.distributed.fsdp.fully_sharded_data_parallel as sharded
        from lightning.pytorch import strategies

        class OnCpu(strategies.FSDPStrategy):  # Lightning refuses the class itself without a GPU
            pass

        find = sharded._init_device_handle
        monkeypatch.setattr(sharded, "_init_device_handle", lambda *args: find(*args[:3], torch.device("cpu")))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self.clone())
        monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda self: None, raising=False)
        monkeypatch.setattr(strategies, "FSDPStrategy", OnCpu)
        try:
            record = gpu_systems.measure(tiny("fsdp", model))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        plain = gpu_systems.measure(tiny("plain", model))
        torch.testing.assert_close(record["losses"], plain["losses"], rtol=1e-5, atol=1e-5)

    def test_what_cannot_run_here_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        there = {"torch"}
        monkeypatch.setattr(gpu_systems, "find_spec", lambda name: name in there or None)
        systems = gpu_systems.SYSTEMS
        assert systems["roundpipe"].missing("cuda") == "not installed: pip install roundpipe==0.1.1"
        assert systems["deepspeed"].missing("cuda") == "not installed: pip install deepspeed"
        there.add("roundpipe")
        monkeypatch.setattr(gpu_systems, "_version", lambda _: "0.2")
        assert systems["roundpipe"].missing("cuda") == "0.2 is installed: pip install roundpipe==0.1.1"
        monkeypatch.setattr(gpu_systems, "_version", lambda _: "0.1.1")
        assert systems["roundpipe"].missing("cpu") == systems["fsdp"].missing("cpu") == "needs a CUDA device"
        assert systems["roundpipe"].missing("cuda") is systems["fsdp"].missing("cuda") is None
        assert systems["ours"].missing("cpu") is systems["plain"].missing("cpu") is None


class TestProcesses:
    """What happens in a row's process stays there."""

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("import time; time.sleep(600)", "not done after 1 s"),
            ("import os; os.kill(os.getpid(), 9)", "killed"),
            ("import sys; print('why'); sys.exit(7)", "ended with code 7; see qwen3_1_7b-all-ours-32.log"),
        ],
    )
    def test_one_that_ends_without_an_answer(self, tmp_path: Path, script: str, reason: str) -> None:
        path = tmp_path / "script.py"
        path.write_text(script)
        record = run_apart(tiny("ours"), path, tmp_path, 1 if "sleep" in script else 60)
        assert reason in record["reason"]
        assert "ours-32.log" not in reason or "why" in (tmp_path / "qwen3_1_7b-all-ours-32.log").read_text()

    def test_its_child_ends_with_it(self, tmp_path: Path) -> None:
        path, noted = tmp_path / "script.py", tmp_path / "pid"
        path.write_text(
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"open({str(noted)!r}, 'w').write(str(child.pid))\n"
        )
        record = run_apart(tiny("ours"), path, tmp_path, 60)
        assert "code 0" in record["reason"]
        with pytest.raises(ProcessLookupError):
            while True:  # until the system has taken it away
                if Path(f"/proc/{noted.read_text()}/stat").read_text().split()[2] == "Z":
                    raise ProcessLookupError
                os.kill(int(noted.read_text()), 0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_an_error_is_the_answer(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        def fail(job: Job) -> Any:
            try:
                raise DeviceOutOfMemory("no room for 3 GiB\nheld: ...")
            except DeviceOutOfMemory as error:
                raise RuntimeError("a layer failed") from error

        gpu_rows.answer(tiny("ours"), tmp_path / "answer.json", fail)
        assert json.loads((tmp_path / "answer.json").read_text()) == {
            "reason": "RuntimeError: a layer failed",
            "out_of_memory": True,
        }
        assert "no room for 3 GiB" in capsys.readouterr().err


class TestCommand:
    def test_without_a_gpu_it_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        if torch.cuda.is_available():
            pytest.skip("it says so where there is none, and here is one")
        assert bench_gpu.main(["--out", str(tmp_path / "out")]) == bench_gpu.NO_DEVICE == 3
        out, err = capsys.readouterr()
        assert "no CUDA device" in err and "--device cpu --tiny" in err
        assert out.count(gpu_table.NOT_YET) == 4 * len(gpu_systems.SYSTEMS)  # two models, each with and without a cap
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("wrong", ["--rows=ours,mine", "--model=qwen", "--cap=much"])
    def test_what_it_does_not_know_is_named(self, wrong: str) -> None:
        with pytest.raises((SystemExit, ValueError), match=wrong.split("=")[1].split(",")[-1]):
            parse([wrong])

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_as_a_whole(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        rows = [*TRY, "--model", "qwen3_1_7b", "--rows", "ours,plain", "--out", str(tmp_path)]
        assert bench_gpu.main(rows) == 0
        records = json.loads((tmp_path / "results.json").read_text())
        assert [row["job"]["row"] for row in records] == ["ours", "plain"]
        assert all(row["tokens_per_s"] > 0 for row in records)
        assert (tmp_path / "table.md").read_text() in capfd.readouterr().out


class TestOrder:
    """Which jobs are measured, with processes that answer from a list."""

    def bench(
        self, patch: pytest.MonkeyPatch, folder: Path, longest: dict[str, int], *options: str
    ) -> tuple[list[tuple[str, int, int, int]], Records]:
        """Every job that was run as (row, microbatches, size, length), where ``longest`` tokens a microbatch fit."""
        jobs: list[tuple[str, int, int, int]] = []

        def answer(job: Job, script: Path, where: Path, seconds: float) -> dict[str, Any]:
            jobs.append((job.row, job.microbatches, job.microbatch_size, job.sequence))
            fits = job.microbatch_size * job.sequence <= longest[job.row]
            return found() if fits else {"reason": "no room", "out_of_memory": True}

        patch.setattr(bench_gpu, "run_apart", answer)
        rows = ["--rows", ",".join(longest), "--model", "qwen3_1_7b", "--out", str(folder)]
        chosen = parse([*TRY, *rows, *options])
        records = Records(chosen.out)
        Bench(chosen, records).run()
        return jobs, records

    def test_microbatches_get_smaller_until_they_fit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        jobs, records = self.bench(monkeypatch, tmp_path, {"ours": 64, "plain": 40})
        assert jobs == [("ours", 4, 2, 32), ("plain", 4, 2, 32), ("plain", 8, 1, 32)]
        assert records.of("qwen3_1_7b", None, "plain")[32]["job"]["microbatch_size"] == 1

    def test_sequences_get_longer_until_they_do_not_fit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = ["--sequence", "2048", "--tokens", "8192", "--microbatch", "4096", "--longest", "65536"]
        jobs, records = self.bench(monkeypatch, tmp_path, {"ours": 13_000, "plain": 1000}, *sizes)
        assert [(row, length) for row, _, _, length in jobs] == [
            ("ours", 2048), ("plain", 2048), ("plain", 2048),
            ("ours", 4096), ("ours", 8192), ("ours", 16384), ("ours", 12288), ("ours", 14336), ("ours", 13312),
        ]  # fmt: skip
        assert gpu_table.longest(records.of("qwen3_1_7b", None, "ours")) == "12,288"
        assert gpu_table.longest(records.of("qwen3_1_7b", None, "plain")) == gpu_table.NONE

    def test_where_the_limit_is_reached_longer_ones_may_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, records = self.bench(monkeypatch, tmp_path, {"ours": 10_000}, "--longest", "100")
        assert gpu_table.longest(records.of("qwen3_1_7b", None, "ours")) == "≥ 64"

    def test_what_is_known_is_not_measured_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench(monkeypatch, tmp_path, {"ours": 64})
        jobs, _ = self.bench(monkeypatch, tmp_path, {"ours": 64, "plain": 64})
        assert jobs == [("plain", 4, 2, 32)]

    def test_but_what_was_not_installed_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(gpu_systems.System, "missing", lambda self, device: "not installed")
            assert self.bench(patch, tmp_path, {"ours": 64})[0] == []
        assert self.bench(monkeypatch, tmp_path, {"ours": 64})[0] == [("ours", 4, 2, 32)]

    def test_nothing_begins_when_the_time_is_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        jobs, records = self.bench(monkeypatch, tmp_path, {"ours": 64}, "--within", "0")
        assert jobs == [] and records.rows == {}

    @pytest.mark.parametrize("within", ["1000", "1300"])
    def test_what_its_time_cut_off_is_measured_another_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: str
    ) -> None:
        monkeypatch.setattr(bench_gpu, "run_apart", lambda *_: {"reason": "not done after ... s", "timed_out": True})
        options = parse([*TRY, "--model", "qwen3_1_7b", "--rows", "ours", "--out", str(tmp_path), "--within", within])
        records = Records(tmp_path)
        Bench(options, records).run()
        assert options.seconds == 1200 and len(records.rows) == (within == "1300")

    def test_a_step_has_the_same_tokens_at_any_length(self) -> None:
        options = parse(["--sequence", "2048"])
        for length in (2048, 4096, 8192, 16384):
            job = job_of(options, "qwen3_1_7b", None, "ours", length)
            assert job.tokens == 65536 and job.microbatch_size * length == max(8192, length)
        assert job_of(options, "qwen3_1_7b", None, "ours", 2**17).microbatches == 2
        whole = job_of(options, "qwen3_1_7b", None, "fsdp", 4096)
        assert (whole.microbatches, whole.microbatch_size) == (1, 16)
        less = smaller(Job("ours", "qwen3_1_7b", None, 2048, 2, 5, 1, 1))
        assert less is not None and (less.microbatches, less.microbatch_size) == (5, 2)


class TestTable:
    ROWS = (("ours", "ours, staleness 0"), ("plain", "plain Lightning"), ("plain_checkpointed", "checkpointed"))

    def records(self, folder: Path) -> Records:
        records = Records(folder)
        records.add(tiny("ours"), found(960.0))
        records.add(tiny("plain"), found(1000.0, host_fell_bytes=8 * GIB))
        records.add(tiny("ours", sequence=64), found(900.0))
        records.add(tiny("plain", sequence=64), {"reason": "RuntimeError: a | b", "out_of_memory": True})
        return Records(folder)  # as a later call reads it

    def test_figures_and_reasons(self, tmp_path: Path) -> None:
        lines = gpu_table.table(self.records(tmp_path), "qwen3_1_7b", None, self.ROWS, 32)
        assert lines[0].startswith("|  | tokens/s at 32 | tokens/s at 64 | device memory at 32 |")
        assert lines[2] == "| ours, staleness 0 | 960 | 900 | 2.0 GiB | 4.0 GiB | ≥ 64 | 4 x 2 sequences |"
        assert lines[3] == "| plain Lightning | 1,000 | – | 2.0 GiB | 8.0 GiB | 32 | 4 x 2 sequences |"
        assert lines[4] == "| checkpointed | – | – | – | – | – | not yet measured |"

    def test_goals(self, tmp_path: Path) -> None:
        records = self.records(tmp_path)
        records.add(tiny("plain_checkpointed"), found(2000.0))
        assert gpu_table.goals(records, "qwen3_1_7b", None, self.ROWS, 32)[2:] == [
            "| ours, staleness 0 | – | – | 0.48 (missed) | – |"
        ]
        for row, speed, host in (("roundpipe", 800.0, 8), ("fsdp", 300.0, 1), ("deepspeed", 500.0, 1)):
            records.add(tiny(row), found(speed, host_bytes=host * GIB))
        assert gpu_table.goals(records, "qwen3_1_7b", None, self.ROWS, 32)[2:] == [
            "| ours, staleness 0 | 1.20 | 1.92 (missed) | 0.48 (missed) | 0.50 |"
        ]


def test_device_memory_is_that_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the engine begins a new peak with each step."""
    peak = [0]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: peak.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: peak[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 2 * peak[0])
    own = torch.cuda.reset_peak_memory_stats
    peak[0] = 99  # of what was before
    with gpu_memory.DeviceMemory() as memory:
        for most in (5, 7, 3):
            torch.cuda.reset_peak_memory_stats(0)
            peak[0] = most
    assert memory.found() == {"device_bytes": 7, "device_reserved_bytes": 14}
    assert torch.cuda.reset_peak_memory_stats is own


@pytest.mark.parametrize(("option", "value"), [("--precision", "bf16-true"), ("--steps", "7"), ("--workers", "2")])
def test_a_folder_of_other_settings_is_refused(tmp_path: Path, option: str, value: str) -> None:
    given = [*TRY, "--rows", "ours", "--model", "qwen3_1_7b", "--precision", "32-true", "--longest", "0"]
    options = parse(given)
    records = Records(tmp_path)
    records.add(job_of(options, "qwen3_1_7b", None, "ours", options.sequence), found())
    Bench(options, Records(tmp_path)).run()
    with pytest.raises(SystemExit, match=f"{option[2:]}=.* Choose another folder"):
        Bench(parse([*given, option, value]), Records(tmp_path)).run()


def test_a_length_that_there_was_no_time_for(tmp_path: Path) -> None:
    options = parse([*TRY, "--rows", "ours", "--model", "qwen3_1_7b", "--within", "0"])
    records = Records(tmp_path)
    records.add(job_of(options, "qwen3_1_7b", None, "ours", 2 * options.sequence), found())
    Bench(options, records).run()
    assert list(records.of("qwen3_1_7b", None, "ours")) == [2 * options.sequence]
