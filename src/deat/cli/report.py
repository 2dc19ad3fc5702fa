"""`deat report`: from run folders and bench folders to tables, figures and one page."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from rich.table import Table
from tyro.conf import Positional, arg

from deat.cli.bench import PIPED_TABLE_COLUMNS
from deat.cli.flag_types import IntFlag, OptionalInt, OptionalStr
from deat.data import as_source
from deat.errors import CheckpointError, DeatError, UsageError
from deat.evaluation.attack_verifier import derive_block_seed
from deat.evaluation.attacks import call_attack, parse_attack
from deat.evaluation.block_evaluation import load_images_at
from deat.evaluation.evaluator import evaluate
from deat.radius_checks import max_image_distance
from deat.report.check_paper_claims import check_claims
from deat.report.detail_tables import (
    describe_evaluations,
    render_balls_markdown,
    render_evaluations_markdown,
    render_metrics_markdown,
)
from deat.report.draw_figures import draw_figure, draw_gallery, has_matplotlib
from deat.report.figure_data import (
    Figure,
    PlotLine,
    build_figures,
    build_radius_panel,
    figure_to_csv_rows,
    split_panels,
)
from deat.report.gallery import (
    WAVE_SAMPLES,
    Gallery,
    Tile,
    gallery_to_csv_rows,
    image_to_uint8,
    is_drawable,
    mask_to_uint8,
    name_tiles,
    select_candidates,
    select_tiles,
    wave_to_uint8,
)
from deat.report.html import render_page
from deat.report.latex import render_latex_table
from deat.report.page_data import Report
from deat.report.problems import (
    UNEVALUATED,
    collect_flags,
    collect_remarks,
    exclude_flagged_rows,
    list_run_problems,
    list_unchecked_seeds,
    list_watch_alarms,
)
from deat.report.report_data import ReportData, format_title, load_report_data
from deat.report.results_table import (
    ResultsTable,
    build_results_table,
    format_csv,
    render_claims_table,
    render_csv_table,
    render_markdown_table,
    render_scores_tables,
)
from deat.report.row_statistics import get_mean_accuracy, summarize_accuracy, summarize_cost
from deat.report.run_results import ReportRow, RunResults
from deat.report.validation_results import (
    EVALUATE_COMMANDS_INTRO,
    HELD_OUT_TITLE,
    collect_held_out_results,
    format_held_out_cells,
    get_held_out_header,
    list_evaluate_commands,
    render_held_out_markdown,
)
from deat.runs.record_files import WEIGHTS_FILE, EpochChoice, read_record
from deat.runs.run_dir import WEIGHT_FOLDERS, is_report_folder, list_report_files
from deat.runs.trained_run import get_test_split, load_run_model, load_trained_run
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel, format_threat
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.console import PlainConsole, is_stdout_terminal
from deat.utils.fingerprints import fingerprint_model
from deat.utils.garbage_collection import collect_new_garbage_only
from deat.utils.safe_write import check_no_symlinks, write_atomic
from deat.utils.text import escape_markdown, make_printable
from deat.utils.torch_contexts import device_of, eval_mode
from deat.utils.user_code import SPEC_HINT, is_file_spec
from deat.utils.user_paths import expand_path

SWEEP_EPS_FACTORS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
"""The radii of a sweep, in units of the run's own eps, as far as images are apart."""
REPORT_ATTACK = "pgd-20"
GALLERY_POOL_IMAGES = 500
"""How many test images a gallery is chosen from."""


@dataclass(frozen=True)
class LoadOptions:
    """The device, the folder of data sets, and the files of networks that the user allows to run."""

    device: str = "auto"
    data_root: str | None = None
    models: tuple[str, ...] = ()


LoadedRun = tuple[torch.nn.Module, Any, ThreatModel]


