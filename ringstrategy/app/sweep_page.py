"""The page about a sweep: one HTML file with a table to sort and plots to zoom, which asks the network for nothing."""

import json
import math
from collections.abc import Sequence
from html import escape

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from ringstrategy.app.sweep_plots import Job, Plot, plots
from ringstrategy.app.sweep_table import Cell, Column, Grid, common_overrides, grids

_GAPS = {"solid": "", "dot": "3 3", "dash": "7 4", "dashdot": "7 3 2 3", "longdash": "11 4", "longdashdot": "11 3 2 3"}
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --faint: #667; --line: #dde; --hover: #f3f4f8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171c; --ink: #dfe2e8; --faint: #99a; --line: #343843; --hover: #1f232b; }
}
body { margin: 0 auto; padding: 1.5rem 2rem; max-width: 1700px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .2rem; }
p { margin: .3rem 0 1rem; color: var(--faint); }
code { font-size: .92em; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .8rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { padding: 0; vertical-align: bottom; border-bottom-width: 2px; }
th button { all: unset; cursor: pointer; padding: .28rem .8rem; font-weight: 600; white-space: pre; }
th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
td.number, th.number { text-align: right; }
td { white-space: nowrap; }
td.long { white-space: normal; overflow-wrap: anywhere; }
td.long:not(:empty) { min-width: 16rem; }
tbody tr:hover { background: var(--hover); }
tr.failed td { color: #d9363e; }
@media (max-width: 600px) { body { padding: 1rem; } th button, td { padding: .28rem .45rem; }
  td.long:not(:empty) { min-width: 8rem; } }
.jobs { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .4rem; max-height: 25vh;
  overflow-y: auto; margin: 1.2rem 0; padding: .6rem 0; background: var(--paper);
  border-bottom: 1px solid var(--line); }
.jobs button { font: inherit; font-size: .87rem; padding: .15rem .6rem; cursor: pointer; color: inherit;
  background: none; border: 1px solid var(--line); border-radius: 1rem; text-align: left; overflow-wrap: anywhere; }
.jobs button:hover { background: var(--hover); }
.jobs button[aria-pressed=false] { opacity: .45; text-decoration: line-through; }
.jobs svg { width: 26px; height: 8px; margin-right: .4rem; vertical-align: middle; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 1.6rem 2rem; }
figure { margin: 0; min-width: 0; }
.key { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .87rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; vertical-align: -.05rem; }
figcaption { padding-top: .3rem; font-size: .87rem; color: var(--faint); overflow-wrap: anywhere; }
"""

_SCRIPT = """
"use strict";
const plots = JSON.parse(document.getElementById("plots").textContent);
const chips = [...document.querySelectorAll("[data-job]")];
const dark = matchMedia("(prefers-color-scheme: dark)");

function kept(trace, hidden) {  // the trace without the jobs that are switched off
  if (!Array.isArray(trace.meta)) return hidden.has(trace.meta) ? [] : [trace];
  const bars = trace.meta.map((job, bar) => bar).filter(bar => !hidden.has(trace.meta[bar]));
  return bars.length ? [{...trace, x: bars.map(bar => trace.x[bar]), y: bars.map(bar => trace.y[bar])}] : [];
}

function draw() {
  const hidden = new Set(chips.filter(chip => chip.ariaPressed === "false").map(chip => Number(chip.dataset.job)));
  const style = getComputedStyle(document.documentElement);
  const [ink, line] = ["--ink", "--line"].map(name => style.getPropertyValue(name));
  const axis = own => ({automargin: true, gridcolor: line, zerolinecolor: line, ...own});
  plots.forEach(({data, layout}, place) => {
    const traces = data.flatMap(trace => kept(trace, hidden));
    const yaxis = {...layout.yaxis};
    if (yaxis.categoryarray) {
      const names = new Set(traces.flatMap(trace => trace.y));
      yaxis.categoryarray = yaxis.categoryarray.filter(name => names.has(name));
    }
    Plotly.react("plot" + place, traces, {
      ...layout, xaxis: axis(layout.xaxis), yaxis: axis(yaxis), showlegend: false,
      font: {color: ink, family: "system-ui, sans-serif"},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 60, r: 15, t: 32, b: 50},
      modebar: {bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink}, uirevision: "zoom and legend stay",
    }, {responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]});
  });
}

