"""The numbers of a report's table, summarised over seeds, and how they are formatted for people."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from deat.evaluation.intervals import wilson_interval_of_share
from deat.evaluation.results import is_real_attack
from deat.report.choose_evaluations import strength_key
from deat.report.run_results import COST_COLUMNS, ReportRow, RunResults, collect_columns
from deat.tasks import CLASSIFICATION, Task, build_task
from deat.utils.text import format_percent

MIXED_SAMPLES_NOTE = (
    "Where another seed of the row has more examples, the standard deviation also reflects the choice of examples."
)
CONCURRENT_MARK = "*"
"""Marks minutes that were measured while several jobs ran at once."""


@dataclass(frozen=True)
class AccuracyCell:
    """A row's accuracy under one attack.

    Attributes:
        mean: The mean over seeds.
        sd: The standard deviation over seeds; None for a single seed.
        low: The lower end of the 95 % interval for the choice of test images.
        high: Its upper end.
        seeds: The number of seeds.
        images: The smallest number of test images of a seed, which the interval is for.
        images_per_seed: The number of test images of each seed.
        sample_note: Which seeds and images this is from, where they are fewer than in the rest of the row.
        is_percent: Whether the values are shown in percent. R², for example, is not.
    """

    mean: float
    sd: float | None
    low: float
    high: float
    seeds: int
    images: int
    images_per_seed: tuple[int, ...]
    sample_note: str
    is_percent: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the accuracy as `deat report --json` prints it."""
        return {
            "mean": self.mean,
            "sd": self.sd,
            "low": self.low,
            "high": self.high,
            "seeds": self.seeds,
            "images": self.images,
            "images_per_seed": self.images_per_seed,
            "sample_note": self.sample_note,
        }


@dataclass(frozen=True)
class RowCost:
    """What a row cost: means over seeds.

    Attributes:
        backprops: Backward passes.
        minutes: Training time; None if no time was logged.
        ran_concurrently: Whether the times were measured while other jobs ran.
    """

    backprops: float
    minutes: float | None
    ran_concurrently: bool

    def as_json(self) -> dict[str, Any]:
        """Return the cost as `deat report --json` prints it."""
        return {"backprops": self.backprops, "minutes": self.minutes, "ran_concurrently": self.ran_concurrently}


def list_attacks(rows: Sequence[ReportRow]) -> list[str]:
    """List the attacks that rows have accuracies for: natural first, then from weak to strong, worst of all last."""
    names = [n for n in collect_columns(rows) if n not in COST_COLUMNS and not n.startswith("last ")]
    return sorted(names, key=strength_key)


def choose_ranking_attack(rows: Sequence[ReportRow]) -> str | None:
    """Choose the accuracy that rows are ranked by.

    This is "worst" if every finished run was evaluated with the same attacks, at least two, and the strongest is
    among them. Otherwise it is the strongest attack that most rows have, if possible one of more than one step.

    Args:
        rows: The rows of a report.

    Returns:
        The attack's name; None if no row has an accuracy.
    """
    num_rows = {name: sum(name in row.columns for row in rows) for name in list_attacks(rows)}
    attacks = [name for name in num_rows if name not in ("natural", "worst")]
    robust = [name for name in attacks if is_robustness(name, rows)] or attacks or list(num_rows)
    strongest = max(robust, key=lambda name: (num_rows[name], strength_key(name)), default=None)
    attack_sets = {
        frozenset(result.name for result in run.evaluation.results)
        for row in rows
        for run in row.finished_runs
        if run.evaluation
    }
    shared_attacks = next(iter(attack_sets)) - {"natural"} if len(attack_sets) == 1 else frozenset()
    is_worst_fair = len(shared_attacks) > 1 and strongest in shared_attacks and "worst" in num_rows
    return "worst" if is_worst_fair else strongest


def is_robustness(attack: str, rows: Sequence[ReportRow]) -> bool:
    """Whether the accuracy under an attack may be called robustness: not without attack, nor under a single step."""
    described = [
        evaluation.settings.get("attacks", {}).get(attack, {})
        for row in rows
        for run in row.finished_runs
        for evaluation in (run.evaluation, *run.extra_evaluations.values())
        if evaluation and attack in evaluation.verdicts
    ]
    return attack == "worst" or any(is_real_attack(attack, settings) for settings in described)


def summarize_accuracy(row: ReportRow, attack: str) -> AccuracyCell | None:
    """Summarise a row's accuracy over its finished seeds; None if no seed has it.

    The interval is Wilson's for the mean accuracy on the fewest images of any seed. Seeds share their test images, so
    more seeds do not narrow it.
    """
    statistics = row.seed_statistics(attack)
    if statistics is None or not math.isfinite(statistics.mean):
        return None
    images_per_seed = tuple(run.images_by_attack[attack] for run in row.finished_runs if attack in run.metrics)
    images = min(images_per_seed)
    low, high = _average_bootstrap(row, attack) or wilson_interval_of_share(statistics.mean, images)
    note = _describe_sample(row, attack, images_per_seed)
    return AccuracyCell(
        statistics.mean,
        statistics.sd,
        low,
        high,
        len(images_per_seed),
        images,
        images_per_seed,
        note,
        is_in_percent(row),
    )


