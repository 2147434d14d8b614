"""Prints the strategy's plan as a table, once it is known and again if it has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich import get_console
from rich.table import Table
from torch.nn import Module
from typing_extensions import override

from lightning_roundpipe.messages import plural
from lightning_roundpipe.reports.pictures import shortest_endings


class PlanTable(Callback):
    """Prints the stages, their layers and weights, and the worker of each in the last step.

    Does nothing under a strategy without ``report()``.
    """

    roundpipe_passive_hooks = True
    roundpipe_announces = True  # the header of `roundpipe-train` shows the rest

    def __init__(self) -> None:
        self._printed: str | None = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._printed is None:  # not for each batch: the cost of a report grows with the step's events
            self._print(strategy_report(trainer), pl_module, final=False)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print(strategy_report(trainer), pl_module, final=True)

    def _print(self, report: Mapping[str, Any], module: Module, final: bool) -> None:
        # The first step has no plan, and each call is a stage. Print that only if no other step follows.
        if report and report["plan"] != self._printed and (final or not report.get("profiled")):
            get_console().print(plan_table(report, module))
            self._printed = report["plan"]


def strategy_report(trainer: Trainer) -> dict[str, Any]:
    """Return the strategy's report on its last step; empty if it has none."""
    report = getattr(trainer.strategy, "report", None)
    return dict(report() or {}) if callable(report) else {}


def plan_table(report: Mapping[str, Any], module: Module) -> Table:
    """Return the slots of one round as a table. ``module`` has the layers under the names in the report.

    A backward stage of calls that nothing differentiates through, such as frozen embeddings, has no layers and no row.
    """
    of_round = [slot for slot in report["slots"] if slot["round"] == report["slots"][0]["round"]]
    slots = {position: slot for position, slot in enumerate(of_round) if slot["layers"]}
    rounds = len({slot["round"] for slot in report["slots"] if slot["round"] >= 0})
    layers = {layer for slot in slots.values() for layer in slot["layers"]}
    short = shortest_endings(layers, lambda ending: not ending.partition(".")[0].isdecimal())
    table = Table(
        title=f"Plan: {plural(len(slots), 'stage')} on {plural(report['workers'], 'worker')}, "
        f"{plural(report['microbatches'], 'microbatch')}" + (f" in {plural(rounds, 'round')}" if rounds > 1 else ""),
        caption=report["plan"],
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("stage", "phase", "layers", "weights", "worker"):
        table.add_column(heading, justify="right" if heading in ("stage", "weights", "worker") else "left")
    for position, slot in slots.items():
        layers = slot["layers"]
        size = f"{weight_bytes(module, layers) / 2**20:,.1f} MiB"
        table.add_row(str(position), slot["phase"], span([short[layer] for layer in layers]), size, str(slot["worker"]))
    return table


def span(names: Sequence[str]) -> str:
    """Return the first and last of several names, with their number."""
    return " … ".join(dict.fromkeys([names[0], names[-1]])) + (f" ({len(names)})" if len(names) > 2 else "")


def weight_bytes(module: Module, layers: Sequence[str]) -> int:
    """Return the bytes of the layers' parameters, each counted once."""
    modules = dict(module.named_modules())
    found = {id(p): p for layer in layers if layer in modules for p in modules[layer].parameters()}
    return sum(p.numel() * p.element_size() for p in found.values())
