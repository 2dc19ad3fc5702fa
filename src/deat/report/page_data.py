"""What the report's page shows: plain data for the macros in templates/sections.html.j2, and for page.js."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deat.report.check_paper_claims import CheckedClaim, describe_claim_setups
from deat.report.detail_tables import (
    BALLS_NOTE,
    BALLS_TITLE,
    EVALUATIONS_HEADER,
    EVALUATIONS_NOTE,
    EVALUATIONS_TITLE,
    METRICS_NOTE,
    METRICS_TITLE,
    format_ball_header,
    list_ball_rows,
    list_evaluation_rows,
    list_metric_columns,
    list_metric_rows,
)
from deat.report.figure_data import Figure, Panel, get_figure_title, get_unit, get_y_label
from deat.report.gallery import Gallery, image_to_data_uri
from deat.report.problems import (
    FLAGGED_MARK,
    UNEVALUATED,
    collect_flags,
    exclude_flagged_rows,
    list_row_problems,
    list_run_problems,
    list_unchecked_seeds,
    list_watch_alarms,
)
from deat.report.report_data import ReportData, describe_common_setup
from deat.report.results_table import (
    CLAIM_COLUMNS,
    ResultsTable,
    collect_table_notes,
    describe_scores,
    format_backprops,
    format_claim_cells,
    format_difference,
    format_last_epoch,
    format_p_value,
    format_paper_accuracy,
    format_paper_cost,
    format_seed_count,
    list_scored_runs,
    read_task,
)
from deat.report.row_grouping import assign_comparison_groups
from deat.report.row_statistics import (
    AccuracyCell,
    find_pareto_front,
    format_attack_name,
    format_deviation,
    format_interval,
    format_mean,
    format_minutes,
    format_value,
    get_mean_accuracy,
    is_robustness,
    summarize_accuracy,
    summarize_cost,
)
from deat.report.run_results import ReportRow, RunResults
from deat.report.setting_names import SETTINGS_IN_EPS, format_setting_value, group_settings, name_setting
from deat.report.significance import SIGNIFICANCE_LEVEL, describe_ties, select_rankable_rows
from deat.report.validation_results import (
    EVALUATE_COMMANDS_INTRO,
    HELD_OUT_TITLE,
    collect_held_out_results,
    describe_held_out,
    format_held_out_cells,
    get_held_out_header,
    list_evaluate_commands,
)
from deat.utils.text import format_eps, make_printable

NOT_COMPARABLE_TEXT = (
    "These rows were evaluated on different data sets, under different threat models, or by attacks with different settings, "
    "so none of them is the best."
)
NO_RESULTS_TEXT = "No run is evaluated yet, so there is nothing to rank."
NOT_ATTACKED_TEXT = (
    "No attack of more than one step was tried, so nothing here is a worst case, and no row is called robust. Evaluate "
    "with pgd-20, or with aa for the number to report."
)
HIDDEN_KEYS = ("digest", "data.digest", "code", "versions", "schedule", "checksum", "best_weights", "best_epoch")
"""Prefixes of keys in records that are no settings of a reader's: hashes, versions, whole schedules, results."""
CLOSE_ACCURACY = 0.01
"""A cheaper row whose accuracy is within this of the best one's is close to it."""


@dataclass(frozen=True, eq=False)
class Report:
    """Everything that a page shows.

    Attributes:
        heading: The page's title.
        date: The day on which the report was made.
        results: The results table.
        figures: The figures.
        claims: The paper's claims.
        gallery: Adversarial examples.
        missing: What the report lacks, and what it needs for it.
    """

    heading: str
    date: str
    results: ResultsTable
    figures: Sequence[Figure]
    claims: Sequence[CheckedClaim]
    gallery: Gallery
    missing: Sequence[str]


class RankedRow(NamedTuple):
    """A row that may be the best: its index in the table, its accuracy under the ranking attack, and its backprops."""

    row_index: int
    row: ReportRow
    accuracy: float
    backprops: float