def get_task(row: ReportRow) -> Task:
    """Return what a row's outputs and labels mean, by the evaluation of its first finished run, or else by its record."""
    evaluated = (run.evaluation.task for run in row.finished_runs if run.evaluation)
    recorded = (build_task(run.record.get("task")) for run in row.runs if run.record)
    return next(chain(evaluated, recorded), CLASSIFICATION)


def is_in_percent(row: ReportRow) -> bool:
    """Whether the first metric of a row's task is a share, which is shown in percent."""
    return get_task(row).format_metric(0.5).endswith("%")


def _average_bootstrap(row: ReportRow, attack: str) -> tuple[float, float] | None:
    """The bootstrap interval of a metric of a whole set, averaged over seeds; None for an accuracy."""
    if not get_task(row).is_graded:
        return None
    pairs = []
    for run in row.finished_runs:
        evaluation, name = run.evaluation, attack
        if attack.startswith("last "):
            evaluation, name = run.extra_evaluations.get("last"), attack.removeprefix("last ")
        if evaluation and name in evaluation.intervals:
            pairs.append(evaluation.intervals[name])
    return (fmean(low for low, _ in pairs), fmean(high for _, high in pairs)) if pairs else None


def summarize_cost(row: ReportRow) -> RowCost | None:
    """Summarise what a row's finished runs cost; None if no run is finished."""
    backprops = row.seed_statistics("backprops")
    return RowCost(backprops.mean, row.minutes, row.ran_concurrently) if backprops else None


def get_mean_accuracy(row: ReportRow, attack: str) -> float:
    """Return a row's mean accuracy for ranking: -1 if it has none, so that it ranks last."""
    cell = summarize_accuracy(row, attack)
    return cell.mean if cell else -1.0


def find_pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Find the points that no other point beats.

    Args:
        points: (cost, accuracy) pairs.

    Returns:
        For each point, whether no other one is at least as cheap and as accurate, and better in one of the two.
    """
    return [not any(c <= cost and a >= acc and (c, a) != (cost, acc) for c, a in points) for cost, acc in points]


def find_low_outliers(accuracies: Sequence[float]) -> list[bool]:
    """Find the accuracies that would leave little room for all others on one axis.

    Args:
        accuracies: Accuracies in [0, 1].

    Returns:
        For each, whether it is below half of the best, with a gap to the rest that is wider than the rest's range.
        The rest must be at least two.
    """
    half = max(accuracies, default=0.0) / 2
    high, low = [a for a in accuracies if a >= half], [a for a in accuracies if a < half]
    if len(high) < 2 or not low or min(high) - max(low) <= max(high) - min(high):
        return [False] * len(accuracies)
    return [a in low for a in accuracies]


def format_attack_name(attack: str) -> str:
    """Format an attack's name as the paper writes it: pgd-50x10 is PGD-50×10."""
    if attack in ("natural", "worst"):
        return attack
    name, *rest = attack.split(" ", 1)
    return " ".join([re.sub(r"(\d)X(\d)", r"\1×\2", name.upper()).replace("-LAST", ", last iterate"), *rest])


def format_seeds(seeds: Sequence[int]) -> str:
    """Format a list of seeds: seed 1, or seeds 1, 2."""
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def format_value(value: float, row: ReportRow) -> str:
    """Format a value of a row's first metric: a share in percent, with its unit, and any other as it is."""
    return f"{format_percent(value)} %" if is_in_percent(row) else f"{value:.3f}"


def format_mean(cell: AccuracyCell) -> str:
    """Format a mean accuracy in percent, or another metric as it is."""
    return format_percent(cell.mean) if cell.is_percent else f"{cell.mean:.3f}"


def format_deviation(cell: AccuracyCell) -> str:
    """Format the standard deviation that follows a mean; empty for a single seed."""
    if cell.sd is None:
        return ""
    return f" ± {format_percent(cell.sd)}" if cell.is_percent else f" ± {cell.sd:.3f}"


def format_interval(cell: AccuracyCell) -> str:
    """Format an interval, as the mean is formatted."""
    if not cell.is_percent:
        return f"{cell.low:.3f} to {cell.high:.3f}"
    return f"{100 * cell.low:.1f} to {100 * cell.high:.1f}"


