"""The records of bench/task_results.py as a page of Markdown and a figure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from shared import Record, command_block, paragraph

TITLES = {
    "breast-cancer": "Breast cancer: a table, two classes",
    "diabetes": "Diabetes: a table, regression",
    "spoken-digits": "Spoken digits: raw waveforms, ten classes",
    "street-presence": "Street scenes: several labels for each image",
    "street-masks": "Street scenes: segmentation",
}
SHORT_TITLES = {
    "breast-cancer": "Breast cancer",
    "diabetes": "Diabetes",
    "spoken-digits": "Spoken digits",
    "street-presence": "Street labels",
    "street-masks": "Street masks",
}
ABOUT = {
    "breast-cancer": (
        "scikit-learn's breast cancer table (Wisconsin), 30 features. A fifth of the rows is the test part. The network is "
        "`mlp`. The radius is in deviations of each feature."
    ),
    "diabetes": (
        "scikit-learn's diabetes table, unscaled: nine features, which can change, and the sex, which cannot. The target is "
        "in deviations from its mean. The network is `mlp`. The radius is in deviations of each feature."
    ),
    "spoken-digits": (
        "The Free Spoken Digit Dataset: 3,000 recordings by six speakers at 8 kHz, cut or padded to 3,072 samples (0.38 s). "
        "The test part has recordings 0 to 4 of each digit and speaker, its official split. The network is a 1D CNN of four "
        "strided convolutions on the waveform."
    ),
    "street-presence": (
        "CamVid at 128x96. A class is present if it covers at least 1 % of the image. Classes that fewer than 5 % or more "
        "than 95 % of the training images have are left out: eight remain. The network is a CNN of four strided convolutions."
    ),
    "street-masks": (
        "CamVid at 128x96 with 11 classes; void does not count. The network is a small U-Net at half the resolution, whose "
        "logits are enlarged to that of the image. `segpgd-20` weighs right and wrong pixels as SegPGD does."
    ),
}
NAMES = {
    "natural": "natural training",
    "pgd-7": "PGD-AT (pgd-7)",
    "pgd-7 short": "PGD-AT, at M+DEAT's backprops",
    "m+deat": "M+DEAT (m+deat)",
    "m+trades": "M+TRADES (m+trades)",
}
FIRST_METRIC = {"street-presence": "mAP", "diabetes": "R2", "street-masks": "mIoU"}
OTHER_METRIC = {"street-presence": "exact match", "diabetes": "MAE", "street-masks": "pixel accuracy"}
SHARES = ("accuracy", "mIoU", "pixel accuracy", "mAP", "exact match")
"""Metrics that are shown in percent."""
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
"""Two-sided 95 % quantiles of Student's t distribution, by degrees of freedom."""
COLORS = {
    "natural": "#475569",
    "pgd-7": "#be123c",
    "pgd-7 short": "#c2410c",
    "m+deat": "#2563eb",
    "m+trades": "#4d7c0f",
}


CONCLUSIONS = (
    "What holds. The same methods, M+ and attacks train and evaluate classification of waveforms and tables, several "
    "labels, masks and regression. On spoken digits natural training has almost no robustness, and every adversarial "
    "training much more. On spoken digits and street scenes, M+DEAT at equal epochs is statistically indistinguishable from "
    "PGD-AT under PGD-20 and more accurate without attack, for 22 to 48 % of the backprops. At equal backprops it is more "
    "accurate on all three without attack, and on street masks 5.8 points more robust. These trainings are short, most "
    "of all the one epoch that PGD-AT has on street masks at M+DEAT's backprops: few epochs favour a method that updates the "
    "weights several times for each batch.",
    "What does not hold. On the tables M+ reaches its largest k early, so that it saves few backprops, and nothing is gained: "
    "on breast cancer M+DEAT is more accurate without attack, and at equal backprops less robust than PGD-AT; on diabetes "
    "the methods are statistically indistinguishable, and natural training is hardly less robust than any other. On street "
    "labels all are close to a constant answer under attack, so that little can be told from them. M+TRADES spends more "
    "backprops than PGD-AT on the tables, and is nowhere shown to be more robust. Intervals over so few seeds are wide.",
    "g+ at equal backprops turns natural training on spoken digits into a robust one (25.4 % under PGD-20 in place of 2.6 %), "
    "for 22.9 points of natural accuracy. In the other nine comparisons it is not shown to bring robustness, and on street "
    "masks, where it leaves DEAT-3 three epochs in place of five, it costs 4.0 points.",
)
"""What the tables show, in words: to be read again whenever a record changes."""


