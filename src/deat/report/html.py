"""Renders the report as one self-contained HTML page from templates; it needs no network and no other file."""

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from deat.report.draw_figures import MARKERS, ROW_COLORS
from deat.report.page_data import Report, build_chart_data, build_page_context
from deat.utils.text import make_printable
from deat.version import VERSION


def render_page(report: Report) -> str:
    """Render a report as one HTML page.

    Args:
        report: What the page shows.

    Returns:
        The page. It contains its style and its script, and its Content-Security-Policy allows nothing else.
    """
    css, js = read_asset("page.css"), read_asset("page.js")
    template = _environment().get_template("page.html.j2")
    return template.render(
        **build_page_context(report),
        css=css,
        js=js,
        content_security_policy=build_content_security_policy(css, js),
        inline_json=to_inline_json(build_chart_data(report)),
        version=VERSION,
    )


def render_template(name: str, **context: Any) -> str:
    """Render a whole template of templates/, every text of it escaped."""
    return _environment().get_template(name).render(**context)


def build_content_security_policy(css: str, js: str) -> str:
    """Build a Content-Security-Policy under which only this style and script apply, and nothing is fetched."""
    return (
        f"default-src 'none'; script-src '{_csp_hash(js)}'; style-src '{_csp_hash(css)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def to_inline_json(value: Any) -> str:
    """Format JSON that cannot end the script element that contains it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def read_asset(name: str) -> str:
    """Read one of the page's own files."""
    return files("deat.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    """The templates, in which every text is made printable and escaped."""
    environment = Environment(
        loader=PackageLoader("deat.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(color_count=len(ROW_COLORS), marker_count=len(MARKERS))
    return environment


def _finalize(value: Any) -> Any:
    """A text without control characters; markup stays."""
    return make_printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
