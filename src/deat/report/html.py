"""The report as one HTML file that needs nothing else: no network, no server, no other file."""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from deat.report.escape import escape_html
from deat.report.figures import Figure, Panel, get_figure_title
from deat.report.gallery import Gallery, image_to_data_uri
from deat.report.grouping import (
    UNEVALUATED,
    ReportData,
    assign_comparison_groups,
    collect_flags,
    exclude_flagged_rows,
    list_run_problems,
    list_unchecked_seeds,
)
from deat.report.held_out import HeldOutResult, collect_held_out_results, list_evaluate_commands
from deat.report.load import ReportRow, RunResults
from deat.report.paper_claims import CheckedClaim, describe_claim_setups
from deat.report.plots import get_unit, get_y_label
from deat.report.significance import SIGNIFICANCE_LEVEL, describe_ties, select_rankable_rows
from deat.report.stats import (
    AccuracyCell,
    find_pareto_front,
    format_attack_name,
    get_mean_accuracy,
    summarize_accuracy,
    summarize_cost,
)
from deat.report.tables import (
    CLAIM_COLUMNS,
    FLAGGED_MARK,
    ResultsTable,
    collect_table_notes,
    describe_scores,
    format_backprops,
    format_claim_cells,
    format_deviation,
    format_difference,
    format_interval,
    format_last_epoch,
    format_mean,
    format_minutes,
    format_p_value,
    format_paper_accuracy,
    format_paper_cost,
    format_seed_count,
    list_row_problems,
    list_scored_runs,
    list_watch_alarms,
)
from deat.utils.text import escape_markdown, format_eps, make_printable
from deat.version import VERSION

COLOR_COUNT, MARKER_SHAPE_COUNT = 10, 3
NOT_COMPARABLE_TEXT = (
    "These rows were judged on different data sets or under different threat models, so none of them is the best."
)
NO_RESULTS_TEXT = "No run is evaluated yet, so there is nothing to rank."
EMPTY_FILTER_HTML = (
    '<p class="empty" id="nothing" hidden>No row is left. '
    '<button type="button" class="button" id="clear">Clear the filter</button></p>'
)
RankedRow = tuple[int, ReportRow, float, float]
"""A row's place, the row, its accuracy under the headline attack, and its backprops."""


def render_winner_cards(results: ResultsTable) -> str:
    """Who wins, in three sentences: the most robust row, the cheapest that comes close, the best on clean images.

    Each says whom its row is not told apart from.
    """
    ranked = rank_rows(results)
    if not ranked or not results.ranking_attack:
        return f'<p class="note">{NOT_COMPARABLE_TEXT if results.ranking_attack else NO_RESULTS_TEXT}</p>'
    best = max(ranked, key=lambda item: (item[2], -item[3]))
    clean = max(ranked, key=lambda item: (get_mean_accuracy(item[1], "natural"), -item[3]))
    name = (
        "the worst of all attacks" if results.ranking_attack == "worst" else format_attack_name(results.ranking_attack)
    )
    tidy = f"{format_percent(get_mean_accuracy(clean[1], 'natural'))}; {format_percent(clean[2])} under {name}"
    parts = [
        (
            best,
            f"Most robust under {name}",
            f"{format_percent(best[2])} for {best[3]:,.0f} backprops",
            ranked,
            results.ranking_attack,
        ),
        *((*card, results.ranking_attack) for card in _find_cheaper_row(ranked, best)),
        (clean, "Best on clean images", tidy, ranked, "natural"),
    ]
    items = "".join(
        f'<li class="h{item[0] % COLOR_COUNT}"><div class="what">{escape_html(what)}</div>'
        f'<div class="who">{render_row_marker(item[0])}{escape_html(item[1].name)}{_render_flag_pill(item[1])}</div>'
        f'<div class="how">{escape_html(how)}{_render_ties(item, rivals, attack)}</div></li>'
        for item, what, how, rivals, attack in parts
    )
    return f'<ul class="answer">{items}</ul>'


def render_row_marker(row_index: int) -> str:
    """The sign of row i wherever it is named: a colour, and a shape that tells colours apart for eyes that cannot."""
    return f'<i class="mark h{row_index % COLOR_COUNT} m{row_index % MARKER_SHAPE_COUNT}"></i>'


def format_percent(share: float) -> str:
    """A share in percent, for people."""
    return f"{100 * share:.2f} %"


