"""What a report is called, and what all of its rows have in common."""

from collections.abc import Sequence

from deat.report.report_data import ReportData
from deat.report.run_results import ReportRow
from deat.threat import format_threat
from deat.utils.text import make_printable
from deat.utils.user_code import is_file_spec

MAX_NAMED_METHODS = 3
"""A title with more methods counts them."""


def format_title(data: ReportData) -> str:
    """Return a report's title: the recipes if their rows are the paper's, else its methods and data sets.

    Args:
        data: What the report is about.
    """
    if data.recipes and data.paper_tables:
        return ", ".join(dict.fromkeys(make_printable(recipe) for recipe in data.recipes))
    names = dict.fromkeys(row.runs[0].record["data"]["name"] for row in data.rows if row.runs and row.runs[0].record)
    methods = list(dict.fromkeys(_name_method(row) for row in data.rows))
    listed = " and ".join(filter(None, (", ".join(methods[:-1]), *methods[-1:])))
    what = listed if len(methods) <= MAX_NAMED_METHODS else f"{len(methods)} methods"
    return make_printable(f"{what} on {' and '.join(names)}" if names else what)


def _name_method(row: ReportRow) -> str:
    """The method's name; for one from a file that no run recorded, the row's, which has no path."""
    recorded = next((run.record["method"]["name"] for run in row.runs if run.record), None)
    return str(recorded or (row.name if is_file_spec(row.method) else row.method))


def describe_common_setup(rows: Sequence[ReportRow]) -> list[str]:
    """Describe what all rows have in common of the data set, the network, and the threat model.

    Args:
        rows: The rows of a report.

    Returns:
        A text for each of them that all rows share.
    """
    records = [run.record for row in rows for run in row.runs if run.record]
    facts = [
        {str(record["data"]["name"]) for record in records},
        {str(record["model"]["name"]) for record in records},
        {format_threat(record["threat"]) for record in records},
    ]
    return [values.pop() for values in facts if len(values) == 1]
