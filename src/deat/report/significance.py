"""Whether one row is really better than another: exact McNemar tests image by image, combined over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deat.evaluation.intervals import one_sided_p_value
from deat.report.problems import exclude_flagged_rows
from deat.report.row_grouping import can_compare_rows, has_same_test_images
from deat.report.row_statistics import format_interval, get_mean_accuracy, summarize_accuracy, summarize_cost
from deat.report.run_results import ReportRow, RunResults

TEST_DESCRIPTION = (
    "Each row is compared with {baseline} example by example. For every seed that both rows have, an exact McNemar test "
    "counts the examples that only one of the two classifies correctly, once for better and once for worse. Only the "
    "seeds and examples that both rows have are compared; where a row has others, the p-value names their number. "
    "Seeds share their test examples, so their tests are not independent: for each direction, their p-values "
    "are combined as twice their mean, which is valid under any dependence (a single seed's p-value is used as it is). "
    "p is twice the smaller of the two directions' p-values, at most 1, with Holm's correction for the number "
    "of rows. A small p means that these trained networks differ by more than the choice of test examples explains; how "
    "much another training seed would change is shown by the standard deviation."
)
DEFAULT_BASELINE = "m+deat"
"""The method that rows are compared with if one row uses it: the method of the paper."""
SIGNIFICANCE_LEVEL = 0.05
"""Two rows with this p-value or a larger one are statistically indistinguishable."""
MAX_NAMED_ROWS = 3
"""The most rows that a sentence names before it counts the others."""


@dataclass(frozen=True)
class PairedComparison:
    """A row compared with a baseline, over the seeds and images that both have.

    Attributes:
        difference: The row's mean accuracy less the baseline's.
        p: The p-value after Holm's correction.
        uncorrected_p: The p-value before it.
        seeds: How many seeds both have.
        images: How many images both have, on average over these seeds.
        gained: Images that only the row classifies correctly, summed over seeds.
        lost: Images that only the baseline classifies correctly.
        shared_note: How many seeds and images both share, where one has more.
    """

    difference: float
    p: float
    uncorrected_p: float
    seeds: int
    images: int
    gained: int
    lost: int
    shared_note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as `deat report --json` prints it."""
        return {
            "difference": self.difference,
            "p": self.p,
            "raw": self.uncorrected_p,
            "seeds": self.seeds,
            "images": self.images,
            "gained": self.gained,
            "lost": self.lost,
            "shared": self.shared_note,
        }


def mcnemar(counts: Sequence[tuple[int, int]]) -> float:
    """Return the two-sided p-value of McNemar's test over several seeds.

    The two directions are combined separately, so that seeds which contradict each other show nothing.

    Args:
        counts: (gained, lost) for each seed.

    Returns:
        The p-value: exact for one seed, an upper bound for several.
    """
    better = combine_p_values([one_sided_p_value(gained, lost) for gained, lost in counts])
    worse = combine_p_values([one_sided_p_value(lost, gained) for gained, lost in counts])
    return min(1.0, 2 * min(better, worse))


def combine_p_values(p_values: Sequence[float]) -> float:
    """Combine p-values that may depend on each other in any way: twice their mean, or the only one."""
    return p_values[0] if len(p_values) == 1 else min(1.0, 2 * sum(p_values) / len(p_values))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values for their number (Holm 1979)."""
    corrected, least = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, (len(p_values) - rank) * p))
        corrected[name] = least
    return {name: corrected[name] for name in p_values}


def compare_rows(rows: Sequence[ReportRow], baseline: ReportRow, attack: str) -> dict[str, PairedComparison]:
    """Compare rows with a baseline under one attack.

    Args:
        rows: The rows; the baseline may be among them.
        baseline: The row to compare with.
        attack: The attack's name, "natural" or "worst".

    Returns:
        By name, the comparison of every row that shares seeds and test images with the baseline.
    """
    comparisons = {
        row.name: comparison
        for row in rows
        if row is not baseline and (comparison := _compare_pair(row, baseline, attack))
    }
    corrected = holm({name: comparison.uncorrected_p for name, comparison in comparisons.items()})
    return {name: replace(comparison, p=corrected[name]) for name, comparison in comparisons.items()}


def choose_baseline(rows: Sequence[ReportRow], attack: str | None) -> ReportRow | None:
    """Choose the row that others are compared with if the user names none.

    This is the row of M+DEAT, or the most robust row if there is none or there are several. Rows with a sanity flag
    are left out unless all have one. Of several rows of M+DEAT, one with exactly this name is chosen.

    Args:
        rows: The rows of a report.
        attack: The attack that rows are ranked by.

    Returns:
        The baseline; None if no row has finished runs.
    """
    candidates = exclude_flagged_rows([row for row in rows if row.finished_runs])
    named = [row for row in candidates if row.name == DEFAULT_BASELINE]
    defaults = named or [row for row in candidates if row.method == DEFAULT_BASELINE]
    return defaults[0] if len(defaults) == 1 else find_most_robust(candidates, attack)


def select_rankable_rows(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Select the rows that may be called the best: those without a flag, or none if they cannot be compared."""
    candidates = exclude_flagged_rows(rows)
    return candidates if can_compare_rows(candidates) else []


