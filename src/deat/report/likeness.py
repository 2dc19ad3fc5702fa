"""What runs have in common that names do not tell: whether they are of one row, and whether rows can be compared."""

from collections.abc import Iterable, Sequence
from typing import Any

from deat.report.collect import OneRun, Row

LABEL = 8
"""Characters of a hash that people see."""


def trained_alike(run: OneRun, other: OneRun) -> bool:
    """Whether two runs were made of the same, as far as both their records tell."""
    mine, theirs = made_of(run), made_of(other)
    return all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())


def made_of(run: OneRun) -> dict[str, Any]:
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
    found = {**parts, **counts, "parameters": record.get("model", {}).get("parameters"), "images": _digest(run)}
    return {name: value for name, value in found.items() if value is not None}


def kinds(runs: Iterable[OneRun]) -> list[list[OneRun]]:
    """The runs put together that were trained alike; those that have no record yet are with the first ones."""
    found: list[list[OneRun]] = []
    for run in sorted(runs, key=lambda run: run.record is None):
        home = next((kind for kind in found if run.record is None or trained_alike(kind[0], run)), None)
        found.append([run]) if home is None else home.append(run)
    return found


def codes(runs: Iterable[OneRun]) -> set[str]:
    """The versions of the user's own files that runs say they were trained by."""
    held = [run.record["code"] for run in runs if run.record and run.record.get("code")]
    return {" ".join(f"{part} {digest[:LABEL]}" for part, digest in sorted(code.items())) for code in held}


def data_of(run: OneRun) -> str:
    """The data set that a run's test images are of, as a person named it, and with a hash where there is one."""
    asked, digest = _judged_data(run), _digest(run)
    return f"{asked} {digest[:LABEL]}" if digest and asked == _asked(run) else asked


def same_images(run: OneRun, other: OneRun) -> bool:
    """Whether two runs were judged on images of one data set, as far as both their records tell."""
    if _judged_data(run) != _asked(run) or _judged_data(other) != _asked(other):
        return _judged_data(run) == _judged_data(other)
    names = [(found.record or {}).get("data", {}).get("name") for found in (run, other)]
    digests = {digest for found in (run, other) if (digest := _digest(found))}
    return names[0] == names[1] and len(digests) < 2


def judged_alike(run: OneRun, other: OneRun) -> bool:
    """Whether two runs' accuracies mean the same: of the same data set, and under the same threat model."""
    threats = [found.evaluation.settings["threat"] for found in (run, other) if found.evaluation]
    return same_images(run, other) and threats[:1] == threats[1:]


def setups(rows: Sequence[Row]) -> list[int]:
    """For each row the place of the first one that was judged like it, which is its own where it has no numbers."""
    return [next((n for n, other in enumerate(rows) if _is_like(row, other)), i) for i, row in enumerate(rows)]


def comparable(rows: Sequence[Row]) -> bool:
    """Whether all rows were judged alike, so that one of them can be the best."""
    return len(set(setups(rows))) < 2


def machines(rows: Sequence[Row]) -> set[str]:
    """What the rows' finished runs were trained by, which their minutes depend on."""
    return {_machine(run.record) for row in rows for run in row.done if run.record and "device" in run.record}


def _machine(record: dict[str, Any]) -> str:
    threads, processes = record.get("threads") if record["device"] == "cpu" else None, record.get("processes") or 1
    told = [f"{threads} thread{'' if threads == 1 else 's'}"] if threads else []
    return ", ".join([str(record["device"]), *told, *([f"{processes} processes"] if processes > 1 else [])])


def _is_like(row: Row, other: Row) -> bool:
    return bool(other.done) and all(judged_alike(other.done[0], run) for run in row.done)


def _digest(run: OneRun) -> str | None:
    found = (run.record or {}).get("data", {}).get("digest")
    return found if isinstance(found, str) else None


def _asked(run: OneRun) -> str:
    return str((run.record or {}).get("request", {}).get("data"))


def _judged_data(run: OneRun) -> str:
    """The data set whose images an evaluation says it judged by; the run's own where it does not say."""
    about = run.evaluation.settings.get("about", {}) if run.evaluation else {}
    return str(about.get("data") or _asked(run))
