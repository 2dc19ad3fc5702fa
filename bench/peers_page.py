"""The result of bench/peers.py as a page of Markdown, and its picture of growth."""

import io
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from peers_growth import UNITS, exponent
from shared import Record, command_block, paragraph
from side_process import compare, middle, seconds_key

TRAINING_GOALS = {"pgd-7": 1.3, "free-8": 1.2}
"""Times a good bf16 loop."""
EVALUATION_GOAL, DIGITS_GOAL, EFFICIENCY_GOAL = 3.0, 1.25, 0.9
COMMAND_GOALS = {"deat --help": 1.0, "deat list methods": 1.0, "deat list attacks": 1.0}
IMPORT_GOAL, DEMO_GOAL, SET_GOAL = 0.2, 10.0, 60.0
EPOCH_PARTS = {"train_seconds": "training", "val_seconds": "validation", "other_seconds": "watch, saving and records"}
TIE = 0.03
"""A side is faster or slower from this share on; what is nearer counts as equal."""
AXIS_LABELS = {
    "k": "backprops a batch (k + 1)",
    "batch": "images in a batch",
    "side": "pixels of an image",
    "classes": "classes",
    "images": "images in the set",
}


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    pages: dict[str, Callable[[Record], list[str]]] = {
        "training": training_page,
        "evaluation": evaluation_page,
        "autoattack": autoattack_page,
        "small": small_page,
        "growth": growth_page,
    }
    lines = ["# deat beside other people's code on a CPU", ""]
    present = {name: result[name] for name in pages if result.get(name, {}).get("cells")}
    lines += [*losses(present), ""]
    for name, part in present.items():
        lines += pages[name](part)
    return "\n".join(lines)


