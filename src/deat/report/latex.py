"""The results table of a report in LaTeX, as wide as the text of `article` at most: wider tables are split into parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deat.report.escape_latex_csv import escape_latex
from deat.report.problems import FLAGGED_MARK, collect_flags, exclude_flagged_rows
from deat.report.report_data import OTHER_SETUP_MARK, describe_common_setup
from deat.report.results_table import (
    MARK_MEANINGS,
    MISPRINT_MARK,
    ResultsTable,
    collect_table_notes,
    format_backprops,
    format_difference,
    format_p_value,
    format_paper_accuracy,
    format_paper_cost,
    format_seed_count,
)
from deat.report.row_statistics import (
    AccuracyCell,
    format_attack_name,
    format_deviation,
    format_interval,
    format_mean,
    format_minutes,
    get_task,
    summarize_accuracy,
    summarize_cost,
)
from deat.report.run_results import ReportRow
from deat.report.significance import SIGNIFICANCE_LEVEL, PairedComparison, find_ties, select_rankable_rows

LATEX_HEADER_LINES = (
    "% needs \\usepackage{booktabs,xcolor}; last epochs, held-out results and remarks are in table.md and table.csv",
    "% names are written for pdflatex: accents and Greek by commands, what its fonts lack by number, such as U+65E5",
    "% no part is wider than the text of article at 10 pt (345 pt); in two columns, use table* in place of table",
    "\\providecommand{\\deatbest}[1]{\\textbf{#1}}",
    "\\providecommand{\\deattie}[1]{\\underline{#1}}",
    "\\providecommand{\\deatsd}[1]{{\\scriptsize$\\,\\pm\\,$#1}}",
    "\\providecommand{\\deatinterval}[1]{{\\scriptsize #1}}",
    "\\providecommand{\\deatpaper}[1]{\\textcolor{gray}{#1}}",
    "\\providecommand{\\deatnote}[1]{\\textsuperscript{#1}}",
)
TEXT_WIDTH, TEXT_HEIGHT = 345.0, 540.0
"""Width of the text of `article` at 10 pt, and height that a float with its caption may have there, in points."""
TEST_NAME = "exact McNemar test image by image with Holm's correction"
COLUMN_GAP, ROW_GAP, LINE_HEIGHT, RULES_HEIGHT, CAPTION_LINE_HEIGHT, CAPTION_LINE_CHARS = 3.0, 2.0, 9.5, 16.0, 12.0, 70
MAX_NAME_WIDTH, MAX_HEADER_WIDTH = 92.0, 56.0
"""Longer names and headers take several lines."""
CHAR_WIDTHS = {
    **dict.fromkeys("`!',.:;[]il", 0.30),
    **dict.fromkeys("fj", 0.33),
    **dict.fromkeys(" -I", 0.39),
    **dict.fromkeys("()rst", 0.42),
    **dict.fromkeys("cez", 0.48),
    **dict.fromkeys('"$*/0123456789agoqvxyJ_{}', 0.57),
    **dict.fromkeys("bdhknpuS?", 0.60),
    **dict.fromkeys("ABCDEFGHKLNOPQRTUVXYZ&+=<>@^~\\|w±×−—–ΔμσεβÄÖÜ", 0.84),
    **dict.fromkeys("mMW#%…", 1.10),
}
"""Widths of characters in Computer Modern at 8 pt, in em; rounded up."""
OTHER_CHAR_WIDTH = 4.0
"""The width of a character that is written by its number, such as U+65E5, in em."""
FONT_POINTS = {"normal": 8.0, "bold": 9.4, "small": 7.8}
"""Points per em of `CHAR_WIDTHS` in each font: small letters and bold ones are relatively wider."""


class LatexText(NamedTuple):
    """Text in LaTeX, and its width in points."""

    latex: str
    width: float

    def __add__(self, other: "LatexText") -> "LatexText":  # type: ignore[override]
        return LatexText(self.latex + other.latex, self.width + other.width)


NOTHING = LatexText("", 0.0)
LINE_KINDS = ("mean", "sd", "interval", "paper")
"""The lines of a row, in order; a row lacks those that no column has a text for."""


@dataclass(frozen=True)
class TableColumn:
    """A column: its header's lines, and for each row a text by the kind of line, one of `LINE_KINDS`."""

    header: list[str]
    cells: list[dict[str, LatexText]]

    @property
    def width(self) -> float:
        """The width of its widest text."""
        texts = [text.width for cell in self.cells for text in cell.values()]
        return max([*texts, *(measure_text(line) for line in self.header)])


