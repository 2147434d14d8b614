"""The report page of a run: one HTML file with pictures of its last step, its plan, settings and versions.

The page loads nothing and runs no script: pictures are a part of the file, which can be mailed and opened offline. To
zoom into a step, open its trace (`traces.write_trace`) in https://ui.perfetto.dev.
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
from typing import Any

from lightning_roundpipe.engine.events import COMPUTE
from lightning_roundpipe.extras import need
from lightning_roundpipe.messages import gib, plural, seconds
from lightning_roundpipe.reports.diagnosis import Diagnosis
from lightning_roundpipe.reports.pictures import draw_steps, stage_names

_PACKAGES = ("lightning-roundpipe", "torch", "lightning", "transformers", "peft", "bitsandbytes", "numpy")
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>RoundPipe report</title>
<style>
:root {{ color-scheme: light dark; --card: #f5f6f8; --quiet: #5c6570; --line: #d9dde3; }}
@media (prefers-color-scheme: dark) {{ :root {{ --card: #1f242b; --quiet: #a3acb8; --line: #363d47; }} }}
body {{ max-width: 1280px; margin: 0 auto; padding: 20px 16px 60px; font: 15px/1.5 system-ui, sans-serif; }}
h2 {{ font-size: 19px; margin: 34px 0 8px; border-bottom: 1px solid var(--line); }}
code {{ overflow-wrap: anywhere; font-size: 13px; }}
img {{ width: 100%; background: white; border-radius: 6px; margin: 6px 0; }}
.quiet, .tile span, .tile small, th {{ color: var(--quiet); }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 10px; }}
.tile {{ background: var(--card); border-radius: 8px; padding: 10px 14px; display: flex; flex-direction: column; }}
.tile b {{ font-size: 21px; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 13.5px; }}
th, td {{ text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }}
</style>
</head>
<body>
<h1>RoundPipe report</h1>
<p class="quiet">{when}</p>
<div class="tiles">{tiles}</div>
{body}</body>
</html>
"""


def write_page(
    report: Mapping[str, Any],
    path: Path,
    *,
    replayed: Mapping[str, Any] | None = None,
    diagnosis: Diagnosis | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write the report page of a report from ``RoundPipeStrategy.report()`` to ``path``, whose folder must exist.

    ``replayed``: the same step as `planned.replay` returns it, for a second picture. ``settings`` are shown in a table.

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
        ValueError: no training step has finished yet.
    """
    need("matplotlib", "The report page has pictures, which are drawn with matplotlib")
    steps = {"The last step": report} | ({"Its replay: each device computes alone": replayed} if replayed else {})
    with tempfile.TemporaryDirectory() as folder:
        draw_steps(steps, picture := Path(folder) / "step.png")
        shown = _image(picture, "The last step on all workers")
    sections = {
        "The last step": shown + (f"<p>From the last log: {_text(diagnosis)}</p>" if diagnosis else ""),
        "The plan": f"<p><code>{_text(report['plan'])}</code></p>{_plan(report)}",
        "Settings": _table(("setting", "value"), _flat(settings)) if settings else "<p>All have their defaults.</p>",
        "Versions": _table(("package", "version"), _versions()),
    }
    of = f"{plural(report['microbatches'], 'microbatch')} on {plural(report['workers'], 'worker')}"
    tiles = (
        f'<div class="tile"><span>{_text(name)}</span><b>{_text(value)}</b><small>{_text(note)}</small></div>'
        for name, value, note in _tiles(report)
    )
    body = "".join(f"<h2>{title}</h2>\n{part}\n" for title, part in sections.items())
    when = f"{of}, written {datetime.now():%Y-%m-%d %H:%M}"
    path.write_text(_PAGE.format(when=when, tiles="".join(tiles), body=body), encoding="utf-8")


def _tiles(report: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Yield the name, value and note of the figures at the top."""
    yield "last step", seconds(report["step_time_s"]), "to the end of its last stage"
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
