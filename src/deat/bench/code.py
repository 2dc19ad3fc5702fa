"""Methods and networks out of the user's files, which may be edited while a bench is made: who was trained by what."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deat.errors import UsageError
from deat.loading import code_digest, is_file_spec
from deat.recipes import Row
from deat.training.folder import RUN


def code_of(row: Row) -> dict[str, str]:
    """A hash of each file that a row's method and network are in, as run.json has them."""
    specs = {"method": row.request.method, "model": row.request.model}
    return {part: code_digest(spec) for part, spec in specs.items() if is_file_spec(spec)}


def is_by(code: dict[str, str], folder: Path) -> bool:
    """Whether a run was trained by this version of the files, as far as its record says."""
    try:
        held: Any = json.loads((folder / RUN).read_text(encoding="utf-8"))
        return bool(held.get("code", code) == code)
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # what cannot be read is found out elsewhere


def check_code(row: Row, folders: Iterable[Path]) -> None:
    """Refuse to go on with a row whose finished runs were trained by another version of its files."""
    code = code_of(row)
    if others := [str(folder) for folder in folders if not is_by(code, folder)]:
        raise UsageError(
            f"the file of {row.label} was edited since {', '.join(others)} {'was' if len(others) == 1 else 'were'} "
            "trained, so its seeds would not be of one kind. Remove what is named to have it trained anew, ask for "
            "the other rows alone, or choose another --out."
        )
