"""Paths in what people share: without the name of their user's home folder, and with one's own in it again."""

import re
from pathlib import Path
from typing import Any

_MARK = re.compile(r"(?<![^:+])~(?=/|$)")
"""The home folder's sign, where a path begins: also after `folder:` and `m+`."""


def tidy(value: Any) -> Any:
    """A setting, or a text with paths in it, without the name of its user's home folder."""
    home = str(Path.home())
    if not isinstance(value, str) or home == "/":  # a home that is the root tells nothing
        return value
    return re.sub(rf"(?<![\w.-]){re.escape(home)}(?=/|[^\w.-]|$)", "~", value)


def at_home(text: str) -> str:
    """A recorded path with the user's home folder in it again."""
    home = str(Path.home())
    return _MARK.sub(lambda _: home, text)
