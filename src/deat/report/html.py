"""The report as one HTML file that needs nothing else: no network, no server, no other file."""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from deat.report.escape import markup
from deat.report.figures import Figure, Panel, heading
from deat.report.gallery import Gallery, data_uri
from deat.report.grouping import UNEVALUATED, Subject, believed, flags_of, setups, troubles, unchecked
from deat.report.held_out import HeldOut, held_out, to_evaluate
from deat.report.load import OneRun, ReportRow
from deat.report.paper_claims import Checked, given
from deat.report.plots import label, unit
from deat.report.significance import SURE, doubt, rivals
from deat.report.stats import Cell, cell, cost, front, mean_under, title
from deat.report.tables import (
    CLAIMED,
    FLAGGED,
    Sheet,
    alarms,
    backprops,
    chance,
    claimed,
    comments,
    compared,
    deviation,
    difference,
    interval,
    last_epoch,
    mean,
    minutes,
    notes,
    paper_accuracy,
    paper_cost,
    scores_note,
    whole,
)
from deat.utils.numbers import level
from deat.utils.text import markdown, plain
from deat.version import VERSION

HUES, SHAPES = 10, 3
APART = "These rows were judged on different data sets or under different threat models, so none of them is the best."
EMPTY = "No run is evaluated yet, so there is nothing to rank."
NOTHING = (
    '<p class="empty" id="nothing" hidden>No row is left. '
    '<button type="button" class="button" id="clear">Clear the filter</button></p>'
)
Ranked = tuple[int, ReportRow, float, float]
"""A row's place, the row, its accuracy under the headline attack, and its backprops."""


def answer(of: Sheet) -> str:
    """Who wins, in three sentences: the most robust row, the cheapest that comes close, the best on clean images.

    Each says whom its row is not told apart from.
    """
    ranked = ranking(of)
    if not ranked or not of.headline:
        return f'<p class="note">{APART if of.headline else EMPTY}</p>'
    best = max(ranked, key=lambda item: (item[2], -item[3]))
    clean = max(ranked, key=lambda item: (mean_under(item[1], "natural"), -item[3]))
    name = "the worst of all attacks" if of.headline == "worst" else title(of.headline)
    tidy = f"{percent(mean_under(clean[1], 'natural'))}; {percent(clean[2])} under {name}"
    parts = [
        (best, f"Most robust under {name}", f"{percent(best[2])} for {best[3]:,.0f} backprops", ranked, of.headline),
        *((*card, of.headline) for card in _cheaper(ranked, best)),
        (clean, "Best on clean images", tidy, ranked, "natural"),
    ]
    items = "".join(
        f'<li class="h{item[0] % HUES}"><div class="what">{markup(what)}</div>'
        f'<div class="who">{mark(item[0])}{markup(item[1].name)}{_raised(item[1])}</div>'
        f'<div class="how">{markup(how)}{_doubted(item, rivals, attack)}</div></li>'
        for item, what, how, rivals, attack in parts
    )
    return f'<ul class="answer">{items}</ul>'


def mark(i: int) -> str:
    """The sign of row i wherever it is named: a colour, and a shape that tells colours apart for eyes that cannot."""
    return f'<i class="mark h{i % HUES} m{i % SHAPES}"></i>'


def percent(share: float) -> str:
    """A share in percent, for people."""
    return f"{100 * share:.2f} %"


def _doubted(best: Ranked, rivals: Sequence[Ranked], attack: str) -> str:
    """Whom a card's row is not told apart from, on a line of its own."""
    text = doubt(best[1], [item[1] for item in rivals], attack)
    return f"<br>{markup(text)}" if text else ""


def _cheaper(ranked: Sequence[Ranked], best: Ranked) -> Iterator[tuple[Ranked, str, str, Sequence[Ranked]]]:
    """The cheapest row within a point of the best, or else the most robust one that costs less; and its rivals."""
    near = [item for item in ranked if item[3] < best[3] and item[2] > best[2] - 0.01]
    less = [item for item in ranked if item[3] < best[3]]
    found = min(near, key=lambda item: item[3]) if near else max(less, key=lambda item: item[2], default=None)
    if found:
        what = "Cheapest within a point of it" if near else "Most robust of those that cost less"
        share = f"{percent(found[2])} for {100 * found[3] / best[3]:.0f} % of the backprops"
        yield found, what, share, [] if near else less


