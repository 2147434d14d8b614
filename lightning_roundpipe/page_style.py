"""How the report page looks, in light and dark: its style sheet, and the script that colours bokeh's figures."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light; --page: #ffffff; --card: #f5f6f8; --ink: #1b1f24; --quiet: #5c6570; --line: #d9dde3;
  --slow: #b54708; --fine: #067647; }
:root[data-theme="dark"] { color-scheme: dark; --page: #14171b; --card: #1f242b; --ink: #e8eaed; --quiet: #a3acb8;
  --line: #363d47; --slow: #fdb022; --fine: #47cd89; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 20px 16px 60px; }
header { display: flex; justify-content: space-between; align-items: center; gap: 16px; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 19px; margin: 34px 0 8px; border-bottom: 1px solid var(--line); padding-bottom: 4px; }
h3 { font-size: 15px; margin: 0 0 4px; }
code { overflow-wrap: anywhere; font-size: 13px; }
button { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: 4px 12px; cursor: pointer; }
.quiet { color: var(--quiet); margin: 4px 0 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 10px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; display: flex;
  flex-direction: column; }
.tile span, .tile small { color: var(--quiet); }
.tile b { font-size: 21px; }
.slow, .fine { border-left: 4px solid var(--slow); background: var(--card); padding: 10px 14px; border-radius: 4px; }
.fine { border-color: var(--fine); }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 20px; }
.curve { min-width: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--quiet); font-weight: 600; }
td { font-variant-numeric: tabular-nums; }
"""

SCRIPT = """
"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const colours = { dark: ["#e8eaed", "#a3acb8", "#6b7480"], light: ["#1b1f24", "#5c6570", "#aab2bd"] };
  function paint(theme) {
    root.dataset.theme = theme;
    const [ink, quiet, line] = colours[theme];
    for (const document of window.Bokeh?.documents ?? []) {
      for (const figure of document.roots()) {
        for (const model of figure.references()) {
          if (model.type.endsWith("Axis")) {
            model.setv({ axis_label_text_color: quiet, major_label_text_color: ink, axis_line_color: line,
              major_tick_line_color: line, minor_tick_line_color: null });
          } else if (model.type === "Grid") {
            model.grid_line_color = line;
          } else if (model.type === "Legend") {
            model.setv({ label_text_color: ink, inactive_fill_color: "#888888", inactive_fill_alpha: 0.4 });
          }
        }
      }
    }
  }
  const chosen = () => root.dataset.chosen ?? (system.matches ? "dark" : "light");
  window.addEventListener("load", () => {
    const figures = document.querySelectorAll("[data-root-id]").length;
    const wait = setInterval(() => {
      paint(chosen());
      if ((window.Bokeh?.documents ?? []).flatMap((d) => d.roots()).length >= figures) {
        clearInterval(wait);
        root.dataset.ready = "yes";
      }
    }, 50);
  });
  paint(chosen());
  system.addEventListener("change", () => paint(chosen()));
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.chosen = chosen() === "dark" ? "light" : "dark";
    paint(chosen());
  });
})();
"""