def build_page_context(report: Report) -> dict[str, Any]:
    """Build what page.html.j2 shows: one entry for each part of the page, empty if the report lacks that part."""
    results = report.results
    rows, data = results.rows, results.data
    return {
        "heading": report.heading,
        "date": report.date,
        "summary": _describe_report(data),
        "has_several_rows": has_several_rows(results),
        "has_seed_curves": any(sum(bool(run.history) for run in row.runs) > 1 for row in rows),
        "rows": [row.name for row in rows],
        "winners": build_winner_cards(results),
        "cost": _build_cost_controls(results) if results.ranking_attack else None,
        "warnings": build_warnings(data),
        "table": build_table(results) if any(row.finished_runs for row in rows) else None,
        "held_out": build_held_out(rows),
        "balls": build_balls(rows),
        "metrics": build_metrics(rows),
        "evaluations": build_evaluations(rows),
        "scores": build_scores(rows),
        "figures": _build_figure_sections(report.figures),
        "gallery": build_gallery(report.gallery),
        "claims": build_claims(report.claims),
        "settings": build_settings(rows),
        "missing": report.missing,
    }


def build_winner_cards(results: ResultsTable) -> dict[str, Any]:
    """Build the cards at the top: the most robust row, the cheapest close to it, and the best on clean images.

    Args:
        results: The results table.

    Returns:
        "cards", each with its row and the rows that are statistically indistinguishable from it; "note" says why there
        are none.
    """
    ranked, attack = rank_rows(results), results.ranking_attack
    if not ranked or not attack:
        return {"cards": [], "note": NOT_COMPARABLE_TEXT if attack else NO_RESULTS_TEXT}
    if not is_robustness(attack, results.rows):
        clean = max(ranked, key=lambda item: (get_mean_accuracy(item.row, "natural"), -item.backprops))
        if summarize_accuracy(clean.row, "natural") is None:
            return {"cards": [], "note": NOT_ATTACKED_TEXT}
        clean_text = (
            f"{format_value(get_mean_accuracy(clean.row, 'natural'), clean.row)}; not attacked by more than one step"
        )
        return {
            "cards": [_build_card("Best on clean examples", clean, clean_text, ranked, "natural")],
            "note": NOT_ATTACKED_TEXT,
        }
    attack_name = "the worst of all attacks" if attack == "worst" else format_attack_name(attack)
    best = max(ranked, key=lambda item: (item.accuracy, -item.backprops))
    clean = max(ranked, key=lambda item: (get_mean_accuracy(item.row, "natural"), -item.backprops))
    best_text = f"{format_value(best.accuracy, best.row)} for {best.backprops:,.0f} backprops"
    clean_text = (
        f"{format_value(get_mean_accuracy(clean.row, 'natural'), clean.row)}; "
        f"{format_value(clean.accuracy, clean.row)} under {attack_name}"
    )
    cards = [
        _build_card(f"Most robust under {attack_name}", best, best_text, ranked, attack),
        *_build_cheaper_card(ranked, best, attack),
        _build_card("Best on clean examples", clean, clean_text, ranked, "natural"),
    ]
    return {"cards": cards, "note": ""}


def rank_rows(results: ResultsTable) -> list[RankedRow]:
    """List the rows that may be the best: those with a cost and with an accuracy under the ranking attack."""
    if not results.ranking_attack:
        return []
    ranked = [
        RankedRow(index, row, cell.mean, cost.backprops)
        for index, row in enumerate(results.rows)
        if (cell := summarize_accuracy(row, results.ranking_attack)) and (cost := summarize_cost(row))
    ]
    rankable = {id(row) for row in select_rankable_rows([item.row for item in ranked])}
    return [item for item in ranked if id(item.row) in rankable]


def has_several_rows(results: ResultsTable) -> bool:
    """Whether there are rows to compare with each other."""
    return len(results.rows) > 1


def find_front_indices(results: ResultsTable) -> set[int]:
    """Find the indices of the rows on the Pareto front of accuracy and backprops."""
    ranked = rank_rows(results) if has_several_rows(results) else []
    front = find_pareto_front([(item.backprops, item.accuracy) for item in ranked])
    return {item.row_index for item, is_best in zip(ranked, front, strict=True) if is_best}