def ranking(of: Sheet) -> list[Ranked]:
    """Every row that may be the best and has an accuracy under the headline attack and a cost."""
    ranked = [
        (i, row, found.mean, spent.backprops)
        for i, row in enumerate(of.rows)
        if of.headline and (found := cell(row, of.headline)) and (spent := cost(row))
    ]
    sound = {id(row) for row in rivals([item[1] for item in ranked])}
    return [item for item in ranked if id(item[1]) in sound]


def several(of: Sheet) -> bool:
    """Whether there are rows to compare with each other."""
    return len(of.rows) > 1


def on_front(of: Sheet) -> set[int]:
    """The places of the rows that may be believed and that no such row beats in robustness and backprops."""
    ranked = ranking(of) if several(of) else []
    good = front([(spent, share) for _, _, share, spent in ranked])
    return {item[0] for item, is_good in zip(ranked, good, strict=True) if is_good}


def warnings_of(subject: Subject) -> str:
    """Sanity flags, collapses, runs that are not whole, rows that cannot be compared; empty where all is well."""
    flags = [
        f"<b>{markup(row.name)}</b>, seed {seed}: <b>{markup(flag.name)}</b>, {markup(flag.seen)}. "
        f"{markup(flag.advice)}"
        for row in subject.rows
        for seed, flag in flags_of(row)
    ]
    broken = [
        f"<b>{markup(row.name)}</b>, {markup(text)}" for row in subject.rows for text in troubles(row, UNEVALUATED)
    ]
    seen = [f"<b>{markup(row.name)}</b>, {markup(text)}" for row in subject.rows for text in alarms(row)]
    parts = [
        ("Sanity flags: these numbers should not be believed as they stand", flags),
        ("Training that collapsed on its way, as the overfit watch saw it", seen),
        ("Runs that are not whole", broken),
        ("Before you compare", [markup(note) for note in subject.notes]),
    ]
    return "".join(_warning(head, items) for head, items in parts if items)


def chips(rows: Sequence[ReportRow]) -> str:
    """A button for each row, which switches it on and off."""
    return "".join(
        f'<button type="button" class="chip" data-row="{i}" aria-pressed="true" title="{markup(row.name)}">'
        f"{mark(i)}<span>{markup(row.name)}</span></button>"
        for i, row in enumerate(rows)
    )


def table(of: Sheet) -> str:
    """The table, which a script sorts and filters."""
    good = on_front(of)
    attacks = {a: f'<span class="one">{markup(title(a))}</span>' for a in of.attacks}
    heads = [("text", "row", ""), *(("number", attacks[a], "") for a in of.attacks), ("number", "backprops", "up")]
    if of.against and of.headline:
        versus = [("number", f"vs {markup(of.against.name)}, {attacks[of.headline]}", "")]
    else:
        versus = []
    heads += [("number", "minutes", "up"), ("number", "seeds", ""), *versus]
    cells = "".join(
        f'<th scope="col" aria-sort="none" data-kind="{kind}" data-first="{first}"><button type="button"><span>'
        f"{text}</span></button></th>"
        for kind, text, first in heads
    )
    body = "".join(_table_row(of, i, row, i in good) for i, row in enumerate(of.rows))
    remarks = "".join(f'<p class="note">{markup(text)}</p>' for text in [*_top_notes(of), *notes(of, "below them")])
    return (
        '<div class="stage"><div class="scroll results" tabindex="0" role="region" aria-label="Results">'
        f'<table id="table"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{NOTHING}</div></div>{remarks}'
    )


def front_of(of: Sheet) -> str:
    """By what the table's front is judged."""
    return f"{title(of.headline or '')} accuracy against backprops"


def _top_notes(of: Sheet) -> list[str]:
    """What the front is, and how the rows at the top of the page were told apart."""
    if not ranking(of) or not several(of):
        return []
    alike = "At the top of the page, rows are not told apart where the paired test against the named row leaves p ≥"
    tested = [f"{alike} {SURE}."] if of.against else []
    return [f"On the front: no other row is as good and cheaper, by {front_of(of)}.", *tested]


