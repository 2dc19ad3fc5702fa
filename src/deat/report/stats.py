"""The numbers of a report's table: each with its spread over seeds, its interval and the paper's value."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deat.evaluation.intervals import wilson_interval_of_share
from deat.report.load import COST_COLUMNS, ReportRow, RunResults, collect_columns

MIXED_SAMPLES_NOTE = (
    "Where another seed of a row has more of them, the deviation over seeds holds the choice of images too."
)
ATTACKS_BY_STRENGTH = ("fgsm", "square", "pgd", "apgd-ce", "cw", "fab-t", "apgd-t", "aa")
"""Attacks from weak to strong, by what their name begins with."""


@dataclass(frozen=True)
class AccuracyCell:
    """An accuracy: mean and standard deviation over seeds, and the 95 % interval that the choice of images leaves.

    each is how many images stand behind each seed's, images the fewest of them, which the interval is for. behind says
    what of this is not as in the rest of the row; it is empty where all is.
    """

    mean: float
    sd: float | None
    low: float
    high: float
    seeds: int
    images: int
    each: tuple[int, ...]
    behind: str


@dataclass(frozen=True)
class RowCost:
    """What a row cost: means over seeds. minutes is None where no clock was kept."""

    backprops: float
    minutes: float | None
    crowded: bool


def list_attacks(rows: Sequence[ReportRow]) -> list[str]:
    """The attacks that some row has an accuracy for, natural first, then from weak to strong, worst of all last."""
    names = [n for n in collect_columns(rows) if n not in COST_COLUMNS and not n.startswith("last ")]
    return sorted(names, key=_strength_key)


def choose_ranking_attack(rows: Sequence[ReportRow]) -> str | None:
    """By what rows are ranked: the worst of all attacks, or else the strongest that most rows were judged by.

    The worst is it where every finished run was judged by the same attacks, several and the strongest among them.
    """
    held = {name: sum(name in row.columns for row in rows) for name in list_attacks(rows)}
    robust = [name for name in held if name not in ("natural", "worst")] or list(held)
    strongest = max(robust, key=lambda name: (held[name], _strength_key(name)), default=None)
    judged = {frozenset(r.name for r in run.evaluation.results) for row in rows for run in row.done if run.evaluation}
    alike = next(iter(judged)) - {"natural"} if len(judged) == 1 else frozenset()
    return "worst" if len(alike) > 1 and strongest in alike and "worst" in held else strongest


def format_attack_name(attack: str) -> str:
    """An attack's name as the paper writes it."""
    if attack in ("natural", "worst"):
        return attack
    return re.sub(r"(\d)X(\d)", r"\1×\2", attack.upper()).replace("-LAST", ", last iterate")


def summarize_accuracy(row: ReportRow, attack: str) -> AccuracyCell | None:
    """A row's accuracy under an attack; None where no finished run has it."""
    spread = row.seed_statistics(attack)
    if spread is None or not math.isfinite(spread.mean):
        return None
    each = tuple(run.images[attack] for run in row.done if attack in run.numbers)
    low, high = wilson_interval_of_share(spread.mean, min(each))
    return AccuracyCell(
        spread.mean, spread.sd, low, high, len(each), min(each), each, _describe_sample(row, attack, each)
    )


def describe_coverage(rows: Sequence[ReportRow]) -> Iterator[str]:
    """What "worst" is the worst of, where there is none, and which attacks the last epoch was not judged by."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for told in dict.fromkeys(_describe_worst(run) for run in row.done):
            groups.setdefault(told, []).append(row.name)
    for (what, how), names in groups.items():
        whose = "" if len(groups) == 1 else f" of {', '.join(names)}"
        yield f"{what}{whose} {how}"
    both = [row for row in rows if "last natural" in row.columns]
    spared = [n for n in list_attacks(both) if any(n in r.columns and f"last {n}" not in r.columns for r in both)]
    if attacks := [format_attack_name(name) for name in spared if name != "worst"]:
        hence = ", so its worst would be another and is not shown" if "worst" in spared else ""
        yield f"The last epoch was not judged by {', '.join(attacks)}{hence}."


def describe_samples(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Which accuracies come from the first images of the test set alone."""
    found: dict[tuple[str, int], dict[str, list[str]]] = {}
    for row in rows:
        held: dict[tuple[str, int], list[int]] = {}
        for run in row.done:
            for name, one in (("", run.evaluation), ("AA of ", run.extra_evaluations["aa"] if run.apart else None)):
                if one and one.settings["sample"]:
                    held.setdefault((name, len(one.labels)), []).append(run.seed)
        for key, seeds in held.items():
            found.setdefault(key, {}).setdefault(_format_seeds(seeds), []).append(row.name)
    for (name, images), groups in found.items():
        told = "; ".join(f"{seeds} of {', '.join(names)}" for seeds, names in groups.items())
        mixed = f" {MIXED_SAMPLES_NOTE}" if name and _has_mixed_samples(rows, images) else ""
        yield f"On the first {images:,} test images alone, a sample: {name}{told}.{mixed}"