@dataclass
class TableNotes:
    """Notes below a table by the letters that refer to them, in the order of their first use."""

    texts: list[str] = field(default_factory=list)

    def refer(self, text: str) -> LatexText:
        """Return the letter of a note, a new one if no cell has it yet."""
        if text not in self.texts:
            self.texts.append(text)
        letter = _note_letter(self.texts.index(text))
        return LatexText(f"\\deatnote{{{letter}}}", measure_text(letter, "small"))


def render_latex_table(results: ResultsTable) -> str:
    """Render the results table for the LaTeX package booktabs.

    The highest accuracy of each column is bold, and those that are statistically indistinguishable from it are
    underlined. Rows with a sanity flag are neither, and no row is if they cannot be compared.

    Args:
        results: The table.

    Returns:
        Table environments in ASCII with captions, with the table's notes as comments above them. None is wider than
        the text of `article` at 10 pt: columns that do not fit are in a part of their own below.
    """
    notes = TableNotes()
    names = _NameColumn(results)
    layouts = [
        [_accuracy_columns(results, notes, sd_below=sd_below), _cost_columns(results, notes)]
        for sd_below in (False, True)
    ]
    blocks = min((_arrange_columns(groups, names.width) for groups in layouts), key=len)
    caption = _describe_table(results)
    parts = [part for block in blocks for part in _render_parts(results, names, block, _caption_height(caption))]
    floats = _collect_floats(parts, caption, notes)
    comments = [f"% {escape_latex(note)}" for note in collect_table_notes(results, "below them")]
    return "\n".join([*LATEX_HEADER_LINES, *comments, *floats, ""])


def measure_text(text: str, font: str = "normal") -> float:
    """Measure a text as LaTeX sets it in a table.

    Args:
        text: The text, before it is escaped.
        font: "normal" (8 pt), "bold" or "small" (7 pt).

    Returns:
        Its width in points, or a little more.
    """
    return FONT_POINTS[font] * sum(map(_measure_character, text))


def wrap_text(text: str, max_width: float) -> list[str]:
    """Break a text into lines: at spaces and after punctuation if possible, else anywhere.

    Args:
        text: The text.
        max_width: The largest width of a line in points.

    Returns:
        The lines; together they are the text.
    """
    pieces = [""]
    for c in text:
        pieces[-1] += c
        if c in " -_:/,":
            pieces.append("")
    lines = [""]
    for piece in pieces:
        if measure_text(lines[-1] + piece.rstrip()) > max_width and lines[-1]:
            lines.append("")
        for c in piece:
            if measure_text((lines[-1] + c).rstrip()) > max_width and lines[-1]:
                lines.append("")
            lines[-1] += c
    return lines


def split_columns(columns: Sequence[TableColumn], name_width: float) -> list[list[TableColumn]]:
    """Split columns into as few blocks as fit the text beside the column of names, keeping their order."""
    blocks: list[list[TableColumn]] = []
    room = 0.0
    for column in columns:
        needed = column.width + 2 * COLUMN_GAP
        if needed > room or not blocks:
            blocks.append([])
            room = TEXT_WIDTH - name_width - COLUMN_GAP
        blocks[-1].append(column)
        room -= needed
    return blocks


def _arrange_columns(groups: Sequence[Sequence[TableColumn]], name_width: float) -> list[list[TableColumn]]:
    """All columns in one block if they fit, else each group in blocks of its own."""
    together = split_columns([column for group in groups for column in group], name_width)
    return together if len(together) == 1 else [b for group in groups for b in split_columns(group, name_width)]