def find_most_robust(rows: Sequence[ReportRow], attack: str | None) -> ReportRow | None:
    """Find the row with the highest accuracy under an attack; of equal rows the cheaper one."""
    return max(rows, key=lambda row: _rank_key(row, attack), default=None)


def find_ties(best: ReportRow, candidates: Sequence[ReportRow], attack: str) -> list[str]:
    """Find the rows that are statistically indistinguishable from the best one.

    Args:
        best: The best row.
        candidates: The rows that it was chosen from.
        attack: The attack that it is the best under.

    Returns:
        Their names. Rows that share no images with it cannot be tested, so they are not among them.
    """
    others = [row for row in candidates if row is not best]
    comparisons = compare_rows([best, *others], best, attack)
    return [name for name, comparison in comparisons.items() if comparison.p >= SIGNIFICANCE_LEVEL]


def describe_ties(best: ReportRow, candidates: Sequence[ReportRow], attack: str) -> str:
    """Describe which rows are statistically indistinguishable from the best one.

    Args:
        best: The best row.
        candidates: The rows that it was chosen from.
        attack: The attack that it is the best under.

    Returns:
        A phrase with the rows' names, empty if there are none. It has the best row's 95 % interval if some rows share
        no images with it, so that they cannot be tested.
    """
    others = [row for row in candidates if row is not best and summarize_accuracy(row, attack)]
    comparisons = compare_rows([best, *others], best, attack)
    ties = find_ties(best, others, attack)
    cell = summarize_accuracy(best, attack)
    parts = [f"statistically indistinguishable from {_join_names(ties)} (p ≥ {SIGNIFICANCE_LEVEL})"] if ties else []
    if cell and len(comparisons) < len(others):
        parts.append(f"95 % interval {format_interval(cell)}")
    return "; ".join(parts)


def _compare_pair(row: ReportRow, baseline: ReportRow, attack: str) -> PairedComparison | None:
    runs_by_seed = {run.seed: run for run in baseline.finished_runs}
    counts = [
        count
        for run in row.finished_runs
        if run.seed in runs_by_seed and (count := _count_discordant(run, runs_by_seed[run.seed], attack))
    ]
    if not counts:
        return None
    p = mcnemar([(gained, lost) for gained, lost, _, _ in counts])
    difference = sum((gained - lost) / images for gained, lost, images, _ in counts) / len(counts)
    gained, lost, images, unshared = (sum(column) for column in zip(*counts, strict=True))
    seeds, images = len(counts), images // len(counts)
    num_results = sum(attack in run.metrics for r in (row, baseline) for run in r.finished_runs)
    notes = [f"{seeds} shared seed{'' if seeds == 1 else 's'}"] if num_results > 2 * seeds else []
    notes += [f"{images:,} shared examples"] if unshared else []
    return PairedComparison(difference, p, p, seeds, images, gained, lost, ", ".join(notes))


def _count_discordant(run: RunResults, other: RunResults, attack: str) -> tuple[int, int, int, int] | None:
    """Count the images that only one of two runs classifies correctly.

    Returns:
        How many only `run` and only `other` classifies correctly, how many images both were evaluated on, and how many
        more one of them was; None if they were not evaluated in the same way on the same images.
    """
    verdicts, other_verdicts = _get_verdicts(run, attack), _get_verdicts(other, attack)
    if (
        verdicts is None
        or other_verdicts is None
        or verdicts[2] != other_verdicts[2]
        or not has_same_test_images(run, other)
    ):
        return None
    images, most = sorted((len(verdicts[0]), len(other_verdicts[0])))
    if verdicts[1][:images] != other_verdicts[1][:images]:
        return None
    pairs = list(zip(verdicts[0][:images], other_verdicts[0][:images], strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs), images, most - images


def _get_verdicts(run: RunResults, attack: str) -> tuple[list[bool], list[int], Any] | None:
    """Each image's verdict and label under an attack, and the settings that a fair comparison must share."""
    if run.evaluation and run.evaluation.task.is_graded:
        return None  # images are not right or wrong, so that McNemar's test does not apply
    for evaluation in (run.evaluation, run.extra_evaluations.get("aa") if attack == "aa" else None):
        if evaluation and attack in evaluation.accuracy:
            settings = evaluation.settings
            attack_settings = settings["attacks"] if attack == "worst" else settings["attacks"].get(attack)
            return evaluation.verdicts[attack], evaluation.labels, (settings["threat"], attack_settings)
    return None


def _join_names(names: Sequence[str]) -> str:
    others = len(names) - MAX_NAMED_ROWS
    return ", ".join(names) if others <= 1 else f"{', '.join(names[:MAX_NAMED_ROWS])} and {others} others"


def _rank_key(row: ReportRow, attack: str | None) -> tuple[float, float]:
    cost = summarize_cost(row)
    return get_mean_accuracy(row, attack) if attack else -1.0, -(cost.backprops if cost else 0.0)
