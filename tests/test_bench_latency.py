"""The benchmark of latency: its devices keep time as a GPU would, and each of its rows runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_roundpipe.devices import cuda, interpreter
from lightning_roundpipe.devices.cuda import CudaDevice
from lightning_roundpipe.devices.cuda_chunks import ChunkedCopyStream

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # its files import each other by their names

import bench_latency
import timed_cuda
from timed_cuda import TimedCuda

CPU = torch.device("cpu")


class Clock:
    """Stands still until a test, or a wait, moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timed_cuda, "time", clock)
    return clock


class TestTimedCuda:
    def test_a_device_starves_when_a_launch_is_late(self, clock: Clock) -> None:
        gpus, stream = TimedCuda(1.0), timed_cuda.Stream(CPU)
        with timed_cuda._entered(stream):
            gpus.launch(5.0)  # until 105
            clock.now = 103.0
            gpus.launch(5.0)  # in time: until 110
            assert gpus.starved_s == 0
            clock.now = 112.0
            gpus.launch(5.0)
        assert (gpus.starved_s, stream.done_at) == (2.0, 117.0)

    def test_not_while_its_inputs_are_on_their_way(self, clock: Clock) -> None:
        gpus, stream, other = TimedCuda(1.0), timed_cuda.Stream(CPU), timed_cuda.Stream(CPU)
        event = timed_cuda.Event()
        with timed_cuda._entered(other):
            gpus.launch(9.0)
        event.record(other)
        with timed_cuda._entered(stream):
            gpus.launch(1.0)
            stream.wait_event(event)
            clock.now = 108.0
            gpus.launch(1.0)  # begins at 109, as soon as it can
            assert (gpus.starved_s, stream.done_at) == (0, 110.0)
            gpus.begin()
            clock.now = 150.0
            gpus.launch(1.0)
        assert gpus.starved_s == 0, "between two steps"

    def test_events_end_when_their_stream_does(self, clock: Clock) -> None:
        gpus, stream, event = TimedCuda(1.0), timed_cuda.Stream(CPU), timed_cuda.Event()
        with timed_cuda._entered(stream):
            gpus.launch(4.0)
        event.record(stream)
        assert not event.query()
        event.synchronize()
        assert event.query() and clock.now == 104.0

    def test_chunks_share_a_link_and_activations_go_first(self, clock: Clock) -> None:
        with TimedCuda(bandwidth=1e6).played() as gpus:
            device = CudaDevice(0, CPU, "off", 1)
            src = torch.ones(500_000, dtype=torch.uint8)
            one, other = torch.zeros_like(src), torch.zeros_like(src)
            device.weights_up.copy(one, src)
            device.weights_up.copy(other, src)
            device.activations_up.copy(torch.zeros(1000, dtype=torch.uint8), src[:1000])
            device.gradients_down.copy(torch.zeros_like(src), one)
            up, down = device.weights_up.record(), device.gradients_down.record()
            done = device.activations_up.record()
            assert [e.event.at for e in (up, down, done)] == pytest.approx([101.0, 100.5, 100.001])
            assert torch.equal(other, src)
            device.close()
        assert gpus.starved_s == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_row_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[float, type, int]] = []
    real = TimedCuda.begin

    def begin(self: TimedCuda) -> None:
        seen.append((interpreter.SWITCH_INTERVAL_S, cuda.ChunkedCopyStream, cuda.LEAD_BYTES))
        real(self)

    monkeypatch.setattr(TimedCuda, "begin", begin)
    monkeypatch.setattr(bench_latency, "BANDWIDTH", 1e9)
    small = {"workers": 2, "microbatches": 2, "layers": 2, "launches": 2, "steps": 1, "turns": 1, "kernel-us": 10}
    arguments = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["bench_latency.py", *arguments])
    before: Any = interpreter.SWITCH_INTERVAL_S, cuda.ChunkedCopyStream, cuda.LEAD_BYTES
    bench_latency.main()
    shown = capsys.readouterr().out
    assert all(way.name in shown for way in bench_latency.WAYS)
    by_thread = bench_latency.ByThread
    assert list(dict.fromkeys(seen)) == [
        (5e-3, by_thread, 0),
        (before[0], by_thread, 0),
        (before[0], ChunkedCopyStream, 0),
        (before[0], ChunkedCopyStream, bench_latency.LEAD),
    ]
    assert (interpreter.SWITCH_INTERVAL_S, cuda.ChunkedCopyStream, cuda.LEAD_BYTES) == before
