"""The benchmark of windows runs in its smallest setting."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # its files import each other by their names

import bench_window


def test_both_sides_run() -> None:
    window, cut = bench_window.compare(devices=2, microbatches=2, layers=3, layer_s=0.001, steps=1)
    assert window > 0.001 and cut > 0.001
