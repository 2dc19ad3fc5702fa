"""Paths in what people share: without their user's name and home folder, and with one's own in them again."""

import getpass
import re
from pathlib import Path
from typing import Any

USER = "$USER"
"""A user's name in a recorded path, as a shell would write it."""
SHORTEST = 3
"""Letters of a user's name that tells who it is."""
_MARK = re.compile(r"(?<![^:+])~(?=/|$)")
"""The home folder's sign, where a path begins: also after `folder:` and `m+`."""
_BEFORE = r"(?:(?<=/)|(?<=folder:)|(?<![^:+])(?={name}/))"
_AFTER = r"(?=/|[^\w.-]|$)"
"""What stands around a part of a path."""


def tidy(value: Any) -> Any:
    """A setting, or a text with paths in it, without the names of its user and of their home folder."""
    if not isinstance(value, str):
        return value
    for home in _homes():
        value = re.sub(rf"(?<![\w.-]){re.escape(home)}{_AFTER}", "~", value)
    name = _user()
    return _part(re.escape(name)).sub(lambda _: USER, value) if name else value


def at_home(text: str) -> str:
    """A recorded path with the user's name and home folder in it again."""
    home, name = str(Path.home()), _user()
    text = _part(re.escape(USER)).sub(lambda _: name, text) if name else text
    return _MARK.sub(lambda _: home, text)


def _part(name: str) -> re.Pattern[str]:
    """Where a path has a part of this name."""
    return re.compile(_BEFORE.format(name=name) + name + _AFTER)


def _homes() -> list[str]:
    """The home folder, and where it really lies; a home that is the root tells nothing."""
    home = Path.home()
    return sorted({str(home), str(home.resolve())} - {"/"}, key=len, reverse=True)


def _user() -> str | None:
    """The user's name, where there is one that tells anything."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):  # nobody knows this user's number
        return None
    return name if len(name) >= SHORTEST and name != "root" else None