def load_evaluated_run(run: RunResults, options: LoadOptions) -> LoadedRun:
    """The network that a run's evaluation is of, whatever its epoch, its test images and its threat model."""
    files = _weight_files(run)
    epoch: EpochChoice = next((which for which in WEIGHT_FOLDERS if files and files[0].parent.name == which), "best")
    model = _match_user_model(read_record(run.path).model, options.models)
    resolved = load_trained_run(
        run.path, epoch=epoch, model=model, device=options.device, data_root=options.data_root
    ).run
    for file in files:
        net = load_run_model(resolved, file).eval()
        if _is_evaluated_model(run, net):
            return net, get_test_split(resolved), resolved.threat
    raise CheckpointError(f"{str(run.path)!r} has other weights than those that were evaluated: evaluate it again.")


def _match_user_model(recorded: str, models: Sequence[str]) -> str | None:
    """Which of the models that the user named a run's own is, by its path or else by file and object alone."""
    same = [spec for spec in models if Path(spec).name == Path(recorded).name]
    return recorded if recorded in models else same[0] if len(same) == 1 else None


def make_sweep_figure(rows: Sequence[ReportRow], num_images: int, options: LoadOptions) -> Figure:
    """PGD-20 accuracy by radius, on the first test images, of each row's first finished run."""
    lines, lacking, counts = [], [], set()
    for row in rows:
        for run in row.finished_runs[:1]:
            try:
                loaded = load_evaluated_run(run, options)
                lines.append(_make_sweep_line(row.name, run.seed, loaded, num_images))
                counts.add(min(num_images, len(loaded[1])))  # a set may have fewer images than requested
            except (DeatError, OSError) as error:
                lacking.append(anonymize_paths(f"{row.name}: {error}"))
    name = "Accuracy by radius"
    if not lines:
        return Figure("sweep", name, missing="; ".join(lacking) or "an evaluated run")
    about = f"{REPORT_ATTACK.upper()} on {' or '.join(f'{n:,}' for n in sorted(counts))} test examples, {_describe_seeds(lines)}"
    return Figure("sweep", name, [build_radius_panel(about, lines)], "; ".join(lacking))


def _describe_seeds(lines: Sequence[PlotLine]) -> str:
    """Which one seed of each row a sweep is of: that of most rows, and who has another."""
    held: dict[int | None, list[str]] = {}
    for line in lines:
        held.setdefault(line.seed, []).append(line.row)
    (usual, _), *others = sorted(held.items(), key=lambda item: -len(item[1]))
    exceptions = [f"but seed {seed} of {', '.join(names)}" for seed, names in others]
    return ", ".join([f"seed {usual} alone", *exceptions])


def make_gallery(row: ReportRow, count: int, options: LoadOptions) -> Gallery:
    """A few test images, some fooled and some not if there are such, attacked through a row's first finished run."""
    try:
        model, part, threat = load_evaluated_run(row.finished_runs[0], options)
    except (DeatError, OSError) as error:
        return Gallery(missing=anonymize_paths(str(error)))
    task = getattr(part, "task", CLASSIFICATION)
    if not is_drawable(tuple(part.shape)):
        return Gallery(missing="images or waveforms, which can be drawn; this row has examples of another shape")
    numbers, x, y = _select_images(row.finished_runs[0], model, part, count, threat)
    how = replace(parse_attack(REPORT_ATTACK), freeze=False)  # else fooled images show their random start
    generator = torch.Generator(x.device).manual_seed(derive_block_seed(0, how.name, 0))
    adv = call_attack(how, model, x, y, threat, generator, task)
    tiles = _make_tiles(numbers, x, adv, y, model, task, part.classes, threat)
    part_note = f", the middle {WAVE_SAMPLES} samples" if len(part.shape) == 2 and part.shape[-1] > WAVE_SAMPLES else ""
    attack = f"{how.name.upper()} with all steps on every example, {format_threat(threat)}{part_note}"
    return Gallery(row.name, attack, select_tiles(tiles, count))


def has_weights(run: RunResults) -> bool:
    """Whether a run's folder has weights."""
    return bool(_weight_files(run))


