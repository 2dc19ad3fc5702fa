"""The report as one HTML file that needs nothing else: no network, no server, no other file."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from deat.numbers import level
from deat.plain import plain
from deat.report.cells import Cell, cell, cost, title
from deat.report.claims import Checked
from deat.report.collect import OneRun, Row
from deat.report.draw import label, unit
from deat.report.escape import markup
from deat.report.gallery import Gallery
from deat.report.gather import Subject, believed, flags_of
from deat.report.held_out_tables import HEADING, held_out_section
from deat.report.likeness import setups
from deat.report.sections import (
    answer,
    chips,
    claims_section,
    front_of,
    gallery_section,
    ranking,
    scores_section,
    several,
    table,
    warnings_of,
)
from deat.report.series import Figure, Panel, heading
from deat.report.settings import settings_section
from deat.report.tables import Sheet, deviation, interval, mean, minutes
from deat.versions import VERSION


@dataclass(frozen=True, eq=False)
class Story:
    """Everything that a page tells."""

    heading: str
    sheet: Sheet
    figures: Sequence[Figure]
    claims: Sequence[Checked]
    gallery: Gallery
    missing: Sequence[str]


def page(story: Story) -> str:
    """The page."""
    css, js = asset("page.css"), asset("page.js")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(css, js)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{markup(story.heading)}</title>
<style>{css}</style>
</head>
<body>
{_top(story)}
<main>
{_body(story)}
<p class="note">Made by deat {markup(VERSION)}. The same numbers are in table.csv, table.md and table.tex.</p>
</main>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{embedded(_data(story))}</script>
<script>{js}</script>
</body>
</html>
"""


