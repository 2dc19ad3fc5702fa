"""What makes a row of a report, and what it is called: no two rows alike."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from deat.numbers import level
from deat.paths import tidy
from deat.plain import plain
from deat.report.collect import OneRun, Row
from deat.report.likeness import LABEL, made_of

ASIDE = ("seed", "data_root", "download", "device", "threads", "workers", "deterministic")
"""Settings that do not make another row: the seed, and how a run was carried out."""


def named(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows under names that differ, and that are no longer than they need to be."""
    return _told_apart(_shortened(rows))


def identity(run: OneRun) -> dict[str, Any]:
    """What makes a run's row: its settings, resolved, without the seed; what tells most comes first."""
    record = run.record or {}
    resolved = {
        "data": record["data"]["name"],
        "model": record["model"]["name"],
        **{name: record["threat"][name] for name in ("norm", "eps")},
    }
    chosen = {**resolved, **record["request"], **record["settings"], **resolved, "watch": record.get("watch")}
    return {name: value for name, value in chosen.items() if name not in ASIDE}


def _shortened(rows: Sequence[Row]) -> list[Row]:
    """The rows without the network behind each name, where it is the same behind all: a note says which."""
    ends = {f" {tidy(row.model)}" for row in rows}
    same = ends.pop() if len(ends) == 1 else ""
    if not all(row.name.endswith(same) for row in rows):
        return list(rows)
    return [replace(row, name=row.name.removesuffix(same)) for row in rows]


def _told_apart(rows: Sequence[Row]) -> Iterator[Row]:
    """The same rows, told apart by what differs between them where their names do not, and by a number otherwise."""
    taken: set[str] = set()
    for row in rows:
        twins = [other for other in rows if other.name == row.name]
        name = plain(" ".join([row.name, *_difference(row, twins)]))
        number = 1
        while (unique := name if number == 1 else f"{name} ({number})") in taken:
            number += 1
        taken.add(unique)
        yield replace(row, name=unique)


def _difference(row: Row, twins: Sequence[Row]) -> list[str]:
    """As many settings as tell a row from its twins, and no more."""
    if any(not twin.runs or twin.runs[0].record is None for twin in twins):
        return []
    mine, others = _told(row.runs[0]), [_told(twin.runs[0]) for twin in twins]
    told: list[str] = []
    apart = 1
    for name in dict.fromkeys(name for other in others for name in other):
        found = len({tuple(_setting(other, n) for n in (*told, name)) for other in others})
        if found > apart:
            told, apart = [*told, name], found
    return [_setting(mine, name) for name in told]


def _told(run: OneRun) -> dict[str, Any]:
    """What a row may be told by: its settings, the data set as it was asked for, and what it was made of."""
    return {**identity(run), "asked": (run.record or {})["request"].get("data"), **made_of(run)}


def _setting(held: dict[str, Any], name: str) -> str:
    shown = _short(name, held.get(name))
    return shown if name in ("model", "data", "asked", "rules") else f"{name}={shown}"


def _short(name: str, value: Any) -> str:
    if isinstance(value, float):
        return level(value) if name in ("eps", "alpha") else f"{value:.4g}"
    return "default" if value is None else str(value)[:LABEL] if name == "images" else str(value)