def _render_ties(best: RankedRow, candidates: Sequence[RankedRow], attack: str) -> str:
    """Whom a card's row is not told apart from, on a line of its own."""
    text = describe_ties(best[1], [item[1] for item in candidates], attack)
    return f"<br>{escape_html(text)}" if text else ""


def _find_cheaper_row(
    ranked: Sequence[RankedRow], best: RankedRow
) -> Iterator[tuple[RankedRow, str, str, Sequence[RankedRow]]]:
    """The cheapest row within a point of the best, or else the most robust one that costs less; and its rivals."""
    near = [item for item in ranked if item[3] < best[3] and item[2] > best[2] - 0.01]
    less = [item for item in ranked if item[3] < best[3]]
    found = min(near, key=lambda item: item[3]) if near else max(less, key=lambda item: item[2], default=None)
    if found:
        what = "Cheapest within a point of it" if near else "Most robust of those that cost less"
        share = f"{format_percent(found[2])} for {100 * found[3] / best[3]:.0f} % of the backprops"
        yield found, what, share, [] if near else less


def rank_rows(results: ResultsTable) -> list[RankedRow]:
    """Every row that may be the best and has an accuracy under the headline attack and a cost."""
    ranked = [
        (i, row, found.mean, spent.backprops)
        for i, row in enumerate(results.rows)
        if results.ranking_attack
        and (found := summarize_accuracy(row, results.ranking_attack))
        and (spent := summarize_cost(row))
    ]
    sound = {id(row) for row in select_rankable_rows([item[1] for item in ranked])}
    return [item for item in ranked if id(item[1]) in sound]


def has_several_rows(results: ResultsTable) -> bool:
    """Whether there are rows to compare with each other."""
    return len(results.rows) > 1


def find_front_indices(results: ResultsTable) -> set[int]:
    """The places of the rows that may be believed and that no such row beats in robustness and backprops."""
    ranked = rank_rows(results) if has_several_rows(results) else []
    good = find_pareto_front([(spent, share) for _, _, share, spent in ranked])
    return {item[0] for item, is_good in zip(ranked, good, strict=True) if is_good}


def render_warnings(data: ReportData) -> str:
    """Sanity flags, collapses, runs that are not whole, rows that cannot be compared; empty where all is well."""
    flags = [
        f"<b>{escape_html(row.name)}</b>, seed {seed}: <b>{escape_html(flag.name)}</b>, {escape_html(flag.seen)}. "
        f"{escape_html(flag.advice)}"
        for row in data.rows
        for seed, flag in collect_flags(row)
    ]
    broken = [
        f"<b>{escape_html(row.name)}</b>, {escape_html(text)}"
        for row in data.rows
        for text in list_run_problems(row, UNEVALUATED)
    ]
    seen = [
        f"<b>{escape_html(row.name)}</b>, {escape_html(text)}" for row in data.rows for text in list_watch_alarms(row)
    ]
    parts = [
        ("Sanity flags: these numbers should not be believed as they stand", flags),
        ("Training that collapsed on its way, as the overfit watch saw it", seen),
        ("Runs that are not whole", broken),
        ("Before you compare", [escape_html(note) for note in data.notes]),
    ]
    return "".join(_render_warning(head, items) for head, items in parts if items)


def render_row_toggles(rows: Sequence[ReportRow]) -> str:
    """A button for each row, which switches it on and off."""
    return "".join(
        f'<button type="button" class="chip" data-row="{i}" aria-pressed="true" title="{escape_html(row.name)}">'
        f"{render_row_marker(i)}<span>{escape_html(row.name)}</span></button>"
        for i, row in enumerate(rows)
    )


def render_results_table(results: ResultsTable) -> str:
    """The table, which a script sorts and filters."""
    good = find_front_indices(results)
    attacks = {a: f'<span class="one">{escape_html(format_attack_name(a))}</span>' for a in results.attacks}
    heads = [("text", "row", ""), *(("number", attacks[a], "") for a in results.attacks), ("number", "backprops", "up")]
    if results.against and results.ranking_attack:
        versus = [("number", f"vs {escape_html(results.against.name)}, {attacks[results.ranking_attack]}", "")]
    else:
        versus = []
    heads += [("number", "minutes", "up"), ("number", "seeds", ""), *versus]
    cells = "".join(
        f'<th scope="col" aria-sort="none" data-kind="{kind}" data-first="{first}"><button type="button"><span>'
        f"{text}</span></button></th>"
        for kind, text, first in heads
    )
    body = "".join(_render_table_row(results, i, row, i in good) for i, row in enumerate(results.rows))
    remarks = "".join(
        f'<p class="note">{escape_html(text)}</p>'
        for text in [*_front_notes(results), *collect_table_notes(results, "below them")]
    )
    return (
        '<div class="stage"><div class="scroll results" tabindex="0" role="region" aria-label="Results">'
        f'<table id="table"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{EMPTY_FILTER_HTML}</div></div>{remarks}'
    )


