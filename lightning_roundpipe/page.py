"""The report page of a run: one HTML file with the plan, an interactive timeline of a step, curves and settings.

A picture cannot be asked what a block is, and a step has thousands of blocks. On the page one can zoom into a step and
point at each. The page loads nothing: bokeh's script is a part of the file, which can be mailed and opened offline.

bokeh comes with the extra ``report``. Its script has 1.3 MB and draws on a canvas; plotly's has 4.8 MB and makes each
block an element of the page, which browsers cannot zoom smoothly beyond some thousands.
"""

from __future__ import annotations

import html
import json
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_roundpipe.diagnosis import SLOW, Diagnosis
from lightning_roundpipe.extras import need
from lightning_roundpipe.messages import gib, plural, seconds
from lightning_roundpipe.page_style import SCRIPT, STYLE
from lightning_roundpipe.timeline import LEGEND, TimelineEvent, read_events, stage_names

_PACKAGES = ("lightning-roundpipe", "torch", "lightning", "transformers", "peft", "bitsandbytes", "numpy", "bokeh")
_LANES = {"compute": (0.0, 0.62), "up": (0.66, 0.78), "down": (0.82, 0.94)}
"""Top and bottom of each lane in a worker's row of height 1."""
_NOTHING = "–"


def write_page(
    report: Mapping[str, Any],
    path: Path,
    *,
    history: Sequence[Mapping[str, Any]] = (),
    diagnosis: Diagnosis | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write the report page.

    Args:
        report: what ``RoundPipeStrategy.report()`` returns.
        path: the file to write; its folder must exist.
        history: ``RoundPipeMonitor.history``, for the curves.
        diagnosis: ``RoundPipeMonitor.diagnosis``, for what to change.
        settings: shown in a table; nested mappings are flattened.

    Raises:
        ImportError: bokeh is not installed; the message names the extra.
        ValueError: no training step has finished yet.
    """
    why = "The report page is drawn with bokeh"
    embed, resources = need("bokeh.embed", why), need("bokeh.resources", why)
    if not report:
        raise ValueError("The report page shows a training step, and none has finished yet: call fit() first.")
    figures = {"timeline": _timeline(report), **_curves(report, history)}
    script, parts = embed.components(figures)
    inline = resources.Resources(mode="inline", components=["bokeh"]).render()
    path.write_text(_document(inline + script, parts, report, history, diagnosis, settings or {}), encoding="utf-8")


# -- figures -----------------------------------------------------------------------------------------------------------


def _figure(**options: Any) -> Any:
    plotting, tools = need("bokeh.plotting", ""), need("bokeh.models", "")
    figure = plotting.figure(
        sizing_mode="stretch_width",
        tools=[],
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        output_backend="canvas",
        **options,
    )
    pan, wheel = tools.PanTool(dimensions="width"), tools.WheelZoomTool(dimensions="width")
    figure.add_tools(pan, wheel, tools.BoxZoomTool(dimensions="width"), tools.ResetTool())
    figure.toolbar.active_drag, figure.toolbar.active_scroll = pan, wheel
    figure.toolbar.logo = None
    figure.xgrid.grid_line_alpha = figure.ygrid.grid_line_alpha = 0.25
    return figure


def _timeline(report: Mapping[str, Any]) -> Any:
    models = need("bokeh.models", "")
    events, stages = read_events(report), stage_names(report)
    sizes = [int(event.get("nbytes", 0)) for event in report["events"]]
    workers = sorted({event.worker for event in events})
    row = {worker: number for number, worker in enumerate(workers)}
    begin = min([0.0, *(event.start_s for event in events if event.lane == "compute")])
    end = max(report["step_time_s"], *(event.end_s for event in events))
    unit, factor = ("s", 1.0) if end >= 1 else ("ms", 1e3)
    figure = _figure(
        height=110 + 92 * len(workers),
        x_range=models.Range1d(begin * factor, end * factor, bounds=(begin * factor, end * factor)),
        y_range=models.Range1d(len(workers) - 0.02, -0.06),
        x_axis_label=f"time in the step ({unit})",
    )
    figure.ygrid.visible = False
    labels = {number + sum(_LANES["compute"]) / 2: f"worker {worker}" for worker, number in row.items()}
    figure.yaxis.ticker, figure.yaxis.major_label_overrides = list(labels), labels
    figure.yaxis.major_tick_line_color = figure.yaxis.axis_line_color = None
    groups: dict[str, list[tuple[TimelineEvent, int]]] = defaultdict(list)
    for event, size in zip(events, sizes, strict=True):
        if event.end_s >= begin:
            groups[event.label].append((event, size))
    for label, colour in LEGEND.items():
        if not (found := groups.get(label)):
            continue
        source = models.ColumnDataSource(
            {
                "left": [max(begin, event.start_s) * factor for event, _ in found],
                "right": [event.end_s * factor for event, _ in found],
                "top": [row[event.worker] + _LANES[event.lane][0] for event, _ in found],
                "bottom": [row[event.worker] + _LANES[event.lane][1] for event, _ in found],
                "what": [event.kind.replace("_", " ") for event, _ in found],
                "layer": [event.layer or _NOTHING for event, _ in found],
                "stage": [stages.get(event.slot, _NOTHING) for event, _ in found],
                "microbatch": [str(event.microbatch) if event.microbatch >= 0 else _NOTHING for event, _ in found],
                "takes": [_precise(event.end_s - event.start_s) for event, _ in found],
                "size": [gib(size) if size else _NOTHING for _, size in found],
            }
        )
        figure.quad(
            left="left", right="right", top="top", bottom="bottom", source=source, color=colour, line_width=0.5,
            line_color=colour if "copy" in label or "upload" in label else "#FFFFFF66", legend_label=label,
        )  # fmt: skip
    columns = ("what", "layer", "stage", "microbatch", "takes", "size")
    tooltips = [("" if column == "what" else column, f"@{column}") for column in columns]
    figure.add_tools(models.HoverTool(tooltips=tooltips))
    _put_legend_above(figure, 4)
    return figure


def _put_legend_above(figure: Any, columns: int) -> None:
    legend = figure.legend[0]
    legend.orientation, legend.click_policy, legend.ncols = "horizontal", "hide", columns
    legend.background_fill_alpha, legend.border_line_color = 0.0, None
    legend.label_text_font_size = "12px"
    figure.add_layout(legend, "above")


def _precise(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{1e3 * value:.2f} ms"


_LINES = ("#2F8FD0", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#8A8A8A")


def _curves(report: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a figure for each curve that ``history`` has at least two points of."""
    devices = max((len(record.get("device_gib", ())) for record in history), default=0)
    of_devices = {
        f"device {number}": [
            record["device_gib"][number] if number < len(record.get("device_gib", ())) else None for record in history
        ]
        for number in range(devices)
    }

    def column(name: str) -> list[float | None]:
        return [record.get(name) for record in history]

    speed = "tokens_per_s" if any("tokens_per_s" in record for record in history) else "samples_per_s"
    wanted: dict[str, tuple[str, dict[str, list[float | None]]]] = {
        "loss": ("loss", {"loss": column("loss")}),
        "speed": (speed.replace("_per_", "/").replace("_", " "), {"speed": column(speed)}),
        "steps": ("seconds", {"step": column("step_time_s"), "planned": column("planned_step_time_s")}),
        "idle": (
            "% of the workers' time",
            {
                "bubble": column("bubble_pct"),
                **{
                    f"waiting for {kind}": column(f"stall_{kind}_pct")
                    for kind in ("weights", "activations", "gradients")
                },
            },
        ),
        "devices": ("GiB", {**of_devices, "planned": column("device_planned_gib")}),
        "host": ("GiB", {"process": column("host_gib"), "weights, gradients, optimizer": column("host_planned_gib")}),
    }
    steps = [record["step"] for record in history]
    found = {}
    for name, (unit, lines) in wanted.items():
        present = {label: values for label, values in lines.items() if any(v is not None for v in values)}
        if len(steps) > 1 and present:
            found[name] = _curve(steps, unit, present)
    return found


def _curve(steps: Sequence[int], unit: str, lines: Mapping[str, Sequence[float | None]]) -> Any:
    models = need("bokeh.models", "")
    lowest = {} if unit == "loss" else {"start": 0}
    figure = _figure(
        height=230,
        x_axis_label="optimizer steps",
        y_axis_label=unit,
        x_range=models.DataRange1d(),
        y_range=models.DataRange1d(only_visible=True, **lowest),
    )
    figure.toolbar.autohide = True
    for number, (label, values) in enumerate(lines.items()):
        source = models.ColumnDataSource(
            {"x": list(steps), "y": [float("nan") if value is None else value for value in values]}
        )
        planned = label == "planned"
        line = figure.line(
            "x", "y", source=source, line_width=2, color="#8A8A8A" if planned else _LINES[number % len(_LINES)],
            line_dash="dashed" if planned else "solid", name=label,
            **({"legend_label": label} if len(lines) > 1 else {}),
        )  # fmt: skip
        figure.add_tools(
            models.HoverTool(renderers=[line], tooltips=[("step", "@x"), (label, "@y{0,0.000}")], mode="vline")
        )
    if len(lines) > 1:
        _put_legend_above(figure, 3)
    return figure


# -- the document ------------------------------------------------------------------------------------------------------

_TITLES = {
    "loss": "Loss",
    "speed": "Speed",
    "steps": "Step time",
    "idle": "Idle time of workers",
    "devices": "Peak memory of devices",
    "host": "Host memory",
}


def _document(
    head: str,
    parts: Mapping[str, str],
    report: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    diagnosis: Diagnosis | None,
    settings: Mapping[str, Any],
) -> str:
    curves = "".join(
        f'<section class="curve"><h3>{_TITLES[name]}</h3>{part}</section>'
        for name, part in parts.items()
        if name != "timeline"
    )
    if not curves:
        curves = (
            "<p>Curves need a <code>RoundPipeMonitor</code> among the Trainer's callbacks, and two of its logs "
            "(<code>every_n_steps</code>).</p>"
        )
    body = f"""
<header><h1>RoundPipe report</h1><button id="theme" type="button">dark / light</button></header>
<p class="quiet">{_text(_subtitle(report, history))}</p>
<div class="tiles">{"".join(_tile(*tile) for tile in _tiles(report, history))}</div>
<h2>What to change</h2>
{_advice(report, diagnosis)}
<h2>The last step</h2>
<p class="quiet">Drag to move, turn the wheel to zoom, point at a block; a click in the legend hides a kind. Below each
worker's computations are the copies to it and back.</p>
{parts["timeline"]}
<h2>The plan</h2>
<p><code>{_text(report["plan"])}</code></p>
{_plan(report)}
<h2>Over time</h2>
<div class="curves">{curves}</div>
<h2>Settings</h2>
{_table(("setting", "value"), _flat(settings)) if settings else "<p>All have their defaults.</p>"}
<h2>Versions</h2>
{_table(("package", "version"), _versions())}
"""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>RoundPipe report</title>\n<style>{STYLE}</style>\n{head}\n</head>\n<body>\n<main>{body}</main>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _subtitle(report: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str:
    steps = f"{plural(history[-1]['step'], 'step')}, " if history else ""
    return (
        f"{steps}{plural(report['microbatches'], 'microbatch')} on {plural(report['workers'], 'worker')}, "
        f"written {datetime.now():%Y-%m-%d %H:%M}"
    )


def _tiles(report: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    last = history[-1] if history else {}
    planned, host = report["planned_device_bytes"], report.get("planned_host_bytes")
    tiles = [("last step", seconds(report["step_time_s"]), "to the end of its last stage")]
    if "step_time_s" in last:
        tiles.append(("from step to step", seconds(last["step_time_s"]), _planned_time(last)))
    for name in ("tokens_per_s", "samples_per_s"):
        if name in last:
            tiles.append((name.replace("_per_s", " per second"), f"{last[name]:,.0f}", "since the last log"))
    return [
        *tiles,
        ("bubble", f"{report['bubble_pct']:.1f} %", f"{report['stall_pct']:.1f} % waiting for copies"),
        (
            "device memory",
            gib(max(report["peak_device_bytes"])),
            f"{gib(planned)} planned" if planned is not None else "no plan",
        ),
        (
            "host memory",
            gib(report["peak_host_bytes"]),
            f"{gib(host)} for weights, gradients, optimizer" if host is not None else "peak of the process",
        ),
        ("copies", gib(sum(report["bytes_uploaded"])), f"to the devices, {gib(sum(report['bytes_downloaded']))} back"),
    ]


def _planned_time(last: Mapping[str, Any]) -> str:
    mean = "mean since the last log"
    return f"{mean}, {seconds(last['planned_step_time_s'])} planned" if "planned_step_time_s" in last else mean


def _tile(name: str, value: str, note: str) -> str:
    return f'<div class="tile"><span>{_text(name)}</span><b>{_text(value)}</b><small>{_text(note)}</small></div>'


def _advice(report: Mapping[str, Any], diagnosis: Diagnosis | None) -> str:
    if diagnosis is None:
        why = "no step had a plan" if report["profiled"] else "a RoundPipeMonitor and eight steps are needed for that"
        return f"<p>Steps were not compared with the plan: {_text(why)}.</p>"
    said = str(diagnosis)
    if diagnosis.slow:
        said = said[0].upper() + said[1:]
    else:
        said = (
            f"From one step to the next pass {seconds(diagnosis.step_s)} (the median), and "
            f"{seconds(diagnosis.planned_s)} are planned. Up to {SLOW - 1:.0%} more is taken for what a plan cannot "
            "know."
        )
    rows = [
        (cause, seconds(lost), diagnosis.said[cause].what.rstrip(","), diagnosis.said[cause].remedy or "no setting")
        for cause, lost in sorted(diagnosis.lost_s.items(), key=lambda item: -item[1])
        if lost >= 0.005 * diagnosis.step_s
    ]
    table = _table(("cause", "from step to step", "what", "what helps"), rows) if rows else ""
    return f'<p class="{"slow" if diagnosis.slow else "fine"}">{_text(said)}</p>{table}'


def _plan(report: Mapping[str, Any]) -> str:
    took: dict[int, float] = defaultdict(float)
    for event in read_events(report):
        if event.lane == "compute":
            took[event.slot] += event.end_s - event.start_s
    names = stage_names(report)
    rows = [
        (
            names.get(slot["slot"], slot["slot"]),
            slot["round"],
            slot["phase"],
            " … ".join(dict.fromkeys((slot["layers"][0], slot["layers"][-1]))),
            len(slot["layers"]),
            slot["worker"],
            _precise(took[slot["slot"]]),
        )
        for slot in report["slots"]
        if slot["layers"]  # nothing differentiates through frozen embeddings
    ]
    return _table(("stage", "round", "phase", "layers", "number", "worker", "computing"), rows)


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
