"""Removes the user's name and home folder from recorded paths, since people share records, and restores them."""

import getpass
import re
from typing import Any

from deat.utils.user_paths import find_home

USER_PLACEHOLDER = "$USER"
"""What a recorded path has instead of the user's name."""
MIN_USER_NAME_LETTERS = 3
"""A shorter user's name is kept: it does not identify a person and is often part of other words."""
_HOME_MARK = re.compile(r"(?<![^:+])~(?=/|$)")
"""The sign of the home folder, where a path begins: also after `folder:` and `m+`."""
_BEFORE_PART = r"(?:(?<=/)|(?<=folder:)|(?<![^:+])(?={name}/))"
_AFTER_PART = r"(?=/|[^\w.-]|$)"
"""What comes before and after a part of a path."""


def anonymize_paths(value: Any) -> Any:
    """Replace the home folder and the user's name in a text.

    Args:
        value: A setting, or a text that contains paths. What is not a string is returned unchanged.

    Returns:
        The value with "~" for the home folder and "$USER" for the user's name.
    """
    if not isinstance(value, str):
        return value
    for home in _home_folders():
        value = re.sub(rf"(?<![\w.-]){re.escape(home)}{_AFTER_PART}", "~", value)
    name = _user_name()
    return _path_part_pattern(re.escape(name)).sub(lambda _: USER_PLACEHOLDER, value) if name else value


def restore_user_paths(text: str) -> str:
    """Undo `anonymize_paths` for the current user.

    Args:
        text: A recorded path.

    Returns:
        The path with this user's home folder and name.
    """
    home, name = find_home(), _user_name()
    text = _path_part_pattern(re.escape(USER_PLACEHOLDER)).sub(lambda _: name, text) if name else text
    return _HOME_MARK.sub(lambda _: str(home), text) if home else text


def _path_part_pattern(name: str) -> re.Pattern[str]:
    """Compile a pattern for a part of a path that has this name."""
    return re.compile(_BEFORE_PART.format(name=name) + name + _AFTER_PART)


def _home_folders() -> list[str]:
    """Return the home folder and what it resolves to; not the root, which identifies no person."""
    home = find_home()
    return sorted({str(home), str(home.resolve())} - {"/"}, key=len, reverse=True) if home else []


def _user_name() -> str | None:
    """Return the user's name if it identifies a person."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):  # the user's number has no name
        return None
    return name if len(name) >= MIN_USER_NAME_LETTERS and name != "root" else None
