"""One part of the page of `deat report`, to be read by a test."""

from typing import Any

from deat.report import html


def render_section(name: str, context: Any) -> str:
    """Render a macro of templates/sections.html.j2 with the data that it shows."""
    return str(getattr(html._environment().get_template("sections.html.j2").module, name)(context))
