"""Numeric sentences of the paper compared with a report's runs: how much less one row costs than another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deat.recipes.paper_numbers import PAPER_CLAIMS, PAPER_TABLES, PaperClaim
from deat.report.report_data import OTHER_SETUP_MARK
from deat.report.row_statistics import summarize_cost
from deat.report.run_results import ReportRow


@dataclass(frozen=True)
class CheckedClaim:
    """A sentence of the paper with this report's percentages.

    Attributes:
        claim: The sentence and its numbers.
        backprops: How many percent fewer backprops the faster row needs; None if a run is missing.
        seconds: How many percent less time it needs; None if a run is missing or its time was not logged.
        ran_concurrently: Whether the time was measured while several jobs ran.
        missing: Which runs are missing; empty if none.
        deviations: Settings of these runs that differ from the recipe's.
    """

    claim: PaperClaim
    backprops: float | None
    seconds: float | None
    ran_concurrently: bool
    missing: str
    deviations: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the claim as `deat report --json` prints it."""
        return {
            "claim": self.claim.text,
            "backprops": self.backprops,
            "seconds": self.seconds,
            "ran_concurrently": self.ran_concurrently,
            "missing": self.missing,
            "differs": self.deviations,
            "paper": self.claim.percent,
            "paper_tables": self.claim.percent_from_table,
        }


def check_claims(rows: Sequence[ReportRow]) -> list[CheckedClaim]:
    """Compare the paper's sentences with a report's rows.

    Args:
        rows: The rows of a report.

    Returns:
        Every sentence with at least one finished row, in the paper's order.
    """
    return [
        _check_claim(claim, rows)
        for claim in PAPER_CLAIMS
        if any(_find_finished_row(rows, claim.table_label, name) for name in (claim.faster_row, claim.slower_row))
    ]


def describe_claim_setups(claims: Sequence[CheckedClaim]) -> list[str]:
    """Describe the settings behind marked claims, one line for each setup."""
    setups = dict.fromkeys(", ".join(checked.deviations) for checked in claims if checked.deviations)
    return [f"{OTHER_SETUP_MARK} From runs with {setup} instead of the recipe's settings." for setup in setups]


def _check_claim(claim: PaperClaim, rows: Sequence[ReportRow]) -> CheckedClaim:
    faster, slower = (
        _find_finished_row(rows, claim.table_label, name) for name in (claim.faster_row, claim.slower_row)
    )
    faster_cost, slower_cost = faster and summarize_cost(faster), slower and summarize_cost(slower)
    if not faster or not slower or not faster_cost or not slower_cost:
        missing = [name for name, row in ((claim.faster_row, faster), (claim.slower_row, slower)) if not row]
        table = PAPER_TABLES[claim.table_label]
        reason = f"no finished run of {' and '.join(missing)} of {table.number} ({table.title})"
        return CheckedClaim(claim, None, None, False, reason)
    return CheckedClaim(
        claim,
        _percent_saved(faster_cost.backprops, slower_cost.backprops),
        _percent_saved(faster_cost.minutes, slower_cost.minutes),
        faster_cost.ran_concurrently or slower_cost.ran_concurrently,
        "",
        tuple(dict.fromkeys((*faster.deviations, *slower.deviations))),
    )


def _find_finished_row(rows: Sequence[ReportRow], table: str, name: str) -> ReportRow | None:
    """The finished row at this place in the paper, if possible one in the paper's own setup."""
    candidates = [row for row in rows if (row.table, row.paper_row) == (table, name) and row.finished_runs]
    return max(candidates, key=lambda row: not row.deviations, default=None)


def _percent_saved(faster: float | None, slower: float | None) -> float | None:
    return None if faster is None or not slower else 100 * (1 - faster / slower)
