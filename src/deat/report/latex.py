"""The results table of a report in LaTeX: a line of means for each row, with intervals and the paper's numbers below."""

from collections.abc import Iterator, Sequence

from deat.report.escape import escape_latex
from deat.report.load import ReportRow
from deat.report.problems import FLAGGED_MARK, collect_flags
from deat.report.report_data import OTHER_SETUP_MARK
from deat.report.stats import (
    AccuracyCell,
    format_attack_name,
    format_mean,
    format_minutes,
    summarize_accuracy,
    summarize_cost,
)
from deat.report.tables import (
    ResultsTable,
    collect_table_notes,
    format_backprops,
    format_difference,
    format_p_value,
    format_paper_accuracy,
    format_paper_cost,
    format_seed_count,
)
from deat.utils.text import format_percent

LATEX_HEADER_LINES = (
    "% needs \\usepackage{booktabs,xcolor}; last epochs, held-out results and remarks are in table.md and table.csv",
    "% names are written for pdflatex: accents and Greek by commands, what its fonts lack by number, such as U+65E5",
    "% too wide for the page? use graphicx's \\resizebox{\\linewidth}{!}{...}, or delete the lines of intervals",
    "\\providecommand{\\deatsd}[1]{{\\scriptsize$\\,\\pm\\,$#1}}",
    "\\providecommand{\\deatinterval}[1]{{\\scriptsize #1}}",
    "\\providecommand{\\deatpaper}[1]{\\textcolor{gray}{#1}}",
)
MAX_NAME_CHARS = 32
"""Characters of an escaped row name that need no column of fixed width."""


def render_latex_table(results: ResultsTable) -> str:
    """Render the results table for the LaTeX package booktabs.

    Args:
        results: The table.

    Returns:
        A tabular environment in ASCII, with the table's notes as comments above it.
    """
    header = ["row", *map(format_attack_name, results.attacks), "backprops", "minutes", "seeds"]
    lines = [
        [*map(escape_latex, header), *_comparison_header(results)],
        *(cells for row in results.rows for cells in _render_row_lines(results, row)),
    ]
    top, *body = [" & ".join(cells) + " \\\\" for cells in lines]
    longest_name = max(len(escape_latex(row.name)) for row in results.rows)
    name_column = "l" if longest_name <= MAX_NAME_CHARS else "p{48mm}"
    return "\n".join(
        [
            *LATEX_HEADER_LINES,
            *(f"% {escape_latex(note)}" for note in collect_table_notes(results, "below them")),
            "{\\footnotesize\\setlength{\\tabcolsep}{4pt}%",
            f"\\begin{{tabular}}{{{name_column}{'r' * (len(lines[0]) - 1)}}}",
            *("\\toprule", top, "\\midrule", *body, "\\bottomrule"),
            "\\end{tabular}}",
            "",
        ]
    )


def _comparison_header(results: ResultsTable) -> list[str]:
    """The header of the column of comparisons, if there is one."""
    if not results.baseline or not results.ranking_attack:
        return []
    name, attack = escape_latex(results.baseline.name), escape_latex(format_attack_name(results.ranking_attack))
    return [f"\\shortstack[r]{{vs {name},\\\\{attack}}}"]


def _render_row_lines(results: ResultsTable, row: ReportRow) -> Iterator[list[str]]:
    """A row's lines: its means, their intervals, smaller samples if it has any, and the paper's numbers if it has any."""
    cells = [summarize_accuracy(row, attack) for attack in results.attacks]
    comparison = (results.ranking_comparisons or {}).get(row.name)
    name = escape_latex(row.name) + (escape_latex(f" {FLAGGED_MARK}") if collect_flags(row) else "")
    means = [
        *map(_format_accuracy, cells),
        escape_latex(format_backprops(row)),
        escape_latex(format_minutes(summarize_cost(row))),
        format_seed_count(row),
    ]
    yield _join_cells(results, name, means, escape_latex(format_difference(comparison)) if comparison else "")
    if any(cells):
        p_value = _format_small(format_p_value(comparison)) if comparison else ""
        intervals = [*map(_format_interval, cells), "", "", ""]
        yield _join_cells(results, "\\quad\\deatinterval{95\\,\\% interval}", intervals, p_value)
    if any(cell and cell.sample_note for cell in cells):
        samples = [_format_small(cell.sample_note) if cell and cell.sample_note else "" for cell in cells]
        yield _join_cells(results, "\\quad\\deatinterval{from}", [*samples, "", "", ""], "")
    paper = [
        *(
            _format_paper_values(format_paper_accuracy(row, attack), _format_sd(cell))
            for attack, cell in zip(results.attacks, cells, strict=True)
        ),
        _format_paper_values(format_paper_cost(row, "per_batch")),
        _format_paper_values(format_paper_cost(row, "minutes", "hours")),
        "",
    ]
    if any(paper):
        mark = escape_latex(OTHER_SETUP_MARK) if row.deviations else ""
        yield _join_cells(results, f"\\quad\\deatpaper{{paper{mark}}}", paper, "")


def _join_cells(results: ResultsTable, name: str, cells: Sequence[str], comparison: str) -> list[str]:
    return [name, *cells, *([comparison] if _comparison_header(results) else [])]


def _format_accuracy(cell: AccuracyCell | None) -> str:
    return escape_latex("—") if cell is None else format_mean(cell) + _format_sd(cell)


def _format_interval(cell: AccuracyCell | None) -> str:
    return "" if cell is None else _format_small(f"{100 * cell.low:.1f}--{100 * cell.high:.1f}")


def _format_small(text: str) -> str:
    return f"\\deatinterval{{{escape_latex(text)}}}"


def _format_sd(cell: AccuracyCell | None) -> str:
    return "" if cell is None or cell.sd is None else f"\\deatsd{{{format_percent(cell.sd)}}}"


def _format_paper_values(texts: Sequence[str], spacer: str = "") -> str:
    """The paper's number, with as much space after it as our deviation takes; the setup's mark is at the line's head."""
    space = f"\\phantom{{{spacer}}}" if spacer else ""
    return "".join(f"\\deatpaper{{{escape_latex(text.removesuffix(OTHER_SETUP_MARK))}}}{space}" for text in texts)
