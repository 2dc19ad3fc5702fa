"""`deat report`: from run folders and bench folders to tables, figures and one page."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.table import Table
from tyro.conf import Positional, arg

from deat.cli.bench import WIDTH
from deat.cli.console import Screen, is_terminal
from deat.cli.evaluate import Epoch, EvaluateCommand, find_run
from deat.cli.flags import MaybeText, MaybeWhole, Whole
from deat.data import as_source
from deat.errors import CheckpointError, DeatError, UsageError
from deat.evaluation.attacks import attack
from deat.evaluation.blocks import images_at
from deat.evaluation.evaluator import evaluate
from deat.evaluation.judge import block_seed
from deat.evaluation.resume_log import fingerprint_model
from deat.report.figures import Figure, Line, Panel, figures, table_of
from deat.report.gallery import Gallery, Tile, candidates, choose, pixels
from deat.report.gallery import table_of as gallery_table
from deat.report.grouping import UNEVALUATED, Subject, believed, flags_of, gather, troubles, unchecked
from deat.report.held_out import held_out, to_evaluate
from deat.report.html import FILLS, HEADING, Story, cells, heads, held_out_markdown, page
from deat.report.latex import latex_table
from deat.report.load import OneRun, ReportRow
from deat.report.paper_claims import check_claims
from deat.report.plots import check_matplotlib, draw, draw_gallery
from deat.report.stats import cell, cost, mean_under
from deat.report.tables import (
    Sheet,
    alarms,
    claims_table,
    csv_table,
    csv_text,
    markdown_table,
    remarks,
    scores_tables,
    sheet,
)
from deat.runs.run_dir import REPORT_FILES, WEIGHTS, is_report, load_model, test_part
from deat.runs.schema import read_record
from deat.threat import ThreatModel, widest_of
from deat.utils.files import refuse_links, write_whole
from deat.utils.numbers import level
from deat.utils.paths import tidy
from deat.utils.text import markdown, plain
from deat.utils.torch_utils import device_of, evaluating
from deat.utils.user_code import FORM, is_file_spec

SWEEP = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
"""The radii of a sweep, in units of the run's own eps, as far as images are apart."""
ATTACK = "pgd-20"
LOOKED = 500
"""How many test images a gallery is chosen from."""


@dataclass(frozen=True)
class Lab:
    """Where networks run and data lies, and the networks of their own, named by the user, whose code may run."""

    device: str = "auto"
    data_root: str | None = None
    models: tuple[str, ...] = ()


Loaded = tuple[torch.nn.Module, Any, ThreatModel]
Shown = tuple[torch.Tensor, list[str]]
"""Images, and what a network takes them for."""


def load(run: OneRun, lab: Lab) -> Loaded:
    """The network that a run's evaluation judged, be it its best or its last, its test images and its threat model."""
    files = _kept(run)
    epoch: Epoch = "last" if files and files[0].parent.name == "last" else "best"
    record = read_record(run.path)
    named = _named(record.model, lab.models)
    order = EvaluateCommand(str(run.path), model=named, epoch=epoch, device=lab.device, data_root=lab.data_root)
    found, _ = find_run(order, record)
    for file in files:
        model = load_model(found, file).eval()
        if _is_judged(run, model):
            return model, test_part(found), found.threat
    raise CheckpointError(f"{str(run.path)!r} has other weights than its evaluation judged: evaluate it again.")


def _named(recorded: str, models: Sequence[str]) -> str | None:
    """Which of the models that the user named a run's own is, by its path or else by file and object alone."""
    same = [spec for spec in models if Path(spec).name == Path(recorded).name]
    return recorded if recorded in models else same[0] if len(same) == 1 else None


def sweep(rows: Sequence[ReportRow], images: int, lab: Lab) -> Figure:
    """PGD-20 accuracy by radius, on the first test images, of each row's first finished run."""
    lines, lacking, counts = [], [], set()
    for row in rows:
        for run in row.done[:1]:
            try:
                loaded = load(run, lab)
                lines.append(_swept(row.name, run.seed, loaded, images))
                counts.add(min(images, len(loaded[1])))  # a set may have fewer than are asked for
            except (DeatError, OSError) as error:
                lacking.append(tidy(f"{row.name}: {error}"))
    name = "Accuracy by radius"
    if not lines:
        return Figure("sweep", name, missing="; ".join(lacking) or "an evaluated run")
    about = f"{ATTACK.upper()} on {' or '.join(f'{n:,}' for n in sorted(counts))} test images, {_seeds(lines)}"
    panel = Panel(about, "eps", "accuracy", lines, percent=True)
    return Figure("sweep", name, [panel], "; ".join(lacking))


def _seeds(lines: Sequence[Line]) -> str:
    """Which one seed of each row a sweep is of: that of most rows, and who has another."""
    held: dict[int | None, list[str]] = {}
    for line in lines:
        held.setdefault(line.seed, []).append(line.row)
    (usual, _), *others = sorted(held.items(), key=lambda item: -len(item[1]))
    told = [f"but seed {seed} of {', '.join(names)}" for seed, names in others]
    return ", ".join([f"seed {usual} alone", *told])