def build_warnings(data: ReportData) -> list[dict[str, Any]]:
    """Build the warnings: sanity flags, collapses, incomplete runs, and notes on what can be compared.

    Args:
        data: The rows of the report and their notes.

    Returns:
        A title and items for each kind of warning that there is. An item is a list of (is_bold, text) pieces.
    """
    flags = [
        [(True, row.name), (False, f", seed {seed}: "), (True, flag.name), (False, f", {flag.seen}. {flag.advice}")]
        for row in data.rows
        for seed, flag in collect_flags(row)
    ]
    incomplete = [
        [(True, row.name), (False, f", {text}")] for row in data.rows for text in list_run_problems(row, UNEVALUATED)
    ]
    collapses = [[(True, row.name), (False, f", {text}")] for row in data.rows for text in list_watch_alarms(row)]
    warnings = [
        ("Sanity flags: do not rely on these numbers", flags),
        ("Collapses during training, logged by the overfit watch", collapses),
        ("Incomplete runs", incomplete),
        ("Before you compare", [[(False, note)] for note in data.notes]),
    ]
    return [{"title": title, "entries": entries} for title, entries in warnings if entries]


def build_table(results: ResultsTable) -> dict[str, Any]:
    """Build the results table, which the page's script sorts and filters."""
    front = find_front_indices(results)
    attack_columns = [_column(format_attack_name(attack), nowrap=True) for attack in results.attacks]
    columns = [
        _column("row", kind="text"),
        *attack_columns,
        _column("backprops", ascending=True),
        _column("minutes", ascending=True),
        _column("seeds"),
    ]
    if results.baseline and results.ranking_attack:
        attack_name = format_attack_name(results.ranking_attack)
        columns.append(_column(attack_name, nowrap=True, prefix=f"vs {results.baseline.name}, "))
    return {
        "columns": columns,
        "rows": [_build_table_row(results, index, row, index in front) for index, row in enumerate(results.rows)],
        "notes": [*_describe_table_front(results), *collect_table_notes(results, "below them")],
        "has_filter": has_several_rows(results),
        "has_front": bool(rank_rows(results)),
        "front_axes": _describe_front_axes(results) if results.ranking_attack else "",
    }


def build_claims(claims: Sequence[CheckedClaim]) -> dict[str, Any] | None:
    """Build the table of the paper's claims; those without finished runs are listed below it. None without claims."""
    checked = [claim for claim in claims if not claim.missing]
    if not claims:
        return None
    return {
        "header": CLAIM_COLUMNS,
        "rows": [(claim.claim.text, format_claim_cells(claim)) for claim in checked],
        "notes": describe_claim_setups(checked),
        "missing": [f"{claim.claim.text}: {claim.missing}" for claim in claims if claim.missing],
    }


def build_scores(rows: Sequence[ReportRow]) -> list[dict[str, Any]]:
    """Build the tables that runs of `deat train` ended with."""
    tables = []
    for row, run in list_scored_runs(rows):
        attacks = list(run.scores[0].accuracy)
        body = [
            [
                *(read_task(run).format_metric(score.accuracy[attack]) for attack in attacks),
                f"{score.backprops:,}",
                f"{score.seconds:.1f}",
            ]
            for score in run.scores
        ]
        tables.append(
            {
                "note": describe_scores(row, run),
                "label": f"Scores of {row.name}, seed {run.seed}",
                "header": ["model", *map(format_attack_name, attacks), "backprops", "seconds"],
                "rows": [(None, score.name, cells) for score, cells in zip(run.scores, body, strict=True)],
            }
        )
    return tables


def build_balls(rows: Sequence[ReportRow]) -> dict[str, Any] | None:
    """Build the table of each ball of a union; None if no row was evaluated against one."""
    body = list_ball_rows(rows)
    if not body:
        return None
    return {
        "title": BALLS_TITLE,
        "note": BALLS_NOTE,
        "header": format_ball_header(rows),
        "rows": [(index, name, cells) for index, (name, *cells) in body],
    }