def describe_front_axes(results: ResultsTable) -> str:
    """By what the table's front is judged."""
    return f"{format_attack_name(results.ranking_attack or '')} accuracy against backprops"


def _front_notes(results: ResultsTable) -> list[str]:
    """What the front is, and how the rows at the top of the page were told apart."""
    if not rank_rows(results) or not has_several_rows(results):
        return []
    alike = "At the top of the page, rows are not told apart where the paired test against the named row leaves p ≥"
    tested = [f"{alike} {SIGNIFICANCE_LEVEL}."] if results.against else []
    return [f"On the front: no other row is as good and cheaper, by {describe_front_axes(results)}.", *tested]


def render_claims(claims: Sequence[CheckedClaim]) -> str:
    """The paper's sentences beside our numbers; those that nothing here can be held against are counted only."""
    shown, lacking = [c for c in claims if not c.missing], [c for c in claims if c.missing]
    rows = "".join(
        f'<tr><td class="wide">{escape_html(c.claim.text)}</td>'
        + "".join(f"<td>{text}</td>" for text in format_claim_cells(c))
        + "</tr>"
        for c in shown
    )
    head = f"<tr>{''.join(f'<th>{text}</th>' for text in CLAIM_COLUMNS)}</tr>"
    box = '<div class="scroll" tabindex="0" role="region" aria-label="Claims beside these runs">'
    text = f"{box}<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>" if shown else ""
    text += "".join(f'<p class="note">{escape_html(line)}</p>' for line in describe_claim_setups(shown))
    if lacking:
        items = "".join(f"<li>{escape_html(c.claim.text)}: {escape_html(c.missing)}</li>" for c in lacking)
        head = f"{len(lacking)} claims that these runs cannot answer"
        text += f'<details><summary>{head}</summary><ul class="note">{items}</ul></details>'
    return text


def render_scores(rows: Sequence[ReportRow]) -> str:
    """The tables that runs of `deat train` ended with, where they have more than their own row; else nothing."""
    return "".join(_render_scores_table(row, run) for row, run in list_scored_runs(rows))


def render_gallery(gallery: Gallery) -> str:
    """Adversarial examples."""
    items = "".join(
        '<li><div class="trio">'
        + "".join(
            f'<img src="{image_to_data_uri(image)}" alt="{escape_html(alt)}">'
            for image, alt in zip(tile.images, _image_alt_texts(tile), strict=True)
        )
        + f"</div><p>{escape_html(tile.label)}: seen as {escape_html(tile.before)}, attacked as "
        f'<span class="{"" if tile.is_robust else "wrong"}">{escape_html(tile.after)}</span></p></li>'
        for tile in gallery.tiles
    )
    return (
        f'<p class="note">Attacks on <b>{escape_html(gallery.row)}</b>, {escape_html(gallery.attack)}: image, perturbation '
        f'(grey is none), and their sum. Images are {gallery.choice}.</p><ul class="gallery">{items}</ul>'
    )


def _render_table_row(results: ResultsTable, row_index: int, row: ReportRow, on_front: bool) -> str:
    spent = summarize_cost(row)
    cells = [
        _render_accuracy(summarize_accuracy(row, a), format_last_epoch(results, row, a), format_paper_accuracy(row, a))
        for a in results.attacks
    ]
    cells.append(
        _render_number(spent.backprops if spent else None, format_backprops(row), format_paper_cost(row, "per_batch"))
    )
    cells.append(
        _render_number(
            spent.minutes if spent else None, format_minutes(spent), format_paper_cost(row, "minutes", "hours")
        )
    )
    cells.append(_render_number(len(row.done), format_seed_count(row)))
    cells.append(_render_comparison(results, row))
    pills = "".join(_render_pills(row, f"by {describe_front_axes(results)}" if on_front else ""))
    told = [*list_watch_alarms(row, short=True), *list_row_problems(row)]
    model = f"<small>{escape_html(row.model)}</small>" if len({other.model for other in results.rows}) > 1 else ""
    why = "".join(f'<small class="why">{escape_html(text)}</small>' for text in told)
    mine = f'<th scope="row"><div>{render_row_marker(row_index)}{escape_html(row.name)}{model}{pills}{why}</div></th>'
    text = escape_html(" ".join([row.name, row.method, row.model, *told, *(f.name for _, f in collect_flags(row))]))
    is_front = ' data-front="1"' if on_front else ""
    return f'<tr class="h{row_index % COLOR_COUNT}" data-row="{row_index}" data-text="{text}"{is_front}>{mine}{"".join(cells)}</tr>'


