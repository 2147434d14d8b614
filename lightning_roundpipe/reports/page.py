"""The report page of a run: one HTML file with pictures of its last step, its plan, curves, settings and versions.

The page loads nothing and runs no script: pictures are a part of the file, which can be mailed and opened offline. To
zoom into a step, open its trace (`timeline.write_trace`) in https://ui.perfetto.dev.
"""

from __future__ import annotations

import base64
import html
import json
import platform
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.engine.events import COMPUTE
from lightning_roundpipe.extras import need
from lightning_roundpipe.messages import gib, plural, seconds
from lightning_roundpipe.reports.diagnosis import Diagnosis
from lightning_roundpipe.reports.pictures import draw_charts, save
from lightning_roundpipe.reports.timeline import chart_of, stage_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PACKAGES = ("lightning-roundpipe", "torch", "lightning", "transformers", "peft", "bitsandbytes", "numpy")
_CURVES = {
    "loss": {"loss": "loss"},
    "speed (1/s)": {"tokens_per_s": "tokens", "samples_per_s": "samples"},
    "step time (s)": {"step_time_s": "step", "planned_step_time_s": "planned"},
    "workers' time (%)": {
        "bubble_pct": "bubble",
        **{f"stall_{kind}_pct": f"waiting for {kind}" for kind in ("weights", "activations", "gradients")},
    },
    "device memory (GiB)": {"device_peak_gib": "peak", "device_planned_gib": "planned"},
    "host memory (GiB)": {"host_gib": "process", "host_planned_gib": "weights, gradients, optimizer"},
}
"""Figures of the monitor's history by the unit of their curve, with their names in the legend."""
_STYLE = """
:root { color-scheme: light dark; --card: #f5f6f8; --quiet: #5c6570; --line: #d9dde3; }
@media (prefers-color-scheme: dark) { :root { --card: #1f242b; --quiet: #a3acb8; --line: #363d47; } }
body { max-width: 1280px; margin: 0 auto; padding: 20px 16px 60px; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 19px; margin: 34px 0 8px; border-bottom: 1px solid var(--line); }
code { overflow-wrap: anywhere; font-size: 13px; }
img { width: 100%; background: white; border-radius: 6px; margin: 6px 0; }
.quiet, .tile span, .tile small, th { color: var(--quiet); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 10px; }
.tile { background: var(--card); border-radius: 8px; padding: 10px 14px; display: flex; flex-direction: column; }
.tile b { font-size: 21px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
"""