def gallery(row: ReportRow, count: int, lab: Lab) -> Gallery:
    """A few test images, some fooled and some not if there are such, attacked through a row's first finished run."""
    try:
        model, part, threat = load(row.done[0], lab)
    except (DeatError, OSError) as error:
        return Gallery(missing=tidy(str(error)))
    numbers, x, y = _worth_showing(row.done[0], model, part, count)
    how = attack(ATTACK)
    generator = torch.Generator(x.device).manual_seed(block_seed(0, how.name, 0))
    adv = how(model, x, y, threat, generator)
    labels = [str(part.classes[i]) for i in y.tolist()]
    tiles = _tiles(
        numbers, labels, (x.cpu(), _seen(model, x, part.classes)), (adv.cpu(), _seen(model, adv, part.classes))
    )
    return Gallery(row.name, f"{how.name.upper()}, {threat.name} eps {level(threat.eps)}", choose(list(tiles), count))


def has_weights(run: OneRun) -> bool:
    """Whether a run has weights beside its record."""
    return bool(_kept(run))


def _kept(run: OneRun) -> list[Path]:
    files = [run.path / epoch / WEIGHTS for epoch in ("best", "last")]
    return [file for file in files if file.is_file()]


def _is_judged(run: OneRun, model: torch.nn.Module) -> bool:
    """Whether these are the weights behind a run's numbers; an evaluation that does not tell is believed."""
    judged = run.evaluation.settings.get("model") if run.evaluation else None
    return judged is None or judged == fingerprint_model(model)


def _swept(name: str, seed: int, loaded: Loaded, images: int) -> Line:
    model, part, threat = loaded
    shares: list[float | None] = []
    radii = [factor * threat.eps for factor in SWEEP if factor * threat.eps < widest_of(threat, part.shape)]
    for eps in radii:
        how, radius = (ATTACK, replace(threat, eps=eps)) if eps else ("natural", threat)
        found = evaluate(model, part, threat=radius, attacks=[how], n=images, sanity=False, progress=False)
        shares.append(found.accuracy[how])
    return Line(name, seed, radii, shares)


def _worth_showing(
    run: OneRun, model: torch.nn.Module, part: Any, count: int
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """The numbers of the test images to attack, the images and their labels."""
    judged = run.evaluation
    if judged is not None and "natural" in judged.verdicts:
        found = judged.verdicts.get(ATTACK, judged.verdicts["worst"])
        numbers = candidates(judged.verdicts["natural"][:LOOKED], found[:LOOKED], count)
        x, y = _pick(model, part, numbers)
        if y.tolist() == [judged.labels[n] for n in numbers]:  # else it was judged on other images than these
            return numbers, x, y
    x, y = _pick(model, part, range(3 * count))
    return list(range(len(y))), x, y


def _pick(model: torch.nn.Module, part: Any, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of these rising numbers, as many of them as there are."""
    device = device_of(model)
    index = torch.tensor([number for number in numbers if number < len(part)])
    return images_at(as_source(part, batch_size=len(index), device=device, shuffle=False), index, device)


def _seen(model: torch.nn.Module, x: torch.Tensor, classes: Sequence[str]) -> list[str]:
    with torch.no_grad(), evaluating(model):
        return [str(classes[i]) for i in model(x).argmax(1).tolist()]


def _tiles(numbers: Sequence[int], labels: Sequence[str], natural: Shown, attacked: Shown) -> Iterator[Tile]:
    (images, before), (adv, after) = natural, attacked
    for n, (number, label) in enumerate(zip(numbers, labels, strict=True)):
        delta = adv[n] - images[n]
        shown = 0.5 + delta / (2 * max(float(delta.abs().max()), 1e-9))
        yield Tile(number, label, before[n], after[n], (pixels(images[n]), pixels(shown), pixels(adv[n])))


@dataclass(frozen=True)
class ReportCommand:
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


def run_report(wish: ReportCommand) -> int:
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


def tell(subject: Subject, wish: ReportCommand) -> Story:
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


def _check(wish: ReportCommand) -> None:
    if wish.sweep is not None and wish.sweep < 1:
        raise UsageError(f"sweep must be a number of test images >= 1, not {wish.sweep}.")
    if wish.gallery < 0:
        raise UsageError(f"gallery must be a number of images >= 0, not {wish.gallery}.")
    for spec in _lab(wish).models:
        if not is_file_spec(spec):
            raise UsageError(f"--model {spec!r} is no network of your own, which alone needs naming: {FORM}.")
    if not wish.no_figures:
        check_matplotlib()


def _lab(wish: ReportCommand) -> Lab:
    named = (wish.model or "").split(",")
    return Lab(wish.device, wish.data_root, tuple(spec.strip() for spec in named if spec.strip()))


def _place(wish: ReportCommand) -> Path:
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


def _gallery(of: Sheet, wish: ReportCommand) -> Gallery:
    """Examples against the most robust row that kept its weights, of those that may be believed if there are any."""
    able = [row for row in of.rows if row.done and has_weights(row.done[0])]
    if not wish.gallery or not able or not of.headline:
        return Gallery(missing="an evaluated run with its weights")
    best = max(believed(able), key=lambda row: mean_under(row, of.headline or ""))
    return gallery(best, wish.gallery, _lab(wish))


def _write(story: Story, out: Path, wish: ReportCommand) -> None:
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


def _show(story: Story, out: Path, wish: ReportCommand) -> None:
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


def _show_held_out(rows: Sequence[ReportRow]) -> None:
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


def _row(of: Sheet, row: ReportRow) -> dict[str, Any]:
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