def find_best_rows(rows: Sequence[ReportRow], attack: str) -> tuple[list[str], list[str]]:
    """Find the rows with the highest accuracy, and those that are statistically indistinguishable from them.

    Args:
        rows: The rows of a report.
        attack: The attack's name, "natural" or "worst".

    Returns:
        The names of both. Both are empty if fewer than two rows can be compared; rows with a sanity flag are in neither.
    """
    means = {
        row.name: format_mean(cell)
        for row in select_rankable_rows([row for row in rows if summarize_accuracy(row, attack)])
        if (cell := summarize_accuracy(row, attack))
    }
    if len(means) < 2:
        return [], []
    candidates = [row for row in rows if row.name in means]
    best = max(candidates, key=lambda row: float(means[row.name]))
    equal = [row.name for row in candidates if means[row.name] == means[best.name]]
    return equal, [name for name in find_ties(best, candidates, attack) if name not in equal]


# ---- columns


class _NameColumn:
    """The first column: names of rows, and what their further lines are."""

    def __init__(self, results: ResultsTable) -> None:
        self.labels = {
            "sd": self._small_label("± over seeds"),
            "interval": self._small_label("95 % interval"),
            "paper": self._paper_label(""),
        }
        self.name_lines = {row.name: wrap_text(row.name, MAX_NAME_WIDTH) for row in results.rows}
        flags = {row.name: measure_text(f" {FLAGGED_MARK}") for row in results.rows if collect_flags(row)}
        widths = [
            measure_text(line.rstrip()) + flags.get(name, 0.0)
            for name, lines in self.name_lines.items()
            for line in lines
        ]
        self.width = max([*widths, *(label.width for label in self.labels.values())])

    def render(self, row: ReportRow, kind: str) -> str:
        """The first cell of one of a row's lines."""
        if kind == "paper":
            return self._paper_label(OTHER_SETUP_MARK if row.deviations else "").latex
        if kind != "mean":
            return self.labels[kind].latex
        *lines, last = (escape_latex(line.rstrip()) for line in self.name_lines[row.name])
        last += escape_latex(f" {FLAGGED_MARK}") if collect_flags(row) else ""
        if not lines:
            return last
        text = " \\\\ ".join([*lines, last])
        return f"\\parbox[t]{{{self.width:.1f}pt}}{{\\raggedright {text}\\strut}}"

    @staticmethod
    def _small_label(text: str) -> LatexText:
        return LatexText(f"\\quad\\deatinterval{{{escape_latex(text)}}}", 9 + measure_text(text, "small"))

    @staticmethod
    def _paper_label(mark: str) -> LatexText:
        return LatexText(
            f"\\quad\\deatpaper{{paper{escape_latex(mark)}}}", 9 + measure_text(f"paper{OTHER_SETUP_MARK}")
        )


def _accuracy_columns(results: ResultsTable, notes: TableNotes, *, sd_below: bool) -> list[TableColumn]:
    """Columns of accuracies, with standard deviations beside the means, or in a line below, which takes less width."""
    columns = []
    for attack in results.attacks:
        best, ties = find_best_rows(results.rows, attack)
        cells = []
        for row in results.rows:
            cell = summarize_accuracy(row, attack)
            sd = _render_sd(cell)
            beside = NOTHING if sd_below else sd
            texts = {"mean": _render_accuracy(cell, beside, row.name in best, row.name in ties, notes)}
            if cell:
                low, high = format_interval(cell).split(" to ")
                width = measure_text(f"{low}–{high}", "small")
                texts["interval"] = LatexText(f"\\deatinterval{{{low}--{high}}}", width)
            if sd_below and sd.latex:
                texts["sd"] = sd
            if paper := format_paper_accuracy(row, attack):
                texts["paper"] = _render_paper_values(paper, notes, beside)
            cells.append(texts)
        columns.append(_make_column(format_attack_name(attack), cells))
    return columns


