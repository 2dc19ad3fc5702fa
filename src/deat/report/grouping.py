"""What a report is about: run folders and bench folders, read into rows whose names differ."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deat.errors import DataError, UsageError, unknown_name_error
from deat.evaluation.sanity import Flag
from deat.recipes import get_recipe, list_recipes
from deat.recipes.overrides import METHOD_SPECIFIC_SETTINGS
from deat.recipes.paper_tables import find_paper_table
from deat.report.load import BenchResults, ReportRow, RunResults, load_bench, load_run_results
from deat.report.stats import describe_samples, describe_single_seeds
from deat.runs.run_dir import has_checkpoint
from deat.runs.schema import BENCH_FILE, RUN_FILE, WATCH_FILE
from deat.training.records import EpochWatch, read_watch
from deat.utils.paths import anonymize_paths
from deat.utils.text import format_eps, make_printable, summarize_error

DIGEST_PREFIX_CHARS = 8
"""Characters of a hash that people see."""


def has_same_training(run: RunResults, other: RunResults) -> bool:
    """Whether two runs were made of the same, as far as both their records tell."""
    mine, theirs = collect_training_components(run), collect_training_components(other)
    return all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())


def collect_training_components(run: RunResults) -> dict[str, Any]:
    """What a run's settings came to: the parts of its method, its network's size, its images by number and hash.

    A file with a method or a network in it, or a folder, may have changed under the same name; with a val/ in it, all
    of train/ is trained on.
    """
    record = run.record or {}
    counts = {name: record.get("data", {}).get(name) for name in ("held_out", "train")}
    parts = {
        f"{part}.{name}": value
        for part, held in record.get("method", {}).items()
        if isinstance(held, dict)
        for name, value in held.items()
    }
    found = {
        **parts,
        **counts,
        "parameters": record.get("model", {}).get("parameters"),
        "images": _read_data_digest(run),
    }
    return {name: value for name, value in found.items() if value is not None}


def group_by_training(runs: Iterable[RunResults]) -> list[list[RunResults]]:
    """The runs put together that were trained alike; those that have no record yet are with the first ones."""
    found: list[list[RunResults]] = []
    for run in sorted(runs, key=lambda run: run.record is None):
        home = next((kind for kind in found if run.record is None or has_same_training(kind[0], run)), None)
        found.append([run]) if home is None else home.append(run)
    return found


def collect_code_versions(runs: Iterable[RunResults]) -> set[str]:
    """The versions of the user's own files that runs say they were trained by."""
    held = [run.record["code"] for run in runs if run.record and run.record.get("code")]
    return {
        " ".join(f"{part} {digest[:DIGEST_PREFIX_CHARS]}" for part, digest in sorted(code.items())) for code in held
    }


def describe_test_data(run: RunResults) -> str:
    """The data set that a run's test images are of, as a person named it, and with a hash where there is one."""
    asked, digest = _read_evaluated_data(run), _read_data_digest(run)
    return f"{asked} {digest[:DIGEST_PREFIX_CHARS]}" if digest and asked == _read_requested_data(run) else asked


def has_same_test_images(run: RunResults, other: RunResults) -> bool:
    """Whether two runs were judged on images of one data set, as far as both their records tell."""
    if _read_evaluated_data(run) != _read_requested_data(run) or _read_evaluated_data(other) != _read_requested_data(
        other
    ):
        return _read_evaluated_data(run) == _read_evaluated_data(other)
    names = [(found.record or {}).get("data", {}).get("name") for found in (run, other)]
    digests = {digest for found in (run, other) if (digest := _read_data_digest(found))}
    return names[0] == names[1] and len(digests) < 2


def can_compare_runs(run: RunResults, other: RunResults) -> bool:
    """Whether two runs' accuracies mean the same: of the same data set, and under the same threat model."""
    threats = [found.evaluation.settings["threat"] for found in (run, other) if found.evaluation]
    return has_same_test_images(run, other) and threats[:1] == threats[1:]


