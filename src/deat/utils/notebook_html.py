"""How objects show themselves in a notebook: small tables and curves as HTML, and tables of pandas."""

import base64
import importlib
import io
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from deat.errors import UsageError

_TEMPLATE = """
<div style="max-width: 60em">
<strong>{{ title }}</strong>
{%- for line in lines %}<div>{{ line }}</div>{% endfor %}
{%- if curves %}
<svg viewBox="0 0 {{ width + 130 }} {{ height + 34 }}" width="{{ width + 130 }}" role="img" aria-label="{{ curves_title }}"
 style="font: 11px sans-serif; display: block; margin: 6px 0">
<rect x="34" y="8" width="{{ width }}" height="{{ height }}" fill="none" stroke="#999"/>
<text x="30" y="16" text-anchor="end" fill="currentColor">{{ top }}</text>
<text x="30" y="{{ height + 8 }}" text-anchor="end" fill="currentColor">{{ bottom }}</text>
<text x="{{ 34 + width / 2 }}" y="{{ height + 28 }}" text-anchor="middle" fill="currentColor">{{ curves_title }}</text>
{%- for curve in curves %}
<polyline points="{{ curve.points }}" fill="none" stroke="{{ curve.color }}" stroke-width="2"/>
<text x="{{ 40 + width }}" y="{{ 20 + 16 * loop.index0 }}" fill="{{ curve.color }}">{{ curve.name }}</text>
{%- endfor %}
</svg>
{%- endif %}
{%- if images %}
<div>{% for name, image in images %}<figure style="display: inline-block; margin: 4px; text-align: center">
<img src="data:image/png;base64,{{ image }}" alt="{{ name }}" style="width: 64px; image-rendering: pixelated">
<figcaption>{{ name }}</figcaption></figure>{% endfor %}</div>
{%- endif %}
{%- if rows %}
<table><thead><tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody></table>
{%- endif %}
</div>
"""
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
_WIDTH, _HEIGHT = 320, 120


def render_html(
    title: str,
    lines: Iterable[str] = (),
    *,
    header: Sequence[str] = (),
    rows: Iterable[Sequence[str]] = (),
    curves: Mapping[str, Sequence[float | None]] | None = None,
    curves_title: str = "",
    images: Sequence[tuple[str, Any]] = (),
) -> str:
    """Render what a notebook shows of an object. All text is escaped.

    Args:
        title: The first line, in bold.
        lines: Further lines.
        header: The names of the table's columns.
        rows: The table; no rows for none.
        curves: Values from 0 to 1 of each named curve, None where there is none; curves without two values are left out.
        curves_title: What the curves show.
        images: Captions and images: arrays (C, H, W) of uint8 with one or three channels.

    Returns:
        HTML.
    """
    drawn = {name: values for name, values in (curves or {}).items() if sum(v is not None for v in values) > 1}
    points = [
        {"name": name, "points": _points(v), "color": c} for (name, v), c in zip(drawn.items(), _COLORS, strict=False)
    ]
    return str(
        _template().render(
            title=title,
            lines=list(lines),
            header=header,
            rows=list(rows),
            curves=points,
            curves_title=curves_title,
            images=[(name, _encode_png(image)) for name, image in images],
            width=_WIDTH,
            height=_HEIGHT,
            top="100 %",
            bottom="0",
        )
    )


def make_data_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Make a pandas.DataFrame.

    Args:
        columns: The values of each column, all of one length.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise UsageError(f"to_pandas() needs pandas ({error}): pip install pandas.") from None
    return pandas.DataFrame(dict(columns))


@cache
def _template() -> Any:
    from jinja2 import Environment

    return Environment(autoescape=True).from_string(_TEMPLATE.strip())


def _points(values: Sequence[float | None]) -> str:
    step = _WIDTH / max(1, len(values) - 1)
    points = [(i, min(1.0, max(0.0, v))) for i, v in enumerate(values) if v is not None]
    return " ".join(f"{34 + i * step:.1f},{8 + _HEIGHT * (1 - v):.1f}" for i, v in points)


def _encode_png(image: Any) -> str:
    from PIL import Image

    array = np.asarray(image)
    data = io.BytesIO()
    Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0)).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()
