"""How long workers wait for copies: activations first, with all else in chunks, against copies in order of issue.

Layers sleep for a model's times on an RTX 4090 and have its weights and activations; the link is PCIe 4.0 x16. All
sizes are a thousandth of the real ones, and so is the bandwidth, so that copies take the time that they would take.
Stalls are the time in which a worker has its turn and its compute stream waits for weights, inputs or gradients, of all
workers' time from the step's first computation to its last. A step without a link to wait for stands beside them.

Stages are the paper's. There is one round of as many microbatches as workers: fewer leave less to hide copies behind.

    .venv/bin/python benchmarks/bench_transfers.py [--models gpt-oss-20b] [--scale 2] [--picture transfers.png]
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from common import Sleeper, Sleepers, batches, quiet, trainer
from matplotlib.figure import Figure
from paper_cases import Case, read_cases
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import copy_priority

CASES = {
    case.model: case
    for case in read_cases(Path(__file__).parents[1] / "conf" / "cases" / "paper.json")
    if case.schedule == "roundpipe"
}
LINK = 25e9
"""Bytes a second each way: what copies reach of PCIe 4.0 x16, as in conf/hardware/rtx4090x8.yaml."""
SHRINK = 1000
"""By how much sizes and the link are smaller here: bytes have to be moved by this machine's cores."""
TOKENS = 8192
"""Of a microbatch in the paper's cases."""
GOAL = 3.0
"""Percent of the step that workers may stall."""
ORDERS = ("activations first", "in order of issue", "no link")
_COMPUTE = ("forward", "recompute", "backward")
COLOURS = {"compute": "#4c78a8", "weights, gradients": "#bab0ac", "activations": "#f58518", "stall": "#e45756"}


@dataclass(frozen=True)
class Sizes:
    """Bytes of one layer's weights (its gradients are as many), of the LM head's, and of what a microbatch carries."""

    layer: int
    head: int
    boundary: int

    @classmethod
    def of(cls, layer: float, head: float, width: int) -> Sizes:
        """From parameters and hidden size; two bytes a number."""
        return cls(*(round(2 * count / SHRINK) for count in (layer, head, TOKENS * width)))


SIZES = {
    "qwen3-1.7b": Sizes.of(50.3e6, 311e6, 2048),
    "llama3.1-8b": Sizes.of(218e6, 525e6, 4096),
    "gpt-oss-20b": Sizes.of(823e6, 579e6, 2880),
    "qwen3-32b": Sizes.of(488e6, 778e6, 5120),
}