def describe_single_seeds(rows: Sequence[ReportRow]) -> Iterator[str]:
    """Which of several rows stand on one training alone, so that nothing tells what another seed would change."""
    done = [row for row in rows if row.done]
    alone = [row.name for row in done if len(row.done) == 1]
    if alone and len(done) > 1:
        who = "all rows" if len(alone) == len(done) else ", ".join(alone)
        yield f"One seed alone stands behind {who}: what another one would change there is not measured."


def _has_mixed_samples(rows: Sequence[ReportRow], images: int) -> bool:
    """Whether some row's AutoAttack was run on so many images for one seed and on more for another."""
    held = [[run.images["aa"] for run in row.done if run.apart] for row in rows]
    return any(images in counts and images < max(counts) for counts in held)


def get_mean_accuracy(row: ReportRow, attack: str) -> float:
    """A row's accuracy to rank it by: below all others where it has none."""
    found = summarize_accuracy(row, attack)
    return found.mean if found else -1.0


def summarize_cost(row: ReportRow) -> RowCost | None:
    """A row's cost; None where no run is finished."""
    spent = row.seed_statistics("backprops")
    if spent is None:
        return None
    return RowCost(spent.mean, row.minutes, row.crowded)


def find_pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points (cost, accuracy) no other one beats: none is at least as cheap and as good, and better in one."""
    return [not any(c <= cost and a >= acc and (c, a) != (cost, acc) for c, a in points) for cost, acc in points]


def find_low_outliers(shares: Sequence[float]) -> list[bool]:
    """Which accuracies would squeeze all others together on one axis.

    They are below half of the best, and further below the rest than the rest, two at least, are apart.
    """
    half = max(shares, default=0.0) / 2
    rest, below = [share for share in shares if share >= half], [share for share in shares if share < half]
    if len(rest) < 2 or not below or min(rest) - max(below) <= max(rest) - min(rest):
        return [False] * len(shares)
    return [share in below for share in shares]


def _describe_worst(run: RunResults) -> tuple[str, str]:
    """What one run's "worst" is, or why there is none."""
    if run.apart:
        return "AA", "was run apart from the other attacks, so no worst of all is shown."
    names = [r.name for r in run.evaluation.results] if run.evaluation else []
    return "worst", f"counts an image only if it stands against all of {', '.join(map(format_attack_name, names))}."


def _describe_sample(row: ReportRow, attack: str, images_per_seed: Sequence[int]) -> str:
    """The seeds and images behind an accuracy, where they are fewer than behind the rest of its row."""
    seeds = [run.seed for run in row.done if attack in run.numbers]
    usual = [len(run.evaluation.labels) for run in row.done if run.evaluation and attack in run.numbers]
    fewer = f"{_format_seeds(seeds)} alone" if len(seeds) < len(row.done) else ""
    counts = Counter(images_per_seed)
    images = " + ".join(f"{n:,}" if times == 1 else f"{times} × {n:,}" for n, times in counts.items())
    return ", ".join(filter(None, (fewer, f"{images} images" if list(images_per_seed) != usual else "")))


def _format_seeds(seeds: Sequence[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def _strength_key(name: str) -> tuple[int, int, str]:
    if name in ("natural", "worst"):
        return (-1 if name == "natural" else len(ATTACKS_BY_STRENGTH) + 1), 0, name
    family = max((i for i, known in enumerate(ATTACKS_BY_STRENGTH) if name.startswith(known)), default=0)
    steps = re.search(r"\d+", name)
    return family, int(steps[0]) if steps else 0, name