def _weight_files(run: RunResults) -> list[Path]:
    files = [run.path / which / WEIGHTS_FILE for which in WEIGHT_FOLDERS]
    return [file for file in files if file.is_file()]


def _is_evaluated_model(run: RunResults, model: torch.nn.Module) -> bool:
    """Whether a run's results are of these weights; True if the evaluation does not record its weights."""
    evaluated_model = run.evaluation.settings.get("model") if run.evaluation else None
    return evaluated_model is None or evaluated_model == fingerprint_model(model)


def _make_sweep_line(name: str, seed: int, loaded: LoadedRun, num_images: int) -> PlotLine:
    model, part, threat = loaded
    if len(threat.balls) > 1:
        raise UsageError(f"it was trained against a {format_threat(threat)}, which has no single radius to change")
    shares: list[float | None] = []
    radii = [
        factor * threat.eps
        for factor in SWEEP_EPS_FACTORS
        if factor * threat.eps < max_image_distance(threat, part.shape)
    ]
    for eps in radii:
        how, radius = (REPORT_ATTACK, replace(threat, eps=eps)) if eps else ("natural", threat)
        evaluation = evaluate(model, part, threat=radius, attacks=[how], n=num_images, sanity=False, progress=False)
        shares.append(evaluation.accuracy[how])
    return PlotLine(name, seed, radii, shares)