@dataclass(frozen=True)
class Estimate:
    """A mean with the half-width of its 95 % interval, which is None for a single value."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The mean of a few values, with an interval for seeds by Student's t."""
        n = len(values)
        return cls(mean(values), T_95[n - 1] * stdev(values) / sqrt(n) if n > 1 else None)

    @classmethod
    def of_difference(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Estimate":
        """The difference of two means, with an interval by the pooled t test."""
        freedom = len(ours) + len(theirs) - 2
        if min(len(ours), len(theirs)) < 2:
            return cls(mean(ours) - mean(theirs), None)
        pooled = ((len(ours) - 1) * stdev(ours) ** 2 + (len(theirs) - 1) * stdev(theirs) ** 2) / freedom
        return cls(mean(ours) - mean(theirs), T_95[freedom] * sqrt(pooled * (1 / len(ours) + 1 / len(theirs))))

    def show(self, metric: str, sign: str = "") -> str:
        """The mean and its interval, in percent for a share."""
        factor, digits = (100, 1) if metric in SHARES else (1, 3)
        interval = "" if self.half_width is None else f" ± {factor * self.half_width:.{digits}f}"
        return f"{factor * self.mean:{sign}.{digits}f}{interval}"

    @property
    def verdict(self) -> str:
        """Whether the seeds show a difference."""
        if self.half_width is None:
            return "one seed only"
        if abs(self.mean) <= self.half_width:
            return "indistinguishable"
        return "higher" if self.mean > 0 else "lower"


class Rows:
    """The records of one task, by method and seed."""

    def __init__(self, task: str, records: Iterable[Record], chosen: Record) -> None:
        self.task, self.chosen = task, chosen
        self.metric = FIRST_METRIC.get(task, "accuracy")
        self.by_label: dict[str, list[Record]] = {}
        for record in sorted(records, key=lambda record: record["seed"]):
            self.by_label.setdefault(record["label"], []).append(record)

    def values(self, label: str, attack: str, metric: str | None = None) -> list[float]:
        """A metric of each seed."""
        return [record["metrics"][attack][metric or self.metric] for record in self.by_label[label]]

    def mean_of(self, label: str, field: str) -> float:
        """The mean of a number over seeds."""
        return float(mean(record[field] for record in self.by_label[label]))

    def shared_by(self, *labels: str) -> "Rows | None":
        """The records of the seeds that all these methods have; None without such seeds."""
        seeds = set.intersection(*({record["seed"] for record in self.by_label.get(label, ())} for label in labels))
        shared = [record for each in self.by_label.values() for record in each if record["seed"] in seeds]
        return Rows(self.task, shared, self.chosen) if seeds else None

    @property
    def attacks(self) -> list[str]:
        """The attacks, without natural and worst."""
        first = next(iter(self.by_label.values()))[0]
        return [name for name in first["metrics"] if name not in ("natural", "worst")]


def render(tasks: Sequence[Rows], command: str, trials: Sequence[Rows] = ()) -> str:
    """The page."""
    records = [record for rows in tasks for each in rows.by_label.values() for record in each]
    where = sorted({f"{record['cpu']}, torch {record['torch']}, Python {record['python']}" for record in records})
    lines = [
        "# Adversarial training on five tasks",
        "",
        *command_block(command),
        "",
        *paragraph(
            "DATA has the unpacked data: `fsdd/`, `camvid96/` and the two tables, which `--write-tables` writes from "
            "scikit-learn. A run that was interrupted resumes; one whose record is there is not repeated. Machine: "
            f"{'; '.join(where)}, one thread of two cores while others ran, so that the seconds in the records say nothing "
            "about speed."
        ),
        "",
        "![Robustness by backprops](robustness.svg)",
        "",
        "## Summary",
        "",
        *paragraph(
            "M+DEAT minus PGD-AT, as differences of the means over seeds with 95 % intervals (pooled t test), in points "
            "(R2 as it is). The intervals are for another seed on the same test examples. `equal epochs` compares trainings "
            "of as many epochs, with M+DEAT's share of PGD-AT's backprops; `equal backprops` compares with a PGD-AT of as "
            "many epochs as the backprops of M+DEAT pay for."
        ),
        "",
        *summary_table(tasks, [("m+deat", "pgd-7", "equal epochs"), ("m+deat", "pgd-7 short", "equal backprops")]),
        "",
        "The same for M+TRADES minus PGD-AT, at equal epochs:",
        "",
        *summary_table(tasks, [("m+trades", "pgd-7", "equal epochs")]),
        "",
        *(line for text in CONCLUSIONS for line in [*paragraph(text), ""]),
        "## How settings were chosen",
        "",
        *paragraph(
            "By validation examples only, in trials with seed 100: a fifth of the training examples was held out, and for "
            "street masks the data's own validation part was used. Trials of the two tables are as long as the runs, the "
            "others shorter. Each method's learning rate is the one with the highest metric at the second of the radii "
            "that were considered (natural training: without attack; others: under PGD-10). The radius is the largest one at "
            "which PGD-AT keeps at least half of what natural training has above a constant answer; they were tried from the "
            "largest on. Numbers of epochs were set by the time there was. Everything else is deat's default: SGD, a cyclic "
            "learning rate, steps and starts of each method. The runs then train on all training examples, and the "
            "last epoch is evaluated once on the test examples."
        ),
        "",
        "| task | radius | considered | natural training | least | PGD-AT under PGD-10 | learning rates tried | chosen |",
        "|---|---|---|---|---|---|---|---|",
        *(choice_row(rows) for rows in (*tasks, *trials)),
        "",
        *(line for rows in tasks for line in task_section(rows)),
        *penalty_section(tasks),
        *trial_section(trials),
    ]
    return "\n".join(lines)


def choice_row(rows: Rows) -> str:
    """What the trials of a task chose."""
    chosen, style = rows.chosen, percent_or_number(rows.metric)
    robust = ", ".join(
        f"{show_radius(float(eps), rows.task)}: {style(value)}" for eps, value in chosen["robust"].items()
    )
    radii = ", ".join(show_radius(eps, rows.task) for eps in chosen["radii"])
    lrs = ", ".join(f"{method} {lr:g}" for method, lr in chosen["lr"].items())
    return (
        f"| {SHORT_TITLES[rows.task]} | {show_radius(chosen['eps'], rows.task)} | {radii} | {style(chosen['natural'])} "
        f"| {style(chosen['least'])} | {robust} | {', '.join(f'{lr:g}' for lr in chosen['lrs'])} | {lrs} |"
    )


def summary_table(tasks: Sequence[Rows], pairs: Sequence[tuple[str, str, str]]) -> list[str]:
    """Differences of methods: a line for each task and pair of methods, with what the pair has in common."""
    lines = [
        "| task | metric | compared at | seeds | backprops | natural | PGD-20 | robustness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rows in tasks:
        for label, rival, compared in pairs:
            both = rows.shared_by(label, rival)
            if both is None:
                continue
            natural, robust = (
                Estimate.of_difference(both.values(label, attack), both.values(rival, attack))
                for attack in ("natural", "pgd-20")
            )
            share = both.mean_of(label, "backprops") / both.mean_of(rival, "backprops")
            lines.append(
                f"| {SHORT_TITLES[rows.task]} | {rows.metric} | {compared} "
                f"| {len(both.by_label[label])} | {share:.0%} "
                f"| {natural.show(rows.metric, '+')} | {robust.show(rows.metric, '+')} | {robust.verdict} |"
            )
    return lines


def penalty_section(tasks: Sequence[Rows]) -> list[str]:
    """g+ on and off at equal backprops; empty without such runs."""
    tasks = [rows for rows in tasks if "g+natural" in rows.by_label]
    if not tasks:
        return []
    lines = [
        "## g+ on and off, at equal backprops",
        "",
        *paragraph(
            "With g+, each batch costs one backprop more, so these runs have fewer epochs. Radius and learning rate are those "
            "of the task: natural training's, and for DEAT-3 that of M+DEAT. The weight of the penalty is the default, 0.1. "
            "Differences of the means over seeds, with 95 % intervals (pooled t test)."
        ),
        "",
        *summary_table(
            tasks,
            [("g+natural", "natural", "g+natural - natural"), ("g+deat-3", "deat-3", "g+deat-3 - deat-3")],
        ),
        "",
        "| task | method | epochs | backprops | natural | PGD-20 |",
        "|---|---|---|---|---|---|",
    ]
    for rows in tasks:
        for label in ("natural", "g+natural", "deat-3", "g+deat-3"):
            if label in rows.by_label:
                cells = [Estimate.of(rows.values(label, attack)).show(rows.metric) for attack in ("natural", "pgd-20")]
                lines.append(
                    f"| {SHORT_TITLES[rows.task]} | {label} | {rows.by_label[label][0]['epochs']} "
                    f"| {rows.mean_of(label, 'backprops'):,.0f} | {' | '.join(cells)} |"
                )
    return [*lines, ""]


def trial_section(trials: Sequence[Rows]) -> list[str]:
    """The trials of tasks whose runs are not finished; empty without such tasks."""
    if not trials:
        return []
    lines = [
        "## Trials alone",
        "",
        *paragraph(
            "The runs of these tasks were not finished, since the two cores were busy with other work; the command above "
            "continues them. Of these tasks there are the trials: one training with seed 100 for each method and learning "
            "rate, evaluated on the validation examples at the second radius. The table has the learning rate that was chosen "
            "on the same examples, so its numbers are optimistic, and one seed shows no uncertainty."
        ),
        "",
        "| task | method | epochs | lr | backprops | metric | natural | PGD-10 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rows in trials:
        for label, lr in rows.chosen["lr"].items():
            for record in rows.by_label.get(label, ()):
                if record["lr"] == lr:
                    natural, robust = (
                        Estimate(record["metrics"][attack][rows.metric], None).show(rows.metric)
                        for attack in ("natural", "pgd-10")
                    )
                    lines.append(
                        f"| {SHORT_TITLES[rows.task]}, radius {show_radius(record['eps'], rows.task)} | {label} "
                        f"| {record['epochs']} | {lr:g} | {record['backprops']:,} | {rows.metric} | {natural} | {robust} |"
                    )
        constant = Estimate(rows.chosen["constant"], None).show(rows.metric)
        lines.append(
            f"| {SHORT_TITLES[rows.task]} | a constant answer | | | | {rows.metric} | {constant} | {constant} |"
        )
    return [*lines, "", *(line for rows in trials for line in [*paragraph(about_trial(rows)), ""])]


def about_trial(rows: Rows) -> str:
    """The data and the network of a task that has trials alone."""
    first = next(iter(rows.by_label.values()))[0]
    return (
        f"{SHORT_TITLES[rows.task]}: {ABOUT[rows.task]} {first['train_examples']:,} training and "
        f"{first['test_examples']:,} validation examples, {first['weights']:,} weights, batches of {first['batch_size']}, "
        f"{first['precision']}."
    )


def task_section(rows: Rows) -> list[str]:
    """A task: its data, and a line for each method."""
    first = next(iter(rows.by_label.values()))[0]
    other = OTHER_METRIC.get(rows.task)
    columns = [("natural", rows.metric), *((attack, rows.metric) for attack in rows.attacks)]
    columns += [("natural", other), ("pgd-20", other)] if other else []
    heads = [f"{metric}, {'natural' if attack == 'natural' else attack}" for attack, metric in columns]
    lines = [
        f"## {TITLES[rows.task]}",
        "",
        *paragraph(
            f"{ABOUT[rows.task]} {first['train_examples']:,} training and {first['test_examples']:,} test examples, "
            f"{first['weights']:,} weights, batches of {first['batch_size']}, {first['precision']}, "
            f"{describe_threat(rows, first)}. Means over seeds {', '.join(str(r['seed']) for r in rows.by_label['natural'])} "
            f"with 95 % intervals for seeds{'; shares in percent' if rows.metric in SHARES else ''}."
        ),
        "",
        f"| | epochs | lr | backprops | {' | '.join(heads)} |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for label, name in NAMES.items():
        if label in rows.by_label:
            cells = [Estimate.of(rows.values(label, attack, metric)).show(str(metric)) for attack, metric in columns]
            epochs = sorted({record["epochs"] for record in rows.by_label[label]})
            span = f"{epochs[0]}" if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}"
            lr, backprops = rows.by_label[label][0]["lr"], rows.mean_of(label, "backprops")
            lines.append(f"| {name} | {span} | {lr:g} | {backprops:,.0f} | {' | '.join(cells)} |")
    constant = rows.chosen["test_constant"]
    cells = [percent_or_number(str(metric))(constant[metric]) if metric in constant else "" for _, metric in columns]
    lines += [f"| a constant answer | | | | {' | '.join(cells)} |", "", *paragraph(test_part_note(rows)), ""]
    return lines


def test_part_note(rows: Rows) -> str:
    """The interval of one run for other test examples, and the flags of all runs."""
    record = rows.by_label["pgd-7"][0]
    low, high = record["intervals"]["pgd-20"][rows.metric]
    style = percent_or_number(rows.metric)
    flags = sorted({flag for each in rows.by_label.values() for record in each for flag in record["flags"]})
    raised = f"Flags of the evaluations: {'; '.join(flags)}." if flags else "No evaluation raised a flag."
    return (
        f"For other test examples the uncertainty is larger: PGD-AT with seed {record['seed']} has "
        f"{style(record['metrics']['pgd-20'][rows.metric])} under PGD-20, with a 95 % bootstrap interval from {style(low)} to "
        f"{style(high)}. {raised}"
    )


def describe_threat(rows: Rows, record: Record) -> str:
    """The threat model in words."""
    text = f"linf, radius {show_radius(record['eps'], rows.task)}"
    if record["snr_db"] is not None:
        text += (
            f" of full scale 1 (signal-to-noise ratio {record['snr_db']:.1f} dB in the mean over the test recordings)"
        )
    return text


def show_radius(eps: float, task: str) -> str:
    """A radius as people write it."""
    return f"{eps * 255:.3g}/255" if task.startswith("street") else f"{eps:g}"


def percent_or_number(metric: str) -> Callable[[float], str]:
    """How a metric is shown."""
    return lambda value: f"{100 * value:.1f} %" if metric in SHARES else f"{value:.3f}"


def draw(tasks: Sequence[Rows], out: Path) -> None:
    """A panel for each task: the metric under PGD-20, and without attack, by backprops."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "svg.hashsalt": "deat",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(2, 3, figsize=(10, 6.4))
        panels = list(axes.flat)
        for panel, rows in zip(panels, tasks, strict=False):
            for label, color in COLORS.items():
                if label not in rows.by_label:
                    continue
                for attack, fill in (("natural", "none"), ("pgd-20", color)):
                    values = rows.values(label, attack)
                    x, y = rows.mean_of(label, "backprops"), mean(values)
                    spread = [[y - min(values)], [max(values) - y]]
                    marks = {"marker": "o", "color": color, "markerfacecolor": fill, "markersize": 7, "linewidth": 1}
                    panel.errorbar([x], [y], yerr=spread, **marks)
            panel.set(title=SHORT_TITLES[rows.task], xlabel="backprops", ylabel=rows.metric)
            panel.set_xlim(left=0)
            panel.grid(color="#e6e6e2")
            panel.set_axisbelow(True)
        legend = panels[len(tasks)]
        for panel in panels[len(tasks) :]:
            panel.axis("off")
        for label, color in COLORS.items():
            legend.plot([], [], "o", color=color, label=NAMES[label])
        legend.plot([], [], "o", color="black", markerfacecolor="none", label="hollow: without attack")
        legend.plot([], [], "o", color="black", label="filled: under PGD-20; bars: range of seeds")
        legend.legend(loc="center", frameon=False)
        figure.tight_layout()
        figure.savefig(out, metadata={"Date": None})
        pyplot.close(figure)
