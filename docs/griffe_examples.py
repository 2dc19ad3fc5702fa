"""Lets the API reference show `Example:` sections of docstrings as code: griffe knows the plural only."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the sections before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the sections of one docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