def build_metrics(rows: Sequence[ReportRow]) -> dict[str, Any] | None:
    """Build the table of every metric; None if no row's task has several."""
    body = list_metric_rows(rows)
    if not body:
        return None
    return {
        "title": METRICS_TITLE,
        "note": METRICS_NOTE,
        "header": ["row", "seed", "attack", *list_metric_columns(rows)],
        "rows": [(index, name, cells) for index, (name, *cells) in body],
    }


def build_evaluations(rows: Sequence[ReportRow]) -> dict[str, Any] | None:
    """Build the table of every evaluation of runs that were evaluated more than once; None if none was."""
    body = list_evaluation_rows(rows)
    if not body:
        return None
    return {
        "title": EVALUATIONS_TITLE,
        "note": EVALUATIONS_NOTE,
        "header": EVALUATIONS_HEADER,
        "rows": [(index, name, cells) for index, (name, *cells) in body],
    }


def build_held_out(rows: Sequence[ReportRow]) -> dict[str, Any] | None:
    """Build the table of validation results with the commands that evaluate these runs; None if none need it."""
    results, commands = collect_held_out_results(rows), list_evaluate_commands(rows)
    if not results and not commands:
        return None
    return {
        "title": HELD_OUT_TITLE,
        "note": describe_held_out(results),
        "header": get_held_out_header(results),
        "rows": [(result.row_index, result.row, format_held_out_cells(result, results)) for result in results],
        "commands_intro": EVALUATE_COMMANDS_INTRO,
        "commands": commands,
    }


def build_gallery(gallery: Gallery) -> dict[str, Any] | None:
    """Build the adversarial examples, if there are any."""
    if not gallery.tiles:
        return None
    tiles = [
        {
            "images": list(
                zip(
                    map(image_to_data_uri, tile.images),
                    tile.captions,
                    strict=True,
                )
            ),
            "label": tile.label or tile.captions[0],
            "natural_prediction": tile.natural_prediction,
            "adversarial_prediction": tile.adversarial_prediction,
            "is_robust": tile.is_robust,
        }
        for tile in gallery.tiles
    ]
    has_masks = any(len(tile.images) > 3 for tile in gallery.tiles)
    masks_note = "; true mask, answer, and answer under attack" if has_masks else ""
    note = gallery.selection_note
    return {"row": gallery.row, "attack": gallery.attack, "note": note, "masks_note": masks_note, "tiles": tiles}


def build_settings(rows: Sequence[ReportRow]) -> dict[str, Any]:
    """Build the table of settings in which rows differ, and the list of every run's settings."""
    first_runs = [(index, row) for index, row in enumerate(rows) if row.runs]
    records = [flatten_record(row.runs[0].record or {}) for _, row in first_runs]
    names = find_differing_settings([row.name for _, row in first_runs], records) if len(first_runs) > 1 else []
    return {
        "header": ["row", *map(name_setting, names)],
        "rows": [
            (index, row.name, [format_setting_value(record.get(name, "—")) for name in names])
            for (index, row), record in zip(first_runs, records, strict=True)
        ],
        "runs": [
            {
                "title": f"{row.name}, seed {run.seed}",
                "groups": group_settings(_list_run_settings(run)),
            }
            for row in rows
            for run in row.runs
        ],
    }


def find_differing_settings(row_names: Sequence[str], records: Sequence[dict[str, str]]) -> list[str]:
    """Find the settings in which rows differ.

    Of several settings with the same values in every row, one is listed. Settings with the rows' names as values, and
    hashes, versions, texts of whole schedules and results, are left out.

    Args:
        row_names: The rows' names.
        records: Each row's record, as `flatten_record` returns it.

    Returns:
        The settings' names.
    """
    names = dict.fromkeys(name for record in records for name in record)
    names_shown = [n for n in names if not n.startswith(HIDDEN_KEYS)]
    name_by_values = {tuple(row_names): ""}
    for name in sorted(names_shown, key=lambda name: name.startswith("request")):  # resolved settings before requested
        name_by_values.setdefault(tuple(record.get(name, "—") for record in records), name)
    return [name for values, name in name_by_values.items() if name and len(set(values)) > 1]


