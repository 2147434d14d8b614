"""What a run reports: a few lines at its start, and its summary, as data and on the screen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from rich import get_console
from rich.table import Table
from rich.text import Text

from lightning_roundpipe.callbacks import Measurements
from lightning_roundpipe.callbacks.measurements import peak_device_bytes
from lightning_roundpipe.callbacks.run_folder import strategy_report
from lightning_roundpipe.devices.intraop_threads import cores
from lightning_roundpipe.messages import gib, plural, seconds
from lightning_roundpipe.model.quantized import weights_in
from lightning_roundpipe.planning.schedule import Plan
from lightning_roundpipe.reports.planned import replay_of

_GIB = 2**30


@dataclass(frozen=True)
class EvaluationResult:
    """The model's validation loss and its completion of the prompt, before or after training."""

    val_loss: float | None
    completion: str | None


def summarise(
    trainer: Trainer, measurements: Measurements, before: EvaluationResult, after: EvaluationResult, wall_s: float
) -> dict[str, Any]:
    """Return the run in numbers, in GiB and seconds. What only a strategy with a report knows is ``None`` under others.

    ``step_time_s`` is the median step and, like ``tokens_per_s``, excludes the first step. ``replay_*`` are of the last
    step if each device computed on its own (`reports.planned`).
    """
    report = strategy_report(trainer)
    replayed = replay_of(trainer.strategy) or {}
    plan = Plan.parse(report["plan"]) if report else None
    uploaded = report.get("weights_bytes_uploaded_total")
    devices = peak_device_bytes(report)
    return {
        "val_loss_before": before.val_loss,
        "val_loss_after": after.val_loss,
        "train_loss": measurements.train_losses[-1] if measurements.train_losses else None,
        "steps": trainer.global_step,
        "step_time_s": measurements.step_time_s,
        "first_step_time_s": measurements.step_seconds[0] if measurements.step_seconds else None,
        "tokens_per_step": measurements.step_tokens[-1] if measurements.step_tokens else None,
        "tokens_per_s": measurements.tokens_per_s,
        "bubble_pct": report.get("bubble_pct"),
        "replay_bubble_pct": replayed.get("bubble_pct"),
        "replay_step_time_s": replayed.get("step_time_s"),
        "peak_host_gib": measurements.peak_host_bytes / _GIB,
        "peak_device_gib": max(devices) / _GIB if devices else None,
        "plan": report.get("plan"),
        "plan_policy": report.get("plan_policy"),
        "workers": report.get("workers"),
        "forward_stages": len(plan.forward) if plan else None,
        "fused_stages": 1 if plan else None,
        "backward_stages": len(plan.backward) if plan else None,
        "microbatches": report.get("microbatches"),
        "weights_uploaded_gib": None if uploaded is None else uploaded / _GIB,
        "wall_s": wall_s,
        "completion_before": before.completion,
        "completion_after": after.completion,
    }


def show_run(**facts: object) -> None:
    """Print facts of the run that begins, a line each. The strategy announces the rest."""
    for label, value in facts.items():
        get_console().print(Text.assemble((f"{label:12}", "bold"), str(value)), soft_wrap=True)


def describe_parameters(task: LightningModule, settings: Mapping[str, Any]) -> str:
    """Return how many parameters a task has and trains, in words."""
    total = sum(weights_in(p) for p in task.parameters())
    trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
    if trained == total:
        return f"{total:,}, all of them trained"
    adapters = f"LoRA, rank {settings['lora']['r']}" if "r" in settings["lora"] else "adapters"
    return f"{trained:,} of {total:,} trained ({100 * trained / total:.2g} %): {adapters}"


def show_outcome(summary: Mapping[str, Any], prompt: str | None) -> None:
    """Print the summary as tables: what training changed, and what it cost."""
    console = get_console()
    changed = Table("", "before", "after", title="What training changed", title_justify="left", show_lines=True)
    before, after = summary["val_loss_before"], summary["val_loss_after"]
    changed.add_row("validation loss", _number(before, 4), _number(after, 4))
    changed.add_row("perplexity", *(_number(None if loss is None else math.exp(loss)) for loss in (before, after)))
    if prompt is not None:
        changed.add_row(Text(prompt), _shown(summary["completion_before"]), _shown(summary["completion_after"]))
    console.print(changed)
    cost = Table("", "", title="What it cost", title_justify="left", show_header=False)
    as_it_ran, in_replay = "{:.1f} %", "{:.1f} %, the same times on devices of their own"
    if summary["replay_bubble_pct"] is not None:
        as_it_ran += f", as {plural(summary['workers'], 'emulated device')} share {plural(cores(), 'core')}"
    for label, key, show in (
        ("optimizer steps", "steps", str),
        ("step time", "step_time_s", seconds),
        ("speed", "tokens_per_s", "{:,.0f} tokens/s".format),
        ("bubble", "bubble_pct", as_it_ran.format),
        ("bubble in a replay", "replay_bubble_pct", in_replay.format),
        ("host memory at its peak", "peak_host_gib", lambda size: gib(size * _GIB)),
        ("a device's at its peak", "peak_device_gib", lambda size: gib(size * _GIB)),
        ("weights uploaded", "weights_uploaded_gib", lambda size: gib(size * _GIB)),
        ("wall time", "wall_s", seconds),
    ):
        if summary[key] is not None:
            cost.add_row(label, show(summary[key]))
    console.print(cost)


def _shown(completion: str) -> Text:
    """Return what a model has written, which may look like rich's markup, without control characters."""
    return Text("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in completion.strip()))


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
