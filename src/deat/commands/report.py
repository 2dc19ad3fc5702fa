"""`deat report`: from run folders and bench folders to tables, figures and one page."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from tyro.conf import Positional, arg

from deat.commands.bench_table import WIDTH
from deat.commands.flags import MaybeText, MaybeWhole, Whole
from deat.commands.probing import Lab, gallery, has_weights, sweep
from deat.errors import CheckpointError, UsageError
from deat.live import Screen, is_terminal
from deat.loading import FORM, is_file_spec
from deat.plain import markdown, plain
from deat.report.alarms import alarms
from deat.report.cells import cell, cost, mean_under
from deat.report.claims import check_claims
from deat.report.collect import Row
from deat.report.draw import check_matplotlib, draw, draw_gallery
from deat.report.gallery import Gallery
from deat.report.gallery import table_of as gallery_table
from deat.report.gather import UNEVALUATED, Subject, believed, flags_of, gather, troubles, unchecked
from deat.report.held_out import held_out, to_evaluate
from deat.report.held_out_tables import FILLS, HEADING, cells, heads, held_out_markdown
from deat.report.latex import latex_table
from deat.report.page import Story, page
from deat.report.series import figures, table_of
from deat.report.tables import (
    Sheet,
    claims_table,
    csv_table,
    csv_text,
    markdown_table,
    remarks,
    scores_tables,
    sheet,
)
from deat.training.folder import REPORT_FILES, is_report
from deat.writing import refuse_links, write_whole


@dataclass(frozen=True)
class Report:
    """Compare runs: tables (Markdown, LaTeX, CSV), figures, and one page to look at without a network."""

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")]
    """Run and bench folders; runs that differ in their seed alone make one row, pieces of one bench one table."""
    out: MaybeText = None
    """The report's folder (report/ in the only folder named, or beside the first of several)."""
    against: MaybeText = None
    """The row that others are tested against, image by image (m+deat, or else the most robust)."""
    sweep: MaybeWhole = None
    """Also attack the first so many test images at radii from 0 to 3 eps, and draw the curves."""
    gallery: Whole = 6
    """Adversarial examples to show, against the most robust row that kept its weights; 0 for none."""
    no_figures: bool = False
    """Leave out the pictures, which need matplotlib; the page and the tables do not."""
    model: MaybeText = None
    """Your own networks among the runs, whose code --sweep and --gallery then run: net.py:Net, several by commas."""
    device: str = "auto"
    """Where networks run for --sweep and --gallery: cpu, cuda, ..."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    json: bool = False
    """Print the numbers as one JSON document."""

    def run(self) -> int:
        """Report."""
        return run_report(self)


def run_report(wish: Report) -> int:
    """Read, compare, draw and write everything down."""
    _check(wish)
    subject = gather(wish.runs)
    out = _place(wish)
    story = tell(subject, wish)
    try:
        _write(story, out, wish)
    except OSError as error:
        raise CheckpointError(f"cannot write to {str(out)!r}: {error.strerror}. Choose another --out.") from None
    _show(story, out, wish)
    return 0


def tell(subject: Subject, wish: Report) -> Story:
    """Everything that the report says."""
    of = sheet(subject, wish.against)
    drawn = figures(subject.rows, of.headline)
    if wish.sweep:
        drawn.append(sweep(subject.rows, wish.sweep, _lab(wish)))
    shown = _gallery(of, wish)
    missing = [f"{figure.title}: {figure.missing}" for figure in drawn if figure.missing]
    if wish.gallery and shown.missing:
        missing.append(f"Adversarial examples: {shown.missing}")
    return Story(_heading(subject), of, drawn, check_claims(subject.rows), shown, missing)


def _check(wish: Report) -> None:
    if wish.sweep is not None and wish.sweep < 1:
        raise UsageError(f"sweep must be a number of test images >= 1, not {wish.sweep}.")
    if wish.gallery < 0:
        raise UsageError(f"gallery must be a number of images >= 0, not {wish.gallery}.")
    for spec in _lab(wish).models:
        if not is_file_spec(spec):
            raise UsageError(f"--model {spec!r} is no network of your own, which alone needs naming: {FORM}.")
    if not wish.no_figures:
        check_matplotlib()


def _lab(wish: Report) -> Lab:
    named = (wish.model or "").split(",")
    return Lab(wish.device, wish.data_root, tuple(spec.strip() for spec in named if spec.strip()))


def _place(wish: Report) -> Path:
    """Where the report goes: --out, or report/ in the only folder named, or beside several."""
    first = Path(wish.runs[0]).expanduser()
    beside = (first if len(set(map(Path, wish.runs))) == 1 else first.parent) / "report"
    out = Path(wish.out).expanduser() if wish.out else beside
    refuse_links([*([] if wish.out else [out]), out / "figures", *(out / name for name in sorted(REPORT_FILES))])
    if out.is_file() or (out.is_dir() and not is_report(out)):
        raise UsageError(f"{str(out)!r} holds other things than a report; name another folder with --out.")
    return out


def _heading(subject: Subject) -> str:
    if subject.recipes:
        return ", ".join(dict.fromkeys(plain(recipe) for recipe in subject.recipes))
    names = dict.fromkeys(row.runs[0].record["data"]["name"] for row in subject.rows if row.runs[0].record)
    methods = dict.fromkeys(row.method for row in subject.rows)
    return plain(f"{' and '.join(methods) if len(methods) < 4 else f'{len(methods)} methods'} on {' and '.join(names)}")


def _gallery(of: Sheet, wish: Report) -> Gallery:
    """Examples against the most robust row that kept its weights, of those that may be believed if there are any."""
    able = [row for row in of.rows if row.done and has_weights(row.done[0])]
    if not wish.gallery or not able or not of.headline:
        return Gallery(missing="an evaluated run with its weights")
    best = max(believed(able), key=lambda row: mean_under(row, of.headline or ""))
    return gallery(best, wish.gallery, _lab(wish))


def _write(story: Story, out: Path, wish: Report) -> None:
    of, folder = story.sheet, out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "index.html": page(story),
        "table.md": _markdown(story),
        "table.tex": latex_table(of),
        "table.csv": csv_table(of),
        **{f"figures/{name}.csv": csv_text(rows) for name, rows in _data(story)},
    }
    for name in REPORT_FILES - texts.keys():  # of an earlier report, which had other figures
        (out / name).unlink(missing_ok=True)
    for name, text in texts.items():
        write_whole(out / name, text.encode())
    if not wish.no_figures:
        _draw(story, folder)


def _markdown(story: Story) -> str:
    of = story.sheet
    place = f"In the paper: {markdown('; '.join(of.subject.tables))}.\n\n" if of.subject.tables else ""
    results = markdown_table(of) if any(row.done for row in of.rows) else _unevaluated(of)
    table = f"# {story.heading}\n\n{place}{results}{held_out_markdown(of.rows)}{scores_tables(of.rows)}"
    return f"{table}\n## The paper's claims\n\n{claims_table(story.claims)}" if story.claims else table


def _unevaluated(of: Sheet) -> str:
    """What stands in place of a table in which there would be no number."""
    told = [f"{row.name}, {text}" for row in of.rows for text in troubles(row, UNEVALUATED)]
    return "\n".join(f"{markdown(text)}\n" for text in ("No run is evaluated yet.", *told, *of.subject.notes))


def _draw(story: Story, folder: Path) -> None:
    order = [row.name for row in story.sheet.rows]
    for figure in story.figures:
        if figure.panels:
            draw(figure, order, folder)
    if story.gallery.tiles:
        draw_gallery(story.gallery, folder)


def _data(story: Story) -> Iterator[tuple[str, Sequence[Sequence[Any]]]]:
    yield from ((figure.name, table_of(figure)) for figure in story.figures if figure.panels)
    if story.gallery.tiles:
        yield "gallery", gallery_table(story.gallery)


def _show(story: Story, out: Path, wish: Report) -> None:
    if wish.json:
        print(json.dumps({"out": str(out), **as_json(story)}, allow_nan=False))
        return
    for text in story.missing:
        print(plain(f"left out: {text}"))
    for row in story.sheet.rows:
        for text in troubles(row, UNEVALUATED):
            print(plain(f"not whole: {row.name}, {text}"))
        for text in alarms(row):
            print(plain(f"watch: {row.name}, {text}"))
    _show_held_out(story.sheet.rows)
    page_file = (out / "index.html").resolve() if is_terminal() else out / "index.html"
    print(f"the report is {page_file}; tables and figures are beside it")


def _show_held_out(rows: Sequence[Row]) -> None:
    """What is known of runs that have no test figures, and what gives them some."""
    console = Screen(soft_wrap=True, width=None if is_terminal() else WIDTH)
    if found := held_out(rows):
        shown = Table(title=f"{HEADING.lower()}, in percent", title_justify="left", box=None, pad_edge=False)
        for n, head in enumerate(heads(found)):
            shown.add_column(plain(head), justify="right" if n else "left")
        for one in found:
            shown.add_row(*map(plain, (one.row, *cells(one, found))))
        console.print(shown)
    if judging := to_evaluate(rows):
        console.print("\n".join([FILLS, *(f"  {plain(text)}" for text in judging)]))


def as_json(story: Story) -> dict[str, Any]:
    """The report's numbers as one document."""
    return {
        "headline": story.sheet.headline,
        "against": story.sheet.against and story.sheet.against.name,
        "rows": [_row(story.sheet, row) for row in story.sheet.rows],
        "claims": [
            {**asdict(c), "claim": c.claim.text, "paper": c.claim.percent, "paper_tables": c.claim.tabled}
            for c in story.claims
        ],
        "figures": [figure.name for figure in story.figures if figure.panels],
        "notes": list(story.sheet.subject.notes),
        "left_out": list(story.missing),
        "to_evaluate": to_evaluate(story.sheet.rows),
    }


def _row(of: Sheet, row: Row) -> dict[str, Any]:
    spent = cost(row)
    cells = {attack: found for attack in of.attacks if (found := cell(row, attack))}
    versus = {a: asdict(pair) for a in of.attacks if (pair := of.versus.get(a, {}).get(row.name))}
    return {
        "name": row.name,
        "method": row.method,
        "model": row.model,
        "seeds": [run.seed for run in row.done],
        "accuracy": {attack: asdict(found) for attack, found in cells.items()},
        "cost": asdict(spent) if spent else None,
        "versus": versus,
        "held_out": next((one.as_json() for one in held_out([row])), None),
        "flags": sorted({flag.name for _, flag in flags_of(row)}),
        "unchecked": unchecked(row),
        "given": list(row.differs),
        "alarms": alarms(row),
        "troubles": troubles(row),
        "remarks": remarks(row),
    }