def write_page(
    report: Mapping[str, Any],
    path: Path,
    *,
    replayed: Mapping[str, Any] | None = None,
    history: Sequence[Mapping[str, Any]] = (),
    diagnosis: Diagnosis | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write the report page.

    Args:
        report: what ``RoundPipeStrategy.report()`` returns.
        path: the file to write; its folder must exist.
        replayed: the same step as `planned.replay` returns it, for a second picture.
        history: ``RoundPipeMonitor.history``, for the curves.
        diagnosis: ``RoundPipeMonitor.diagnosis``.
        settings: shown in a table; nested mappings are flattened.

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
        ValueError: no training step has finished yet.
    """
    need("matplotlib", "The report page has pictures, which are drawn with matplotlib")
    charts = [chart_of(report, "The last step")]
    if replayed:
        charts.append(chart_of(replayed, "Its replay: each device computes alone"))
    with tempfile.TemporaryDirectory() as folder:
        draw_charts(charts, step := Path(folder) / "step.png")
        curves = "<p>Curves need a <code>RoundPipeMonitor</code> among the callbacks, and two of its logs.</p>"
        if len(history) > 1:
            save(_curves(history), Path(folder) / "curves.png")
            curves = _image(Path(folder) / "curves.png", "Curves over the optimizer steps")
        shown = _image(step, "The last step on all workers")
    waits = f"<p>From the last log: {_text(diagnosis)}</p>" if diagnosis is not None else ""
    sections = {
        "The last step": shown + waits,
        "The plan": f"<p><code>{_text(report['plan'])}</code></p>{_plan(report)}",
        "Over time": curves,
        "Settings": _table(("setting", "value"), _flat(settings)) if settings else "<p>All have their defaults.</p>",
        "Versions": _table(("package", "version"), _versions()),
    }
    body = "".join(f"<h2>{title}</h2>\n{part}\n" for title, part in sections.items())
    when = f"{plural(report['microbatches'], 'microbatch')} on {plural(report['workers'], 'worker')}"
    steps = f"{plural(history[-1]['step'], 'step')}, " if history else ""
    tiles = "".join(
        f'<div class="tile"><span>{_text(name)}</span><b>{_text(value)}</b><small>{_text(note)}</small></div>'
        for name, value, note in _tiles(report, history[-1] if history else {})
    )
    path.write_text(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<link rel="icon" href="data:,">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>RoundPipe report</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>RoundPipe report</h1>\n"
        f'<p class="quiet">{steps}{when}, written {datetime.now():%Y-%m-%d %H:%M}</p>\n'
        f'<div class="tiles">{tiles}</div>\n{body}</body>\n</html>\n',
        encoding="utf-8",
    )


def _tiles(report: Mapping[str, Any], last: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Yield the name, value and note of the figures at the top. ``last`` is the last record of the history."""
    yield "last step", seconds(report["step_time_s"]), "to the end of its last stage"
    if "step_time_s" in last:
        planned = f", {seconds(last['planned_step_time_s'])} planned" if "planned_step_time_s" in last else ""
        yield "from step to step", seconds(last["step_time_s"]), f"mean since the last log{planned}"
    for name in ("tokens_per_s", "samples_per_s"):
        if name in last:
            yield name.replace("_per_s", " per second"), f"{last[name]:,.0f}", "since the last log"
    yield "bubble", f"{report['bubble_pct']:.1f} %", f"{report['stall_pct']:.1f} % waiting for copies"
    planned, host = report["planned_device_bytes"], report.get("planned_host_bytes")
    yield "device memory", gib(max(report["peak_device_bytes"])), f"{gib(planned)} planned" if planned else "no plan"
    note = f"{gib(host)} for weights, gradients, optimizer" if host is not None else "peak of the process"
    yield "host memory", gib(report["peak_host_bytes"]), note
    yield "copies", gib(sum(report["bytes_uploaded"])), f"to the devices, {gib(sum(report['bytes_downloaded']))} back"


def _plan(report: Mapping[str, Any]) -> str:
    took: dict[int, float] = defaultdict(float)
    for event in report["events"]:
        if event["kind"] in COMPUTE:
            took[event["slot"]] += event["end_s"] - event["start_s"]
    names = stage_names(report)
    rows = [
        (
            names.get(slot["slot"], slot["slot"]),
            *(slot[key] for key in ("round", "phase")),
            " … ".join(dict.fromkeys((slot["layers"][0], slot["layers"][-1]))),
            slot["worker"],
            seconds(took[slot["slot"]]),
        )
        for slot in report["slots"]
        if slot["layers"]  # nothing differentiates through frozen embeddings
    ]
    return _table(("stage", "round", "phase", "layers", "worker", "computing"), rows)


def _curves(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a figure with a curve for each of `_CURVES` that ``history`` has."""
    from matplotlib.figure import Figure

    found = {
        unit: {name: [record.get(key) for record in history] for key, name in lines.items() if key in history[-1]}
        for unit, lines in _CURVES.items()
    }
    found = {unit: lines for unit, lines in found.items() if lines}
    figure = Figure(figsize=(12, 2.4 * -(-len(found) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(found) // 2), 2, squeeze=False).flat
    steps = [record["step"] for record in history]
    for (unit, lines), axes in zip(found.items(), panels, strict=False):
        for name, values in lines.items():
            axes.plot(
                steps,
                [float("nan") if v is None else v for v in values],
                "--" if name == "planned" else "-",
                label=name,
            )
        axes.set_title(unit, loc="left", fontsize=9)
        axes.set_ylim(bottom=None if unit == "loss" else 0)
        axes.legend(fontsize=8, frameon=False)
    for axes in panels:
        axes.set_axis_off()
    figure.supxlabel("optimizer steps", fontsize=9)
    return figure


def _image(path: Path, what: str) -> str:
    return f'<img alt="{what}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def _text(value: object) -> str:
    return html.escape(str(value))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def _versions() -> Iterable[tuple[str, str]]:
    yield "Python", platform.python_version()
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