def _select_images(
    run: RunResults, model: torch.nn.Module, part: Any, count: int, threat: ThreatModel
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """The numbers of the test images to attack, the images and their labels."""
    evaluation = run.evaluation
    if evaluation is not None and "natural" in evaluation.verdicts:
        verdicts = evaluation.verdicts.get(REPORT_ATTACK, evaluation.verdicts["worst"])
        numbers = select_candidates(
            evaluation.verdicts["natural"][:GALLERY_POOL_IMAGES], verdicts[:GALLERY_POOL_IMAGES], count
        )
        x, y = _load_images(model, part, numbers, threat)
        known = [evaluation.labels[n] for n in numbers] if evaluation.labels else None
        if known is None or y.tolist() == known:  # else these are not the images of the evaluation
            return numbers[: len(y)], x, y
    x, y = _load_images(model, part, range(3 * count), threat)
    return list(range(len(y))), x, y


def _load_images(
    model: torch.nn.Module, part: Any, numbers: Sequence[int], threat: ThreatModel
) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of these rising numbers, as many of them as there are."""
    device = device_of(model)
    index = torch.tensor([number for number in numbers if number < len(part)])
    task = getattr(part, "task", None)
    source = as_source(part, batch_size=len(index), device=device, shuffle=False, task=task, box=threat.box)
    return load_images_at(source, index, device)


def _make_tiles(
    numbers: Sequence[int],
    x: torch.Tensor,
    adv: torch.Tensor,
    y: torch.Tensor,
    model: torch.nn.Module,
    task: Task,
    classes: Sequence[str],
    threat: ThreatModel,
) -> list[Tile]:
    """One tile for each example, with what the task says of the answers."""
    with torch.no_grad(), eval_mode(model):
        outputs = [model(examples) for examples in (x, adv)]
    labels = task.describe_labels(y, classes)
    before, after = (task.describe_answers(answers, y, classes) for answers in outputs)
    right = [task.is_right(answers, y).tolist() for answers in outputs]
    masks = [task.masks(answers) for answers in outputs]
    tiles = []
    for n, number in enumerate(numbers):
        pictures = _draw_example(x[n].cpu(), adv[n].cpu(), threat)
        if masks[0] is not None and masks[1] is not None:
            pictures += tuple(mask_to_uint8(mask.cpu()) for mask in (y[n], masks[0][n], masks[1][n]))
        tiles.append(Tile(number, labels[n], before[n], after[n], pictures, (right[0][n], right[1][n])))
    return tiles


def _draw_example(example: torch.Tensor, attacked: torch.Tensor, threat: ThreatModel) -> tuple[Any, ...]:
    """An example, its perturbation at full contrast, and the attacked example, as pictures."""
    delta = attacked - example
    largest = max(float(delta.abs().max()), 1e-9)
    both = torch.stack((example, attacked))
    low, high = threat.box or (float(both.min()), max(float(both.max()), float(both.min()) + 1e-9))
    if example.dim() == 2:
        waves = ((example, low, high), (delta, -largest, largest), (attacked, low, high))
        return tuple(wave_to_uint8(wave, least, most) for wave, least, most in waves)
    scaled = [(image - low) / (high - low) for image in both]
    return tuple(map(image_to_uint8, (scaled[0], 0.5 + delta / (2 * largest), scaled[1])))


@dataclass(frozen=True)
class ReportCommand:
    """Compare runs: tables (Markdown, LaTeX, CSV), figures, and one page to look at without a network."""

    is_resumable: ClassVar[bool] = False

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")]
    """Run and bench folders; runs that differ in their seed alone make one row, pieces of one bench one table."""
    out: OptionalStr = None
    """The report's folder (report/ in the only folder named, or beside the first of several)."""
    title: OptionalStr = None
    """The report's title (its recipe in the paper, or its methods and data)."""
    against: OptionalStr = None
    """The row that others are tested against, image by image (m+deat, or else the most robust)."""
    sweep: OptionalInt = None
    """Also attack the first so many test images at radii from 0 to 3 eps, and draw the curves."""
    gallery: IntFlag = 6
    """Adversarial examples to show, against the most robust row that kept its weights; 0 for none."""
    no_figures: bool = False
    """Leave out the figures as files, which need matplotlib; the page and the tables do not."""
    model: OptionalStr = None
    """Your own networks among the runs, whose code --sweep and --gallery then run: net.py:Net, several by commas."""
    device: str = "auto"
    """Where networks run for --sweep and --gallery: cpu, cuda, ..."""
    data_root: OptionalStr = None
    """The folder of data sets ($DEAT_DATA, or ~/.cache/deat)."""
    json: bool = False
    """Print the numbers as one JSON document."""

    def run(self) -> int:
        """Report."""
        return run_report(self)


def run_report(args: ReportCommand) -> int:
    """Write the report and print a summary."""
    story, out = write_report(args)
    _print_report(story, out, args)
    return 0


def write_report(args: ReportCommand) -> tuple[Report, Path]:
    """Read, compare, draw and write everything down.

    Args:
        args: The command's flags.

    Returns:
        The report and its folder.

    Raises:
        UsageError: A flag has no valid value.
        DataError: A folder is no run or bench, or is damaged.
        CheckpointError: The report cannot be written.
    """
    _check_arguments(args)
    subject = load_report_data(args.runs)
    out = _choose_folder(args)
    story = build_report(subject, args)
    try:
        _write_files(story, out, args)
    except OSError as error:
        raise CheckpointError(f"cannot write to {str(out)!r}: {error.strerror}. Choose another --out.") from None
    return story, out


def build_report(subject: ReportData, args: ReportCommand) -> Report:
    """Everything that the report says."""
    of = build_results_table(subject, args.against)
    drawn = build_figures(subject.rows, of.ranking_attack)
    if args.sweep:
        drawn.append(make_sweep_figure(subject.rows, args.sweep, _load_options(args)))
    shown = _make_best_row_gallery(of, args)
    missing = [f"{figure.title}: {figure.missing}" for figure in drawn if figure.missing]
    if args.gallery and shown.missing:
        missing.append(f"Adversarial examples: {shown.missing}")
    if not args.no_figures and not has_matplotlib():
        missing.append("Figures as files: matplotlib (pip install matplotlib)")
    title, today = args.title or format_title(subject), date.today().isoformat()
    return Report(title, today, of, drawn, check_claims(subject.rows), shown, missing)


def _check_arguments(args: ReportCommand) -> None:
    if args.sweep is not None and args.sweep < 1:
        raise UsageError(f"sweep must be a number of test images >= 1, not {args.sweep}.")
    if args.gallery < 0:
        raise UsageError(f"gallery must be a number of images >= 0, not {args.gallery}.")
    for spec in _load_options(args).models:
        if not is_file_spec(spec):
            raise UsageError(f"--model {spec!r} is no network of your own, which alone needs naming: {SPEC_HINT}.")


def _load_options(args: ReportCommand) -> LoadOptions:
    named = (args.model or "").split(",")
    return LoadOptions(args.device, args.data_root, tuple(spec.strip() for spec in named if spec.strip()))


def _choose_folder(args: ReportCommand) -> Path:
    """The report's folder: --out, or report/ in the only folder named, or beside several."""
    first = expand_path(args.runs[0])
    beside = (first if len(set(map(Path, args.runs))) == 1 else first.parent) / "report"
    out = expand_path(args.out) if args.out else beside
    check_no_symlinks([*([] if args.out else [out]), out / "figures"])
    check_no_symlinks(list_report_files(out))
    if out.is_file() or (out.is_dir() and not is_report_folder(out)):
        raise UsageError(f"{str(out)!r} holds other things than a report; name another folder with --out.")
    return out


def _make_best_row_gallery(results_sheet: ResultsTable, args: ReportCommand) -> Gallery:
    """Examples against the most robust row that kept its weights, of those that may be believed if there are any."""
    able = [row for row in results_sheet.rows if row.finished_runs and has_weights(row.finished_runs[0])]
    if not args.gallery or not able or not results_sheet.ranking_attack:
        return Gallery(missing="an evaluated run with its weights")
    best = max(exclude_flagged_rows(able), key=lambda row: get_mean_accuracy(row, results_sheet.ranking_attack or ""))
    return make_gallery(best, args.gallery, _load_options(args))


def _write_files(story: Report, out: Path, args: ReportCommand) -> None:
    of, folder = story.results, out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "index.html": render_page(story),
        "table.md": _format_markdown(story),
        "table.tex": render_latex_table(of),
        "table.csv": render_csv_table(of),
        **{f"figures/{name}.csv": format_csv(rows) for name, rows in _figure_tables(story)},
    }
    for file in list_report_files(out):
        if file.relative_to(out).as_posix() not in texts:  # of an earlier report, which had other figures
            file.unlink()
    for name, text in texts.items():
        write_atomic(out / name, text.encode())
    if not args.no_figures and has_matplotlib():
        _draw_figures(story, folder)


