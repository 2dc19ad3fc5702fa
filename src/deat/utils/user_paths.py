"""Paths that begin with ~, as people give them, and the home folder, which not every process has."""

import os
from pathlib import Path

from deat.errors import UsageError


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Replace ~ and ~USER at the beginning of a path by that home folder.

    Args:
        path: A path that a person gave.

    Raises:
        UsageError: If there is no such home folder, or the path is not text in UTF-8.

    Example:
        >>> expand_path("~/runs")
        PosixPath('/home/kim/runs')
    """
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"the path {text!a} is not text in UTF-8, and deat's files could not name it. Rename the folder or file."
        ) from None
    if not text.startswith("~"):  # as ./~x, whose beginning Path drops
        return Path(text)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(
            f"{text!r}: {Path(text).parts[0]} is not the home folder of a user of this machine. Give the whole path, or "
            f"./{text} for a name that begins with ~."
        ) from None


def find_home() -> Path | None:
    """Return the home folder, or None if the process has none, as with a user id of a container that has no name."""
    try:
        return Path.home()
    except RuntimeError:
        return None
