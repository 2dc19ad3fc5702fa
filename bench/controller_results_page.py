"""The records of bench/controller_results.py as a page of Markdown.

python bench/controller_results_page.py docs/results/controller
"""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gamma, pi, sqrt
from pathlib import Path
from statistics import mean, stdev

from controller_results import OURS, SETUPS, Setup, Start
from shared import PAGE_WIDTH, Record, command_block
from shared import paragraph as wrap

TITLES = {"cifar10": "A part of CIFAR-10", "digits": "Digits"}
ATTACK = "pgd-20"
INTEGRATION_STEPS = 20_000


def two_sided_p(t: float, freedom: int) -> float:
    """The probability of a larger |t| under Student's t distribution, by the midpoint rule on its density."""
    scale: float = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))
    width = abs(t) / INTEGRATION_STEPS
    middles = (width * (step + 0.5) for step in range(INTEGRATION_STEPS))
    total: float = sum((1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in middles)
    return 1 - 2 * width * scale * total


def quantile_95(freedom: int) -> float:
    """The |t| that is exceeded with a probability of 5 %, by bisection."""
    low, high = 0.0, 20.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > 0.05 else (low, middle)
    return high


@dataclass(frozen=True)
class Difference:
    """A mean of differences of equal seeds, in points.

    Attributes:
        mean: The mean.
        half_width: Of its 95 % interval for another seed, by Student's t.
        p: The two-sided p-value of the paired t test.
        seeds: The number of seeds.
    """

    mean: float
    half_width: float
    p: float
    seeds: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Difference":
        """The mean of the differences of at least two seeds."""
        n, center, error = len(differences), mean(differences), stdev(differences) / sqrt(len(differences))
        p = two_sided_p(center / error, n - 1) if error else float(center == 0)
        return cls(center, quantile_95(n - 1) * error, p, n)

    def show(self) -> str:
        """The mean, its interval and the p-value."""
        return f"{self.mean:+.2f} ± {self.half_width:.2f} (p {'< 0.001' if self.p < 0.001 else f'= {self.p:.3f}'})"


class Runs:
    """The records of one start, by method and seed."""

    def __init__(self, start: Start, records: Sequence[Record]) -> None:
        self.start = start
        self.by_method: dict[str, dict[int, Record]] = {}
        for record in records:
            self.by_method.setdefault(record["method"], {})[record["seed"]] = record

    def compare_at_equal_backprops(self, rule: str, family: Sequence[str]) -> Difference | None:
        """A rule minus a family of methods, whose accuracy is interpolated at the rule's backprops, seed by seed."""
        runs = self.by_method.get(rule, {})
        others = {seed: self._interpolate(run["backprops"], family, seed) for seed, run in runs.items()}
        return self._compare(rule, others)

    def compare(self, rule: str, method: str) -> Difference | None:
        """A rule minus a method, whatever both cost."""
        return self._compare(rule, {seed: _robust(run) for seed, run in self.by_method.get(method, {}).items()})

    def _interpolate(self, cost: float, family: Sequence[str], seed: int) -> float | None:
        """The accuracy of a family at a cost; None outside its costs, or if a record is missing."""
        found = [self.by_method.get(method, {}).get(seed) for method in family]
        if not all(found):
            return None
        points = sorted((float(record["backprops"]), _robust(record)) for record in found if record)
        for (less, low), (more, high) in pairwise(points):
            if less <= cost <= more:
                return low + (high - low) * (cost - less) / (more - less)
        return None

    def _compare(self, rule: str, others: Mapping[int, float | None]) -> Difference | None:
        runs = self.by_method.get(rule, {})
        pairs = [(_robust(runs[seed]), other) for seed, other in others.items() if seed in runs and other is not None]
        return Difference.of([robust - other for robust, other in pairs]) if len(pairs) > 1 else None


def render(folder: Path) -> str:
    """The page of all data sets that have records."""
    names = [name for name in SETUPS if (folder / name / "runs").is_dir()]
    runs = {name: _read(SETUPS[name], folder / name / "runs") for name in names}
    commands = [f"python bench/controller_results.py {name} --work docs/results/controller" for name in names]
    commands = [command + ("" if "digits" in command else " --data-root FOLDER") for command in commands]
    commands += [
        f"{commands[0]} \\\n    --candidates",
        "python bench/controller_results_page.py docs/results/controller",
    ]
    sections = [
        "# Step counts that tune themselves",
        "\n".join(command_block("\n".join(commands))),
        _about_rules(),
        _summary(runs),
        *(_section(name, runs[name]) for name in names),
    ]
    return "\n\n".join(sections) + "\n"


def _about_rules() -> str:
    text = wrap(
        "Rules that choose k by what training measures anyway, beside M+DEAT, plain ramps (DEAT-d) and FREE-m, from three "
        "starts. All of them replay a batch k + 1 times. The rules read the gap of the adversary: one minus what delta "
        "reaches of the largest first-order rise of the loss in the ball, along its last gradient. `auto` is in deat, the "
        "others are in bench/controller_rules.py:"
    )
    rules = [
        "* `auto+deat`: k is 0 in the first half of training, and 1 from the epoch on in which the largest rise exceeds the "
        "loss. The second half begins with k = 3; then k grows above a gap of 4 % and falls below 1 %.",
        "* `gap`: from the second epoch on, k grows above a gap of 15 % and falls below a quarter of that.",
        "* `least l_X`: M+ with a threshold of 1.01 times the least l_X at this k.",
        "* `k ...`: the numbers are the k of each epoch, given before training.",
    ]
    return "\n".join([*text, "", *("\n".join(_hang(rule)) for rule in rules)])


def _hang(text: str) -> list[str]:
    first, *others = textwrap.wrap(text, PAGE_WIDTH, subsequent_indent="  ")
    return [first, *others]


def _summary(runs: Mapping[str, Mapping[str, Runs]]) -> str:
    text = wrap(
        "Accuracy under PGD-20 minus that of the others, in points, paired by seed, with 95 % intervals for another seed and "
        "the p-value of the paired t test. At equal backprops, the others' accuracy is interpolated, seed by seed, between "
        "the two members of the family whose backprops are next to those of the rule's run. A dash means that the rule's "
        "backprops are outside those, or that there is one seed. A line between two points of a front that bends downwards "
        "runs below it, which favours the rule a little. No p-value is corrected for the number of comparisons."
    )
    lines = [
        "| data | start | rule | backprops | ramp at equal backprops | FREE at equal backprops | M+DEAT at its own backprops |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, starts in runs.items():
        for start_name, found in starts.items():
            for rule in (rule for rule in (OURS, *found.start.candidates) if rule in found.by_method):
                families = ([f"deat-{d}" for d in found.start.ramps], [f"free-{m}" for m in found.start.frees])
                cells = [found.compare_at_equal_backprops(rule, family) for family in families]
                shown = [cell.show() if cell else "–" for cell in (*cells, found.compare(rule, "m+deat"))]
                cost = f"{_mean_cost(list(found.by_method[rule].values())):.1f}"
                lines.append(f"| {' | '.join([name, start_name, rule, cost, *shown])} |")
    return "\n".join(["## What the rules bring", "", *text, "", *lines])


def _section(name: str, starts: Mapping[str, Runs]) -> str:
    setup = SETUPS[name]
    head = wrap(
        "Accuracies are in percent, of the last epoch: means over seeds ± standard deviation. Backprops are those of one "
        "place in the epoch over the whole training, as in the paper: an epoch with k steps counts k + 1."
    )
    parts = [f"## {TITLES[name]}", "\n".join(head)]
    for start_name, runs in starts.items():
        parts += [
            "\n".join([f"### {start_name[0].upper()}{start_name[1:]}", "", *_about_start(setup, runs)]),
            _table(runs),
        ]
    return "\n\n".join(parts)


def _about_start(setup: Setup, runs: Runs) -> list[str]:
    start, first = runs.start, next(iter(next(iter(runs.by_method.values())).values()))
    before = f", after {start.epochs_before} epochs of natural training on them" if start.epochs_before else ""
    kind = "held-out training" if setup.on_held_out else "test"
    return wrap(
        f"{first['record']['data']['train']:,} training images{before}; {start.epochs} epochs, batches of "
        f"{start.batch_size}, lr {start.lr:g}, Linf eps {setup.eps:.4g}, {first['record']['model']['parameters']:,} weights; "
        f"evaluated on {first['images']:,} {kind} images."
    )


def _table(runs: Runs) -> str:
    lines = ["| method | backprops | natural | PGD-20 | k by epoch, first seed | seeds |", "|---|---|---|---|---|---|"]
    rows = sorted(runs.by_method.items(), key=lambda item: _mean_cost(list(item[1].values())))
    for method, by_seed in rows:
        records = list(by_seed.values())
        natural, robust = ([100 * record["accuracy"][attack] for record in records] for attack in ("natural", ATTACK))
        steps = " ".join(map(str, by_seed[min(by_seed)]["k"]))
        cells = [method, f"{_mean_cost(records):.1f}", _show(natural), _show(robust), steps, str(len(records))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _robust(record: Record) -> float:
    return 100 * float(record["accuracy"][ATTACK])


def _mean_cost(records: Sequence[Record]) -> float:
    return mean(float(record["backprops a batch"]) for record in records)


def _show(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _read(setup: Setup, folder: Path) -> dict[str, Runs]:
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    by_start = {name: [record for record in records if record["start"] == name] for name in setup.starts}
    return {name: Runs(setup.starts[name], found) for name, found in by_start.items() if found}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    findings = target / "findings.md"
    page = render(target)
    (target / "README.md").write_text(page + ("\n" + findings.read_text() if findings.is_file() else ""))