def _cost_columns(results: ResultsTable, notes: TableNotes) -> list[TableColumn]:
    """Columns of the comparison with the baseline, of costs, and of the numbers of seeds."""
    cheapest = _find_cheapest_rows(results.rows)
    cost_cells: dict[str, list[dict[str, LatexText]]] = {"backprops": [], "minutes": [], "seeds": []}
    for row in results.rows:
        backprops, minutes = format_backprops(row), format_minutes(summarize_cost(row))
        cost_cells["backprops"].append(
            _with_paper(
                _render_value(backprops, is_best=row.name in cheapest), format_paper_cost(row, "per_batch"), notes
            )
        )
        paper_minutes = format_paper_cost(row, "minutes", "hours")
        cost_cells["minutes"].append(_with_paper(_render_value(minutes), paper_minutes, notes))
        cost_cells["seeds"].append({"mean": _render_value(format_seed_count(row))})
    columns = [_make_column(name, cells) for name, cells in cost_cells.items()]
    if results.ranking_comparisons is None or not results.ranking_attack:
        return columns
    comparisons = [results.ranking_comparisons.get(row.name) for row in results.rows]
    differences = [{"mean": _render_value(format_difference(c))} if c else {} for c in comparisons]
    p_values = [{"mean": _render_p_value(c, notes)} if c else {} for c in comparisons]
    return [
        _make_column(f"Δ {format_attack_name(results.ranking_attack)}", differences),
        _make_column("p", p_values),
        *columns,
    ]


def _make_column(header: str, cells: list[dict[str, LatexText]]) -> TableColumn:
    return TableColumn([line.rstrip() for line in wrap_text(header, MAX_HEADER_WIDTH)], cells)


def _find_cheapest_rows(rows: Sequence[ReportRow]) -> list[str]:
    """The rows with the fewest backprops, of those that may be the best; none if there are not two."""
    costs = {row.name: cost.backprops for row in select_rankable_rows(rows) if (cost := summarize_cost(row))}
    return [name for name, backprops in costs.items() if backprops == min(costs.values())] if len(costs) > 1 else []


def _render_accuracy(
    cell: AccuracyCell | None, sd: LatexText, is_best: bool, is_tie: bool, notes: TableNotes
) -> LatexText:
    if cell is None:
        return _render_value("—")
    note = notes.refer(f"From {cell.sample_note}.") if cell.sample_note else NOTHING
    return _render_value(format_mean(cell), is_best=is_best, is_tie=is_tie) + sd + note


def _render_value(text: str, *, is_best: bool = False, is_tie: bool = False) -> LatexText:
    latex = escape_latex(text)
    if is_best:
        return LatexText(f"\\deatbest{{{latex}}}", measure_text(text, "bold"))
    return LatexText(f"\\deattie{{{latex}}}" if is_tie else latex, measure_text(text))


def _render_sd(cell: AccuracyCell | None) -> LatexText:
    if cell is None or cell.sd is None:
        return NOTHING
    text = format_deviation(cell).removeprefix(" ± ")
    return LatexText(f"\\deatsd{{{text}}}", measure_text(f" ±{text}", "small"))


def _render_p_value(comparison: PairedComparison, notes: TableNotes) -> LatexText:
    p, _, shared = format_p_value(comparison).partition(", ")
    text = p.removeprefix("p ").removeprefix("= ").replace("< ", "<")
    return _render_value(text) + (notes.refer(f"Over {shared}.") if shared else NOTHING)


def _render_paper_values(texts: Sequence[str], notes: TableNotes, spacer: LatexText = NOTHING) -> LatexText:
    """The paper's number, with as much space after it as our deviation takes; the setup's mark is at the line's head."""
    result = NOTHING
    for text in texts:
        value, misprint, logged = text.removesuffix(OTHER_SETUP_MARK).partition(MISPRINT_MARK)
        result += LatexText(f"\\deatpaper{{{escape_latex(value)}}}", measure_text(value))
        if misprint:
            result += notes.refer(f"A misprint of the paper: the authors' own log has {logged.strip(' ()')}.")
    return result + (LatexText(f"\\phantom{{{spacer.latex}}}", spacer.width) if spacer.latex else NOTHING)


def _with_paper(value: LatexText, paper: Sequence[str], notes: TableNotes) -> dict[str, LatexText]:
    return {"mean": value, **({"paper": _render_paper_values(paper, notes)} if paper else {})}


# ---- parts and floats


class TablePart(NamedTuple):
    """A tabular environment and its height in points."""

    latex: str
    height: float


