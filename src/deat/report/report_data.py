"""What a report is about: run folders and bench folders, loaded as rows, with notes for the reader."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deat.data import list_datasets
from deat.errors import DataError, UsageError, unknown_name_error
from deat.recipes import get_recipe, list_recipes
from deat.recipes.overrides import METHOD_SPECIFIC_SETTINGS
from deat.recipes.paper_numbers import find_paper_table
from deat.report.problems import add_status, list_unchecked_seeds
from deat.report.row_grouping import (
    RESULT_NEUTRAL_SETTINGS,
    assign_unique_names,
    collect_code_versions,
    describe_test_data,
    find_attack_differences,
    group_runs,
    has_same_test_images,
    merge_bench_rows,
    read_evaluation_info,
)
from deat.report.row_statistics import describe_samples, describe_single_seeds, format_attack_name
from deat.report.run_results import BenchResults, ReportRow, RunResults, load_bench, load_run_results
from deat.runs.fit_checkpoint_folder import read_checkpoint_folder
from deat.runs.record_files import BENCH_FILE, RUN_FILE, WATCH_FILE
from deat.runs.run_dir import has_checkpoint
from deat.threat import format_threat
from deat.training.epoch_records import EpochWatch, read_watch
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.json_checksum import is_unchanged
from deat.utils.text import format_eps, make_printable, summarize_error
from deat.utils.user_code import is_file_spec
from deat.utils.user_paths import expand_path

OTHER_SETUP_MARK = "‡"
"""Marks a number of the paper next to a row with other settings."""


MAX_NAMED_METHODS = 3
"""A title with more methods counts them."""


@dataclass(frozen=True, eq=False)
class ReportData:
    """What a report is about.

    Attributes:
        rows: The rows, in order. Their names differ.
        recipes: The recipes of the benches among the folders.
        notes: Sentences about what limits a comparison of the rows.
        paper_tables: Where in the paper the recipes are, of those whose setup is the paper's.
    """

    rows: tuple[ReportRow, ...]
    recipes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    paper_tables: tuple[str, ...] = ()

    def get_row(self, name: str) -> ReportRow:
        """Return the row of this name, with or without the network's name at its end.

        Raises:
            UsageError: There is no such row.
        """
        for row in self.rows:
            if make_printable(name) in (row.name, f"{row.name} {make_printable(row.model)}"):
                return row
        raise unknown_name_error("row", name, [row.name for row in self.rows], "--against names a row of the table.")


def load_report_data(paths: Sequence[str]) -> ReportData:
    """Load run folders and bench folders as the rows of a report.

    Runs that differ in their seed alone form one row, also across benches. Runs of a bench's row that were not trained
    in the same way form several.

    Args:
        paths: Folders of `deat train` and `deat bench`. A folder that is named twice counts once.

    Returns:
        The rows, with notes for the reader.

    Raises:
        UsageError: No folder is named.
        DataError: A folder has neither run.json nor bench.json, or a file that deat did not write.
    """
    if not paths:
        raise UsageError("name at least one run folder or bench folder, such as runs/demo.")
    folders = [expand_path(text) for text in paths]
    folders = list({folder.resolve(): folder for folder in folders}.values())
    benches = [load_bench(folder) for folder in folders if (folder / BENCH_FILE).is_file()]
    single_runs = [_load_run_folder(folder) for folder in folders if not (folder / BENCH_FILE).is_file()]
    bench_rows = merge_bench_rows((bench, _annotate_bench_rows(bench)) for bench in benches)
    rows = tuple(assign_unique_names([*bench_rows, *group_runs(single_runs)]))
    paper_tables = dict.fromkeys(
        make_printable(bench.table) for bench in benches if bench.table and _is_paper_setup(bench)
    )
    return ReportData(rows, tuple(bench.recipe for bench in benches), tuple(_collect_notes(rows)), tuple(paper_tables))


def _is_paper_setup(bench: BenchResults) -> bool:
    """Whether a bench's recipe is in the paper, and its data are the recipe's or may be: a folder may hold them."""
    recipe_data = get_recipe(bench.recipe).data if bench.recipe in list_recipes() else None
    data = bench.settings.get("data", recipe_data)
    return not str(bench.table).startswith("none") and (data == recipe_data or data not in list_datasets())


def _load_run_folder(path: Path) -> RunResults:
    if (path / RUN_FILE).is_file():
        return _add_watch_and_status(load_run_results(path))
    if not has_checkpoint(path):
        raise DataError(
            f"{str(path)!r} holds neither {RUN_FILE} nor {BENCH_FILE}; give folders that deat train or bench wrote, or "
            "of fit(checkpoints=)."
        )
    return add_status(_load_checkpoint_results(path))


def _load_checkpoint_results(path: Path) -> RunResults:
    """The results of a training of `deat.fit`, whose folder has checkpoints in place of records."""
    stored = read_checkpoint_folder(path)
    return replace(
        load_run_results(path, stored.record["settings"]["seed"]),
        record=stored.record,
        history=stored.history,
        train_seconds=stored.seconds,
    )


def _add_watch_and_status(run: RunResults) -> RunResults:
    return add_status(replace(run, watch=_read_watch_records(run.path)))


def _read_watch_records(path: Path) -> tuple[EpochWatch, ...]:
    try:
        return tuple(read_watch(path / WATCH_FILE))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{str(path / WATCH_FILE)!r} is not what deat wrote ({summarize_error(error)}). Leave {path.name} out."
        ) from None


# ---- what differs from the recipe


def _annotate_bench_rows(bench: BenchResults) -> Iterator[ReportRow]:
    """A bench's rows with the status of their runs, their deviations from the recipe, and their budget."""
    budget = bench.settings.get("budget_bp")
    budget = budget if isinstance(budget, int) else None
    shared = [*_data_deviation(bench), *([f"a budget of {budget:,} backprops"] if budget else [])]
    for row in bench.rows:
        yield replace(
            row,
            runs=tuple(map(_add_watch_and_status, row.runs)),
            deviations=(*shared, *_model_deviation(bench, row), *_setting_deviations(bench, row)),
            budget=budget,
        )


