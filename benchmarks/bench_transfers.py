"""How long workers wait for copies: activations first, with all else in chunks, beside a step without a link.

Layers sleep for a model's times on an RTX 4090 and have its weights and activations; the link is PCIe 4.0 x16. All
sizes are a thousandth of the real ones, and so is the bandwidth, so that copies take the time that they would take.
Stalls are the time in which a worker has its turn and its compute stream waits for weights, inputs or gradients, of all
workers' time from the step's first computation to its last.

Stages are the paper's. There is one round of as many microbatches as workers: fewer leave less to hide copies behind.

    .venv/bin/python benchmarks/bench_transfers.py [--models gpt-oss-20b] [--scale 2]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from common import Sleeper, Sleepers, batches, paper_cases, parser_of, quiet, show, trainer
from paper_cases import Case
from torch import nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import copy_priority

LINK = 25e9
"""Bytes a second each way: what copies reach of PCIe 4.0 x16, as in conf/hardware/rtx4090x8.yaml."""
SHRINK = 1000
"""By how much sizes and the link are smaller here: bytes have to be moved by this machine's cores."""
TOKENS = 8192
"""Of a microbatch in the paper's cases."""
GOAL = 3.0
"""Percent of the step that workers may stall."""
_COMPUTE = ("forward", "recompute", "backward")


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


class Reports(pl.Callback):
    """The reports of all steps but the first one, which learns the trace; then devices get their link.

    Args:
        strategy: of the run.
        bandwidth: bytes a second; None: no link.
    """

    roundpipe_passive_hooks = True

    def __init__(self, strategy: RoundPipeStrategy, bandwidth: float | None) -> None:
        self._strategy, self._bandwidth = strategy, bandwidth
        self._found: dict[int, dict[str, Any]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look()
        if batch_idx == 0 and self._bandwidth is not None:
            for device in trainer.strategy._engine.context.pool.devices:
                device._up._bandwidth = device._down._bandwidth = self._bandwidth

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


def measure(case: Case, bandwidth: float | None, scale: float, steps: int) -> tuple[float, float]:
    """Median seconds of a step, and percent of it that workers stall."""
    costs, sizes = case.costs(scale), SIZES[case.model]
    strategy = RoundPipeStrategy(num_microbatches=case.workers, plan=plan_of(case), layers=["Sleeper"])
    reports = Reports(strategy, bandwidth)
    samples = torch.ones((steps + 1) * case.workers, sizes.boundary // 4)
    module = Loaded([(call.forward_s, call.backward_s) for call in costs], sizes)
    trainer(strategy, case.workers, callbacks=reports).fit(module, batches(samples, case.workers))
    found = reports.look()
    return median(map(seconds_of, found)), median(report["stall_pct"] for report in found)


def seconds_of(report: dict[str, Any]) -> float:
    """Of the report's step, from its first computation to its last."""
    times = [t for e in report["events"] if e["kind"] in _COMPUTE for t in (e["start_s"], e["end_s"])]
    return float(max(times) - min(times))


def rows(models: list[str], scale: float, steps: int) -> Iterator[tuple[str, ...]]:
    for model in models:
        case = paper_cases()[model]
        free, idle = measure(case, None, scale, steps)
        took, stall = measure(case, LINK / SHRINK / scale, scale, steps)
        yield f"{model}, with the link", f"{took:.3f}", f"{took / free:.3f}", f"{stall:.2f} %", f"{GOAL:g} %"
        yield f"{model}, without", f"{free:.3f}", "1.000", f"{idle:.2f} %", ""


def main() -> None:
    parser = parser_of(__doc__, scale=1.0, steps=3)
    parser.add_argument("--models", nargs="+", default=["gpt-oss-20b"], choices=SIZES)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    copy_priority.MAX_WAIT_S *= options.scale
    title = f"8 workers, 8 microbatches, times stretched {options.scale:g} times, PCIe 4.0 x16 likewise"
    headings = ("copies of", "step (s)", "over no link", "stalls", "goal")
    show(title, headings, rows(options.models, options.scale, options.steps))


if __name__ == "__main__":
    main()