def _render_flag_pill(row: ReportRow) -> str:
    """A mark beside the name of a row that a sanity flag speaks against."""
    return f' <span class="pill flag">{FLAGGED_MARK} flagged</span>' if collect_flags(row) else ""


def _render_comparison(results: ResultsTable, row: ReportRow) -> str:
    if not results.against or not results.ranking_attack:
        return ""
    found = results.comparisons[results.ranking_attack].get(row.name)
    if found is None:
        return f'<td data-v="">{"" if row is results.against else "—"}</td>'
    return f'<td data-v="{found.difference!r}">{format_difference(found)}<small>{escape_html(format_p_value(found))}</small></td>'


def _render_pills(row: ReportRow, front_title: str) -> Iterator[str]:
    if front_title:
        yield f' <span class="pill front" title="{escape_html(front_title)}">on the front</span>'
    for name in sorted({flag.name for _, flag in collect_flags(row)}):
        yield f' <span class="pill flag">{FLAGGED_MARK} {escape_html(name)}</span>'
    if list_unchecked_seeds(row):
        yield ' <span class="pill flag">sanity not checked</span>'
    if len(row.done) < len(row.runs):
        yield f' <span class="pill failed">{len(row.done)} of {len(row.runs)} whole</span>'


def _render_accuracy(cell: AccuracyCell | None, last_epoch_text: str, paper: Sequence[str]) -> str:
    beside = (f"<small>{last_epoch_text}</small>" if last_epoch_text else "") + _render_paper_values(paper)
    if cell is None:
        return f'<td data-v="">—{beside}</td>'
    behind = f"<small>{escape_html(cell.behind)}</small>" if cell.behind else ""
    shown = f"<b>{format_mean(cell)}</b>{format_deviation(cell)}<small>{format_interval(cell)}</small>{behind}"
    return f'<td data-v="{cell.mean!r}">{shown}{beside}</td>'


def _render_number(value: float | None, text: str, paper: Sequence[str] = ()) -> str:
    return f'<td data-v="{"" if value is None else repr(value)}">{escape_html(text)}{_render_paper_values(paper)}</td>'


def _render_paper_values(paper: Sequence[str]) -> str:
    return "".join(f"<small>paper {escape_html(text)}</small>" for text in paper)


def render_text_row(name: str, texts: Sequence[str], marker: str = "") -> str:
    """A row of a table of plain text."""
    cells = "".join(f"<td>{escape_html(text)}</td>" for text in texts)
    return f'<tr><th scope="row"><div>{marker}{escape_html(name)}</div></th>{cells}</tr>'