def _data_deviation(bench: BenchResults) -> Iterator[str]:
    recipe_data = get_recipe(bench.recipe).data if bench.recipe in list_recipes() else None
    data = bench.settings.get("data", recipe_data)
    if data != recipe_data:
        hint = " (the paper's images only if the folder holds them)" if str(data).startswith("folder:") else ""
        yield make_printable(f"data {data}{hint}")


def _model_deviation(bench: BenchResults, row: ReportRow) -> Iterator[str]:
    """A network that is neither in the recipe nor in the paper's table."""
    recipe_models = get_recipe(bench.recipe).models if bench.recipe in list_recipes() else (row.model,)
    if row.model not in recipe_models and not find_paper_table(row.table, row.paper_row):
        yield make_printable(f"network {anonymize_paths(row.model)}")


def _setting_deviations(bench: BenchResults, row: ReportRow) -> Iterator[str]:
    overrides = bench.settings.get("set", {})
    for name, text in overrides.items() if isinstance(overrides, dict) else ():
        is_ignored = name in METHOD_SPECIFIC_SETTINGS and _lacks_setting(row, name)
        if name not in RESULT_NEUTRAL_SETTINGS and not is_ignored:
            yield make_printable(f"{name}={text}")


def _lacks_setting(row: ReportRow, name: str) -> bool:
    """Whether a setting did not apply to this row, whose method does not have it."""
    requests: list[dict[str, Any]] = [run.record["request"] for run in row.runs if run.record]
    return bool(requests) and all(request.get(name) is None for request in requests)


# ---- notes for the reader


def _collect_notes(rows: Sequence[ReportRow]) -> Iterator[str]:
    """What limits a comparison of the rows, one sentence each."""
    yield from _describe_deviations(rows)
    yield from _describe_repeated_seeds(rows)
    yield from _describe_differences(rows)
    yield from _describe_changed_records(rows)
    yield from _describe_code_versions(rows)
    yield from _describe_other_test_data(rows)
    yield from _describe_machines(rows)
    yield from describe_single_seeds(rows)
    yield from describe_samples(rows)
    yield from _describe_cascades(rows)
    yield from _describe_unchecked_seeds(rows)


def _describe_deviations(rows: Sequence[ReportRow]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[ReportRow]] = {}
    for row in rows:
        groups.setdefault(row.deviations, []).append(row)
    for deviations, group in groups.items():
        if deviations:
            names = "All rows" if len(groups) == 1 else ", ".join(row.name for row in group)
            is_in_paper = any(find_paper_table(row.table, row.paper_row) for row in group)
            mark = (
                f" {OTHER_SETUP_MARK} marks numbers of the paper, which are for its own setup." if is_in_paper else ""
            )
            yield f"{names}: with {', '.join(deviations)} instead of the recipe's settings.{mark}"


def _describe_repeated_seeds(rows: Sequence[ReportRow]) -> Iterator[str]:
    for row in rows:
        seeds = [run.seed for run in row.finished_runs]
        if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            yield f"{row.name} has several runs of seed {', '.join(map(str, repeated))}; each is counted as a seed."