def _format_markdown(story: Report) -> str:
    of = story.results
    place = f"In the paper: {escape_markdown('; '.join(of.data.paper_tables))}.\n\n" if of.data.paper_tables else ""
    results = render_markdown_table(of) if any(row.finished_runs for row in of.rows) else _format_unevaluated(of)
    balls, metrics = render_balls_markdown(of.rows), render_metrics_markdown(of.rows)
    evaluations = f"{balls}{metrics}{render_evaluations_markdown(of.rows)}"
    tables = f"{results}{evaluations}{render_held_out_markdown(of.rows)}{render_scores_tables(of.rows)}"
    table = f"# {escape_markdown(story.heading)}\n\n{place}{tables}"
    return f"{table}\n## The paper's claims\n\n{render_claims_table(story.claims)}" if story.claims else table


def _format_unevaluated(results_sheet: ResultsTable) -> str:
    """Return the text in place of a table without numbers."""
    problems = [f"{row.name}, {text}" for row in results_sheet.rows for text in list_run_problems(row, UNEVALUATED)]
    return "\n".join(
        f"{escape_markdown(text)}\n" for text in ("No run is evaluated yet.", *problems, *results_sheet.data.notes)
    )


def _draw_figures(story: Report, folder: Path) -> None:
    order = [row.name for row in story.results.rows]
    with collect_new_garbage_only():  # each picture leaves much garbage
        for figure in story.figures:
            if figure.panels:
                draw_figure(figure, order, folder)
        if story.gallery.tiles:
            draw_gallery(story.gallery, folder)


