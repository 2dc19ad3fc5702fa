"""Whether one row really beats another: exact McNemar tests on the same images, seed by seed, put together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deat.report.grouping import can_compare_rows, exclude_flagged_rows, has_same_test_images
from deat.report.load import ReportRow, RunResults
from deat.report.stats import summarize_accuracy, summarize_cost

TEST_DESCRIPTION = (
    "Each row is compared with {against} image by image: for every seed that both have, an exact McNemar test on the "
    "verdicts that differ, once for better and once for worse. Where either row has more seeds or images than both "
    "share, the difference is of the shared ones alone, and p says of how many. Seeds share their test images, so "
    "their tests are not independent; those of one direction are put together as twice the mean of their p-values, "
    "which holds however they depend on each other (a single seed's is taken as it is), and p is twice the smaller of "
    "the two directions', at most 1. Then Holm's correction for the number of rows. A small p says that these trained "
    "networks differ beyond the choice of test images; what another training seed would change is the standard "
    "deviation's to tell."
)


@dataclass(frozen=True)
class PairedComparison:
    """A row against another: the mean difference in accuracy, and the p-value after and before Holm's correction.

    Both are of the seeds and images that both rows have; shared says of how many, where either has others.
    """

    difference: float
    p: float
    raw: float
    seeds: int
    images: int
    gained: int
    lost: int
    shared: str = ""


def one_sided_p_value(gained: int, lost: int) -> float:
    """The exact one-sided p-value of winning so many and losing so few: a fair coin's, computed in whole numbers."""
    n = gained + lost
    term = total = 1
    for i in range(lost):
        term = term * (n - i) // (i + 1)
        total += term
    return float(total / 2**n)


def mcnemar(counts: Sequence[tuple[int, int]]) -> float:
    """The two-sided p-value of verdicts won and lost, seed by seed: exact for one seed, for several a bound.

    Wins and losses are put together apart from each other, so that seeds which contradict each other show nothing.
    """
    better = combine_p_values([one_sided_p_value(gained, lost) for gained, lost in counts])
    worse = combine_p_values([one_sided_p_value(lost, gained) for gained, lost in counts])
    return min(1.0, 2 * min(better, worse))