function press(pressed) {
  chips.forEach(chip => { chip.ariaPressed = String(pressed(chip)); });
  draw();
}
chips.forEach(chip => {
  chip.onclick = () => press(other => (other === chip) !== (other.ariaPressed === "true"));
  chip.ondblclick = () => press(other => other === chip);
});
const all = document.getElementById("all");
if (all) all.onclick = () => press(() => true);
dark.onchange = draw;
draw();

function sortable(table) {
  const headings = [...table.querySelectorAll("th")];
  headings.forEach((heading, column) => heading.firstChild.onclick = () => {
    const down = heading.ariaSort === "ascending";
    headings.forEach(other => other.removeAttribute("aria-sort"));
    heading.ariaSort = down ? "descending" : "ascending";
    const key = row => JSON.parse(row.cells[column].dataset.value);
    const compare = (a, b) => typeof a === "string" ? a.localeCompare(b, undefined, {numeric: true}) : a - b;
    const rows = [...table.tBodies[0].rows].sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      if (a === null || b === null) return (a === null) - (b === null);  // what was not measured comes last
      return (down ? -1 : 1) * compare(a, b);
    });
    table.tBodies[0].append(...rows);
  });
}
document.querySelectorAll("table").forEach(sortable);
"""


def page(title: str, jobs: Sequence[Job]) -> str:
    """The whole file. Text from users (overrides, names of folders) is shown as it is, and never run."""
    rows = [job.row for job in jobs]
    failed = sum(row["status"] == "failed" for row in rows)
    about = f"{len(rows)} {'job' if len(rows) == 1 else 'jobs'}" + (f", {failed} failed" if failed else "")
    if common := common_overrides(rows):
        about += f"; {'in all of them' if len(rows) > 1 else 'with'} <code>{escape(' '.join(common))}</code>"
    tables, drawn = grids(rows), plots(jobs)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{about}</p>
{"".join(map(_table, tables))}<div class="jobs">{_chips(jobs)}</div>
<div class="plots">
{"".join(_figure(place, plot) for place, plot in enumerate(drawn))}</div>
<script type="application/json" id="plots">{_json(drawn)}</script>
<script>{get_plotlyjs()}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _table(grid: Grid) -> str:
    rows = [
        f"<tr{' class=failed' if failed else ''}>{''.join(map(_cell, grid.columns, row))}</tr>\n"
        for row, failed in zip(grid.rows, grid.failed, strict=True)
    ]
    return f"""<h2>{escape(grid.title)}</h2>
<div class="wide"><table>
<thead><tr>{"".join(map(_heading, grid.columns))}</tr></thead>
<tbody>
{"".join(rows)}</tbody>
</table></div>
<p>{escape(grid.caption)}</p>
"""


def _heading(column: Column) -> str:
    kind = ' class="number"' if column.is_number else ""
    return f'<th{kind} scope="col"><button title="sort">{escape(column.heading)}</button></th>'


def _cell(column: Column, cell: Cell) -> str:
    kind = ' class="number"' if column.is_number else ' class="long"' if column.heading == "overrides" else ""
    value = None if isinstance(cell.value, float) and not math.isfinite(cell.value) else cell.value
    return f'<td{kind} data-value="{escape(json.dumps(value))}">{escape(cell.text)}</td>'


def _chips(jobs: Sequence[Job]) -> str:
    """A button a job with its line, which takes it out of all plots and back."""
    chips = [
        f'<button data-job="{place}" aria-pressed="true" title="click: hide or show; double click: this one alone">'
        f"{_line(job)}{escape(' '.join(job.words))}</button>"
        for place, job in enumerate(jobs)
        if job.row["status"] != "failed"
    ]
    return "".join(chips) + ('<button id="all">show all</button>' if len(chips) > 1 else "")


def _line(job: Job) -> str:
    stroke = f'stroke="{job.color}" stroke-width="3" stroke-dasharray="{_GAPS[job.dash]}"'
    return f'<svg aria-hidden="true" viewBox="0 0 26 8"><path d="M0 4H26" {stroke}/></svg>'


def _figure(place: int, plot: Plot) -> str:
    key = "".join(f'<span><i style="background: {color}"></i>{escape(words)}</span>' for words, color in plot.key)
    return (
        f'<figure><h2>{escape(plot.title)}</h2><div class="key">{key}</div>'
        f'<div id="plot{place}" style="height: {plot.height}px"></div>'
        f"<figcaption>{escape(plot.note)}</figcaption></figure>\n"
    )


def _json(plots: Sequence[Plot]) -> str:
    """In a script element only < could end it early."""
    figures = [{"data": plot.data, "layout": plot.layout} for plot in plots]
    return json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