def _render_scores_table(row: ReportRow, run: RunResults) -> str:
    attacks = list(run.scores[0].accuracy)
    head = "".join(
        f"<th>{escape_html(text)}</th>" for text in (*map(format_attack_name, attacks), "backprops", "seconds")
    )
    body = "".join(
        render_text_row(s.name, [*(f"{s.accuracy[a]:.1%}" for a in attacks), f"{s.backprops:,}", f"{s.seconds:.1f}"])
        for s in run.scores
    )
    return (
        f'<p class="note">{escape_html(describe_scores(row, run))}</p><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Scores of {escape_html(row.name)}, seed {run.seed}"><table>'
        f"<thead><tr><th>model</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _render_warning(title: str, items: Sequence[str]) -> str:
    return (
        f'<section class="warning"><h2>{title}</h2><ul>{"".join(f"<li>{item}</li>" for item in items)}</ul></section>'
    )


def _image_alt_texts(tile: Any) -> tuple[str, str, str]:
    return f"a {tile.label}", "perturbation", f"attacked, seen as {tile.after}"


SETTINGS_IN_EPS = tuple(f"method.schedule.{name}" for name in ("alpha", "stretch", "ramp"))
"""Lengths that a method declares as parts of eps."""


def render_settings(rows: Sequence[ReportRow]) -> str:
    """What differs between rows side by side, and every setting of every run."""
    held = [(i, row.name, flatten_record(run.record or {})) for i, row in enumerate(rows) for run in row.runs[:1]]
    differ = find_differing_settings([name for _, name, _ in held], [found for _, _, found in held])
    head = "".join(f'<th scope="col">{escape_html(format_setting_name(name))}</th>' for name in differ)
    body = "".join(
        render_text_row(name, [found.get(n, "—") for n in differ], render_row_marker(i)) for i, name, found in held
    )
    side = (
        '<h3>What differs</h3><div class="scroll" tabindex="0" role="region" aria-label="Settings that differ">'
        f'<table class="words"><thead><tr><th scope="col">row</th>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )
    each = "".join(_render_run_settings(row, run) for row in rows for run in row.runs)
    return (side if differ and len(held) > 1 else "") + each


def find_differing_settings(row_names: Sequence[str], records: Sequence[dict[str, str]]) -> list[str]:
    """The settings in which rows differ, each told once: not as their names, as asked and as resolved, or as text."""
    names = dict.fromkeys(name for found in records for name in found)
    told = [name for name in names if not name.startswith(("digest", "data.digest", "code", "versions", "schedule"))]
    columns = {tuple(row_names): ""}
    for name in sorted(told, key=lambda name: name.startswith("request")):  # what was asked is what came of it, mostly
        columns.setdefault(tuple(found.get(name, "—") for found in records), name)
    return [name for values, name in columns.items() if name and len(set(values)) > 1]


def format_setting_name(name: str) -> str:
    """A setting's name, with its unit."""
    return f"{name}, in eps" if name in SETTINGS_IN_EPS else name


def flatten_record(value: Any, name: str = "") -> dict[str, str]:
    """A nested record as name.of.setting → text."""
    if isinstance(value, dict):
        return {
            key: text
            for part, held in value.items()
            for key, text in flatten_record(held, f"{name}.{part}".strip(".")).items()
        }
    if isinstance(value, list):
        return {name: ", ".join(map(str, value))}
    return {
        name: "—" if value is None else _format_setting_number(name, value) if isinstance(value, float) else str(value)
    }


def _format_setting_number(name: str, value: float) -> str:
    """A number; a radius or a step as people write it, where it is none in units of eps."""
    return format_eps(value) if name.endswith(("eps", "alpha")) and name not in SETTINGS_IN_EPS else f"{value:.6g}"


def _render_run_settings(row: ReportRow, run: RunResults) -> str:
    pairs: Iterable[tuple[str, str]] = flatten_record(run.record or {}).items()
    if run.evaluation:
        main = flatten_record(run.evaluation.settings)
        pairs = [*pairs, *((f"evaluation.{name}", text) for name, text in main.items())]
        for key, beside in run.extra_evaluations.items():
            others = [pair for pair in flatten_record(beside.settings).items() if pair not in main.items()]
            pairs = [*pairs, *((f"evaluation of {key}.{name}", text) for name, text in others)]
    items = "".join(
        f"<div><dt>{escape_html(format_setting_name(name))}</dt><dd>{escape_html(text)}</dd></div>"
        for name, text in pairs
    )
    items = items or "<div><dt>no record</dt><dd></dd></div>"
    return f"<details><summary>{escape_html(row.name)}, seed {run.seed}</summary><dl>{items}</dl></details>"


HELD_OUT_TITLE = "On held-out images"
HELD_OUT_NOTE = (
    "Accuracy in percent at the epoch that validation chose as the best, on the very images that it was chosen by: "
    "held out of the training images, or from val/. These are no test figures, and nothing is ranked by them."
)
EVALUATE_COMMANDS_INTRO = "This evaluates on test images what is not evaluated yet, and fills its columns:"


def get_held_out_header(held_out_results: Sequence[HeldOutResult]) -> list[str]:
    """The columns of a table of such figures."""
    attacks = {format_attack_name(one.attack) for one in held_out_results}
    under = attacks.pop() if len(attacks) == 1 else "under attack"
    return ["row", "held-out natural", f"held-out {under}", "best epoch", "images", "backprops", "minutes", "seeds"]


def format_held_out_cells(result: HeldOutResult, held_out_results: Sequence[HeldOutResult]) -> list[str]:
    """A row's figures for people; the attack is named where rows were validated by different ones."""
    apart = f" ({format_attack_name(result.attack)})" if len({other.attack for other in held_out_results}) > 1 else ""
    epochs = f"{', '.join(map(str, result.epochs))} of {result.asked}"
    figures = [result.natural.percent, result.robust.percent + apart, epochs, f"{result.images:,}"]
    return [*figures, f"{result.cost.backprops:,.0f}", format_minutes(result.cost), ", ".join(map(str, result.seeds))]


def render_held_out_markdown(rows: Sequence[ReportRow]) -> str:
    """The figures in Markdown, and the command that gives these runs test figures; empty where all runs have them."""
    found, judging = collect_held_out_results(rows), list_evaluate_commands(rows)
    parts = []
    if found:
        lines = [
            get_held_out_header(found),
            ["---"] + ["---:"] * 7,
            *([one.row, *format_held_out_cells(one, found)] for one in found),
        ]
        shown = "\n".join(f"| {' | '.join(map(escape_markdown, line))} |" for line in lines)
        parts += [f"## {HELD_OUT_TITLE}", HELD_OUT_NOTE, shown]
    if judging:
        parts += [EVALUATE_COMMANDS_INTRO, "\n".join(["```", *map(make_printable, judging), "```"])]
    return "".join(f"\n{part}\n" for part in parts)


def render_held_out_html(rows: Sequence[ReportRow]) -> str:
    """The same as HTML."""
    found, judging = collect_held_out_results(rows), list_evaluate_commands(rows)
    head = "".join(f'<th scope="col">{escape_html(text)}</th>' for text in get_held_out_header(found))
    body = "".join(
        render_text_row(one.row, format_held_out_cells(one, found), render_row_marker(one.place)) for one in found
    )
    shown = (
        f'<p class="note">{escape_html(HELD_OUT_NOTE)}</p><div class="scroll" tabindex="0" role="region" aria-label="{HELD_OUT_TITLE}">'
        f'<table class="apart"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    lines = "\n".join(map(escape_html, judging))
    fills = (
        f'<p class="note">{escape_html(EVALUATE_COMMANDS_INTRO)}</p><pre class="scroll" tabindex="0">{lines}</pre>'
        if judging
        else ""
    )
    return (shown if found else "") + fills


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that a page tells."""

    heading: str
    results: ResultsTable
    figures: Sequence[Figure]
    claims: Sequence[CheckedClaim]
    gallery: Gallery
    missing: Sequence[str]


def render_page(report: Report) -> str:
    """The page."""
    css, js = read_asset("page.css"), read_asset("page.js")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{build_content_security_policy(css, js)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape_html(report.heading)}</title>
<style>{css}</style>
</head>
<body>
{_render_header(report)}
<main>
{_render_body(report)}
<p class="note">Made by deat {escape_html(VERSION)}. The same numbers are in table.csv, table.md and table.tex.</p>
</main>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{to_inline_json(_page_data(report))}</script>
<script>{js}</script>
</body>
</html>
"""


def build_content_security_policy(css: str, js: str) -> str:
    """A Content-Security-Policy under which nothing runs but this page's own script, and nothing is fetched."""
    return (
        f"default-src 'none'; script-src '{_csp_hash(js)}'; style-src '{_csp_hash(css)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def to_inline_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def read_asset(name: str) -> str:
    """One of the page's own files."""
    return files("deat.report").joinpath("assets", name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _render_header(report: Report) -> str:
    rows = report.results.rows
    runs = sum(len(row.runs) for row in rows)
    about = (
        f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}, {runs} {'run' if runs == 1 else 'runs'}{_describe_common_setup(rows)}"
        f"{_describe_paper_tables(report.results.data)}"
    )
    return (
        f'<header class="top"><div><h1>{escape_html(report.heading)}</h1><p class="muted">{escape_html(about)}</p></div>'
        '<button type="button" class="button" id="theme">Dark</button></header>'
    )


def _describe_paper_tables(data: ReportData) -> str:
    """Where in the paper the recipes are."""
    return f" · in the paper: {'; '.join(data.tables)}" if data.tables else ""


def _describe_common_setup(rows: Sequence[ReportRow]) -> str:
    """What all runs have in common, for the line under the heading."""
    records = [run.record for row in rows for run in row.runs if run.record]
    facts = [
        {str(r["data"]["name"]) for r in records},
        {str(r["model"]["name"]) for r in records},
        {f"{r['threat']['norm']} eps {format_eps(r['threat']['eps'])}" for r in records},
    ]
    return "".join(f" · {fact.pop()}" for fact in facts if len(fact) == 1)


def _render_body(report: Report) -> str:
    parts = [
        *(_render_comparison_sections if has_several_rows(report.results) else _render_single_row_sections)(report)
    ]
    if report.gallery.tiles:
        parts.append(_render_section("gallery", "Adversarial examples", render_gallery(report.gallery)))
    if report.claims:
        parts.append(_render_section("claims", "The paper's claims", render_claims(report.claims)))
    parts.append(_render_section("settings", "Settings", render_settings(report.results.rows)))
    parts += [f'<p class="note">Left out. {escape_html(text)}.</p>' for text in report.missing]
    return "\n".join(parts)


def _render_comparison_sections(report: Report) -> Iterator[str]:
    """What rows are compared by: the front, the table, then how each was trained."""
    of = report.results
    yield render_winner_cards(of)
    yield _render_legend(of)
    if of.ranking_attack:
        yield _render_cost_section(of)
    yield render_warnings(of.data)
    yield from _render_results_sections(of, _render_filter_bar(of))
    yield from _render_scores_section(of)
    yield from _render_figures(report.figures)


def _render_single_row_sections(report: Report) -> Iterator[str]:
    """A row that has none to be compared with: what training ended with and how it went, then the judging."""
    of, curves = report.results, list(_render_figures(report.figures))
    yield render_winner_cards(of)
    yield render_warnings(of.data)
    yield from _render_scores_section(of)
    if _has_seed_curves(of):
        yield _render_legend(of)
    yield from curves[:1]
    yield from _render_results_sections(of)
    yield from curves[1:]


def _render_results_sections(results: ResultsTable, toolbar: str = "") -> Iterator[str]:
    """The table, once a run is evaluated, and what is known of those that are not."""
    if any(row.done for row in results.rows):
        yield _render_section("results", "Results", toolbar + render_results_table(results))
    if known := render_held_out_html(results.rows):
        yield _render_section("held-out", HELD_OUT_TITLE, known)


def _render_scores_section(results: ResultsTable) -> Iterator[str]:
    if scores := render_scores(results.rows):
        yield _render_section("scores", "At the end of training", scores)


def _has_seed_curves(results: ResultsTable) -> bool:
    """Whether some row has the curves of several seeds."""
    return any(sum(bool(run.history) for run in row.runs) > 1 for row in results.rows)


def _render_legend(results: ResultsTable) -> str:
    toggle = '<button type="button" class="chip" id="seeds" aria-pressed="false"><span>each seed</span></button>'
    return (
        '<nav class="legend" aria-label="Rows on and off"><div class="switches">'
        '<button type="button" class="chip plain" id="all">all</button>'
        f'<button type="button" class="chip plain" id="none">none</button>{toggle if _has_seed_curves(results) else ""}</div>'
        f'<div class="chips">{render_row_toggles(results.rows)}</div></nav>'
    )


def _render_cost_section(results: ResultsTable) -> str:
    options = "".join(
        f'<option value="{escape_html(a)}"{" selected" if a == results.ranking_attack else ""}>{escape_html(format_attack_name(a))}</option>'
        for a in results.attacks
    )
    return (
        '<section class="card" aria-labelledby="cost"><h2 id="cost">Robustness against cost</h2>'
        f'<p class="note">Up is more robust, left is cheaper. {_describe_front(results)} Whiskers are 95 % intervals.</p>'
        f'<div class="bar"><label>accuracy under <select id="cost-attack">{options}</select></label>'
        '<label>cost in <select id="cost-unit"><option value="backprops">backprops</option>'
        '<option value="minutes">minutes</option></select></label><span class="muted" id="cost-note"></span></div>'
        '<div id="cost-chart"></div></section>'
    )


def _describe_front(results: ResultsTable) -> str:
    """What the chart's front is, or why there is none."""
    if not rank_rows(results):
        return "Rows that were not judged alike have no front together; switch some off to see that of the others."
    doubted = (
        " A flagged row (⚑) is never on it." if len(exclude_flagged_rows(results.rows)) < len(results.rows) else ""
    )
    line = "The dashed line is the Pareto front: filled points are on it; no other row is as good and cheaper."
    return f"{line}{doubted}"


def _render_filter_bar(results: ResultsTable) -> str:
    count = len(results.rows)
    by = f' <span class="muted">({escape_html(describe_front_axes(results))})</span>' if results.ranking_attack else ""
    box = f'<label><input type="checkbox" id="only-front"><span>on the front only{by}</span></label>'
    return (
        '<div class="bar"><label>filter '
        '<input type="search" id="filter" placeholder="name, method, model, flag"></label>'
        f"{box if rank_rows(results) else ''}"
        f'<span class="muted" id="shown" role="status">{count} of {count} rows</span></div>'
    )


def _render_figures(figures: Sequence[Figure]) -> Iterator[str]:
    """Every figure's curves; a panel that two figures share is shown once."""
    shown: set[str] = set()
    for place, figure in enumerate(figures):
        fresh = {n: panel for n, panel in enumerate(figure.panels) if panel.title not in shown}
        shown |= {panel.title for panel in fresh.values()}
        if fresh and not figure.layout.apart:
            cards = "".join(_render_panel_card(place, n, panel) for n, panel in fresh.items())
            yield _render_section(
                figure.name, get_figure_title(figure, list(fresh.values())), f'<div class="charts">{cards}</div>'
            )


def _render_panel_card(figure_index: int, panel_index: int, panel: Panel) -> str:
    return f'<div class="card"><h3>{escape_html(panel.title)}</h3><div data-panel="{figure_index} {panel_index}"></div></div>'


def _render_section(name: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape_html(title)}</h2>{body}</section>'


def _page_data(report: Report) -> dict[str, Any]:
    of = report.results
    return {
        "rows": [
            {**_row_data(of, row), "setup": n}
            for row, n in zip(of.rows, assign_comparison_groups(of.rows), strict=True)
        ],
        "titles": {a: format_attack_name(a) for a in of.attacks},
        "figures": [{"name": f.name, "panels": [_panel_data(p) for p in f.panels]} for f in report.figures],
    }


def _row_data(results: ResultsTable, row: ReportRow) -> dict[str, Any]:
    spent = summarize_cost(row)
    found = {attack: summarize_accuracy(row, attack) for attack in results.attacks}
    return {
        "name": make_printable(row.name),
        "accuracy": {a: _accuracy_data(c) for a, c in found.items() if c},
        "said": {"backprops": f"{spent.backprops:,.0f}", "minutes": format_minutes(spent)} if spent else {},
        "seeds": [_seed_data(results, run) for run in row.done] if len(row.done) > 1 else [],
        "backprops": spent.backprops if spent else None,
        "minutes": spent.minutes if spent else None,
        "crowded": row.crowded,
        "flags": sorted({make_printable(flag.name) for _, flag in collect_flags(row)}),
    }


def _accuracy_data(cell: AccuracyCell) -> dict[str, Any]:
    """An accuracy to draw, and in words, so that it is rounded in one place."""
    said = f"{format_mean(cell)}{format_deviation(cell)} %"
    shown = {"said": said, "interval": f"{format_interval(cell)} %", "behind": cell.behind}
    return {"mean": cell.mean, "low": cell.low, "high": cell.high, **shown}


def _seed_data(results: ResultsTable, run: RunResults) -> dict[str, Any]:
    """One seed's point among those of its row."""
    held = {a: run.numbers[a] for a in results.attacks if a in run.numbers}
    said = {a: f"{100 * share:.2f} %" for a, share in held.items()}
    costs = {"backprops": run.numbers["backprops"], "minutes": run.numbers["minutes"] or None}
    return {"seed": run.seed, "accuracy": held, "said": said, **costs}


def _panel_data(panel: Panel) -> dict[str, Any]:
    lines = [
        {
            "row": make_printable(line.row),
            "seed": line.seed,
            "x": [_round_significant(x) for x in line.x],
            "y": [y if y is None else _round_significant(y) for y in line.y],
        }
        for line in panel.lines
    ]
    about = {"title": panel.title, "x": panel.x, "y": get_y_label(panel), "unit": get_unit(panel), "kind": panel.kind}
    return {**about, "percent": panel.percent, "lines": lines}


def _round_significant(value: float) -> float:
    return float(f"{value:.6g}")
