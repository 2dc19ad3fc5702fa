"""The paper's numeric sentences beside ours: how much less a row costs than another, in backprops and on the clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from deat.recipes.paper_tables import PAPER_CLAIMS, PAPER_TABLES, PaperClaim
from deat.report.grouping import OTHER_SETUP_MARK
from deat.report.load import ReportRow
from deat.report.stats import RowCost, summarize_cost


@dataclass(frozen=True)
class CheckedClaim:
    """A claim with our percentages; None where the runs to compute them are not there, and `missing` says which.

    differs is what these runs were given in place of the paper's setup.
    """

    claim: PaperClaim
    backprops: float | None
    seconds: float | None
    crowded: bool
    missing: str
    differs: tuple[str, ...] = ()


def check_claims(rows: Sequence[ReportRow]) -> list[CheckedClaim]:
    """The paper's claims that some finished run here is about, beside ours."""
    return [
        _check_claim(claim, rows)
        for claim in PAPER_CLAIMS
        if any(_find_cost(rows, claim.table_label, n) for n in _compared_row_names(claim))
    ]


def describe_claim_setups(claims: Sequence[CheckedClaim]) -> list[str]:
    """What the runs behind marked claims were given, for the line below them."""
    found = dict.fromkeys(", ".join(c.differs) for c in claims if c.differs)
    return [f"{OTHER_SETUP_MARK} From runs that were given {text}." for text in found]


def _compared_row_names(claim: PaperClaim) -> tuple[str, str]:
    return claim.faster_row, claim.slower_row


def _find_cost(rows: Sequence[ReportRow], table: str, name: str) -> RowCost | None:
    row = _find_paper_row(rows, table, name)
    return summarize_cost(row) if row else None


def _check_claim(claim: PaperClaim, rows: Sequence[ReportRow]) -> CheckedClaim:
    fast, slow = (_find_paper_row(rows, claim.table_label, name) for name in _compared_row_names(claim))
    spent, other = fast and summarize_cost(fast), slow and summarize_cost(slow)
    if not spent or not other:
        lacking = [name for name, found in ((claim.faster_row, spent), (claim.slower_row, other)) if not found]
        place = f"{PAPER_TABLES[claim.table_label].number} ({PAPER_TABLES[claim.table_label].title})"
        return CheckedClaim(claim, None, None, False, f"no finished run of {' and '.join(lacking)} of {place}")
    clock = _percent_saved(spent.minutes, other.minutes)
    differs = tuple(dict.fromkeys(text for row in (fast, slow) if row for text in row.differs))
    return CheckedClaim(
        claim, _percent_saved(spent.backprops, other.backprops), clock, spent.crowded or other.crowded, "", differs
    )


def _find_paper_row(rows: Sequence[ReportRow], table: str, name: str) -> ReportRow | None:
    """The row of that place in the paper: a finished one if there is, and best in the paper's own setup."""
    held = [row for row in rows if (row.table, row.paper_row) == (table, name)]
    return max(held, key=lambda row: (bool(row.done), not row.differs), default=None)


def _percent_saved(fast: float | None, slow: float | None) -> float | None:
    """How many percent less."""
    return None if fast is None or not slow else 100 * (1 - fast / slow)
