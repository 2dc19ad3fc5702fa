"""The paper's numeric sentences beside ours: how much less a row costs than another, in backprops and on the clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from deat.recipes.paper import CLAIMS, Claim
from deat.report.cells import cost
from deat.report.collect import Row


@dataclass(frozen=True)
class Checked:
    """A claim with our percentages; None where the runs to compute them are not there, and `missing` says which."""

    claim: Claim
    backprops: float | None
    seconds: float | None
    crowded: bool
    missing: str


def check_claims(rows: Sequence[Row]) -> list[Checked]:
    """Every claim of the paper, beside ours."""
    return [_check(claim, rows) for claim in CLAIMS]


def _check(claim: Claim, rows: Sequence[Row]) -> Checked:
    fast, slow = (_find(rows, claim.table, name) for name in (claim.fast, claim.slow))
    spent, other = fast and cost(fast), slow and cost(slow)
    if not spent or not other:
        lacking = [name for name, found in ((claim.fast, spent), (claim.slow, other)) if not found]
        return Checked(claim, None, None, False, f"no finished run of {' and '.join(lacking)}")
    clock = _saving(spent.minutes, other.minutes)
    return Checked(claim, _saving(spent.backprops, other.backprops), clock, spent.crowded or other.crowded, "")


def _find(rows: Sequence[Row], table: str, name: str) -> Row | None:
    return next((row for row in rows if (row.table, row.paper_row) == (table, name)), None)


def _saving(fast: float | None, slow: float | None) -> float | None:
    """How many percent less."""
    return None if fast is None or not slow else 100 * (1 - fast / slow)
