"""Paths in what people share: without their user's name and home folder, and with one's own in them again."""

import getpass
import re
from pathlib import Path
from typing import Any

USER_PLACEHOLDER = "$USER"
"""A user's name in a recorded path, as a shell would write it."""
MIN_USER_NAME_LETTERS = 3
"""Letters of a user's name that tells who it is."""
_HOME_MARK = re.compile(r"(?<![^:+])~(?=/|$)")
"""The home folder's sign, where a path begins: also after `folder:` and `m+`."""
_BEFORE_PART = r"(?:(?<=/)|(?<=folder:)|(?<![^:+])(?={name}/))"
_AFTER_PART = r"(?=/|[^\w.-]|$)"
"""What stands around a part of a path."""


def anonymize_paths(value: Any) -> Any:
    """A setting, or a text with paths in it, without the names of its user and of their home folder."""
    if not isinstance(value, str):
        return value
    for home in _home_folders():
        value = re.sub(rf"(?<![\w.-]){re.escape(home)}{_AFTER_PART}", "~", value)
    name = _user_name()
    return _path_part_pattern(re.escape(name)).sub(lambda _: USER_PLACEHOLDER, value) if name else value


def restore_user_paths(text: str) -> str:
    """A recorded path with the user's name and home folder in it again."""
    home, name = str(Path.home()), _user_name()
    text = _path_part_pattern(re.escape(USER_PLACEHOLDER)).sub(lambda _: name, text) if name else text
    return _HOME_MARK.sub(lambda _: home, text)


def _path_part_pattern(name: str) -> re.Pattern[str]:
    """Where a path has a part of this name."""
    return re.compile(_BEFORE_PART.format(name=name) + name + _AFTER_PART)


def _home_folders() -> list[str]:
    """The home folder, and where it really lies; a home that is the root tells nothing."""
    home = Path.home()
    return sorted({str(home), str(home.resolve())} - {"/"}, key=len, reverse=True)


def _user_name() -> str | None:
    """The user's name, where there is one that tells anything."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):  # nobody knows this user's number
        return None
    return name if len(name) >= MIN_USER_NAME_LETTERS and name != "root" else None
