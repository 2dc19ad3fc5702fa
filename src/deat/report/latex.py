"""The table of a report in LaTeX: a line of means and deviations a row, its intervals and the paper's numbers below."""

from collections.abc import Iterator, Sequence

from deat.report.escape import escape_latex
from deat.report.grouping import OTHER_SETUP_MARK, collect_flags
from deat.report.load import ReportRow
from deat.report.stats import AccuracyCell, format_attack_name, summarize_accuracy, summarize_cost
from deat.report.tables import (
    FLAGGED_MARK,
    ResultsTable,
    collect_table_notes,
    format_backprops,
    format_difference,
    format_mean,
    format_minutes,
    format_p_value,
    format_paper_accuracy,
    format_paper_cost,
    format_seed_count,
)

LATEX_HEADER_LINES = (
    "% needs \\usepackage{booktabs,xcolor}; last epochs, held-out figures and remarks are in table.md and table.csv",
    "% names are written for pdflatex: accents and Greek by commands, what its fonts lack by number, such as U+65E5",
    "% too wide for the page? use graphicx's \\resizebox{\\linewidth}{!}{...}, or delete the lines of intervals",
    "\\providecommand{\\deatsd}[1]{{\\scriptsize$\\,\\pm\\,$#1}}",
    "\\providecommand{\\deatinterval}[1]{{\\scriptsize #1}}",
    "\\providecommand{\\deatpaper}[1]{\\textcolor{gray}{#1}}",
)
MAX_NAME_CHARS = 32
"""Characters of a row's name, as it is written, that need no column of fixed width."""


def render_latex_table(results: ResultsTable) -> str:
    """The table, for booktabs."""
    head = ["row", *map(format_attack_name, results.attacks), "backprops", "minutes", "seeds"]
    lines = [
        [*map(escape_latex, head), *_comparison_header(results)],
        *(cells for row in results.rows for cells in _render_row_lines(results, row)),
    ]
    top, *body = [" & ".join(cells) + " \\\\" for cells in lines]
    name = "l" if max(len(escape_latex(row.name)) for row in results.rows) <= MAX_NAME_CHARS else "p{48mm}"
    return "\n".join(
        [
            *LATEX_HEADER_LINES,
            *(f"% {escape_latex(note)}" for note in collect_table_notes(results, "below them")),
            "{\\footnotesize\\setlength{\\tabcolsep}{4pt}%",
            f"\\begin{{tabular}}{{{name}{'r' * (len(lines[0]) - 1)}}}",
            *("\\toprule", top, "\\midrule", *body, "\\bottomrule"),
            "\\end{tabular}}",
            "",
        ]
    )


def _comparison_header(results: ResultsTable) -> list[str]:
    """The head of the column of tests, if there is one."""
    if not results.against or not results.ranking_attack:
        return []
    return [
        f"\\shortstack[r]{{vs {escape_latex(results.against.name)},\\\\{escape_latex(format_attack_name(results.ranking_attack))}}}"
    ]


def _render_row_lines(results: ResultsTable, row: ReportRow) -> Iterator[list[str]]:
    """A row, its intervals, what stands behind those that stand on less, and the paper's numbers where it has any."""
    cells = [summarize_accuracy(row, a) for a in results.attacks]
    found = (
        results.comparisons[results.ranking_attack].get(row.name)
        if results.against and results.ranking_attack
        else None
    )
    ours = [
        *map(_format_accuracy, cells),
        escape_latex(format_backprops(row)),
        escape_latex(format_minutes(summarize_cost(row))),
        format_seed_count(row),
    ]
    name = escape_latex(row.name) + (escape_latex(f" {FLAGGED_MARK}") if collect_flags(row) else "")
    yield _join_cells(results, name, ours, escape_latex(format_difference(found)) if found else "")
    if any(cells):
        spans = [*map(_format_interval, cells), "", "", ""]
        yield _join_cells(
            results,
            "\\quad\\deatinterval{95\\,\\% interval}",
            spans,
            _format_small(format_p_value(found)) if found else "",
        )
    if any(c and c.behind for c in cells):
        behind = [_format_small(c.behind) if c and c.behind else "" for c in cells]
        yield _join_cells(results, "\\quad\\deatinterval{from}", [*behind, "", "", ""], "")
    theirs = [
        _format_paper_values(format_paper_accuracy(row, a), _format_sd(c))
        for a, c in zip(results.attacks, cells, strict=True)
    ]
    theirs += [
        _format_paper_values(format_paper_cost(row, "per_batch")),
        _format_paper_values(format_paper_cost(row, "minutes", "hours")),
        "",
    ]
    if any(theirs):
        yield _join_cells(
            results, f"\\quad\\deatpaper{{paper{escape_latex(OTHER_SETUP_MARK) if row.differs else ''}}}", theirs, ""
        )


def _join_cells(results: ResultsTable, name: str, cells: Sequence[str], comparison: str) -> list[str]:
    return [name, *cells, *([comparison] if _comparison_header(results) else [])]


def _format_accuracy(cell: AccuracyCell | None) -> str:
    return escape_latex("—") if cell is None else format_mean(cell) + _format_sd(cell)


def _format_interval(cell: AccuracyCell | None) -> str:
    return "" if cell is None else _format_small(f"{100 * cell.low:.1f}--{100 * cell.high:.1f}")


def _format_small(text: str) -> str:
    return f"\\deatinterval{{{escape_latex(text)}}}"


def _format_sd(cell: AccuracyCell | None) -> str:
    return "" if cell is None or cell.sd is None else f"\\deatsd{{{100 * cell.sd:.2f}}}"


def _format_paper_values(texts: Sequence[str], spacer: str = "") -> str:
    """The paper's number, with as much room behind it as ours has; that its setup is another is said once a line."""
    room = f"\\phantom{{{spacer}}}" if spacer else ""
    return "".join(f"\\deatpaper{{{escape_latex(text.removesuffix(OTHER_SETUP_MARK))}}}{room}" for text in texts)
