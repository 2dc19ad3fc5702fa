"""The table of a report in LaTeX: a line of means and deviations a row, its intervals and the paper's numbers below."""

from collections.abc import Iterator, Sequence

from deat.report.escape import latex
from deat.report.grouping import OTHER, flags_of
from deat.report.load import ReportRow
from deat.report.stats import Cell, cell, cost, title
from deat.report.tables import (
    FLAGGED,
    Sheet,
    backprops,
    chance,
    difference,
    mean,
    minutes,
    notes,
    paper_accuracy,
    paper_cost,
    whole,
)

HEAD = (
    "% needs \\usepackage{booktabs,xcolor}; last epochs, held-out figures and remarks are in table.md and table.csv",
    "% names are written for pdflatex: accents and Greek by commands, what its fonts lack by number, such as U+65E5",
    "% too wide for the page? use graphicx's \\resizebox{\\linewidth}{!}{...}, or delete the lines of intervals",
    "\\providecommand{\\deatsd}[1]{{\\scriptsize$\\,\\pm\\,$#1}}",
    "\\providecommand{\\deatinterval}[1]{{\\scriptsize #1}}",
    "\\providecommand{\\deatpaper}[1]{\\textcolor{gray}{#1}}",
)
LONGEST = 32
"""Characters of a row's name, as it is written, that need no column of fixed width."""


def latex_table(of: Sheet) -> str:
    """The table, for booktabs."""
    head = ["row", *map(title, of.attacks), "backprops", "minutes", "seeds"]
    lines = [[*map(latex, head), *_against(of)], *(cells for row in of.rows for cells in _rows(of, row))]
    top, *body = [" & ".join(cells) + " \\\\" for cells in lines]
    name = "l" if max(len(latex(row.name)) for row in of.rows) <= LONGEST else "p{48mm}"
    return "\n".join(
        [
            *HEAD,
            *(f"% {latex(note)}" for note in notes(of, "below them")),
            "{\\footnotesize\\setlength{\\tabcolsep}{4pt}%",
            f"\\begin{{tabular}}{{{name}{'r' * (len(lines[0]) - 1)}}}",
            *("\\toprule", top, "\\midrule", *body, "\\bottomrule"),
            "\\end{tabular}}",
            "",
        ]
    )


def _against(of: Sheet) -> list[str]:
    """The head of the column of tests, if there is one."""
    if not of.against or not of.headline:
        return []
    return [f"\\shortstack[r]{{vs {latex(of.against.name)},\\\\{latex(title(of.headline))}}}"]


def _rows(of: Sheet, row: ReportRow) -> Iterator[list[str]]:
    """A row, its intervals, what stands behind those that stand on less, and the paper's numbers where it has any."""
    cells = [cell(row, a) for a in of.attacks]
    found = of.versus[of.headline].get(row.name) if of.against and of.headline else None
    ours = [*map(_accuracy, cells), latex(backprops(row)), latex(minutes(cost(row))), whole(row)]
    name = latex(row.name) + (latex(f" {FLAGGED}") if flags_of(row) else "")
    yield _line(of, name, ours, latex(difference(found)) if found else "")
    if any(cells):
        spans = [*map(_interval, cells), "", "", ""]
        yield _line(of, "\\quad\\deatinterval{95\\,\\% interval}", spans, _small(chance(found)) if found else "")
    if any(c and c.behind for c in cells):
        behind = [_small(c.behind) if c and c.behind else "" for c in cells]
        yield _line(of, "\\quad\\deatinterval{from}", [*behind, "", "", ""], "")
    theirs = [_paper(paper_accuracy(row, a), _sd(c)) for a, c in zip(of.attacks, cells, strict=True)]
    theirs += [_paper(paper_cost(row, "per_batch")), _paper(paper_cost(row, "minutes", "hours")), ""]
    if any(theirs):
        yield _line(of, f"\\quad\\deatpaper{{paper{latex(OTHER) if row.differs else ''}}}", theirs, "")


def _line(of: Sheet, name: str, cells: Sequence[str], versus: str) -> list[str]:
    return [name, *cells, *([versus] if _against(of) else [])]


def _accuracy(found: Cell | None) -> str:
    return latex("—") if found is None else mean(found) + _sd(found)


def _interval(found: Cell | None) -> str:
    return "" if found is None else _small(f"{100 * found.low:.1f}--{100 * found.high:.1f}")


def _small(text: str) -> str:
    return f"\\deatinterval{{{latex(text)}}}"


def _sd(found: Cell | None) -> str:
    return "" if found is None or found.sd is None else f"\\deatsd{{{100 * found.sd:.2f}}}"


def _paper(held: Sequence[str], behind: str = "") -> str:
    """The paper's number, with as much room behind it as ours has; that its setup is another is said once a line."""
    room = f"\\phantom{{{behind}}}" if behind else ""
    return "".join(f"\\deatpaper{{{latex(text.removesuffix(OTHER))}}}{room}" for text in held)