def claims_section(claims: Sequence[Checked]) -> str:
    """The paper's sentences beside our numbers; those that nothing here can be held against are counted only."""
    shown, lacking = [c for c in claims if not c.missing], [c for c in claims if c.missing]
    rows = "".join(
        f'<tr><td class="wide">{markup(c.claim.text)}</td>'
        + "".join(f"<td>{text}</td>" for text in claimed(c))
        + "</tr>"
        for c in shown
    )
    head = f"<tr>{''.join(f'<th>{text}</th>' for text in CLAIMED)}</tr>"
    box = '<div class="scroll" tabindex="0" role="region" aria-label="Claims beside these runs">'
    text = f"{box}<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>" if shown else ""
    text += "".join(f'<p class="note">{markup(line)}</p>' for line in given(shown))
    if lacking:
        items = "".join(f"<li>{markup(c.claim.text)}: {markup(c.missing)}</li>" for c in lacking)
        head = f"{len(lacking)} claims that these runs cannot answer"
        text += f'<details><summary>{head}</summary><ul class="note">{items}</ul></details>'
    return text


def scores_section(rows: Sequence[ReportRow]) -> str:
    """The tables that runs of `deat train` ended with, where they have more than their own row; else nothing."""
    return "".join(_scores(row, run) for row, run in compared(rows))


def gallery_section(gallery: Gallery) -> str:
    """Adversarial examples."""
    items = "".join(
        '<li><div class="trio">'
        + "".join(
            f'<img src="{data_uri(image)}" alt="{markup(alt)}">'
            for image, alt in zip(tile.images, _alts(tile), strict=True)
        )
        + f"</div><p>{markup(tile.label)}: seen as {markup(tile.before)}, attacked as "
        f'<span class="{"" if tile.stands else "wrong"}">{markup(tile.after)}</span></p></li>'
        for tile in gallery.tiles
    )
    return (
        f'<p class="note">Attacks on <b>{markup(gallery.row)}</b>, {markup(gallery.attack)}: image, perturbation '
        f'(grey is none), and their sum. Images are {gallery.choice}.</p><ul class="gallery">{items}</ul>'
    )


def _table_row(of: Sheet, i: int, row: ReportRow, good: bool) -> str:
    spent = cost(row)
    cells = [_accuracy(cell(row, a), last_epoch(of, row, a), paper_accuracy(row, a)) for a in of.attacks]
    cells.append(_number(spent.backprops if spent else None, backprops(row), paper_cost(row, "per_batch")))
    cells.append(_number(spent.minutes if spent else None, minutes(spent), paper_cost(row, "minutes", "hours")))
    cells.append(_number(len(row.done), whole(row)))
    cells.append(_versus(of, row))
    pills = "".join(_pills(row, f"by {front_of(of)}" if good else ""))
    told = [*alarms(row, short=True), *comments(row)]
    model = f"<small>{markup(row.model)}</small>" if len({other.model for other in of.rows}) > 1 else ""
    why = "".join(f'<small class="why">{markup(text)}</small>' for text in told)
    mine = f'<th scope="row"><div>{mark(i)}{markup(row.name)}{model}{pills}{why}</div></th>'
    text = markup(" ".join([row.name, row.method, row.model, *told, *(f.name for _, f in flags_of(row))]))
    is_front = ' data-front="1"' if good else ""
    return f'<tr class="h{i % HUES}" data-row="{i}" data-text="{text}"{is_front}>{mine}{"".join(cells)}</tr>'


def _raised(row: ReportRow) -> str:
    """A mark beside the name of a row that a sanity flag speaks against."""
    return f' <span class="pill flag">{FLAGGED} flagged</span>' if flags_of(row) else ""


def _versus(of: Sheet, row: ReportRow) -> str:
    if not of.against or not of.headline:
        return ""
    found = of.versus[of.headline].get(row.name)
    if found is None:
        return f'<td data-v="">{"" if row is of.against else "—"}</td>'
    return f'<td data-v="{found.difference!r}">{difference(found)}<small>{markup(chance(found))}</small></td>'


def _pills(row: ReportRow, front: str) -> Iterator[str]:
    if front:
        yield f' <span class="pill front" title="{markup(front)}">on the front</span>'
    for name in sorted({flag.name for _, flag in flags_of(row)}):
        yield f' <span class="pill flag">{FLAGGED} {markup(name)}</span>'
    if unchecked(row):
        yield ' <span class="pill flag">sanity not checked</span>'
    if len(row.done) < len(row.runs):
        yield f' <span class="pill failed">{len(row.done)} of {len(row.runs)} whole</span>'


def _accuracy(found: Cell | None, last: str, paper: Sequence[str]) -> str:
    beside = (f"<small>{last}</small>" if last else "") + _small(paper)
    if found is None:
        return f'<td data-v="">—{beside}</td>'
    behind = f"<small>{markup(found.behind)}</small>" if found.behind else ""
    shown = f"<b>{mean(found)}</b>{deviation(found)}<small>{interval(found)}</small>{behind}"
    return f'<td data-v="{found.mean!r}">{shown}{beside}</td>'