def combine_p_values(p_values: Sequence[float]) -> float:
    """One p-value of several that may depend on each other in any way: twice their mean, or the only one."""
    return p_values[0] if len(p_values) == 1 else min(1.0, 2 * sum(p_values) / len(p_values))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for how many there are (Holm 1979)."""
    found, least = {}, 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, (len(p_values) - place) * p))
        found[name] = least
    return {name: found[name] for name in p_values}


def compare_rows(rows: Sequence[ReportRow], baseline: ReportRow, attack: str) -> dict[str, PairedComparison]:
    """Every other row that can be compared with `against` under an attack, by name."""
    found = {
        row.name: versus for row in rows if row is not baseline and (versus := _compare_pair(row, baseline, attack))
    }
    corrected = holm({name: versus.raw for name, versus in found.items()})
    return {name: replace(versus, p=corrected[name]) for name, versus in found.items()}


def _compare_pair(row: ReportRow, baseline: ReportRow, attack: str) -> PairedComparison | None:
    theirs = {run.seed: run for run in baseline.done}
    tables = [t for run in row.done if run.seed in theirs and (t := _count_discordant(run, theirs[run.seed], attack))]
    if not tables:
        return None
    raw = mcnemar([(gained, lost) for gained, lost, _, _ in tables])
    difference = sum((gained - lost) / images for gained, lost, images, _ in tables) / len(tables)
    gained, lost, images, left = (sum(column) for column in zip(*tables, strict=True))
    seeds, images = len(tables), images // len(tables)
    others = sum(attack in run.numbers for held in (row, baseline) for run in held.done) > 2 * seeds
    told = [f"{seeds} shared seed{'' if seeds == 1 else 's'}"] if others else []
    told += [f"{images:,} shared images"] if left else []
    return PairedComparison(difference, raw, raw, seeds, images, gained, lost, ", ".join(told))


def _count_discordant(run: RunResults, other: RunResults, attack: str) -> tuple[int, int, int, int] | None:
    """Verdicts won and lost on the images that both were judged on in the same way; None where there are none.

    Behind them stand how many images these are, and how many more only one of the two was judged on.
    """
    mine, theirs = get_verdicts(run, attack), get_verdicts(other, attack)
    if mine is None or theirs is None or mine[2] != theirs[2] or not has_same_test_images(run, other):
        return None
    images, most = sorted((len(mine[0]), len(theirs[0])))
    if mine[1][:images] != theirs[1][:images]:
        return None
    pairs = list(zip(mine[0][:images], theirs[0][:images], strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs), images, most - images


def get_verdicts(run: RunResults, attack: str) -> tuple[list[bool], list[int], Any] | None:
    """Verdict and label of each image under an attack, and what a fair comparison must have in common."""
    for found in (run.evaluation, run.extra_evaluations.get("aa") if attack == "aa" else None):
        if found and attack in found.accuracy:
            settings = found.settings
            how = settings["attacks"] if attack == "worst" else settings["attacks"].get(attack)
            return found.verdicts[attack], found.labels, (settings["threat"], how)
    return None


DEFAULT_BASELINE = "m+deat"
"""The method that rows are tested against where it is among them: the one that all this is about."""
SIGNIFICANCE_LEVEL = 0.05
"""The p-value from which on two rows are not told apart."""
MAX_NAMED_ROWS = 3
"""Rows that are named, at most, before the others are counted."""


def choose_baseline(rows: Sequence[ReportRow], attack: str | None) -> ReportRow | None:
    """The row that others are tested against unless one is named: M+DEAT's, or else the most robust one.

    Both only among those that may be believed. Of several rows of M+DEAT it is the one that is called just so, if any.
    """
    sound = exclude_flagged_rows([row for row in rows if row.done])
    called = [row for row in sound if row.name == DEFAULT_BASELINE]
    mine = called or [row for row in sound if row.method == DEFAULT_BASELINE]
    return mine[0] if len(mine) == 1 else find_most_robust(sound, attack)


def select_rankable_rows(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """The rows one of which is the best: those that may be believed, or none where these were not judged alike."""
    sound = exclude_flagged_rows(rows)
    return sound if can_compare_rows(sound) else []


def find_most_robust(rows: Sequence[ReportRow], attack: str | None) -> ReportRow | None:
    """The row with the highest accuracy under an attack, the cheaper of equals; the first where none has one."""
    return max(rows, key=lambda row: _rank_key(row, attack), default=None)


def describe_ties(best: ReportRow, candidates: Sequence[ReportRow], attack: str) -> str:
    """Which rivals the paired test does not tell from the best one, for people; empty where it tells all.

    Where there are rivals that it cannot test, since no verdicts on the same images are there, the interval speaks.
    """
    others = [row for row in candidates if row is not best and summarize_accuracy(row, attack)]
    tested = compare_rows([best, *others], best, attack)
    alike = [row.name for row in others if row.name in tested and tested[row.name].p >= SIGNIFICANCE_LEVEL]
    found = summarize_accuracy(best, attack)
    parts = [f"not told apart from {_join_names(alike)} (p ≥ {SIGNIFICANCE_LEVEL})"] if alike else []
    if found and len(tested) < len(others):
        parts.append(f"95 % interval {100 * found.low:.1f} to {100 * found.high:.1f}")
    return "; ".join(parts)


def _join_names(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMED_ROWS
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:MAX_NAMED_ROWS])} and {rest} others"


def _rank_key(row: ReportRow, attack: str | None) -> tuple[float, float]:
    found, spent = summarize_accuracy(row, attack) if attack else None, summarize_cost(row)
    return (found.mean if found else -1.0), -(spent.backprops if spent else 0.0)