def policy(css: str, js: str) -> str:
    """A Content-Security-Policy under which nothing runs but this page's own script, and nothing is fetched."""
    return (
        f"default-src 'none'; script-src '{_digest(js)}'; style-src '{_digest(css)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def asset(name: str) -> str:
    """One of the page's own files."""
    return files("deat.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _top(story: Story) -> str:
    rows = story.sheet.rows
    runs = sum(len(row.runs) for row in rows)
    about = (
        f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}, {runs} {'run' if runs == 1 else 'runs'}{_setting(rows)}"
        f"{_place(story.sheet.subject)}"
    )
    return (
        f'<header class="top"><div><h1>{markup(story.heading)}</h1><p class="muted">{markup(about)}</p></div>'
        '<button type="button" class="button" id="theme">Dark</button></header>'
    )


def _place(subject: Subject) -> str:
    """Where in the paper the recipes are."""
    return f" · in the paper: {'; '.join(subject.tables)}" if subject.tables else ""


def _setting(rows: Sequence[Row]) -> str:
    """What all runs have in common, for the line under the heading."""
    records = [run.record for row in rows for run in row.runs if run.record]
    facts = [
        {str(r["data"]["name"]) for r in records},
        {str(r["model"]["name"]) for r in records},
        {f"{r['threat']['norm']} eps {level(r['threat']['eps'])}" for r in records},
    ]
    return "".join(f" · {fact.pop()}" for fact in facts if len(fact) == 1)


def _body(story: Story) -> str:
    parts = [*(_opening if several(story.sheet) else _opening_of_one)(story)]
    if story.gallery.tiles:
        parts.append(_section("gallery", "Adversarial examples", gallery_section(story.gallery)))
    if story.claims:
        parts.append(_section("claims", "The paper's claims", claims_section(story.claims)))
    parts.append(_section("settings", "Settings", settings_section(story.sheet.rows)))
    parts += [f'<p class="note">Left out. {markup(text)}.</p>' for text in story.missing]
    return "\n".join(parts)


def _opening(story: Story) -> Iterator[str]:
    """What rows are compared by: the front, the table, then how each was trained."""
    of = story.sheet
    yield answer(of)
    yield _legend(of)
    if of.headline:
        yield _cost_section(of)
    yield warnings_of(of.subject)
    yield from _results(of, _table_bar(of))
    yield from _scores(of)
    yield from _figures(story.figures)


def _opening_of_one(story: Story) -> Iterator[str]:
    """A row that has none to be compared with: what training ended with and how it went, then the judging."""
    of, curves = story.sheet, list(_figures(story.figures))
    yield answer(of)
    yield warnings_of(of.subject)
    yield from _scores(of)
    if _has_seeds(of):
        yield _legend(of)
    yield from curves[:1]
    yield from _results(of)
    yield from curves[1:]


def _results(of: Sheet, bar: str = "") -> Iterator[str]:
    """The table, once a run is evaluated, and what is known of those that are not."""
    if any(row.done for row in of.rows):
        yield _section("results", "Results", bar + table(of))
    if known := held_out_section(of.rows):
        yield _section("held-out", HEADING, known)


def _scores(of: Sheet) -> Iterator[str]:
    if scores := scores_section(of.rows):
        yield _section("scores", "At the end of training", scores)


def _has_seeds(of: Sheet) -> bool:
    """Whether some row has the curves of several seeds."""
    return any(sum(bool(run.history) for run in row.runs) > 1 for row in of.rows)


def _legend(of: Sheet) -> str:
    toggle = '<button type="button" class="chip" id="seeds" aria-pressed="false"><span>each seed</span></button>'
    return (
        '<nav class="legend" aria-label="Rows on and off"><div class="switches">'
        '<button type="button" class="chip plain" id="all">all</button>'
        f'<button type="button" class="chip plain" id="none">none</button>{toggle if _has_seeds(of) else ""}</div>'
        f'<div class="chips">{chips(of.rows)}</div></nav>'
    )


def _cost_section(of: Sheet) -> str:
    options = "".join(
        f'<option value="{markup(a)}"{" selected" if a == of.headline else ""}>{markup(title(a))}</option>'
        for a in of.attacks
    )
    return (
        '<section class="card" aria-labelledby="cost"><h2 id="cost">Robustness against cost</h2>'
        f'<p class="note">Up is more robust, left is cheaper. {_front(of)} Whiskers are 95 % intervals.</p>'
        f'<div class="bar"><label>accuracy under <select id="cost-attack">{options}</select></label>'
        '<label>cost in <select id="cost-unit"><option value="backprops">backprops</option>'
        '<option value="minutes">minutes</option></select></label><span class="muted" id="cost-note"></span></div>'
        '<div id="cost-chart"></div></section>'
    )


def _front(of: Sheet) -> str:
    """What the chart's front is, or why there is none."""
    if not ranking(of):
        return "Rows that were not judged alike have no front together; switch some off to see that of the others."
    doubted = " A flagged row (⚑) is never on it." if len(believed(of.rows)) < len(of.rows) else ""
    line = "The dashed line is the Pareto front: filled points are on it; no other row is as good and cheaper."
    return f"{line}{doubted}"


def _table_bar(of: Sheet) -> str:
    count = len(of.rows)
    by = f' <span class="muted">({markup(front_of(of))})</span>' if of.headline else ""
    box = f'<label><input type="checkbox" id="only-front"><span>on the front only{by}</span></label>'
    return (
        '<div class="bar"><label>filter '
        '<input type="search" id="filter" placeholder="name, method, model, flag"></label>'
        f"{box if ranking(of) else ''}"
        f'<span class="muted" id="shown" role="status">{count} of {count} rows</span></div>'
    )


def _figures(figures: Sequence[Figure]) -> Iterator[str]:
    """Every figure's curves; a panel that two figures share is shown once."""
    shown: set[str] = set()
    for place, figure in enumerate(figures):
        fresh = {n: panel for n, panel in enumerate(figure.panels) if panel.title not in shown}
        shown |= {panel.title for panel in fresh.values()}
        if fresh and not figure.layout.apart:
            cards = "".join(_card(place, n, panel) for n, panel in fresh.items())
            yield _section(figure.name, heading(figure, list(fresh.values())), f'<div class="charts">{cards}</div>')


def _card(place: int, n: int, panel: Panel) -> str:
    return f'<div class="card"><h3>{markup(panel.title)}</h3><div data-panel="{place} {n}"></div></div>'


def _section(name: str, head: str, body: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{markup(head)}</h2>{body}</section>'


def _data(story: Story) -> dict[str, Any]:
    of = story.sheet
    return {
        "rows": [{**_row(of, row), "setup": n} for row, n in zip(of.rows, setups(of.rows), strict=True)],
        "titles": {a: title(a) for a in of.attacks},
        "figures": [{"name": f.name, "panels": [_panel(p) for p in f.panels]} for f in story.figures],
    }


def _row(of: Sheet, row: Row) -> dict[str, Any]:
    spent = cost(row)
    found = {attack: cell(row, attack) for attack in of.attacks}
    return {
        "name": plain(row.name),
        "accuracy": {a: _accuracy(c) for a, c in found.items() if c},
        "said": {"backprops": f"{spent.backprops:,.0f}", "minutes": minutes(spent)} if spent else {},
        "seeds": [_seed(of, run) for run in row.done] if len(row.done) > 1 else [],
        "backprops": spent.backprops if spent else None,
        "minutes": spent.minutes if spent else None,
        "crowded": row.crowded,
        "flags": sorted({plain(flag.name) for _, flag in flags_of(row)}),
    }


def _accuracy(found: Cell) -> dict[str, Any]:
    """An accuracy to draw, and in words, so that it is rounded in one place."""
    said = f"{mean(found)}{deviation(found)} %"
    shown = {"said": said, "interval": f"{interval(found)} %", "behind": found.behind}
    return {"mean": found.mean, "low": found.low, "high": found.high, **shown}


def _seed(of: Sheet, run: OneRun) -> dict[str, Any]:
    """One seed's point among those of its row."""
    held = {a: run.numbers[a] for a in of.attacks if a in run.numbers}
    said = {a: f"{100 * share:.2f} %" for a, share in held.items()}
    costs = {"backprops": run.numbers["backprops"], "minutes": run.numbers["minutes"] or None}
    return {"seed": run.seed, "accuracy": held, "said": said, **costs}


def _panel(panel: Panel) -> dict[str, Any]:
    lines = [
        {
            "row": plain(line.row),
            "seed": line.seed,
            "x": [_short(x) for x in line.x],
            "y": [y if y is None else _short(y) for y in line.y],
        }
        for line in panel.lines
    ]
    about = {"title": panel.title, "x": panel.x, "y": label(panel), "unit": unit(panel), "kind": panel.kind}
    return {**about, "percent": panel.percent, "lines": lines}


def _short(value: float) -> float:
    return float(f"{value:.6g}")
