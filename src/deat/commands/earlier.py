"""An evaluation's file that is there already: what may be replaced, and what is kept beside it."""

from itertools import count
from pathlib import Path
from typing import Any

from deat.errors import CheckpointError, UsageError
from deat.evaluation.evaluation import Evaluation, held_evaluation
from deat.live import say_aside
from deat.writing import refuse_links, write_whole

Held = dict[str, Any]
"""An evaluation.json, or a part of one."""


def check_out(out: Path) -> None:
    """Refuse to replace anything but an earlier evaluation, and to write through a link."""
    refuse_links([out])
    if not out.name or out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a folder; name a file, such as evaluation.json.")
    if out.exists() and held_evaluation(out) is None:
        raise UsageError(f"{str(out)!r} exists and is no evaluation, so it is not replaced. Choose another --out.")


def put(found: Evaluation, out: Path) -> None:
    """Write an evaluation, and keep another that is there by then."""
    try:
        keep_other(out, {"settings": found.settings, "images": len(found.labels)})
    except OSError as error:
        raise CheckpointError(f"cannot keep the {out.name} that is there: {error.strerror}.") from None
    found.save(out)


def keep_other(out: Path, found: Held) -> None:
    """Keep an earlier evaluation that the new one does not answer anew, under the next free number."""
    held = held_evaluation(out) if out.exists() else None
    if held is None or _is_answered(old := _asked(held), new := _asked(found)):
        return
    why = "answers another question" if old["model"] == new["model"] else "is about other weights"
    data = out.read_bytes()
    for number in count(1):
        copy = out.with_name(f"{out.stem}-{number}{out.suffix}")
        if not copy.exists():
            write_whole(copy, data)
            say_aside(f"{out.name} {why}; it is kept as {copy.name}.")
        if copy.read_bytes() == data:
            return


def _asked(held: Held) -> Held:
    """What an evaluation was asked: of which weights, on which images and how many, by which attacks, and how.

    Weights are known by their hash, since a file of the same name may hold others.
    """
    settings = held.get("settings", {})
    how = {name: settings.get(name) for name in ("model", "threat", "seed", "block", "cascade")}
    about = {name: settings.get("about", {}).get(name) for name in ("epoch", "data", "size", "normalize")}
    n = held.get("images") if settings.get("sample") else None
    return {"attacks": settings.get("attacks", {}), "n": n, **how, **about}


def _is_answered(old: Held, new: Held) -> bool:
    """Whether the new question is the old one, by the same attacks or by more."""
    rest = [{name: value for name, value in asked.items() if name != "attacks"} for asked in (old, new)]
    return rest[0] == rest[1] and old["attacks"].items() <= new["attacks"].items()
