"""What `deat list` prints, saved so that the next time it is printed without importing torch, which takes most of the time.

A listing is saved with a hash of itself and of deat's own source, and is used only where both are the same. Lists that
depend on installed packages, and all lists while a package adds plugins, are not saved.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from deat.utils.plugins import PLUGIN_GROUPS
from deat.utils.safe_write import write_atomic
from deat.utils.user_paths import find_home

SAVED_KINDS = ("methods", "models", "data", "attacks", "threats", "tasks", "recipes")
PACKAGE_ROOT = Path(__file__).parents[1]
OMITTED_COLUMNS = ("methods", "settings", "models")
"""Columns that are too long for the table; they are printed below it."""
Rows = list[dict[str, Any]]


def find_saved_kind(argv: Sequence[str]) -> str | None:
    """Return the kind of a command line `deat list KIND [--json]` whose rows are saved; None for any other."""
    kinds = [argument for argument in argv[1:] if argument != "--json"]
    is_listing = list(argv[:1]) == ["list"] and len(kinds) == 1 and len(argv) <= 3
    return kinds[0] if is_listing and kinds[0] in SAVED_KINDS else None


def load_rows(kind: str) -> Rows | None:
    """Load the saved rows of a kind.

    Args:
        kind: One of `SAVED_KINDS`.

    Returns:
        The rows; None if none are saved, or not by this very source of deat.
    """
    try:
        saved = json.loads(_saved_file(kind).read_bytes())
        rows: Rows = saved["rows"]
        return rows if saved["hash"] == _hash_rows(kind, rows) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def save_rows(kind: str, rows: Rows) -> None:
    """Save the rows of a kind; where that is impossible, they are not saved.

    Args:
        kind: One of `SAVED_KINDS`.
        rows: The rows of a process in which nothing but deat has registered names.
    """
    with suppress(OSError, LookupError):
        text = json.dumps({"hash": _hash_rows(kind, rows), "rows": rows})
        write_atomic(_saved_file(kind), text.encode())


def print_rows(kind: str, rows: Rows, *, as_json: bool) -> None:
    """Print the rows of one kind, as a table or as JSON.

    Args:
        kind: What is listed, such as "methods".
        rows: The rows, all with the same columns.
        as_json: Whether one JSON document is printed in place of a table.
    """
    from rich.table import Table

    from deat.utils.console import make_table_console

    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print(f"no {kind} are installed")
        return
    columns = [name for name in rows[0] if name not in OMITTED_COLUMNS]
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_format_cell(row[name]) for name in columns))
    console = make_table_console()
    console.print(table)
    for row in rows:
        if "settings" in row:
            console.print(f"\n{row['name']}: {row['methods']} on {row['models']}\n{row['settings']}")


def _format_cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def _saved_file(kind: str) -> Path:
    home = find_home()
    if home is None:
        raise FileNotFoundError("no home folder")
    return home / ".cache" / "deat" / "listings" / f"{kind}.json"


def _hash_rows(kind: str, rows: Rows) -> str:
    """A hash of the rows, and of all source that they are computed by.

    Raises:
        LookupError: There are plugins, or there is no source.
    """
    if any(entry_points(group=group) for group in PLUGIN_GROUPS):
        raise LookupError("plugins")
    sources = sorted(PACKAGE_ROOT.rglob("*.py"))
    if not sources:
        raise LookupError("no source")
    digest = sha256(json.dumps([kind, rows, sys.version, sys.flags.optimize]).encode())  # -OO removes docstrings
    for path in sources:
        digest.update(f"\n{path.relative_to(PACKAGE_ROOT)}\n".encode())
        digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()