def _figure_tables(story: Report) -> Iterator[tuple[str, Sequence[Sequence[Any]]]]:
    for figure in story.figures:
        if figure.panels:
            yield from ((part.name, figure_to_csv_rows(part)) for part in (figure, *split_panels(figure)))
    if story.gallery.tiles:
        yield "gallery", gallery_to_csv_rows(story.gallery)
        for name, tile in name_tiles(story.gallery):
            yield name, gallery_to_csv_rows(replace(story.gallery, tiles=(tile,)))


def _print_report(story: Report, out: Path, args: ReportCommand) -> None:
    if args.json:
        print(json.dumps({"out": str(out), **report_to_json(story)}, allow_nan=False))
        return
    for text in story.missing:
        print(make_printable(f"left out: {text}"))
    for row in story.results.rows:
        for text in list_run_problems(row, UNEVALUATED):
            print(make_printable(f"incomplete: {row.name}, {text}"))
        for text in list_watch_alarms(row):
            print(make_printable(f"watch: {row.name}, {text}"))
    _print_held_out(story.results.rows)
    page_file = (out / "index.html").resolve() if is_stdout_terminal() else out / "index.html"
    print(f"the report is {page_file}; tables and figures are beside it")


def _print_held_out(rows: Sequence[ReportRow]) -> None:
    """What is known of runs that have no test figures, and what gives them some."""
    console = PlainConsole(soft_wrap=True, width=None if is_stdout_terminal() else PIPED_TABLE_COLUMNS)
    if held_out := collect_held_out_results(rows):
        shown = Table(title=f"{HELD_OUT_TITLE.lower()}, in percent", title_justify="left", box=None, pad_edge=False)
        for n, head in enumerate(get_held_out_header(held_out)):
            shown.add_column(make_printable(head), justify="right" if n else "left")
        for one in held_out:
            shown.add_row(*map(make_printable, (one.row, *format_held_out_cells(one, held_out))))
        console.print(shown)
    if commands := list_evaluate_commands(rows):
        console.print("\n".join([EVALUATE_COMMANDS_INTRO, *(f"  {make_printable(text)}" for text in commands)]))


def report_to_json(story: Report) -> dict[str, Any]:
    """The report's numbers as one document."""
    return {
        "headline": story.results.ranking_attack,
        "against": story.results.baseline and story.results.baseline.name,
        "rows": [_row_to_json(story.results, row) for row in story.results.rows],
        "claims": [checked.as_json() for checked in story.claims],
        "figures": [figure.name for figure in story.figures if figure.panels],
        "notes": list(story.results.data.notes),
        "left_out": list(story.missing),
        "to_evaluate": list_evaluate_commands(story.results.rows),
    }


def _row_to_json(results_sheet: ResultsTable, row: ReportRow) -> dict[str, Any]:
    spent = summarize_cost(row)
    cells = {attack: cell for attack in results_sheet.attacks if (cell := summarize_accuracy(row, attack))}
    versus = {
        a: pair.as_json() for a in results_sheet.attacks if (pair := results_sheet.comparisons.get(a, {}).get(row.name))
    }
    return {
        "name": row.name,
        "method": row.method,
        "model": row.model,
        "seeds": [run.seed for run in row.finished_runs],
        "accuracy": {attack: cell.as_json() for attack, cell in cells.items()},
        "cost": spent.as_json() if spent else None,
        "versus": versus,
        "held_out": next((one.as_json() for one in collect_held_out_results([row])), None),
        "evaluations": {str(run.seed): describe_evaluations(run) for run in row.runs},
        "scores": {str(run.seed): [asdict(score) for score in run.scores] for run in row.runs if run.scores},
        "flags": sorted({flag.name for _, flag in collect_flags(row)}),
        "unchecked": list_unchecked_seeds(row),
        "given": list(row.deviations),
        "alarms": list_watch_alarms(row),
        "troubles": list_run_problems(row),
        "remarks": collect_remarks(row),
    }
