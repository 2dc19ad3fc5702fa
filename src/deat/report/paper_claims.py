"""The paper's numeric sentences beside ours: how much less a row costs than another, in backprops and on the clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from deat.recipes.paper_tables import CLAIMS, TABLES, Claim
from deat.report.grouping import OTHER
from deat.report.load import ReportRow
from deat.report.stats import Cost, cost


@dataclass(frozen=True)
class Checked:
    """A claim with our percentages; None where the runs to compute them are not there, and `missing` says which.

    differs is what these runs were given in place of the paper's setup.
    """

    claim: Claim
    backprops: float | None
    seconds: float | None
    crowded: bool
    missing: str
    differs: tuple[str, ...] = ()


def check_claims(rows: Sequence[ReportRow]) -> list[Checked]:
    """The paper's claims that some finished run here is about, beside ours."""
    return [_check(claim, rows) for claim in CLAIMS if any(_spent(rows, claim.table, n) for n in _needed(claim))]


def given(claims: Sequence[Checked]) -> list[str]:
    """What the runs behind marked claims were given, for the line below them."""
    found = dict.fromkeys(", ".join(c.differs) for c in claims if c.differs)
    return [f"{OTHER} From runs that were given {text}." for text in found]


def _needed(claim: Claim) -> tuple[str, str]:
    return claim.fast, claim.slow


def _spent(rows: Sequence[ReportRow], table: str, name: str) -> Cost | None:
    row = _find(rows, table, name)
    return cost(row) if row else None


def _check(claim: Claim, rows: Sequence[ReportRow]) -> Checked:
    fast, slow = (_find(rows, claim.table, name) for name in _needed(claim))
    spent, other = fast and cost(fast), slow and cost(slow)
    if not spent or not other:
        lacking = [name for name, found in ((claim.fast, spent), (claim.slow, other)) if not found]
        place = f"{TABLES[claim.table].number} ({TABLES[claim.table].title})"
        return Checked(claim, None, None, False, f"no finished run of {' and '.join(lacking)} of {place}")
    clock = _saving(spent.minutes, other.minutes)
    differs = tuple(dict.fromkeys(text for row in (fast, slow) if row for text in row.differs))
    return Checked(claim, _saving(spent.backprops, other.backprops), clock, spent.crowded or other.crowded, "", differs)


def _find(rows: Sequence[ReportRow], table: str, name: str) -> ReportRow | None:
    """The row of that place in the paper: a finished one if there is, and best in the paper's own setup."""
    held = [row for row in rows if (row.table, row.paper_row) == (table, name)]
    return max(held, key=lambda row: (bool(row.done), not row.differs), default=None)


def _saving(fast: float | None, slow: float | None) -> float | None:
    """How many percent less."""
    return None if fast is None or not slow else 100 * (1 - fast / slow)