def assign_comparison_groups(rows: Sequence[ReportRow]) -> list[int]:
    """For each row the place of the first one that was judged like it, which is its own where it has no numbers."""
    return [
        next((n for n, other in enumerate(rows) if _can_compare_row_pair(row, other)), i) for i, row in enumerate(rows)
    ]


def can_compare_rows(rows: Sequence[ReportRow]) -> bool:
    """Whether all rows were judged alike, so that one of them can be the best."""
    return len(set(assign_comparison_groups(rows))) < 2


def collect_machines(rows: Sequence[ReportRow]) -> set[str]:
    """What the rows' finished runs were trained by, which their minutes depend on."""
    return {_describe_machine(run.record) for row in rows for run in row.done if run.record and "device" in run.record}


def _describe_machine(record: dict[str, Any]) -> str:
    threads, processes = record.get("threads") if record["device"] == "cpu" else None, record.get("processes") or 1
    told = [f"{threads} thread{'' if threads == 1 else 's'}"] if threads else []
    return ", ".join([str(record["device"]), *told, *([f"{processes} processes"] if processes > 1 else [])])


def _can_compare_row_pair(row: ReportRow, other: ReportRow) -> bool:
    return bool(other.done) and all(can_compare_runs(other.done[0], run) for run in row.done)


def _read_data_digest(run: RunResults) -> str | None:
    found = (run.record or {}).get("data", {}).get("digest")
    return found if isinstance(found, str) else None


def _read_requested_data(run: RunResults) -> str:
    return str((run.record or {}).get("request", {}).get("data"))


def _read_evaluated_data(run: RunResults) -> str:
    """The data set whose images an evaluation says it judged by; the run's own where it does not say."""
    about = run.evaluation.settings.get("about", {}) if run.evaluation else {}
    return str(about.get("data") or _read_requested_data(run))


NON_IDENTITY_SETTINGS = ("seed", "data_root", "download", "device", "threads", "workers", "deterministic")
"""Settings that do not make another row: the seed, and how a run was carried out."""


def assign_unique_names(rows: Sequence[ReportRow]) -> Iterator[ReportRow]:
    """The rows under names that differ, and that are no longer than they need to be."""
    return _disambiguate_names(_drop_shared_model_name(rows))


def get_row_identity(run: RunResults) -> dict[str, Any]:
    """What makes a run's row: its settings, resolved, without the seed; what tells most comes first."""
    record = run.record or {}
    resolved = {
        "data": record["data"]["name"],
        "model": record["model"]["name"],
        **{name: record["threat"][name] for name in ("norm", "eps")},
    }
    chosen = {**resolved, **record["request"], **record["settings"], **resolved, "watch": record.get("watch")}
    return {name: value for name, value in chosen.items() if name not in NON_IDENTITY_SETTINGS}