def _render_parts(
    results: ResultsTable, names: _NameColumn, columns: Sequence[TableColumn], caption_height: float
) -> Iterator[TablePart]:
    """A block of columns: one part, or several if there are more rows than fit a page."""
    room = TEXT_HEIGHT - caption_height - RULES_HEIGHT - LINE_HEIGHT * max(len(c.header) for c in columns)
    lines: list[str] = []
    height = 0.0
    for index, row in enumerate(results.rows):
        row_lines, row_height = _render_row(names, columns, index, row)
        if lines and height + row_height > room:
            yield _render_part(columns, lines, height)
            lines, height = [], 0.0
        lines += row_lines
        height += row_height
    yield _render_part(columns, lines, height)


def _render_row(
    names: _NameColumn, columns: Sequence[TableColumn], index: int, row: ReportRow
) -> tuple[list[str], float]:
    """A row's lines in a block of columns, and their height."""
    cells = [column.cells[index] for column in columns]
    kinds = [kind for kind in LINE_KINDS if kind == "mean" or any(kind in cell for cell in cells)]
    lines = [
        " & ".join([names.render(row, kind), *(cell.get(kind, NOTHING).latex for cell in cells)]) + " \\\\"
        for kind in kinds
    ]
    gap = [f"\\addlinespace[{ROW_GAP:g}pt]"] if index and len(lines) > 1 else []
    return [*gap, *lines], LINE_HEIGHT * (len(lines) + len(names.name_lines[row.name]) - 1) + ROW_GAP * len(gap)


def _render_part(columns: Sequence[TableColumn], lines: Sequence[str], height: float) -> TablePart:
    headers = ["row", *(_render_header(column.header) for column in columns)]
    latex = "\n".join(
        [
            f"\\begin{{tabular}}{{@{{}}l{'r' * len(columns)}@{{}}}}",
            *("\\toprule", " & ".join(headers) + " \\\\", "\\midrule", *lines, "\\bottomrule"),
            "\\end{tabular}",
        ]
    )
    return TablePart(latex, height + RULES_HEIGHT + LINE_HEIGHT * max(len(column.header) for column in columns))


def _render_header(lines: Sequence[str]) -> str:
    first, *others = (escape_latex(line) for line in lines)
    return "".join(["\\shortstack[r]{", first, *(f"\\\\{line}" for line in others), "}"]) if others else first


def _collect_floats(parts: Sequence[TablePart], caption: str, notes: TableNotes) -> list[str]:
    """The parts in as few floats as fit a page each; the first has the caption."""
    groups: list[list[TablePart]] = []
    room = 0.0
    for part in parts:
        if part.height + LINE_HEIGHT > room or not groups:
            groups.append([])
            room = TEXT_HEIGHT - _caption_height(caption)
        groups[-1].append(part)
        room -= part.height + LINE_HEIGHT
    captions = [caption, *["Continued."] * (len(groups) - 1)]
    return [
        _render_float([part.latex for part in group], text, notes, is_first=n == 0)
        for n, (group, text) in enumerate(zip(groups, captions, strict=True))
    ]


def _render_float(parts: Sequence[str], caption: str, notes: TableNotes, *, is_first: bool) -> str:
    used = [(_note_letter(n), text) for n, text in enumerate(notes.texts)]
    used = [(letter, text) for letter, text in used if any(f"\\deatnote{{{letter}}}" in part for part in parts)]
    note_text = " ".join(f"\\deatnote{{{letter}}}\\,{escape_latex(text)}" for letter, text in used)
    return "\n".join(
        [
            "\\begin{table}",
            *(["\\centering"] if is_first else ["\\addtocounter{table}{-1}", "\\centering"]),
            *(f"\\caption{{{caption}}}", *(["\\label{tab:deat}"] if is_first else []), "\\smallskip"),
            f"\\footnotesize\\setlength{{\\tabcolsep}}{{{COLUMN_GAP:g}pt}}%",
            "\\par\\medskip\n".join(f"{part}%\n" for part in parts).rstrip("\n"),
            *([f"\\par\\smallskip\\parbox{{\\linewidth}}{{\\scriptsize {note_text}}}"] if used else []),
            "\\end{table}",
        ]
    )


