"""The report page: complete in one file, with the report's figures, and drawn by a browser without an error."""

import re
from html.parser import HTMLParser

import pytest
import torch
from harness import loader, ours, quiet, trainer_of
from reports.test_monitor import Tokens, known, times

from lightning_roundpipe import RoundPipeMonitor
from lightning_roundpipe.messages import gib, seconds
from lightning_roundpipe.reports.diagnosis import diagnose
from lightning_roundpipe.reports.page import write_page

TOKENS = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "labels": torch.zeros(4, 8, dtype=torch.long)}


def full(**changes):
    more = {
        "peak_device_bytes": [1 << 29, 1 << 28], "peak_host_bytes": 3 << 30, "planned_host_bytes": 1 << 30,
        "stall_pct": 1.5, "bytes_uploaded": [1 << 20, 1 << 20], "bytes_downloaded": [1 << 19, 0],
    }  # fmt: skip
    return known() | more | changes


def page(folder, **options):
    write_page(full(), folder / "report.html", **options)
    return (folder / "report.html").read_text()


class References(HTMLParser):
    """What a browser would load, and the text that it would show."""

    def __init__(self, text):
        super().__init__()
        self.loaded = []
        self.shown = []
        self._hidden = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._hidden = tag in ("script", "style")
        self.loaded += [str(v) for name, v in attrs if name in ("src", "href", "srcset", "data", "action") and v]

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden and data.strip():
            self.shown.append(" ".join(data.split()))


def test_nothing_is_loaded(tmp_path):
    text = page(tmp_path)
    assert [target for target in References(text).loaded if not target.startswith("data:")] == []
    for style in re.findall(r"<style>(.*?)</style>", text, re.DOTALL):
        assert "@import" not in style and "url(" not in style
    assert len(text) < 2_000_000


def test_its_figures_are_the_reports(tmp_path):
    report = full()
    shown = References(page(tmp_path, settings={"data": {"batch_size": 8}})).shown
    for value in (
        seconds(report["step_time_s"]),
        f"{report['bubble_pct']:.1f} %",
        "1.5 % waiting for copies",
        gib(1 << 29),
        f"{gib(report['planned_device_bytes'])} planned",
        "3.0 GiB",
        "1.0 GiB for weights, gradients, optimizer",
        "2 MiB",
        report["plan"],
        "data.batch_size",
        torch.__version__.partition("+")[0],
    ):
        assert any(value == text or value in text for text in shown), value
    stages = [text for text in shown if re.fullmatch(r"[FB]\d+|fused", text)]
    assert {text for text in stages if text != "fused"} == {"F1", "F2", "B1", "B2", "B3", "B4", "B5"}
    assert page(tmp_path).count("<img") == 1


def test_what_steps_wait_for(tmp_path):
    found = diagnose(known(), times(between_s=1.0), waited_s=1.8)
    shown = " ".join(References(page(tmp_path, diagnosis=found)).shown)
    assert "waits longest for the data loader, 900 ms: set num_workers=" in shown
    assert "waits longest" not in " ".join(References(page(tmp_path)).shown)


def test_text_is_escaped(tmp_path):
    text = page(tmp_path, settings={"prompt": "</td><script>alert(1)</script>"})
    assert "<script>alert(1)" not in text


def test_a_strategy_writes_it_after_a_run(tmp_path):
    strategy, monitor = ours(num_microbatches=2), RoundPipeMonitor(every_n_steps=1)
    with pytest.raises(ValueError, match="no training step has finished yet"):
        strategy.save_report(tmp_path / "early.html")
    with quiet():
        trainer_of(strategy, devices=2, callbacks=[monitor]).fit(Tokens(), loader([TOKENS] * 3))
    strategy.save_report(tmp_path / "report.html")
    shown = References((tmp_path / "report.html").read_text()).shown
    assert strategy.report()["plan"] in shown
    assert "num_microbatches" in shown and "All have their defaults." not in shown  # settings that are not defaults