def flatten_record(value: Any, name: str = "") -> dict[str, str]:
    """Flatten a nested record: {"a": {"b": 1}} becomes {"a.b": "1"}."""
    if isinstance(value, dict):
        return {
            key: text
            for part, inner in value.items()
            for key, text in flatten_record(inner, f"{name}.{part}".strip(".")).items()
        }
    if isinstance(value, list):
        return {name: ", ".join(map(str, value))}
    if isinstance(value, float):
        return {name: _format_setting_number(name, value)}
    return {name: "—" if value is None else str(value)}


# ---- parts of the page


def _describe_report(data: ReportData) -> str:
    """The line below the heading: how many rows and runs, what they have in common, where they are in the paper."""
    runs = [run for row in data.rows for run in row.runs]
    counts = [
        f"{len(items)} {name}{'' if len(items) == 1 else 's'}" for items, name in ((data.rows, "row"), (runs, "run"))
    ]
    paper = [f"in the paper: {'; '.join(data.paper_tables)}"] if data.paper_tables else []
    return " · ".join([", ".join(counts), *describe_common_setup(data.rows), *paper])


def _build_card(title: str, best: RankedRow, text: str, candidates: Sequence[RankedRow], attack: str) -> dict[str, Any]:
    return {
        "title": title,
        "row_index": best.row_index,
        "row": best.row.name,
        "is_flagged": bool(collect_flags(best.row)),
        "text": text,
        "ties": describe_ties(best.row, [item.row for item in candidates], attack),
    }


def _build_cheaper_card(ranked: Sequence[RankedRow], best: RankedRow, attack: str) -> Iterator[dict[str, Any]]:
    """The cheapest row close to the best one, or else the most robust of the cheaper rows, if there are any."""
    cheaper = [item for item in ranked if item.backprops < best.backprops]
    close = [item for item in cheaper if item.accuracy > best.accuracy - CLOSE_ACCURACY]
    if not cheaper:
        return
    chosen = min(close, key=lambda item: item.backprops) if close else max(cheaper, key=lambda item: item.accuracy)
    title = "Cheapest within a point of it" if close else "Most robust of those that cost less"
    share = f"{100 * chosen.backprops / best.backprops:.0f} % of the backprops"
    text = f"{format_value(chosen.accuracy, chosen.row)} for {share}"
    yield _build_card(title, chosen, text, [] if close else cheaper, attack)


def _build_cost_controls(results: ResultsTable) -> dict[str, Any]:
    """The section with the chart of robustness against cost, which the page's script draws."""
    is_robust = is_robustness(results.ranking_attack or "", results.rows)
    return {
        "title": "Robustness against cost" if is_robust else "Accuracy against cost",
        "axes_note": "Up is more robust, left is cheaper." if is_robust else "Up is more accurate, left is cheaper.",
        "front_note": _describe_chart_front(results),
        "attacks": [(attack, format_attack_name(attack)) for attack in results.attacks],
        "ranking_attack": results.ranking_attack,
    }


def _describe_chart_front(results: ResultsTable) -> str:
    """What the chart's Pareto front is, or why there is none."""
    if not rank_rows(results):
        return "Rows that cannot be compared have no common Pareto front; switch some off to see that of the others."
    has_flagged = len(exclude_flagged_rows(results.rows)) < len(results.rows)
    flagged = f" A flagged row ({FLAGGED_MARK}) is never on it." if has_flagged else ""
    return (
        f"The dashed line is the Pareto front: filled points are on it; no other row is as good and cheaper.{flagged}"
    )


def _describe_front_axes(results: ResultsTable) -> str:
    return f"{format_attack_name(results.ranking_attack or '')} accuracy against backprops"


def _describe_table_front(results: ResultsTable) -> list[str]:
    """What the table's Pareto front is, and when rows at the top of the page are indistinguishable."""
    if not rank_rows(results) or not has_several_rows(results):
        return []
    front = f"On the front: no other row is as good and cheaper, by {_describe_front_axes(results)}."
    ties = (
        "At the top of the page, rows are called statistically indistinguishable where the paired test against the "
        f"named row gives p ≥ {SIGNIFICANCE_LEVEL}."
    )
    return [front, *([ties] if results.baseline else [])]