def _caption_height(caption: str) -> float:
    return CAPTION_LINE_HEIGHT * (len(caption) // CAPTION_LINE_CHARS + 2)


def _note_letter(n: int) -> str:
    return ("" if n < 26 else _note_letter(n // 26 - 1)) + chr(ord("a") + n % 26)


def _measure_character(character: str) -> float:
    if character in CHAR_WIDTHS:
        return CHAR_WIDTHS[character]
    latex = escape_latex(character)
    return OTHER_CHAR_WIDTH if latex.startswith("\\texttt") else 1.1


# ---- the caption


def _describe_table(results: ResultsTable) -> str:
    """The caption: what the numbers are, and what bold, underlined and marked ones mean."""
    setup = ", ".join(describe_common_setup(results.rows))
    has_sd = any(
        (cell := summarize_accuracy(row, a)) and cell.sd is not None for row in results.rows for a in results.attacks
    )
    mean = ": mean ± standard deviation over seeds" if has_sd else ""
    tasks = {get_task(row).name: get_task(row) for row in results.rows if row.finished_runs}
    graded = [task for task in tasks.values() if task.is_graded]
    values, interval = "Accuracy in percent", "Wilson"
    if graded:
        units = [task.metric_names[0] + (" in percent" if "%" in task.format_metric(0.5) else "") for task in graded]
        values = ", ".join(([values] if len(graded) < len(tasks) else []) + units)
        interval = "bootstrap" if len(graded) == len(tasks) else "bootstrap or Wilson"
    sentences = [
        f"{values}{f' ({setup})' if setup else ''}{mean}, with the 95 % interval ({interval}) for the choice of test "
        "examples below."
        if results.attacks
        else f"Results{f' ({setup})' if setup else ''}.",
        *_describe_emphasis(results),
        *_describe_comparison(results),
        *_describe_marks(results),
    ]
    return escape_latex(" ".join(sentences))


def _describe_emphasis(results: ResultsTable) -> Iterator[str]:
    best_rows = [find_best_rows(results.rows, attack) for attack in results.attacks]
    if not any(best for best, _ in best_rows):
        if len([row for row in results.rows if row.finished_runs]) > 1:
            yield "No value is bold, since the rows cannot be compared."
        return
    flagged = len(exclude_flagged_rows(results.rows)) < len(results.rows)
    yield (
        "Bold: the highest accuracy of a column, and the fewest backprops"
        f"{', of rows without a sanity flag' if flagged else ''}."
    )
    if any(ties for _, ties in best_rows):
        yield (f"Underlined: statistically indistinguishable from the highest ({TEST_NAME}, p ≥ {SIGNIFICANCE_LEVEL}).")


def _describe_comparison(results: ResultsTable) -> Iterator[str]:
    if results.ranking_comparisons is not None and results.baseline and results.ranking_attack:
        yield (
            f"Δ: difference of {format_attack_name(results.ranking_attack)} accuracy from {results.baseline.name}, in "
            f"points, with its p-value ({TEST_NAME})."
        )


def _describe_marks(results: ResultsTable) -> Iterator[str]:
    """The meaning of each mark that the table contains."""
    texts = [
        f"{FLAGGED_MARK if collect_flags(row) else ''}{format_minutes(summarize_cost(row))}" for row in results.rows
    ]
    papers = [text for row in results.rows for text in _list_paper_values(results, row)]
    if papers:
        yield "Grey: the paper's numbers."
    if any(OTHER_SETUP_MARK in text for text in papers):
        yield f"{OTHER_SETUP_MARK}: the paper's setup differs."
    for mark, meaning in MARK_MEANINGS.items():
        if any(mark in text for text in texts):
            yield f"{mark}: {meaning}."


def _list_paper_values(results: ResultsTable, row: ReportRow) -> list[str]:
    accuracies = [text for attack in results.attacks for text in format_paper_accuracy(row, attack)]
    return [*accuracies, *format_paper_cost(row, "per_batch"), *format_paper_cost(row, "minutes", "hours")]
