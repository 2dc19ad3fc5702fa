"""What a report is about: run folders and bench folders, read into rows whose names differ."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deat.errors import DataError, UsageError, in_brief, unknown
from deat.evaluation.sanity import Flag
from deat.numbers import level
from deat.plain import plain
from deat.report.cells import samples, single_seeds
from deat.report.collect import BENCH, Bench, OneRun, Row, collect, collect_run
from deat.report.likeness import codes, data_of, kinds, machines, same_images
from deat.report.naming import identity, named
from deat.report.setups import SAME, marked, notes_on
from deat.training.folder import RUN, WATCH, has_checkpoint
from deat.training.history import EpochWatch, read_watch

UNEVALUATED = "unevaluated"
"""The status of a run that was trained to its end and lacks its evaluation alone."""


@dataclass(frozen=True, eq=False)
class Subject:
    """The rows of a report, in order; recipes and notes say where they come from and what is odd about them.

    tables are the recipes' places in the paper.
    """

    rows: tuple[Row, ...]
    recipes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row of that name."""
        found = next((row for row in self.rows if plain(name) in (row.name, f"{row.name} {plain(row.model)}")), None)
        if found is None:
            raise unknown("row", name, [row.name for row in self.rows], "--against names a row of the table.")
        return found


def gather(paths: Sequence[str]) -> Subject:
    """Read run folders and bench folders; runs that differ in their seed alone make one row, of several benches too.

    Runs of a bench's row that were not trained alike, by a file that was edited in between say, make several.
    """
    if not paths:
        raise UsageError("name at least one run folder or bench folder, such as runs/demo.")
    folders = [Path(text).expanduser() for text in paths]
    given = list({folder.resolve(): folder for folder in folders}.values())  # a folder named twice counts once
    benches = [collect(path) for path in given if (path / BENCH).is_file()]
    loose = [_alone(path) for path in given if not (path / BENCH).is_file()]
    found = tuple(named([*_joined(benches), *_grouped(loose)]))
    places = dict.fromkeys(plain(bench.table) for bench in benches if bench.table)
    return Subject(found, tuple(bench.recipe for bench in benches), tuple(_notes(found)), tuple(places))


def reason(run: OneRun) -> str | None:
    """Why a run has no numbers, or fewer than it should; None for one that is whole."""
    return None if run.numbers and not run.why else run.why or run.status


def troubles(row: Row, but: str = "") -> list[str]:
    """What is wrong with a row's runs, each reason with its seeds; runs of the status `but` are left out."""
    found: dict[str, list[str]] = {}
    for run in row.runs:
        if run.status != but and (why := reason(run)):
            found.setdefault(why, []).append(str(run.seed))
    return [f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}: {why}" for why, seeds in found.items()]


def flags_of(row: Row) -> list[tuple[int, Flag]]:
    """The sanity flags of a row's evaluations, each with its seed; what the last epoch's alone raised says so."""
    return [(run.seed, flag) for run in row.runs for flag in _flags(run)]


def believed(rows: Sequence[Row]) -> list[Row]:
    """The rows without a sanity flag, who alone may win; all of them where each has one."""
    return [row for row in rows if not flags_of(row)] or list(rows)


def _flags(run: OneRun) -> list[Flag]:
    held = {"": run.evaluation, **run.beside}
    raised = [(key, flag) for key, found in held.items() if found for flag in found.flags]
    first = dict.fromkeys(flag for key, flag in raised if key != "last")
    late = dict.fromkeys(flag for key, flag in raised if key == "last" and flag not in first)
    return [*first, *(replace(flag, seen=f"in the last epoch {flag.seen}") for flag in late)]


def unchecked(row: Row) -> list[int]:
    """The seeds of a row whose evaluations were made without sanity checks."""
    return [run.seed for run in row.runs if any(e and not e.checked for e in (run.evaluation, *run.beside.values()))]


def _alone(path: Path) -> OneRun:
    """A run folder that was named by itself."""
    if not (path / RUN).is_file():
        kept = " What deat.fit keeps has no record to report; deat export writes its weights." * has_checkpoint(path)
        raise DataError(
            f"{str(path)!r} holds neither {RUN} nor {BENCH}; give folders that deat train or bench wrote.{kept}"
        )
    return _read(collect_run(path))


def _read(run: OneRun) -> OneRun:
    """A run with what the watch saw, and with a reason where it is not whole."""
    return _explained(replace(run, watch=_watched(run.path)))


def _watched(path: Path) -> tuple[EpochWatch, ...]:
    try:
        return tuple(read_watch(path / WATCH))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{str(path / WATCH)!r} is not what deat wrote ({in_brief(error)}). Leave {path.name} out."
        ) from None


def _explained(run: OneRun) -> OneRun:
    """A run with a reason where it is not whole."""
    if run.status in ("failed", "waiting", "running"):
        return replace(run, why=run.why or _unfinished(run))
    if run.record is None or not run.history:
        return replace(run, status="incomplete", why=run.why or "no epoch was finished")
    done, asked = run.history[-1].epoch + 1, run.record["settings"]["epochs"]
    stopped = done < asked and _stopped(run)
    if done < asked and not stopped:
        return replace(run, status="incomplete", why=f"{done} of {asked} epochs")
    if run.evaluation is not None and stopped:
        return replace(run, why=f"stopped by the watch, at the weights of epoch {done} of {asked}")
    if run.evaluation is None:
        return replace(run, status=UNEVALUATED, why="not evaluated")
    return run


