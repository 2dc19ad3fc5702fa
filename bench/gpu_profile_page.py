"""The kernel profile as a page of Markdown and as a picture."""

from collections.abc import Callable
from pathlib import Path

from gpu_source import told
from shared import Record


def render(result: Record) -> str:
    """The profile as a page of Markdown."""
    machine, moves = result["machine"], result["moves"]
    kinds = list(dict.fromkeys(kind for move in moves.values() for kind in move["kinds"]))
    lines = [
        "# Where a move's time goes",
        "",
        f"`python bench/gpu_profile.py --out docs/results/profile.json` on {machine['device']},",
        f"torch {machine['torch']}, deat {told(result.get('made'))}. PreAct-ResNet 18, batches of 128, bf16; a",
        "recorded move replayed alone, so without data and augmentation. Microseconds by what a kernel is for;",
        '"gaps" is what is left of the move\'s time; kernels that overlap add up to more than it.',
        "",
        "| | " + " | ".join(moves) + " |",
        "|---" * (len(moves) + 1) + "|",
        "| **ms a move** | " + " | ".join(f"**{move['ms']:.2f}**" for move in moves.values()) + " |",
        "| kernels | " + " | ".join(str(move["launches"]) for move in moves.values()) + " |",
    ]
    for kind in kinds:
        lines.append(f"| {kind} | " + " | ".join(f"{move['kinds'].get(kind, 0):.0f}" for move in moves.values()) + " |")
    lines.append("| gaps | " + " | ".join(f"{gaps(move):.0f}" for move in moves.values()) + " |")
    lines += batch_lines(result.get("batches", {}))
    for name, move in moves.items():
        lines += ["", f"## The kernels of {name}", "", "| µs | times | kernel |", "|---|---|---|"]
        lines += [f"| {k['us']:.1f} | {k['times']:.0f} | `{k['name'][:90]}` |" for k in move["kernels"][:20]]
    return "\n".join([*lines, ""])


def batch_lines(batches: dict[str, Record]) -> list[str]:
    """Whole batches side by side, where they were profiled."""
    if not batches:
        return []
    names = [f"{method}, k = {cell['k']}" if "k" in cell else method for method, cell in batches.items()]
    lines = [
        "",
        "## Where a batch's time goes",
        "",
        "Whole batches as a trainer plays them, compiled, data and augmentation included; milliseconds a batch. The",
        "host's are how long it takes to ask for a batch while the device waits for it: where they are fewer, the",
        "device is the limit. From the busy device on the profiler has measured, under which gaps are longer.",
        "",
        "| | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    lines += [f"| {row} | " + " | ".join(shown(cell, show) for cell in batches.values()) + " |" for row, show in ROWS]
    if any(why := [failure(cell) for cell in batches.values()]):
        lines.append("| failed | " + " | ".join(why) + " |")
    return lines


ROWS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("**ms a batch**", lambda cell: f"**{cell['ms']:.2f}**"),
    ("the host's", lambda cell: f"{cell['host_ms']:.2f}"),
    ("a batch whose replays are left out", lambda cell: f"{cell['rest_ms']:.2f}"),
    ("the host's", lambda cell: f"{cell['rest_host_ms']:.2f}"),
    ("device busy", lambda cell: f"{cell['device']['busy_ms']:.2f}"),
    ("idle inside replays", lambda cell: f"{cell['device']['idle_inside_ms']:.2f}"),
    ("idle between launches", lambda cell: f"{cell['device']['idle_between_ms']:.2f}"),
    ("kernels inside replays", lambda cell: in_all(cell["device"]["inside"])),
    ("kernels outside", lambda cell: in_all(cell["device"]["outside"])),
    ("replays, by their kernels", lambda cell: ", ".join(map(replay, cell["device"]["replays"]))),
)
"""What is shown of a batch, from its record."""


def shown(cell: Record, show: Callable[[Record], str]) -> str:
    """A cell's entry in a row, which is empty where that was not measured."""
    try:
        return show(cell)
    except KeyError:
        return ""


def failure(cell: Record) -> str:
    """Why a cell, or its profile, is missing; empty where it is not."""
    why = cell.get("failed") or cell.get("device", {}).get("failed") or ""
    return str(why).replace("|", "/")


def in_all(kernels: Record) -> str:
    """What a batch's kernels take, one after the other, and how many they are."""
    return f"{kernels['ms']:.2f} in {kernels['launches']:.0f}"


def replay(found: Record) -> str:
    """How often a batch has a replay, from its first kernel to its last, and of how many kernels."""
    return f"{found['times']:g} x {found['ms']:.2f} ({found['kernels']})"


def gaps(move: Record) -> float:
    """Microseconds in which no kernel runs."""
    return max(0.0, 1000 * float(move["ms"]) - float(sum(move["kinds"].values())))


def draw(result: Record, out: Path) -> None:
    """A bar for each move, cut by what its kernels are for."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    moves = result["moves"]
    kinds = [*dict.fromkeys(kind for move in moves.values() for kind in move["kinds"]), "gaps"]
    figure, axes = pyplot.subplots(figsize=(8, 0.7 * len(moves) + 1.6))
    left = [0.0] * len(moves)
    for kind in kinds:
        widths = [(gaps(m) if kind == "gaps" else m["kinds"].get(kind, 0)) / 1000 for m in moves.values()]
        axes.barh(list(moves), widths, left=left, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    times = [move["ms"] for move in moves.values()]
    axes.scatter(times, list(moves), marker="|", s=900, color="black", zorder=3, label="its end: kernels overlap")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=2, frameon=False, fontsize=8, markerscale=0.25)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})
