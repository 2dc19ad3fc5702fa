"""The records of bench/union_results.py as a page of Markdown.

python bench/union_results_page.py docs/results/unions
"""

import json
import sys
from collections.abc import Sequence
from math import comb, sqrt
from pathlib import Path
from statistics import mean, stdev

from shared import Record, command_block
from shared import paragraph as wrap
from union_results import METHOD, SEEDS, SETUPS, TRIAL_ATTACK, TRIAL_SEED

from deat.evaluation.intervals import wilson_interval
from deat.evaluation.results import unpack_bits
from deat.threat import UNION_RULES, format_threat

TITLES = {
    "digits": "Digits",
    "cifar10": "A part of CIFAR-10, radii by trials",
    "cifar10-apart": "A part of CIFAR-10, radii at which no ball dominates",
}
T_95 = {1: 12.706, 2: 4.303}
"""Two-sided 95 % quantiles of Student's t distribution, by degrees of freedom."""
WORST = "worst"
NORMS = ("linf", "l2", "l1")


def paragraph(text: str) -> str:
    """A wrapped paragraph."""
    return "\n".join(wrap(text))


def render(folder: Path) -> str:
    """The page of all setups that have records."""
    made = [name for name in SETUPS if (folder / name / "runs").is_dir()]
    sections = [_render_setup(name, folder / name) for name in made]
    head = paragraph(
        f"{METHOD} against three balls at once by each of the four rules, beside {METHOD} on each ball alone. Accuracies "
        "are in percent, of the last epoch, on test images: means over seeds ± standard deviation, and in brackets Wilson's "
        "95 % interval for the choice of test images. `in ...` counts an image if it stands all attacks in that ball, "
        "`union` if it does so in every ball."
    )
    commands = [
        f"python bench/union_results.py {name} --work docs/results/unions"
        + (" --data-root FOLDER" if (SETUPS[name].data or name) == "cifar10" else "")
        for name in made
    ]
    commands += ["python bench/union_results_page.py docs/results/unions"]
    return (
        "\n\n".join(["# Several threats at once", "\n".join(command_block("\n".join(commands))), head, *sections])
        + "\n"
    )


def _render_setup(name: str, folder: Path) -> str:
    trials = _read(folder / "trials")
    runs = [run for run in _read(folder / "runs") if run["seed"] in SEEDS]
    order = [*NORMS, *UNION_RULES]
    rows = {trained: [run for run in runs if run["trained_on"] == trained] for trained in order}
    rows = {trained: found for trained, found in rows.items() if found}
    setup, first = SETUPS[name], runs[0]
    data = first["record"]["data"]
    told = ", ".join(f"{field} {value}" for field, value in setup.config.items())
    about = paragraph(
        f"{first['record']['model']['parameters']:,} weights, {data['train']:,} training images, "
        f"{first['evaluation']['images']:,} test images; {told}. The balls are the "
        f"{format_threat(first['evaluation']['settings']['threat'])}. Attacks: "
        f"{', '.join(attack['name'] for attack in first['evaluation']['attacks'])}, without sanity checks."
    )
    if all("in" in trial for trial in trials):
        chosen = paragraph(
            f"How the radii were chosen: at those taken, training on each ball alone falls short of the best single ball in "
            f"some ball, and the one that does so least by as much as there is. Accuracies under {TRIAL_ATTACK} of trainings "
            f"with seed {TRIAL_SEED} and {setup.trial_epochs or setup.config['epochs']} epochs, on {setup.held_out} training "
            "images that were held out. Test images played no part."
        )
        return "\n\n".join(
            [f"## {TITLES[name]}", about, chosen, _cross_table(trials), _accuracy_table(rows), _comparison(rows)]
        )
    chosen = paragraph(
        f"How the radii were chosen: the Linf radius was set, and of the L2 and L1 radii below those were taken at which "
        f"training on that ball alone (seed {TRIAL_SEED}, {setup.held_out} training images held out) leaves the accuracy under "
        f"{TRIAL_ATTACK} in that ball, on the held-out images, nearest to that of the Linf ball. Test images played no part."
    )
    return "\n\n".join(
        [f"## {TITLES[name]}", about, chosen, _trial_table(trials), _accuracy_table(rows), _comparison(rows)]
    )


def _cross_table(trials: Sequence[Record]) -> str:
    order = sorted((trial["threat"] for trial in trials), key=_place)
    by_threat = {trial["threat"]: trial for trial in trials}
    lines = [_line(["trained on", "natural", *map(_name, order)]), _line(["---"] * (len(order) + 2))]
    for threat in order:
        trial = by_threat[threat]
        shares = [trial["accuracy"]["natural"], *(trial["in"][ball] for ball in order)]
        lines.append(_line([_name(threat), *(f"{100 * share:.1f}" for share in shares)]))
    return "\n".join(lines)


def _place(threat: str) -> tuple[int, float]:
    norm, _, eps = threat.partition(":")
    return NORMS.index(norm), float(eps)