class Loaded(Sleepers):
    """Sleepers with weights to carry."""

    def __init__(self, seconds: list[tuple[float, float]], sizes: Sizes) -> None:
        super().__init__(seconds)
        for layer in self.layers:
            assert isinstance(layer, Sleeper)
            nbytes = sizes.head if layer is self.layers[-1] else sizes.layer
            layer.ballast = nn.Parameter(torch.zeros(nbytes // 4))


class Plug(pl.Callback):
    """Gives devices their link when the trace has been found: that step uploads every layer for every call."""

    roundpipe_looks_away = True

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            for device in trainer.strategy._engine.worker_pool.devices:
                device._up._bandwidth = device._down._bandwidth = self._bandwidth


class Reports(pl.Callback):
    """Of all steps but the first one, which learns the trace."""

    roundpipe_looks_away = True

    def __init__(self, strategy: RoundPipeStrategy) -> None:
        self._strategy = strategy
        self._found: dict[int, dict[str, Any]] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()

    def look(self) -> list[dict[str, Any]]:
        """The report of a step is there when the next one is on its way."""
        report = self._strategy.report()
        if not report["profiled"]:
            self._found[report["slots"][0]["slot"]] = report
        return list(self._found.values())


def plan_of(case: Case) -> str:
    """The paper's stages: forward ones count layers from the first one, backward ones from the last one."""
    first, forward = 0, []
    for count in case.forward_stages:
        forward.append(f"{first}-{first + count - 1}")
        first += count
    last, backward = case.layers - 1, []
    for count in case.backward_stages[1:]:
        backward.append(f"{last - count + 1}-{last}")
        last -= count
    assert case.backward_stages[0] == 0, "the fused stage is the head"
    return f"forward {' '.join(forward)}; fused {case.layers}; backward {' '.join(backward)}; round {case.workers}"


def measure(case: Case, order: str, scale: float, steps: int) -> list[dict[str, Any]]:
    """The reports of ``steps`` steps."""
    costs, sizes = case.costs(scale), SIZES[case.model]
    strategy = RoundPipeStrategy(num_microbatches=case.workers, plan=plan_of(case), layers=["Sleeper"])
    reports = Reports(strategy)
    callbacks: list[pl.Callback] = [reports, *([] if order == "no link" else [Plug(LINK / SHRINK / scale)])]
    samples = torch.ones((steps + 1) * case.workers, sizes.boundary // 4)
    module = Loaded([(call.forward_s, call.backward_s) for call in costs], sizes)
    with copy_priority.fifo_copies() if order == "in order of issue" else contextlib.nullcontext():
        trainer(strategy, case.workers, callbacks=callbacks).fit(module, batches(samples, case.workers))
    return reports.look()


def seconds_of(report: dict[str, Any]) -> float:
    """Of the report's step, from its first computation to its last."""
    times = [t for e in report["events"] if e["kind"] in _COMPUTE for t in (e["start_s"], e["end_s"])]
    return float(max(times) - min(times))


def draw(reports: dict[str, dict[str, Any]], slot: int, path: Path) -> None:
    """What a worker and its link did around one slot of the step, under both orders."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(len(reports), 1, sharex=True)
    for panel, (order, report) in zip(axes, reports.items(), strict=True):
        length = _lanes(panel, report, slot)
        panel.set_title(f"{order}: workers stall {report['stall_pct']:.1f} % of the step", loc="left", fontsize=10)
    axes[-1].set_xlim(-0.35 * length, 1.65 * length)
    axes[-1].set_xlabel(f"seconds, from the start of slot {slot} of the step")
    handles = [axes[0].barh(0, 0, color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(COLOURS), frameon=False)
    figure.savefig(path, dpi=110)


def _lanes(panel: Any, report: dict[str, Any], slot: int) -> float:
    """Draw them; returns how long the slot takes."""
    shown = report["slots"][slot]
    mine = [e for e in report["events"] if e["worker"] == shown["worker"]]
    compute = [e for e in mine if e["kind"] in _COMPUTE]
    origin = min(e["start_s"] for e in compute if e["slot"] == shown["slot"])
    stalls = [s for s in report["stalls"] if s["worker"] == shown["worker"]]
    for name, lane, height, events in (
        ("compute", 2, 0.76, compute),
        ("stall", 2, 0.76, stalls),
        ("weights, gradients", 1, 0.76, [e for e in mine if e["kind"] == "upload_weights"]),
        ("activations", 1, 0.5, [e for e in mine if e["kind"] == "upload_activations"]),
        ("weights, gradients", 0, 0.76, [e for e in mine if e["kind"] == "download_gradients"]),
        ("activations", 0, 0.5, [e for e in mine if e["kind"] == "download_activations"]),
    ):
        spans = [(e["start_s"] - origin, e["end_s"] - e["start_s"]) for e in events]
        panel.broken_barh(spans, (lane + 0.12, height), color=COLOURS[name], linewidth=0)
    panel.set_yticks([2.5, 1.5, 0.5], ["computes", "link up", "link down"])
    panel.spines[["top", "right"]].set_visible(False)
    return float(max(e["end_s"] for e in compute if e["slot"] == shown["slot"]) - origin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt-oss-20b"], choices=SIZES)
    parser.add_argument("--scale", type=float, default=1.0, help="stretches the layers' times and the copies'")
    parser.add_argument("--steps", type=int, default=3, help="of which the median counts")
    parser.add_argument("--picture", type=Path, help="draw a slot of the first model under both orders")
    parser.add_argument("--slot", type=int, default=13, help="which of the step's")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    copy_priority.MAX_WAIT_S *= options.scale
    console = Console(width=120)
    table = Table(title=f"8 workers, 8 microbatches, times stretched {options.scale:g} times, PCIe 4.0 x16 likewise")
    for heading in ("model", "order of copies", "step (s)", "without a link", "stalls", "goal"):
        table.add_column(heading, justify="left" if heading in ("model", "order of copies") else "right")
    for model in options.models:
        found = {}
        for order in ORDERS:
            with console.status(f"{model}, {order}: {options.steps} steps"):
                found[order] = sorted(
                    measure(CASES[model], order, options.scale, options.steps), key=lambda report: report["stall_pct"]
                )
        free = median(seconds_of(report) for report in found["no link"])
        for order, reports in found.items():
            took, stall = median(map(seconds_of, reports)), median(report["stall_pct"] for report in reports)
            goal = f"{GOAL:g} %" if order == ORDERS[0] else ""
            table.add_row(model, order, f"{took:.3f}", f"{took / free:.3f}", f"{stall:.2f} %", goal)
        table.add_section()
        if options.picture and model == options.models[0]:
            shown = {order: found[order][len(found[order]) // 2] for order in ORDERS[:2]}
            draw(shown, options.slot, options.picture)
    console.print(table)


if __name__ == "__main__":
    main()