def head(title: str, part: Record, text: str) -> list[str]:
    """A section's title, command and machine."""
    m = part["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items()) or "no other package"
    missing = f" Not installed, so left out: {', '.join(m['missing'])}." if m["missing"] else ""
    clock = (
        "Times are seconds by the clock; rounds in which other processes took 5 % of the cores were repeated."
        if m["clock"] == "wall"
        else "Times are processor time, on a machine that other processes used too."
    )
    where = f"Machine: {m['cpu']}, {m['cores']} cores, threads of each side: {m['threads']}, torch {m['torch']}"
    return [
        f"## {title}",
        "",
        *command_block(part["command"]),
        "",
        *paragraph(f"{where}, Python {m['python']}; {packages}.{missing} {clock} {text}"),
        "",
    ]


def losses(parts: Record) -> list[str]:
    """Where somebody else is faster than deat, or a goal is missed."""
    faster: list[str] = []
    for name, cell in parts.get("training", {}).get("cells", {}).items():
        for side in cell["sides"]:
            ratio = compare(cell, side, "deat")
            if side != "deat" and ratio and ratio[1] < 1 - TIE:
                faster.append(f"{name}: {side} takes {ratio[1]:.2f} of deat's time")
    for part in ("evaluation", "autoattack"):
        for cell in parts.get(part, {}).get("cells", {}).values():
            for side in cell["sides"]:
                for ours in ("deat", "deat with its checks"):
                    ratio = shared_ratio(cell, side, ours)
                    if not side.startswith("deat") and ratio and ratio[1] < 1 - TIE:
                        faster.append(f"{part}: {side} takes {ratio[1]:.2f} of the time of {ours}")
    missed = list(missed_goals(parts))
    lines = [
        "**Where somebody else is faster.** " + ("; ".join(faster) + "." if faster else "Nowhere in these tables.")
    ]
    lines.append("**Goals that are missed.** " + ("; ".join(missed) + "." if missed else "None."))
    return [*paragraph(lines[0]), "", *paragraph(lines[1])]


def missed_goals(parts: Record) -> Iterator[str]:
    """The goals that the numbers do not reach."""
    for name, cell in parts.get("training", {}).get("cells", {}).items():
        goal, ratio = TRAINING_GOALS.get(name.split(", ")[1]), compare(cell, "good bf16 loop", "deat")
        if goal and ratio and ratio[1] < goal:
            yield f"{name}: {ratio[1]:.2f} times as fast as a good bf16 loop, not {goal}"
    for part in ("evaluation", "autoattack"):
        for cell in parts.get(part, {}).get("cells", {}).values():
            for side in cell["sides"]:
                ratio = shared_ratio(cell, side, "deat")
                if is_package(side) and ratio and ratio[1] < EVALUATION_GOAL:
                    yield f"{part}: {ratio[1]:.2f} times as fast as {side}, not {EVALUATION_GOAL:.0f}"
    small = parts.get("small", {}).get("cells", {})
    if "digits" in small and (ratio := compare(small["digits"], "deat train", "plain loop")) and ratio[1] > DIGITS_GOAL:
        yield f"a run on digits: {ratio[1]:.2f} times a plain loop's time, not {DIGITS_GOAL}"
    if "commands" in small:
        clock = parts["small"]["machine"]["clock"]
        for name, goal in COMMAND_GOALS.items():
            if (seconds := command_seconds(small["commands"], clock)[name]) > goal:
                yield f"`{name}`: {seconds:.2f} s, not {goal:.0f}"
        if (added := import_cost(small["commands"], clock)) > IMPORT_GOAL:
            yield f"`import deat` adds {added:.2f} s, not {IMPORT_GOAL}"
    if "demo" in small and (seconds := demo_seconds(small["demo"], parts["small"]["machine"]["clock"])) > DEMO_GOAL:
        yield f"the demo: {seconds:.1f} s, not {DEMO_GOAL:.0f}"
    growth = parts.get("growth", {}).get("cells", {})
    for axis in UNITS:
        if axis in growth and (slope := exponent(axis, growth[axis]["points"])) > 1.05:
            yield f"cost grows with {AXIS_LABELS[axis]} to the power of {slope:.2f}, not 1"
    for case in growth.get("processes", {}).get("cases", []):
        if case["median_efficiency"] < EFFICIENCY_GOAL:
            yield f"two processes, {case['method']}: {case['median_efficiency']:.2f} of twice one, not {EFFICIENCY_GOAL}"
    if "large set" in growth:
        found = growth["large set"]
        if found["second"]["seconds"] > SET_GOAL:
            yield f"a large set starts in {found['second']['seconds']:.0f} s the second time, not {SET_GOAL:.0f}"
        for time in ("first", "second"):
            if (share := found[time]["peak_bytes"] / found["bytes"]) > 1:
                own = found[time]["own_bytes"] / found["bytes"]
                yield (
                    f"a large set takes at most {share:.2f} times its bytes the {time} time, {own:.2f} of them without the "
                    "pages of files, which the system can take back"
                )


def is_package(side: str) -> bool:
    """Whether a side is a package of somebody else."""
    return not side.startswith("deat") and not side.endswith(("loop", "script"))


def training_page(part: Record) -> list[str]:
    """Seconds a batch, and ratios."""
    sides = list(dict.fromkeys(side for cell in part["cells"].values() for side in [*cell["sides"], *cell["errors"]]))
    others = [side for side in sides if side != "deat"]
    lines = head(
        "Training",
        part,
        "Batches of 64 images of 32 x 32, no augmentation, the same number of attack steps on each side. The good loops "
        "compute the gradient of the perturbation alone in attack steps, with channels last, fused SGD and no loader. The "
        "paper's script computes every gradient in every step, in float32, with a DataLoader. torchattacks and foolbox craft "
        "the images in a loop of torch. ART's TRADES attacks the cross-entropy. deat's side is a whole epoch of its trainer, "
        "with its records. The first table has milliseconds a batch (medians); the second has times that deat is faster: the "
        "median of the rounds' ratios, and their range.",
    )
    lines += table(["network, method", "deat's precision", *sides])
    for name, cell in part["cells"].items():
        cells = [
            f"{1000 * middle(cell, side) / cell['batches']:,.0f}" if side in cell["sides"] else "" for side in sides
        ]
        precision = cell["sides"]["deat"][0]["precision"] if "deat" in cell["sides"] else "failed"
        lines.append(row([name, precision, *cells]))
    lines += ["", *table(["network, method", *others, "rounds"])]
    for name, cell in part["cells"].items():
        ratios = [spread(compare(cell, side, "deat")) for side in others]
        lines.append(row([name, *ratios, rounds(cell)]))
    return [*lines, "", *failures(part)]


def evaluation_page(part: Record) -> list[str]:
    """Seconds, accuracies and ratios of the attacks."""
    cell = part["cells"]["attacks"]
    clock = {"wall": "each", "cpu": "each_cpu"}[cell["clock"]]
    lines = head(
        "Evaluation",
        part,
        f"PreAct-ResNet 8 trained with DEAT-3, {cell['images']} test images of {cell['data']}, linf 8/255, steps of 2/255. "
        "Each cell has seconds, then accuracy in %. deat counts an image as fooled if any step fooled it; the others look at "
        "the last step. CW-20 is PGD on the margin; torchattacks has no such attack. The last column has times that deat "
        "without its checks is faster over the attacks that both have: the median of the rounds' ratios, and their range.",
    )
    names = cell["attacks"]
    lines += table(["", *names, "checks", "all", "deat is faster"])
    for side, laps in cell["sides"].items():
        values = [median(lap[clock][name] for lap in laps) if name in laps[0][clock] else None for name in names]
        shown = [
            "" if seconds is None else f"{seconds:.1f} s, {100 * laps[0]['accuracy'][name]:.1f}"
            for name, seconds in zip(names, values, strict=True)
        ]
        whole = middle(cell, side)
        checks = f"{whole - sum(filter(None, values)):.1f} s" if side == "deat with its checks" else ""
        ratio = "" if side == "deat" else spread(shared_ratio(cell, side, "deat"))
        lines.append(row([side, *shown, checks, f"{whole:.1f} s", ratio]))
    return [*lines, "", *paragraph(f"Rounds: {rounds(cell)}."), "", *failures(part)]


def autoattack_page(part: Record) -> list[str]:
    """Standard AutoAttack."""
    cell = part["cells"]["aa"]
    lines = head(
        "AutoAttack",
        part,
        f"The standard version on {cell['images']} images, with the same network. torchattacks' APGD, "
        "APGD-T and FAB-T take 10 steps where the standard version has 100. ART's AutoAttack has other parts, and foolbox "
        "has none.",
    )
    lines += table(["", "seconds", "accuracy, %", "deat is faster", "deat with its checks is faster"])
    for side, laps in cell["sides"].items():
        ratios = [
            "" if side.startswith("deat") else spread(compare(cell, side, ours))
            for ours in ("deat", "deat with its checks")
        ]
        lines.append(row([side, f"{middle(cell, side):.1f}", f"{100 * laps[0]['accuracy']['aa']:.1f}", *ratios]))
    return [*lines, "", *paragraph(f"Rounds: {rounds(cell)}."), "", *failures(part)]


def shared_ratio(cell: Record, side: str, ours: str) -> list[float] | None:
    """The ratio of the seconds over the attacks that both sides have, and deat's checks."""
    laps = cell["sides"]
    if side not in laps or ours not in laps:
        return None
    shared = set(laps[side][0]["each"]) & set(laps[ours][0]["each"])
    clock = {"wall": "each", "cpu": "each_cpu"}[cell["clock"]]

    def seconds(lap: Record) -> float:
        checks = lap[seconds_key(cell["clock"])] - sum(lap[clock].values())
        return float(sum(lap[clock][name] for name in shared) + checks)

    return compare(cell, side, ours, seconds)


def small_page(part: Record) -> list[str]:
    """A run on digits, commands and the demo."""
    cells, clock = part["cells"], part["machine"]["clock"]
    lines = head("Little things", part, "")
    if "digits" in cells:
        cell = cells["digits"]
        parts = cell["sides"]["deat train"][0]["parts"]
        whole = sum(parts.values())
        shares = ", ".join(f"{label} {parts[name] / whole:.0%}" for name, label in EPOCH_PARTS.items() if name in parts)
        lines += paragraph(
            f"`deat train` with PGD-7, 10 epochs of digits, in a process that has imported everything: "
            f"{middle(cell, 'deat train'):.2f} s, validation, watch, checkpoints and final scores included (of its epochs: "
            f"{shares}). A plain loop of the same training alone: {middle(cell, 'plain loop'):.2f} s. Ratio: "
            f"{spread(compare(cell, 'deat train', 'plain loop'))}, goal {DIGITS_GOAL}. Rounds: {rounds(cell)}."
        )
        lines.append("")
    if "commands" in cells:
        seconds = command_seconds(cells["commands"], clock)
        lines += table(["command", "seconds", "goal"])
        lines += [row([f"`{name}`", f"{value:.2f}", COMMAND_GOALS.get(name, "")]) for name, value in seconds.items()]
        compiler = "import" if cells["commands"]["imports_compiler"] else "do not import"
        lines += [
            "",
            *paragraph(
                f"`import deat` adds {import_cost(cells['commands'], clock):.2f} s to Python's own start (goal {IMPORT_GOAL}). "
                f"The modules of `deat train` {compiler} torch's compiler."
            ),
            "",
        ]
    if "demo" in cells:
        key = {"wall": "seconds", "cpu": "cpu_seconds"}[clock]
        each = ", ".join(f"`{name}` {median(values):.1f} s" for name, values in cells["demo"][key].items())
        lines += [
            *paragraph(
                f"The demo, installation left out: {demo_seconds(cells['demo'], clock):.1f} s, goal {DEMO_GOAL:.0f}: {each}."
            ),
            "",
        ]
    return lines


def command_seconds(measured: Record, clock: str) -> dict[str, float]:
    """The median of each command."""
    key = {"wall": "seconds", "cpu": "cpu_seconds"}[clock]
    return {name: median(values) for name, values in measured[key].items()}


def import_cost(measured: Record, clock: str) -> float:
    """What `import deat` adds to Python's start."""
    seconds = command_seconds(measured, clock)
    return seconds["import deat"] - seconds["python -c pass"]


def demo_seconds(measured: Record, clock: str) -> float:
    """The seconds of the demo."""
    return sum(command_seconds(measured, clock).values())


def growth_page(part: Record) -> list[str]:
    """Cost and memory along each axis, processes, and a large set."""
    cells = part["cells"]
    axes = [axis for axis in UNITS if axis in cells]
    lines = head(
        "Growth",
        part,
        "Each point is an epoch of PGD-7 with PreAct-ResNet 8 on 256 images of 32 x 32 in batches of 64, but for the quantity "
        "that varies. The exponent is the slope of the logarithm of the cost by that of the quantity between the ends; 1 is "
        "linear, less is better.",
    )
    if axes:
        lines += ["![Cost against each quantity, in logarithms](peers.svg)", ""]
        lines += table(["quantity", "values", "ms", "exponent", "memory of a run, MB", "of its data, MB"])
        for axis in axes:
            points = cells[axis]["points"]
            values = ", ".join(f"{UNITS[axis](p['value']):,}" for p in points)
            ms = ", ".join(f"{median(p['ms']):,.0f}" for p in points)
            memory = ", ".join(f"{p['run_mb']:,.0f}" for p in points)
            data = ", ".join(f"{p['data_mb']:.2g}" for p in points)
            lines.append(row([AXIS_LABELS[axis], values, ms, f"{exponent(axis, points):.2f}", memory, data]))
        most = max(p["others"] for axis in axes for p in cells[axis]["points"])
        lines += [
            "",
            *paragraph(
                "Milliseconds are those of a batch, or of an epoch where the images in the set vary; medians. The memory of a "
                "run is the most that its process had above what it had before the trainer was made: weights, gradients, "
                f"activations, and code that is loaded late. Other processes took up to {most:.0%} of the cores."
            ),
            "",
        ]
    if "processes" in cells:
        lines += table(["network, method", "one process, s", "two processes, s", "of twice one", "goal"])
        for case in cells["processes"]["cases"]:
            each = sorted(case["efficiency"])
            lines.append(
                row(
                    [
                        f"{case['network']}, {case['method']}",
                        f"{case['one_process']['median']:.2f}",
                        f"{case['two_processes']['median']:.2f}",
                        f"{case['median_efficiency']:.2f} ({each[0]:.2f} to {each[-1]:.2f})",
                        EFFICIENCY_GOAL,
                    ]
                )
            )
        lines += ["", *paragraph("One thread a process; the two share each batch (`bench/ranks.py`)."), ""]
    if "large set" in cells:
        found = cells["large set"]
        times = [
            f"the {name} time {found[name]['seconds']:.1f} s, at most {found[name]['peak_bytes'] / 2**20:,.0f} MB, "
            f"and in the end {found[name]['own_bytes'] / 2**20:,.0f} MB without pages of files"
            for name in ("first", "second")
        ]
        lines += [
            *paragraph(
                f"A zip archive of {found['images']:,} PNG images of {found['side']} x {found['side']}, which are "
                f"{found['bytes'] / 2**20:,.0f} MB as bytes. From `load_data` to the end of the first batch of "
                f"`fit`, {times[0]}; {times[1]}. Memory is what the process had above its imports."
            ),
            "",
        ]
    return lines


def draw(result: Record) -> str | None:
    """The picture of growth as SVG, or None without numbers or matplotlib."""
    cells = result.get("growth", {}).get("cells", {})
    axes = [axis for axis in UNITS if axis in cells]
    if not axes:
        return None
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("svg")
    import matplotlib.pyplot as plt

    style: Any = {"svg.hashsalt": "deat", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure, panels = plt.subplots(1, len(axes), figsize=(2.2 * len(axes), 2.4), squeeze=False, layout="constrained")
        for panel, axis in zip(panels[0], axes, strict=True):
            points = cells[axis]["points"]
            units = [UNITS[axis](point["value"]) for point in points]
            costs = [median(point["ms"]) for point in points]
            panel.loglog(
                units, [costs[0] * unit / units[0] for unit in units], "--", color="#888888", lw=0.8, label="linear"
            )
            panel.loglog(units, costs, "o-", color="#4361ee", ms=3, lw=1.2, label="measured")
            panel.set_xlabel(AXIS_LABELS[axis])
            panel.minorticks_off()
            panel.set_xticks(units, [f"{unit:,}" for unit in units], rotation=45)
        panels[0][0].set_ylabel("ms")
        panels[0][0].legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
    return file.getvalue()


def failures(part: Record) -> list[str]:
    """The sides that failed, in words."""
    errors = {f"{name}, {side}": text for name, cell in part["cells"].items() for side, text in cell["errors"].items()}
    if not errors:
        return []
    return [*paragraph("Failed: " + "; ".join(f"{name} ({text})" for name, text in errors.items()) + "."), ""]


def rounds(cell: Record) -> str:
    """How many rounds count."""
    count = len(next(iter(cell["sides"].values()), []))
    if cell["clock"] == "cpu":
        return str(count)
    note = "" if cell["undisturbed"] >= count else ", disturbed"
    return f"{count} of {cell['played']}{note}"


def spread(ratio: Sequence[float] | None) -> str:
    """A median, and its range."""
    return "" if ratio is None else f"{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"


def table(columns: Sequence[object]) -> list[str]:
    """The head of a table."""
    return [row(columns), "|" + "---|" * len(columns)]


def row(cells: Sequence[object]) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"