def _column(
    name: str, *, kind: str = "number", ascending: bool = False, nowrap: bool = False, prefix: str = ""
) -> dict[str, Any]:
    """A column of the results table; `ascending` is the order of its first sorting."""
    return {"kind": kind, "first": "up" if ascending else "", "prefix": prefix, "name": name, "nowrap": nowrap}


def _build_table_row(results: ResultsTable, index: int, row: ReportRow, on_front: bool) -> dict[str, Any]:
    cost = summarize_cost(row)
    problems = [*list_watch_alarms(row, short=True), *list_row_problems(row)]
    flags = sorted({flag.name for _, flag in collect_flags(row)})
    cells = [
        *(_build_accuracy_cell(results, row, attack) for attack in results.attacks),
        _build_cell(
            cost.backprops if cost else None, format_backprops(row), _paper_notes(format_paper_cost(row, "per_batch"))
        ),
        _build_cell(
            cost.minutes if cost else None,
            format_minutes(cost),
            _paper_notes(format_paper_cost(row, "minutes", "hours")),
        ),
        _build_cell(len(row.finished_runs), format_seed_count(row)),
        *_build_comparison_cells(results, row),
    ]
    has_several_models = len({other.model for other in results.rows}) > 1
    return {
        "index": index,
        "name": row.name,
        "model": row.model if has_several_models else "",
        "pills": list(_build_pills(row, flags, f"by {_describe_front_axes(results)}" if on_front else "")),
        "problems": problems,
        "cells": cells,
        "search_text": " ".join([row.name, row.method, row.model, *problems, *flags]),
        "on_front": on_front,
    }


def _build_cell(value: float | None, text: str, notes: Sequence[str] = (), strong: str = "") -> dict[str, Any]:
    """A cell: the value to sort by, an emphasised text, a text, and notes below it."""
    return {"value": "" if value is None else repr(value), "strong": strong, "text": text, "notes": notes}


def _build_accuracy_cell(results: ResultsTable, row: ReportRow, attack: str) -> dict[str, Any]:
    cell, last_epoch = summarize_accuracy(row, attack), format_last_epoch(results, row, attack)
    notes = [*([last_epoch] if last_epoch else []), *_paper_notes(format_paper_accuracy(row, attack))]
    if cell is None:
        return _build_cell(None, "—", notes)
    sample = [cell.sample_note] if cell.sample_note else []
    return _build_cell(cell.mean, format_deviation(cell), [format_interval(cell), *sample, *notes], format_mean(cell))


def _build_comparison_cells(results: ResultsTable, row: ReportRow) -> list[dict[str, Any]]:
    """The cell of the comparison with the baseline, if there is such a column."""
    if results.ranking_comparisons is None:
        return []
    comparison = results.ranking_comparisons.get(row.name)
    if comparison is None:
        return [_build_cell(None, "" if row is results.baseline else "—")]
    return [_build_cell(comparison.difference, format_difference(comparison), [format_p_value(comparison)])]


def _build_pills(row: ReportRow, flags: Sequence[str], front_title: str) -> Iterator[dict[str, str]]:
    """Labels next to a row's name: a CSS class, a text, and a title to show on hovering."""
    if front_title:
        yield {"class": "front", "text": "on the front", "title": front_title}
    for name in flags:
        yield {"class": "flag", "text": f"{FLAGGED_MARK} {name}", "title": ""}
    if list_unchecked_seeds(row):
        yield {"class": "flag", "text": "sanity not checked", "title": ""}
    if len(row.finished_runs) < len(row.runs):
        yield {"class": "failed", "text": f"{len(row.finished_runs)} of {len(row.runs)} complete", "title": ""}


def _paper_notes(values: Sequence[str]) -> list[str]:
    return [f"paper {value}" for value in values]