def format_minutes(cost: RowCost | None) -> str:
    """Format minutes, with a mark if several jobs ran at once; a dash if there are none."""
    if cost is None or cost.minutes is None:
        return "—"
    minutes = f"{cost.minutes:.1f}" if cost.minutes >= 10 else f"{cost.minutes:#.2g}"
    return minutes + (CONCURRENT_MARK if cost.ran_concurrently else "")


def describe_coverage(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Describe which attacks "worst" covers or why it is missing, and which attacks the last epoch lacks."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for description in dict.fromkeys(_describe_worst(run) for run in row.finished_runs):
            groups.setdefault(description, []).append(row.name)
    for (subject, predicate), names in groups.items():
        rows_text = "" if len(groups) == 1 else f" of {', '.join(names)}"
        yield f"{subject}{rows_text} {predicate}"
    rows_with_last = [row for row in rows if "last natural" in row.columns]
    missing = [
        name
        for name in list_attacks(rows_with_last)
        if any(name in row.columns and f"last {name}" not in row.columns for row in rows_with_last)
    ]
    if attacks := [format_attack_name(name) for name in missing if name != "worst"]:
        consequence = ", so its worst is not comparable and not shown" if "worst" in missing else ""
        yield f"The last epoch was not evaluated with {', '.join(attacks)}{consequence}."


def describe_samples(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Describe which accuracies are from the first images of the test set only."""
    rows_by_sample: dict[tuple[str, int], dict[str, list[str]]] = {}
    for row in rows:
        seeds_by_sample: dict[tuple[str, int], list[int]] = {}
        for run in row.finished_runs:
            separate = run.extra_evaluations["aa"] if run.has_separate_autoattack else None
            for prefix, evaluation in (("", run.evaluation), ("AA of ", separate)):
                if evaluation and evaluation.settings["sample"]:
                    seeds_by_sample.setdefault((prefix, evaluation.num_images), []).append(run.seed)
        for sample, seeds in seeds_by_sample.items():
            rows_by_sample.setdefault(sample, {}).setdefault(format_seeds(seeds), []).append(row.name)
    for (prefix, images), names_by_seeds in rows_by_sample.items():
        where = "; ".join(f"{seeds} of {', '.join(names)}" for seeds, names in names_by_seeds.items())
        mixed = f" {MIXED_SAMPLES_NOTE}" if prefix and _has_mixed_samples(rows, images) else ""
        yield f"Evaluated on a sample, the first {images:,} test examples: {prefix}{where}.{mixed}"


def describe_single_seeds(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Describe which of several rows have one seed only, so that nothing shows how much seeds vary."""
    finished = [row for row in rows if row.finished_runs]
    single = [row.name for row in finished if len(row.finished_runs) == 1]
    if single and len(finished) > 1:
        names = "all rows" if len(single) == len(finished) else ", ".join(single)
        yield f"One seed only for {names}: the variation between seeds is not measured there."


def _has_mixed_samples(rows: Sequence[ReportRow], images: int) -> bool:
    """Whether some row's separate AutoAttack ran on this many images for one seed and on more for another."""
    counts_by_row = [
        [run.images_by_attack["aa"] for run in row.finished_runs if run.has_separate_autoattack] for row in rows
    ]
    return any(images in counts and images < max(counts) for counts in counts_by_row)


def _describe_worst(run: RunResults) -> tuple[str, str]:
    """Subject and predicate of a sentence that says what a run's "worst" is, or why it has none."""
    if run.has_separate_autoattack:
        return "AA", "was run separately from the other attacks, so worst is not shown."
    names = [result.name for result in run.evaluation.results] if run.evaluation else []
    attacks = ", ".join(map(format_attack_name, names))
    if run.evaluation and not run.evaluation.has_worst_case:
        return "No worst case", f"is shown: no attack of more than one step was tried ({attacks})."
    if run.evaluation and run.evaluation.task.is_graded:
        return "worst", f"is computed from each example's worst answer under {attacks}."
    return "worst", f"counts an example as correct only if it is classified correctly under all of {attacks}."


def _describe_sample(row: ReportRow, attack: str, images_per_seed: Sequence[int]) -> str:
    """Name the seeds and images of an accuracy where they are fewer than in the rest of its row."""
    seeds = [run.seed for run in row.finished_runs if attack in run.metrics]
    main_images = [run.evaluation.num_images for run in row.finished_runs if run.evaluation and attack in run.metrics]
    fewer_seeds = f"{format_seeds(seeds)} only" if len(seeds) < len(row.finished_runs) else ""
    counts = Counter(images_per_seed)
    images = " + ".join(f"{n:,}" if times == 1 else f"{times} × {n:,}" for n, times in counts.items())
    fewer_images = f"{images} examples" if list(images_per_seed) != main_images else ""
    return ", ".join(filter(None, (fewer_seeds, fewer_images)))
