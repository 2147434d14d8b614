"""Writes what a run leaves beside metrics and checkpoints: its plan, a picture of one step, and its adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from peft import PeftModel
from typing_extensions import override

from lightning_roundpipe.devices.intraop_threads import cores
from lightning_roundpipe.extras import is_installed, remedy
from lightning_roundpipe.messages import PREFIX, plural, warn
from lightning_roundpipe.reports.pictures import draw_steps
from lightning_roundpipe.reports.planned import replay_of
from lightning_roundpipe.reports.traces import write_trace


def strategy_report(trainer: Trainer) -> dict[str, Any]:
    """Return the strategy's report on its last step; empty if it has none."""
    report = getattr(trainer.strategy, "report", None)
    return dict(report() or {}) if callable(report) else {}


class RunFolder(Callback):
    """Writes to ``folder`` at the end of training:

    * ``plan.txt``: the plan as text, which ``partition.plan`` accepts;
    * ``costs.json``: what each layer costs, which ``planning.Costs.from_dict`` reads;
    * ``timeline.png``: the last step as it ran; ``trace.json``: the same for https://ui.perfetto.dev; ``step.json``:
      the report of that step;
    * ``replay.png``: the step of several emulated devices as if each computed on its own (`reports.planned`);
    * ``report.html``: a page on the run with these pictures (`reports.page`);
    * ``adapters/``: PEFT adapters, which plain PEFT loads; also written with every checkpoint.

    Whatever does not exist (a strategy without a report, a model without adapters) is left out, as are pictures and
    page where matplotlib is not installed.

    Args:
        folder: where to write.
        settings: the configuration of the run, which the page shows.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.settings = settings

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if report := strategy_report(trainer):
            self._write_report(report)
            self._draw(trainer.strategy, report)
        self._write_adapters(pl_module)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            self._write_adapters(pl_module)

    def _write_adapters(self, pl_module: LightningModule) -> None:
        """Write the adapters beside the present ones, then replace those: a killed run leaves one complete set."""
        for module in pl_module.modules():
            if isinstance(module, PeftModel):
                final, unfinished = self.folder / "adapters", self.folder / "adapters.unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)
                # Left to itself, PEFT asks the Hugging Face Hub whether the vocabulary was resized.
                module.save_pretrained(str(unfinished), save_embedding_layers=False)
                shutil.rmtree(final, ignore_errors=True)
                unfinished.rename(final)
                break

    def _write_report(self, report: dict[str, Any]) -> None:
        (self.folder / "plan.txt").write_text(f"{report['plan']}\n")
        if report.get("costs"):
            facts = {"workers": report["workers"], "microbatches": report["microbatches"], **report["costs"]}
            (self.folder / "costs.json").write_text(json.dumps(facts, indent=1) + "\n")
        (self.folder / "step.json").write_text(json.dumps(report))
        write_trace({"RoundPipe": report}, self.folder / "trace.json")

    def _draw(self, strategy: Any, report: dict[str, Any]) -> None:
        if not is_installed("matplotlib"):
            warn(f"{PREFIX}no pictures and no report page are written, as {remedy('matplotlib')}")
            return
        title = "RoundPipe"
        if replayed := replay_of(strategy):
            title = f"As it ran, on {plural(report['workers'], 'emulated device')} that share {plural(cores(), 'core')}"
            draw_steps({"Replay: each device computes alone": replayed}, self.folder / "replay.png")
        draw_steps({title: report}, self.folder / "timeline.png")
        strategy.save_report(self.folder / "report.html", self.settings)