def _unfinished(run: OneRun) -> str:
    """How far a run of a bench came that is not finished."""
    if run.status == "failed":
        return run.status
    if run.status == "running":
        return ", ".join(filter(None, ("running, or killed while it ran", _far(run))))
    return f"{_far(run)}; the same command goes on" if _far(run) else "not run yet"


def _far(run: OneRun) -> str:
    """How many of its epochs a run has; empty where it was never begun."""
    if run.record is None:
        return ""
    done, asked = len(run.history) and run.history[-1].epoch + 1, run.record["settings"]["epochs"]
    return f"{done} of {asked} epochs" + (", not evaluated" if done == asked else "")


def _stopped(run: OneRun) -> bool:
    """Whether the last thing that the overfit watch did was to end the training."""
    return bool(run.watch) and run.watch[-1].action == "stop"


def _joined(benches: Sequence[Bench]) -> list[Row]:
    """The rows of all benches; pieces of one bench that were run apart are put together, row by row."""
    held: dict[str, list[Row]] = {}
    for bench in benches:
        for row in marked(bench):
            mine = replace(row, runs=tuple(map(_read, row.runs)))
            same = held.setdefault(json.dumps([*_setup(bench), row.name, row.method, row.model]), [])
            place = next((n for n, other in enumerate(same) if not _seeds(other) & _seeds(mine)), None)
            if place is None:
                same.append(mine)
            else:
                same[place] = _together(same[place], mine)
    return [replace(row, runs=tuple(kind)) for same in held.values() for row in same for kind in kinds(row.runs)]


def _setup(bench: Bench) -> tuple[str, str]:
    """What two benches have in common that are pieces of one."""
    given = bench.settings.get("set")
    told = {name: text for name, text in given.items() if name not in SAME} if isinstance(given, dict) else given
    return bench.recipe, json.dumps({**bench.settings, "set": told}, sort_keys=True)


def _seeds(row: Row) -> set[int]:
    return {run.seed for run in row.done}


def _together(row: Row, other: Row) -> Row:
    """Two pieces of a row as one: of a seed that both have, the run that is finished."""
    best = {run.seed: run for run in sorted((*row.runs, *other.runs), key=lambda run: bool(run.numbers))}
    return replace(row, runs=tuple(best[seed] for seed in sorted(best)))


def _grouped(runs: Sequence[OneRun]) -> Iterator[Row]:
    """Rows of runs that differ in their seed alone."""
    held: dict[str, list[OneRun]] = {}
    for run in runs:
        held.setdefault(json.dumps(identity(run), sort_keys=True, default=str), []).append(run)
    for same in (kind for asked in held.values() for kind in kinds(asked)):
        about = same[0].record or {}
        yield Row(about["method"]["name"], about["method"]["name"], about["model"]["name"], tuple(same))


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """What keeps rows from being compared, or from saying what they seem to."""
    yield from notes_on(rows)
    for row in rows:
        seeds = [run.seed for run in row.done]
        if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            yield f"{row.name} has several runs of seed {', '.join(map(str, twice))}, counted as different ones."
    done = [run for row in rows for run in row.done]
    for what, values in (
        ("data set", _data_sets(done)),
        ("threat model", {_threat(run) for run in done}),
        ("number of test images", {f"{len(run.evaluation.labels):,}" for run in done if run.evaluation}),
        ("judged epoch", {epoch for run in done if (epoch := _judged(run, "epoch"))}),
    ):
        if len(values) > 1:
            yield f"Rows differ in their {what} ({', '.join(sorted(values))}), so not all of them can be compared."
    for row in rows:
        if len(versions := codes(row.runs)) > 1:
            yield f"{row.name} was trained by different versions of a file ({', '.join(sorted(versions))})."
    for row in rows:
        for run in row.done:
            judged, trained = _judged(run, "data"), run.record["request"].get("data") if run.record else None
            if judged and trained and judged != trained:
                yield f"{row.name} seed {run.seed} was trained on {trained} and judged on other images, of {judged}."
    if len(found := machines(rows)) > 1:
        yield f"Rows had different hardware or threads ({'; '.join(sorted(found))}): compare backprops, not minutes."
    yield from single_seeds(rows)
    yield from samples(rows)
    yield from _cascades(rows)
    for row in rows:
        if seeds := unchecked(row):
            yield f"Sanity not checked: {row.name} seed {', '.join(map(str, seeds))}, so no flag there means nothing."


def _data_sets(runs: Sequence[OneRun]) -> set[str]:
    """The names of the runs' data sets; of different ones that are called the same, more than their names."""
    names = {run.record["data"]["name"] for run in runs if run.record}
    alike = all(same_images(run, runs[0]) for run in runs)
    return names if alike or len(names) > 1 else {data_of(run) for run in runs}


def _cascades(rows: Sequence[Row]) -> Iterator[str]:
    """Whose attacks were not each run on all images."""
    runs = [f"{row.name} seed {run.seed}" for row in rows for run in row.done if _cascaded(run)]
    if runs:
        said = "Judged in a cascade, each attack on those alone that stood against the ones before it"
        yield f"{said}: {', '.join(runs)}."


def _cascaded(run: OneRun) -> bool:
    return any(held and held.settings["cascade"] for held in (run.evaluation, run.beside.get("aa")))


def _judged(run: OneRun, what: str) -> str | None:
    """The epoch or the data that a run's evaluation says it judged."""
    about = run.evaluation.settings.get("about", {}) if run.evaluation else {}
    return str(about[what]) if about.get(what) else None


def _threat(run: OneRun) -> str:
    threat = run.evaluation.settings["threat"] if run.evaluation else {}
    return f"{threat.get('norm')} eps {level(threat.get('eps', 0))}"
