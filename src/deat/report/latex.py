"""The table of a report in LaTeX: means and deviations alone, and the paper's numbers in grey below each row."""

from collections.abc import Iterator, Sequence

from deat.report.cells import Cell, cell, cost, coverage, title
from deat.report.collect import Row
from deat.report.escape import latex
from deat.report.gather import flags_of
from deat.report.setups import OTHER
from deat.report.tables import (
    FLAGGED,
    MISPRINT,
    SPREAD,
    Sheet,
    backprops,
    marks,
    mean,
    minutes,
    paper_accuracy,
    paper_cost,
    source,
    whole,
)

HEAD = (
    "% needs \\usepackage{booktabs,xcolor}; intervals, tests, last epochs and remarks are in table.md and table.csv",
    "\\providecommand{\\deatsd}[1]{{\\scriptsize$\\,\\pm\\,$#1}}",
    "\\providecommand{\\deatpaper}[1]{\\textcolor{gray}{#1}}",
)
SIGNS = {MISPRINT: "\\dag{}", OTHER: "\\ddag{}", FLAGGED: "\\textbf{!}", "—": "--", "×": "$\\times$"}
LONGEST = 32
"""Characters of a row's name that need no column of fixed width."""


def latex_table(of: Sheet) -> str:
    """The table, for booktabs."""
    seeds = len({whole(row) for row in of.rows}) > 1
    head = ["row", *map(title, of.attacks), "backprops", "minutes", *(["seeds"] if seeds else [])]
    name = "l" if max(len(row.name) for row in of.rows) <= LONGEST else "p{48mm}"
    lines = [list(map(_tex, head)), *(cells for row in of.rows for cells in _rows(of, row, seeds))]
    top, *body = [" & ".join(cells) + " \\\\" for cells in lines]
    same = [] if seeds else [f"Seeds: {whole(of.rows[0])} in every row."]
    told = [SPREAD.format(rest=""), *same, *coverage(of.rows), *source(of.rows), *marks(of), *of.subject.notes]
    return "\n".join(
        [
            *HEAD,
            *(f"% {latex(note).replace(FLAGGED, '!')}" for note in told),
            "{\\footnotesize\\setlength{\\tabcolsep}{4pt}%",
            f"\\begin{{tabular}}{{{name}{'r' * (len(head) - 1)}}}",
            *("\\toprule", top, "\\midrule", *body, "\\bottomrule"),
            "\\end{tabular}}",
            "",
        ]
    )


def _rows(of: Sheet, row: Row, seeds: bool) -> Iterator[list[str]]:
    """A row, and the paper's below it where it has one."""
    ours = [*(_accuracy(cell(row, a)) for a in of.attacks), _tex(backprops(row)), _tex(minutes(cost(row)))]
    yield [_tex(row.name) + (_tex(f" {FLAGGED}") if flags_of(row) else ""), *ours, *([whole(row)] if seeds else [])]
    theirs = [_paper(paper_accuracy(row, a), _sd(cell(row, a))) for a in of.attacks]
    theirs += [_paper(paper_cost(row, "per_batch")), _paper(paper_cost(row, "minutes", "hours"))]
    if any(theirs):
        yield ["\\quad\\deatpaper{paper}", *theirs, *([""] if seeds else [])]


def _accuracy(found: Cell | None) -> str:
    if found is None:
        return _tex("—")
    return mean(found) + _sd(found)


def _sd(found: Cell | None) -> str:
    return "" if found is None or found.sd is None else f"\\deatsd{{{100 * found.sd:.2f}}}"


def _paper(held: Sequence[str], behind: str = "") -> str:
    """The paper's number, with as much room behind it as ours has, so that both stand below each other."""
    room = f"\\phantom{{{behind}}}" if behind else ""
    return "".join(f"\\deatpaper{{{_tex(text)}}}{room}" for text in held)


def _tex(text: str) -> str:
    """Text in which nothing is a command but our own signs."""
    return "".join(SIGNS.get(c, c) for c in latex(text))