def _number(value: float | None, shown: str, paper: Sequence[str] = ()) -> str:
    return f'<td data-v="{"" if value is None else repr(value)}">{markup(shown)}{_small(paper)}</td>'


def _small(paper: Sequence[str]) -> str:
    return "".join(f"<small>paper {markup(text)}</small>" for text in paper)


def record_row(name: str, texts: Sequence[str], sign: str = "") -> str:
    """A row of a table of plain text."""
    cells = "".join(f"<td>{markup(text)}</td>" for text in texts)
    return f'<tr><th scope="row"><div>{sign}{markup(name)}</div></th>{cells}</tr>'


def _scores(row: ReportRow, run: OneRun) -> str:
    attacks = list(run.scores[0].accuracy)
    head = "".join(f"<th>{markup(text)}</th>" for text in (*map(title, attacks), "backprops", "seconds"))
    body = "".join(
        record_row(s.name, [*(f"{s.accuracy[a]:.1%}" for a in attacks), f"{s.backprops:,}", f"{s.seconds:.1f}"])
        for s in run.scores
    )
    return (
        f'<p class="note">{markup(scores_note(row, run))}</p><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Scores of {markup(row.name)}, seed {run.seed}"><table>'
        f"<thead><tr><th>model</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _warning(head: str, items: Sequence[str]) -> str:
    return f'<section class="warning"><h2>{head}</h2><ul>{"".join(f"<li>{item}</li>" for item in items)}</ul></section>'


def _alts(tile: Any) -> tuple[str, str, str]:
    return f"a {tile.label}", "perturbation", f"attacked, seen as {tile.after}"


IN_EPS = tuple(f"method.schedule.{name}" for name in ("alpha", "stretch", "ramp"))
"""Lengths that a method declares as parts of eps."""


def settings_section(rows: Sequence[ReportRow]) -> str:
    """What differs between rows side by side, and every setting of every run."""
    held = [(i, row.name, flat(run.record or {})) for i, row in enumerate(rows) for run in row.runs[:1]]
    differ = differing([name for _, name, _ in held], [found for _, _, found in held])
    head = "".join(f'<th scope="col">{markup(setting(name))}</th>' for name in differ)
    body = "".join(record_row(name, [found.get(n, "—") for n in differ], mark(i)) for i, name, found in held)
    side = (
        '<h3>What differs</h3><div class="scroll" tabindex="0" role="region" aria-label="Settings that differ">'
        f'<table class="words"><thead><tr><th scope="col">row</th>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )
    each = "".join(_settings_of(row, run) for row in rows for run in row.runs)
    return (side if differ and len(held) > 1 else "") + each


def differing(rows: Sequence[str], held: Sequence[dict[str, str]]) -> list[str]:
    """The settings in which rows differ, each told once: not as their names, as asked and as resolved, or as text."""
    names = dict.fromkeys(name for found in held for name in found)
    told = [name for name in names if not name.startswith(("digest", "data.digest", "code", "versions", "schedule"))]
    columns = {tuple(rows): ""}
    for name in sorted(told, key=lambda name: name.startswith("request")):  # what was asked is what came of it, mostly
        columns.setdefault(tuple(found.get(name, "—") for found in held), name)
    return [name for values, name in columns.items() if name and len(set(values)) > 1]


def setting(name: str) -> str:
    """A setting's name, with its unit."""
    return f"{name}, in eps" if name in IN_EPS else name


def flat(value: Any, name: str = "") -> dict[str, str]:
    """A nested record as name.of.setting → text."""
    if isinstance(value, dict):
        return {
            key: text for part, held in value.items() for key, text in flat(held, f"{name}.{part}".strip(".")).items()
        }
    if isinstance(value, list):
        return {name: ", ".join(map(str, value))}
    return {name: "—" if value is None else _setting_number(name, value) if isinstance(value, float) else str(value)}


def _setting_number(name: str, value: float) -> str:
    """A number; a radius or a step as people write it, where it is none in units of eps."""
    return level(value) if name.endswith(("eps", "alpha")) and name not in IN_EPS else f"{value:.6g}"


def _settings_of(row: ReportRow, run: OneRun) -> str:
    pairs: Iterable[tuple[str, str]] = flat(run.record or {}).items()
    if run.evaluation:
        main = flat(run.evaluation.settings)
        pairs = [*pairs, *((f"evaluation.{name}", text) for name, text in main.items())]
        for key, beside in run.beside.items():
            others = [pair for pair in flat(beside.settings).items() if pair not in main.items()]
            pairs = [*pairs, *((f"evaluation of {key}.{name}", text) for name, text in others)]
    items = "".join(f"<div><dt>{markup(setting(name))}</dt><dd>{markup(text)}</dd></div>" for name, text in pairs)
    items = items or "<div><dt>no record</dt><dd></dd></div>"
    return f"<details><summary>{markup(row.name)}, seed {run.seed}</summary><dl>{items}</dl></details>"


HEADING = "On held-out images"
NOTE = (
    "Accuracy in percent at the epoch that validation chose as the best, on the very images that it was chosen by: "
    "held out of the training images, or from val/. These are no test figures, and nothing is ranked by them."
)
FILLS = "This evaluates on test images what is not evaluated yet, and fills its columns:"


def heads(found: Sequence[HeldOut]) -> list[str]:
    """The columns of a table of such figures."""
    attacks = {title(one.attack) for one in found}
    under = attacks.pop() if len(attacks) == 1 else "under attack"
    return ["row", "held-out natural", f"held-out {under}", "best epoch", "images", "backprops", "minutes", "seeds"]


def cells(one: HeldOut, found: Sequence[HeldOut]) -> list[str]:
    """A row's figures for people; the attack is named where rows were validated by different ones."""
    apart = f" ({title(one.attack)})" if len({other.attack for other in found}) > 1 else ""
    epochs = f"{', '.join(map(str, one.epochs))} of {one.asked}"
    figures = [one.natural.percent, one.robust.percent + apart, epochs, f"{one.images:,}"]
    return [*figures, f"{one.cost.backprops:,.0f}", minutes(one.cost), ", ".join(map(str, one.seeds))]


def held_out_markdown(rows: Sequence[ReportRow]) -> str:
    """The figures in Markdown, and the command that gives these runs test figures; empty where all runs have them."""
    found, judging = held_out(rows), to_evaluate(rows)
    parts = []
    if found:
        lines = [heads(found), ["---"] + ["---:"] * 7, *([one.row, *cells(one, found)] for one in found)]
        shown = "\n".join(f"| {' | '.join(map(markdown, line))} |" for line in lines)
        parts += [f"## {HEADING}", NOTE, shown]
    if judging:
        parts += [FILLS, "\n".join(["```", *map(plain, judging), "```"])]
    return "".join(f"\n{part}\n" for part in parts)


def held_out_section(rows: Sequence[ReportRow]) -> str:
    """The same as HTML."""
    found, judging = held_out(rows), to_evaluate(rows)
    head = "".join(f'<th scope="col">{markup(text)}</th>' for text in heads(found))
    body = "".join(record_row(one.row, cells(one, found), mark(one.place)) for one in found)
    shown = (
        f'<p class="note">{markup(NOTE)}</p><div class="scroll" tabindex="0" role="region" aria-label="{HEADING}">'
        f'<table class="apart"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    lines = "\n".join(map(markup, judging))
    fills = f'<p class="note">{markup(FILLS)}</p><pre class="scroll" tabindex="0">{lines}</pre>' if judging else ""
    return (shown if found else "") + fills


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


def _setting(rows: Sequence[ReportRow]) -> str:
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
    yield from _scores_part(of)
    yield from _figures(story.figures)


def _opening_of_one(story: Story) -> Iterator[str]:
    """A row that has none to be compared with: what training ended with and how it went, then the judging."""
    of, curves = story.sheet, list(_figures(story.figures))
    yield answer(of)
    yield warnings_of(of.subject)
    yield from _scores_part(of)
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


def _scores_part(of: Sheet) -> Iterator[str]:
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


def _row(of: Sheet, row: ReportRow) -> dict[str, Any]:
    spent = cost(row)
    found = {attack: cell(row, attack) for attack in of.attacks}
    return {
        "name": plain(row.name),
        "accuracy": {a: _accuracy_data(c) for a, c in found.items() if c},
        "said": {"backprops": f"{spent.backprops:,.0f}", "minutes": minutes(spent)} if spent else {},
        "seeds": [_seed(of, run) for run in row.done] if len(row.done) > 1 else [],
        "backprops": spent.backprops if spent else None,
        "minutes": spent.minutes if spent else None,
        "crowded": row.crowded,
        "flags": sorted({plain(flag.name) for _, flag in flags_of(row)}),
    }


def _accuracy_data(found: Cell) -> dict[str, Any]:
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
