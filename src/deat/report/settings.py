"""The page's settings: what differs between rows side by side, and every setting of every run."""

from collections.abc import Iterable, Sequence
from typing import Any

from deat.numbers import level
from deat.report.collect import OneRun, Row
from deat.report.escape import markup
from deat.report.sections import mark, record_row

IN_EPS = tuple(f"method.schedule.{name}" for name in ("alpha", "stretch", "ramp"))
"""Lengths that a method declares as parts of eps."""


def settings_section(rows: Sequence[Row]) -> str:
    """What differs between rows side by side, and every setting of every run."""
    held = [(i, row.name, flat(run.record or {})) for i, row in enumerate(rows) for run in row.runs[:1]]
    differ = differing([name for _, name, _ in held], [found for _, _, found in held])
    head = "".join(f'<th scope="col">{markup(setting(name))}</th>' for name in differ)
    body = "".join(record_row(name, [found.get(n, "—") for n in differ], mark(i)) for i, name, found in held)
    side = (
        '<h3>What differs</h3><div class="scroll" tabindex="0" role="region" aria-label="Settings that differ">'
        f'<table class="words"><thead><tr><th scope="col">row</th>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )
    each = "".join(_settings_of(row, run) for row in rows for run in row.runs)
    return (side if differ and len(held) > 1 else "") + each


def differing(rows: Sequence[str], held: Sequence[dict[str, str]]) -> list[str]:
    """The settings in which rows differ, each told once: not as their names, as asked and as resolved, or as text."""
    names = dict.fromkeys(name for found in held for name in found)
    told = [name for name in names if not name.startswith(("digest", "data.digest", "code", "versions", "schedule"))]
    columns = {tuple(rows): ""}
    for name in sorted(told, key=lambda name: name.startswith("request")):  # what was asked is what came of it, mostly
        columns.setdefault(tuple(found.get(name, "—") for found in held), name)
    return [name for values, name in columns.items() if name and len(set(values)) > 1]


def setting(name: str) -> str:
    """A setting's name, with its unit."""
    return f"{name}, in eps" if name in IN_EPS else name


def flat(value: Any, name: str = "") -> dict[str, str]:
    """A nested record as name.of.setting → text."""
    if isinstance(value, dict):
        return {
            key: text for part, held in value.items() for key, text in flat(held, f"{name}.{part}".strip(".")).items()
        }
    if isinstance(value, list):
        return {name: ", ".join(map(str, value))}
    return {name: "—" if value is None else _number(name, value) if isinstance(value, float) else str(value)}


def _number(name: str, value: float) -> str:
    """A number; a radius or a step as people write it, where it is none in units of eps."""
    return level(value) if name.endswith(("eps", "alpha")) and name not in IN_EPS else f"{value:.6g}"


def _settings_of(row: Row, run: OneRun) -> str:
    pairs: Iterable[tuple[str, str]] = flat(run.record or {}).items()
    if run.evaluation:
        main = flat(run.evaluation.settings)
        pairs = [*pairs, *((f"evaluation.{name}", text) for name, text in main.items())]
        for key, beside in run.beside.items():
            others = [pair for pair in flat(beside.settings).items() if pair not in main.items()]
            pairs = [*pairs, *((f"evaluation of {key}.{name}", text) for name, text in others)]
    items = "".join(f"<div><dt>{markup(setting(name))}</dt><dd>{markup(text)}</dd></div>" for name, text in pairs)
    items = items or "<div><dt>no record</dt><dd></dd></div>"
    return f"<details><summary>{markup(row.name)}, seed {run.seed}</summary><dl>{items}</dl></details>"