def _name(threat: str) -> str:
    norm, _, eps = threat.partition(":")
    return format_threat({"norm": norm, "eps": float(eps)})


def _trial_table(trials: Sequence[Record]) -> str:
    lines = ["| trained on, and attacked in | natural | " + TRIAL_ATTACK + " |", "|---|---|---|"]
    for trial in sorted(trials, key=lambda trial: _place(trial["threat"])):
        accuracy = trial["accuracy"]
        lines.append(
            f"| {_name(trial['threat'])} | {100 * accuracy['natural']:.1f} | {100 * accuracy[TRIAL_ATTACK]:.1f} |"
        )
    return "\n".join(lines)


def _accuracy_table(rows: dict[str, list[Record]]) -> str:
    header = [
        "trained on",
        "natural",
        *(f"in {norm}" for norm in NORMS),
        "union",
        "backprops",
        "passes",
        "last k",
        "seeds",
    ]
    lines = [_line(header), _line(["---"] * len(header))]
    for trained, runs in rows.items():
        evaluations = [run["evaluation"] for run in runs]
        cells = [_cell([e["accuracy"]["natural"] for e in evaluations], evaluations[0]["images"])]
        cells += [
            _cell([e["balls"][norm]["accuracy"][WORST] for e in evaluations], evaluations[0]["images"])
            for norm in NORMS
        ]
        cells += [f"**{_cell([e['accuracy'][WORST] for e in evaluations], evaluations[0]['images'])}**"]
        counts = [f"{mean(run[cost] for run in runs):,.0f}" for cost in ("backprops", "passes")]
        last = "/".join(str(run["k"][-1]) for run in runs)
        name = f"{trained} alone" if trained in NORMS else f"union, {trained}"
        lines.append(_line([name, *cells, *counts, last, " ".join(str(run["seed"]) for run in runs)]))
    return "\n".join(lines)


def _comparison(rows: dict[str, list[Record]]) -> str:
    """Each rule against the best single ball, by the differences of equal seeds on the union."""
    singles = {name: runs for name, runs in rows.items() if name in NORMS}
    rules = {name: runs for name, runs in rows.items() if name not in NORMS}
    if not singles or not rules:
        return ""
    best = max(singles, key=lambda name: mean(_union(run) for run in singles[name]))
    base = {run["seed"]: run for run in singles[best]}
    lines = [
        f"Union accuracy minus that of training on {best} alone, the best single ball on the union, in points: means over "
        "equal seeds, with 95 % intervals for another seed on the same test images (Student's t) where there are several. "
        "`images` counts, for each seed, the test images that only the rule's network and that only the other one classifies "
        "correctly in every ball, with the p-value of the exact McNemar test, which is for other images and not for other "
        "seeds.",
        "",
        "| rule | difference | images | backprops, as a share |",
        "|---|---|---|---|",
    ]
    spent = mean(run["backprops"] for run in singles[best])
    for name, runs in rules.items():
        shared = [(run, base[run["seed"]]) for run in runs if run["seed"] in base]
        pairs = [100 * (_union(run) - _union(other)) for run, other in shared]
        images = ", ".join(_compare_images(run, other) for run, other in shared) or "—"
        share = mean(run["backprops"] for run in runs) / spent
        lines.append(f"| {name} | {_difference(pairs)} | {images} | {100 * share:.0f} % |")
    return "\n".join([paragraph(lines[0]), *lines[1:]])


def _compare_images(run: Record, other: Record) -> str:
    """Which test images only one of two networks classifies correctly in every ball."""
    mine, theirs = (_stands_all(one["evaluation"]) for one in (run, other))
    wins = sum(a and not b for a, b in zip(mine, theirs, strict=True))
    losses = sum(b and not a for a, b in zip(mine, theirs, strict=True))
    n, k = wins + losses, min(wins, losses)
    p = min(1.0, 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n)
    return f"{wins} and {losses} (p {'< 0.001' if p < 0.001 else f'= {p:.3f}'})"


def _stands_all(evaluation: Record) -> list[bool]:
    return [all(column) for column in zip(*(unpack_bits(a["correct"]) for a in evaluation["attacks"]), strict=True)]


def _difference(values: Sequence[float]) -> str:
    if len(values) < 2:
        return " ".join(f"{value:+.1f}" for value in values) or "—"
    return f"{mean(values):+.1f} ± {T_95[len(values) - 1] * stdev(values) / sqrt(len(values)):.1f}"


def _union(run: Record) -> float:
    accuracy: float = run["evaluation"]["accuracy"][WORST]
    return accuracy


def _cell(values: Sequence[float], images: int) -> str:
    low, high = wilson_interval(round(mean(values) * images), images)
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread} ({100 * low:.1f} to {100 * high:.1f})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _read(folder: Path) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    found = target / "findings.md"
    page = render(target)
    (target / "README.md").write_text(page + ("\n" + found.read_text() if found.is_file() else ""))