def _build_figure_sections(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """The sections of charts; a panel that several figures have is in the first section only."""
    sections = []
    titles: set[str] = set()
    for figure_index, figure in enumerate(figures):
        panels = {n: panel for n, panel in enumerate(figure.panels) if panel.title not in titles}
        titles |= {panel.title for panel in panels.values()}
        if panels and not figure.layout.has_own_section:
            sections.append(
                {
                    "name": figure.name,
                    "title": get_figure_title(figure, list(panels.values())),
                    "panels": [(f"{figure_index} {n}", panel.title) for n, panel in panels.items()],
                }
            )
    return sections


def _list_run_settings(run: RunResults) -> list[tuple[str, str]]:
    """A run's record, and the settings of its evaluations where they differ from the main one's."""
    pairs = list(flatten_record(run.record or {}).items())
    if run.evaluation:
        main = flatten_record(run.evaluation.settings)
        pairs += [(f"evaluation.{name}", text) for name, text in main.items()]
        for key, evaluation in run.extra_evaluations.items():
            differing = [pair for pair in flatten_record(evaluation.settings).items() if pair not in main.items()]
            pairs += [(f"evaluation of {key}.{name}", text) for name, text in differing]
    return pairs


def _format_setting_number(name: str, value: float) -> str:
    """A number; a radius or a step size as people write it unless it is in units of eps."""
    return format_eps(value) if name.endswith(("eps", "alpha")) and name not in SETTINGS_IN_EPS else f"{value:.6g}"


# ---- charts: page.js reads these keys


def build_chart_data(report: Report) -> dict[str, Any]:
    """Build the data that the page's script draws: rows with their accuracies and costs, and the figures' panels."""
    results = report.results
    return {
        "rows": [
            {**_row_data(results, row), "setup": group}
            for row, group in zip(results.rows, assign_comparison_groups(results.rows), strict=True)
        ],
        "titles": {attack: format_attack_name(attack) for attack in results.attacks},
        "figures": [
            {"name": figure.name, "panels": [_panel_data(panel) for panel in figure.panels]}
            for figure in report.figures
        ],
    }


def _row_data(results: ResultsTable, row: ReportRow) -> dict[str, Any]:
    cost = summarize_cost(row)
    cells = {attack: summarize_accuracy(row, attack) for attack in results.attacks}
    return {
        "name": make_printable(row.name),
        "accuracy": {attack: _accuracy_data(cell) for attack, cell in cells.items() if cell},
        "text": {"backprops": f"{cost.backprops:,.0f}", "minutes": format_minutes(cost)} if cost else {},
        "seeds": [_seed_data(results, row, run) for run in row.finished_runs] if len(row.finished_runs) > 1 else [],
        "backprops": cost.backprops if cost else None,
        "minutes": cost.minutes if cost else None,
        "ran_concurrently": row.ran_concurrently,
        "flags": sorted({make_printable(flag.name) for _, flag in collect_flags(row)}),
    }


def _accuracy_data(cell: AccuracyCell) -> dict[str, Any]:
    """An accuracy as numbers to draw and as text to show, so that it is rounded in one place."""
    return {
        "mean": cell.mean,
        "low": cell.low,
        "high": cell.high,
        "text": f"{format_mean(cell)}{format_deviation(cell)}{' %' if cell.is_percent else ''}",
        "interval": f"{format_interval(cell)}{' %' if cell.is_percent else ''}",
        "sample_note": cell.sample_note,
    }


def _seed_data(results: ResultsTable, row: ReportRow, run: RunResults) -> dict[str, Any]:
    """One seed's point."""
    shares = {attack: run.metrics[attack] for attack in results.attacks if attack in run.metrics}
    return {
        "seed": run.seed,
        "accuracy": shares,
        "text": {attack: format_value(share, row) for attack, share in shares.items()},
        "backprops": run.metrics["backprops"],
        "minutes": run.metrics["minutes"] or None,
    }


def _panel_data(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.title,
        "x": panel.x_label,
        "labels": [(_round_significant(x), label) for x, label in panel.x_labels],
        "y": get_y_label(panel),
        "unit": get_unit(panel),
        "kind": panel.kind,
        "percent": panel.percent,
        "lines": [
            {
                "row": make_printable(line.row),
                "seed": line.seed,
                "x": [_round_significant(x) for x in line.x],
                "y": [y if y is None else _round_significant(y) for y in line.y],
            }
            for line in panel.lines
        ],
    }


def _round_significant(value: float) -> float:
    return float(f"{value:.6g}")