def _describe_differences(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Differences in evaluation that make accuracies incomparable."""
    runs = [run for row in rows for run in row.finished_runs]
    for what, values in (
        ("data set", _collect_data_set_names(runs)),
        ("threat model", {_describe_threat(run) for run in runs}),
        ("number of test examples", {f"{run.evaluation.num_images:,}" for run in runs if run.evaluation}),
        ("evaluated epoch", {epoch for run in runs if (epoch := read_evaluation_info(run, "epoch"))}),
    ):
        if len(values) > 1:
            yield f"Rows differ in their {what} ({', '.join(sorted(values))}), so not all of them can be compared."
    for name, settings in find_attack_differences(runs).items():
        differing = "; ".join(
            f"{key} {', '.join(format_eps(value) if key == 'alpha' else str(value) for value in settings[key])}"
            for key in sorted(settings)
        )
        yield f"Rows differ in the settings of {format_attack_name(name)} ({differing}), so not all of them can be compared."


def _describe_changed_records(rows: Sequence[ReportRow]) -> Iterator[str]:
    runs = [f"{row.name} seed {run.seed}" for row in rows for run in row.runs if not is_unchanged(run.record or {})]
    if runs:
        yield f"run.json was changed after deat wrote it, so the settings may not be those of training: {', '.join(runs)}."


def _describe_code_versions(rows: Sequence[ReportRow]) -> Iterator[str]:
    for row in rows:
        if len(versions := collect_code_versions(row.runs)) > 1:
            yield f"{row.name} was trained with different versions of a code file ({', '.join(sorted(versions))})."


def _describe_other_test_data(rows: Sequence[ReportRow]) -> Iterator[str]:
    for row in rows:
        for run in row.finished_runs:
            evaluated = read_evaluation_info(run, "data")
            trained = run.record["request"].get("data") if run.record else None
            if evaluated and trained and evaluated != trained:
                yield f"{row.name} seed {run.seed} was trained on {trained} but evaluated on examples of {evaluated}."


def _describe_machines(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Differences in hardware, which minutes depend on."""
    records = [run.record for row in rows for run in row.finished_runs if run.record and "device" in run.record]
    machines = sorted({_describe_machine(record) for record in records})
    if len(machines) > 1:
        yield f"Rows had different hardware or threads ({'; '.join(machines)}): compare backprops, not minutes."


def _describe_cascades(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Evaluations whose attacks did not each run on all images."""
    runs = [f"{row.name} seed {run.seed}" for row in rows for run in row.finished_runs if _is_cascaded(run)]
    if runs:
        yield (
            "Evaluated as a cascade, where each attack runs only on examples that all attacks before it left correct: "
            f"{', '.join(runs)}."
        )


def _describe_unchecked_seeds(rows: Sequence[ReportRow]) -> Iterator[str]:
    for row in rows:
        if seeds := list_unchecked_seeds(row):
            runs = f"{row.name} seed {', '.join(map(str, seeds))}"
            yield f"Sanity not checked: {runs}. The absence of flags there means nothing."


def _collect_data_set_names(runs: Sequence[RunResults]) -> set[str]:
    """The names of the runs' data sets; with hashes if different data sets have one name."""
    names = {run.record["data"]["name"] for run in runs if run.record}
    is_same = all(has_same_test_images(run, runs[0]) for run in runs)
    return names if is_same or len(names) > 1 else {describe_test_data(run) for run in runs}


def _describe_threat(run: RunResults) -> str:
    return format_threat(run.evaluation.settings["threat"]) if run.evaluation else "not evaluated"


def _describe_machine(record: dict[str, Any]) -> str:
    threads, processes = record.get("threads") if record["device"] == "cpu" else None, record.get("processes") or 1
    threads_text = [f"{threads} thread{'' if threads == 1 else 's'}"] if threads else []
    processes_text = [f"{processes} processes"] if processes > 1 else []
    return ", ".join([str(record["device"]), *threads_text, *processes_text])


def _is_cascaded(run: RunResults) -> bool:
    evaluations = (run.evaluation, run.extra_evaluations.get("aa"))
    return any(evaluation and evaluation.settings["cascade"] for evaluation in evaluations)


def format_title(data: ReportData) -> str:
    """Return a report's title: the recipes if their rows are the paper's, else its methods and data sets.

    Args:
        data: What the report is about.
    """
    if data.recipes and data.paper_tables:
        return ", ".join(dict.fromkeys(make_printable(recipe) for recipe in data.recipes))
    names = dict.fromkeys(row.runs[0].record["data"]["name"] for row in data.rows if row.runs and row.runs[0].record)
    methods = list(dict.fromkeys(_name_method(row) for row in data.rows))
    listed = " and ".join(filter(None, (", ".join(methods[:-1]), *methods[-1:])))
    what = listed if len(methods) <= MAX_NAMED_METHODS else f"{len(methods)} methods"
    return make_printable(f"{what} on {' and '.join(names)}" if names else what)


def _name_method(row: ReportRow) -> str:
    """The method's name; for one from a file that no run recorded, the row's, which has no path."""
    recorded = next((run.record["method"]["name"] for run in row.runs if run.record), None)
    return str(recorded or (row.name if is_file_spec(row.method) else row.method))


def describe_common_setup(rows: Sequence[ReportRow]) -> list[str]:
    """Describe what all rows have in common of the data set, the network, and the threat model.

    Args:
        rows: The rows of a report.

    Returns:
        A text for each of them that all rows share.
    """
    records = [run.record for row in rows for run in row.runs if run.record]
    facts = [
        {str(record["data"]["name"]) for record in records},
        {str(record["model"]["name"]) for record in records},
        {format_threat(record["threat"]) for record in records},
    ]
    return [values.pop() for values in facts if len(values) == 1]