def _drop_shared_model_name(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """The rows without the network behind each name, where it is the same behind all: a note says which."""
    ends = {f" {anonymize_paths(row.model)}" for row in rows}
    same = ends.pop() if len(ends) == 1 else ""
    if not all(row.name.endswith(same) for row in rows):
        return list(rows)
    return [replace(row, name=row.name.removesuffix(same)) for row in rows]


def _disambiguate_names(rows: Sequence[ReportRow]) -> Iterator[ReportRow]:
    """The same rows, told apart by what differs between them where their names do not, and by a number otherwise."""
    taken: set[str] = set()
    for row in rows:
        twins = [other for other in rows if other.name == row.name]
        name = make_printable(" ".join([row.name, *_distinguishing_settings(row, twins)]))
        number = 1
        while (unique := name if number == 1 else f"{name} ({number})") in taken:
            number += 1
        taken.add(unique)
        yield replace(row, name=unique)


def _distinguishing_settings(row: ReportRow, twins: Sequence[ReportRow]) -> list[str]:
    """As many settings as tell a row from its twins, and no more."""
    if any(not twin.runs or twin.runs[0].record is None for twin in twins):
        return []
    mine, others = _collect_naming_settings(row.runs[0]), [_collect_naming_settings(twin.runs[0]) for twin in twins]
    told: list[str] = []
    apart = 1
    for name in dict.fromkeys(name for other in others for name in other):
        found = len({tuple(_format_setting(other, n) for n in (*told, name)) for other in others})
        if found > apart:
            told, apart = [*told, name], found
    return [_format_setting(mine, name) for name in told]


def _collect_naming_settings(run: RunResults) -> dict[str, Any]:
    """What a row may be told by: its settings, the data set as it was asked for, and what it was made of."""
    return {
        **get_row_identity(run),
        "asked": (run.record or {})["request"].get("data"),
        **collect_training_components(run),
    }


def _format_setting(settings: dict[str, Any], name: str) -> str:
    shown = _format_setting_value(name, settings.get(name))
    return shown if name in ("model", "data", "asked", "rules") else f"{name}={shown}"


def _format_setting_value(name: str, value: Any) -> str:
    if isinstance(value, float):
        return format_eps(value) if name in ("eps", "alpha") else f"{value:.4g}"
    return "default" if value is None else str(value)[:DIGEST_PREFIX_CHARS] if name == "images" else str(value)


OTHER_SETUP_MARK = "‡"
"""Beside a number of the paper whose row was given other settings."""
RESULT_NEUTRAL_SETTINGS = ("engine", "block", "workers", "device", "threads", "deterministic", "aa_n", "aa_whole")
"""Settings that change neither training nor judging; on how many images AutoAttack was run is told as a sample."""


def annotate_bench_rows(bench: BenchResults) -> Iterator[ReportRow]:
    """A bench's rows, each with what it was given, and with the backprops that it had to spend."""
    budget = bench.settings.get("budget_bp")
    held = budget if isinstance(budget, int) else None
    common = [*_data_deviation(bench), *([f"a budget of {held:,} backprops"] if held else [])]
    for row in bench.rows:
        yield replace(
            row, differs=(*common, *_model_deviation(bench, row), *_setting_deviations(bench, row)), budget=held
        )


def describe_deviations(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Which rows were given what."""
    groups: dict[tuple[str, ...], list[ReportRow]] = {}
    for row in rows:
        groups.setdefault(row.differs, []).append(row)
    for differs, same in groups.items():
        if differs:
            who = "All rows" if len(groups) == 1 else ", ".join(row.name for row in same)
            paper = any(find_paper_table(row.table, row.paper_row) for row in same)
            mark = f" {OTHER_SETUP_MARK} marks numbers of the paper, which are for its own setup." if paper else ""
            yield f"{who}: given {', '.join(differs)} in place of the recipe's own.{mark}"


def _data_deviation(bench: BenchResults) -> Iterator[str]:
    own = get_recipe(bench.recipe).data if bench.recipe in list_recipes() else None
    given = bench.settings.get("data", own)
    if given != own:
        folder = " (the paper's images only if it holds them)" if str(given).startswith("folder:") else ""
        yield make_printable(f"data {given}{folder}")


def _model_deviation(bench: BenchResults, row: ReportRow) -> Iterator[str]:
    """A network that neither the recipe nor the paper's table has."""
    own = get_recipe(bench.recipe).models if bench.recipe in list_recipes() else (row.model,)
    if row.model not in own and not find_paper_table(row.table, row.paper_row):
        yield make_printable(f"the network {anonymize_paths(row.model)}")


def _setting_deviations(bench: BenchResults, row: ReportRow) -> Iterator[str]:
    given = bench.settings.get("set", {})
    for name, text in given.items() if isinstance(given, dict) else ():
        if name not in RESULT_NEUTRAL_SETTINGS and not (name in METHOD_SPECIFIC_SETTINGS and _lacks_setting(row, name)):
            yield make_printable(f"{name}={text}")


def _lacks_setting(row: ReportRow, name: str) -> bool:
    """Whether a method's own setting did not reach this row, whose method does not have it."""
    requests = [run.record["request"] for run in row.runs if run.record]
    return bool(requests) and all(request.get(name) is None for request in requests)


UNEVALUATED = "unevaluated"
"""The status of a run that was trained to its end and lacks its evaluation alone."""


@dataclass(frozen=True, eq=False)
class ReportData:
    """The rows of a report, in order; recipes and notes say where they come from and what is odd about them.

    tables are the recipes' places in the paper.
    """

    rows: tuple[ReportRow, ...]
    recipes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()

    def row(self, name: str) -> ReportRow:
        """The row of that name."""
        found = next(
            (row for row in self.rows if make_printable(name) in (row.name, f"{row.name} {make_printable(row.model)}")),
            None,
        )
        if found is None:
            raise unknown_name_error(
                "row", name, [row.name for row in self.rows], "--against names a row of the table."
            )
        return found


def load_report_data(paths: Sequence[str]) -> ReportData:
    """Read run folders and bench folders; runs that differ in their seed alone make one row, of several benches too.

    Runs of a bench's row that were not trained alike, by a file that was edited in between say, make several.
    """
    if not paths:
        raise UsageError("name at least one run folder or bench folder, such as runs/demo.")
    folders = [Path(text).expanduser() for text in paths]
    given = list({folder.resolve(): folder for folder in folders}.values())  # a folder named twice counts once
    benches = [load_bench(path) for path in given if (path / BENCH_FILE).is_file()]
    loose = [_load_run_folder(path) for path in given if not (path / BENCH_FILE).is_file()]
    found = tuple(assign_unique_names([*_merge_benches(benches), *_group_runs_into_rows(loose)]))
    places = dict.fromkeys(make_printable(bench.table) for bench in benches if bench.table)
    return ReportData(found, tuple(bench.recipe for bench in benches), tuple(_collect_notes(found)), tuple(places))


def get_incomplete_reason(run: RunResults) -> str | None:
    """Why a run has no numbers, or fewer than it should; None for one that is whole."""
    return None if run.numbers and not run.why else run.why or run.status


def list_run_problems(row: ReportRow, excluded_status: str = "") -> list[str]:
    """What is wrong with a row's runs, each reason with its seeds; runs of the status `but` are left out."""
    found: dict[str, list[str]] = {}
    for run in row.runs:
        if run.status != excluded_status and (why := get_incomplete_reason(run)):
            found.setdefault(why, []).append(str(run.seed))
    return [f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}: {why}" for why, seeds in found.items()]


def collect_flags(row: ReportRow) -> list[tuple[int, Flag]]:
    """The sanity flags of a row's evaluations, each with its seed; what the last epoch's alone raised says so."""
    return [(run.seed, flag) for run in row.runs for flag in _collect_run_flags(run)]


def exclude_flagged_rows(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """The rows without a sanity flag, who alone may win; all of them where each has one."""
    return [row for row in rows if not collect_flags(row)] or list(rows)


def _collect_run_flags(run: RunResults) -> list[Flag]:
    held = {"": run.evaluation, **run.extra_evaluations}
    raised = [(key, flag) for key, found in held.items() if found for flag in found.flags]
    first = dict.fromkeys(flag for key, flag in raised if key != "last")
    late = dict.fromkeys(flag for key, flag in raised if key == "last" and flag not in first)
    return [*first, *(replace(flag, seen=f"in the last epoch {flag.seen}") for flag in late)]


def list_unchecked_seeds(row: ReportRow) -> list[int]:
    """The seeds of a row whose evaluations were made without sanity checks."""
    return [
        run.seed
        for run in row.runs
        if any(e and not e.sanity_checked for e in (run.evaluation, *run.extra_evaluations.values()))
    ]


def _load_run_folder(path: Path) -> RunResults:
    """A run folder that was named by itself."""
    if not (path / RUN_FILE).is_file():
        kept = " What deat.fit keeps has no record to report; deat export writes its weights." * has_checkpoint(path)
        raise DataError(
            f"{str(path)!r} holds neither {RUN_FILE} nor {BENCH_FILE}; give folders that deat train or bench wrote.{kept}"
        )
    return _add_watch_and_status(load_run_results(path))


def _add_watch_and_status(run: RunResults) -> RunResults:
    """A run with what the watch saw, and with a reason where it is not whole."""
    return _add_status(replace(run, watch=_read_watch_records(run.path)))


def _read_watch_records(path: Path) -> tuple[EpochWatch, ...]:
    try:
        return tuple(read_watch(path / WATCH_FILE))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{str(path / WATCH_FILE)!r} is not what deat wrote ({summarize_error(error)}). Leave {path.name} out."
        ) from None


def _add_status(run: RunResults) -> RunResults:
    """A run with a reason where it is not whole."""
    if run.status in ("failed", "waiting", "running"):
        return replace(run, why=run.why or _describe_unfinished(run))
    if run.record is None or not run.history:
        return replace(run, status="incomplete", why=run.why or "no epoch was finished")
    done, asked = run.history[-1].epoch + 1, run.record["settings"]["epochs"]
    stopped = done < asked and _is_stopped_by_watch(run)
    if done < asked and not stopped:
        return replace(run, status="incomplete", why=f"{done} of {asked} epochs")
    if run.evaluation is not None and stopped:
        return replace(run, why=f"stopped by the watch, at the weights of epoch {done} of {asked}")
    if run.evaluation is None:
        return replace(run, status=UNEVALUATED, why="not evaluated")
    return run


def _describe_unfinished(run: RunResults) -> str:
    """How far a run of a bench came that is not finished."""
    if run.status == "failed":
        return run.status
    if run.status == "running":
        return ", ".join(filter(None, ("running, or killed while it ran", _describe_epochs_done(run))))
    return f"{_describe_epochs_done(run)}; the same command goes on" if _describe_epochs_done(run) else "not run yet"


def _describe_epochs_done(run: RunResults) -> str:
    """How many of its epochs a run has; empty where it was never begun."""
    if run.record is None:
        return ""
    done, asked = len(run.history) and run.history[-1].epoch + 1, run.record["settings"]["epochs"]
    return f"{done} of {asked} epochs" + (", not evaluated" if done == asked else "")


def _is_stopped_by_watch(run: RunResults) -> bool:
    """Whether the last thing that the overfit watch did was to end the training."""
    return bool(run.watch) and run.watch[-1].action == "stop"


def _merge_benches(benches: Sequence[BenchResults]) -> list[ReportRow]:
    """The rows of all benches; pieces of one bench that were run apart are put together, row by row."""
    held: dict[str, list[ReportRow]] = {}
    for bench in benches:
        for row in annotate_bench_rows(bench):
            mine = replace(row, runs=tuple(map(_add_watch_and_status, row.runs)))
            same = held.setdefault(json.dumps([*_bench_merge_key(bench), row.name, row.method, row.model]), [])
            place = next(
                (n for n, other in enumerate(same) if not _finished_seeds(other) & _finished_seeds(mine)), None
            )
            if place is None:
                same.append(mine)
            else:
                same[place] = _merge_rows(same[place], mine)
    return [
        replace(row, runs=tuple(kind)) for same in held.values() for row in same for kind in group_by_training(row.runs)
    ]


def _bench_merge_key(bench: BenchResults) -> tuple[str, str]:
    """What two benches have in common that are pieces of one."""
    given = bench.settings.get("set")
    told = (
        {name: text for name, text in given.items() if name not in RESULT_NEUTRAL_SETTINGS}
        if isinstance(given, dict)
        else given
    )
    return bench.recipe, json.dumps({**bench.settings, "set": told}, sort_keys=True)


def _finished_seeds(row: ReportRow) -> set[int]:
    return {run.seed for run in row.done}


def _merge_rows(row: ReportRow, other: ReportRow) -> ReportRow:
    """Two pieces of a row as one: of a seed that both have, the run that is finished."""
    best = {run.seed: run for run in sorted((*row.runs, *other.runs), key=lambda run: bool(run.numbers))}
    return replace(row, runs=tuple(best[seed] for seed in sorted(best)))


def _group_runs_into_rows(runs: Sequence[RunResults]) -> Iterator[ReportRow]:
    """Rows of runs that differ in their seed alone."""
    held: dict[str, list[RunResults]] = {}
    for run in runs:
        held.setdefault(json.dumps(get_row_identity(run), sort_keys=True, default=str), []).append(run)
    for same in (kind for asked in held.values() for kind in group_by_training(asked)):
        about = same[0].record or {}
        yield ReportRow(about["method"]["name"], about["method"]["name"], about["model"]["name"], tuple(same))


def _collect_notes(rows: Sequence[ReportRow]) -> Iterator[str]:
    """What keeps rows from being compared, or from saying what they seem to."""
    yield from describe_deviations(rows)
    for row in rows:
        seeds = [run.seed for run in row.done]
        if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            yield f"{row.name} has several runs of seed {', '.join(map(str, twice))}, counted as different ones."
    done = [run for row in rows for run in row.done]
    for what, values in (
        ("data set", _collect_data_set_names(done)),
        ("threat model", {_describe_threat(run) for run in done}),
        ("number of test images", {f"{len(run.evaluation.labels):,}" for run in done if run.evaluation}),
        ("judged epoch", {epoch for run in done if (epoch := _read_evaluation_info(run, "epoch"))}),
    ):
        if len(values) > 1:
            yield f"Rows differ in their {what} ({', '.join(sorted(values))}), so not all of them can be compared."
    for row in rows:
        if len(versions := collect_code_versions(row.runs)) > 1:
            yield f"{row.name} was trained by different versions of a file ({', '.join(sorted(versions))})."
    for row in rows:
        for run in row.done:
            judged, trained = (
                _read_evaluation_info(run, "data"),
                run.record["request"].get("data") if run.record else None,
            )
            if judged and trained and judged != trained:
                yield f"{row.name} seed {run.seed} was trained on {trained} and judged on other images, of {judged}."
    if len(found := collect_machines(rows)) > 1:
        yield f"Rows had different hardware or threads ({'; '.join(sorted(found))}): compare backprops, not minutes."
    yield from describe_single_seeds(rows)
    yield from describe_samples(rows)
    yield from _describe_cascades(rows)
    for row in rows:
        if seeds := list_unchecked_seeds(row):
            yield f"Sanity not checked: {row.name} seed {', '.join(map(str, seeds))}, so no flag there means nothing."


def _collect_data_set_names(runs: Sequence[RunResults]) -> set[str]:
    """The names of the runs' data sets; of different ones that are called the same, more than their names."""
    names = {run.record["data"]["name"] for run in runs if run.record}
    alike = all(has_same_test_images(run, runs[0]) for run in runs)
    return names if alike or len(names) > 1 else {describe_test_data(run) for run in runs}


def _describe_cascades(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Whose attacks were not each run on all images."""
    runs = [f"{row.name} seed {run.seed}" for row in rows for run in row.done if _is_cascaded(run)]
    if runs:
        said = "Judged in a cascade, each attack on those alone that stood against the ones before it"
        yield f"{said}: {', '.join(runs)}."


def _is_cascaded(run: RunResults) -> bool:
    return any(held and held.settings["cascade"] for held in (run.evaluation, run.extra_evaluations.get("aa")))


def _read_evaluation_info(run: RunResults, key: str) -> str | None:
    """The epoch or the data that a run's evaluation says it judged."""
    about = run.evaluation.settings.get("about", {}) if run.evaluation else {}
    return str(about[key]) if about.get(key) else None


def _describe_threat(run: RunResults) -> str:
    threat = run.evaluation.settings["threat"] if run.evaluation else {}
    return f"{threat.get('norm')} eps {format_eps(threat.get('eps', 0))}"
