"""The kernel profile as a page of Markdown and as a picture."""

from collections.abc import Callable
from pathlib import Path

from gpu_source import describe_source
from shared import Record, command_block, paragraph


def render(result: Record) -> str:
    """The profile as a page of Markdown."""
    machine, moves = result["machine"], result["moves"]
    kinds = list(dict.fromkeys(kind for move in moves.values() for kind in move["kinds"]))
    lines = [
        "# Where a move's time goes",
        "",
        *command_block("python bench/gpu_profile.py --out docs/results/profile.json"),
        "",
        *paragraph(
            f"Machine: {machine['device']}, torch {machine['torch']}. deat: {describe_source(result.get('made'))}. "
            "Network: PreAct-ResNet 18, batches of 128, bf16. A recorded move is replayed alone, without data and "
            'augmentation. The rows give microseconds, by the purpose of a kernel. "Gaps" is the rest of the move\'s '
            "time. Kernels can overlap; their sum is then larger than the move's time."
        ),
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
    """Return the table of whole batches; empty if they were not profiled."""
    if not batches:
        return []
    names = [f"{method}, k = {cell['k']}" if "k" in cell else method for method, cell in batches.items()]
    lines = [
        "",
        "## Where a batch's time goes",
        "",
        *paragraph(
            "Whole batches as the trainer runs them: compiled, with data and augmentation. Times are milliseconds per "
            "batch. Host time is the time in which the host launches a batch on an idle device. Where it is shorter "
            'than the batch, the device is the limit. The rows from "device busy" on were measured under the '
            "profiler, which makes gaps longer."
        ),
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
    ("host time", lambda cell: f"{cell['host_ms']:.2f}"),
    ("a batch without the replays", lambda cell: f"{cell['rest_ms']:.2f}"),
    ("host time without the replays", lambda cell: f"{cell['rest_host_ms']:.2f}"),
    ("device busy", lambda cell: f"{cell['device']['busy_ms']:.2f}"),
    ("idle inside replays", lambda cell: f"{cell['device']['idle_inside_ms']:.2f}"),
    ("idle between launches", lambda cell: f"{cell['device']['idle_between_ms']:.2f}"),
    ("kernels inside replays: time and number", lambda cell: in_all(cell["device"]["inside"])),
    ("kernels outside: time and number", lambda cell: in_all(cell["device"]["outside"])),
    ("replays: number x time (kernels)", lambda cell: ", ".join(map(replay, cell["device"]["replays"]))),
)
"""The rows of a batch, and how to read each from its record."""


def shown(cell: Record, show: Callable[[Record], str]) -> str:
    """Return a cell's entry in a row; empty if it was not measured."""
    try:
        return show(cell)
    except KeyError:
        return ""


def failure(cell: Record) -> str:
    """Return why a cell or its profile is missing; empty if it is there."""
    why = cell.get("failed") or cell.get("device", {}).get("failed") or ""
    return str(why).replace("|", "/")


def in_all(kernels: Record) -> str:
    """Return the sum of the kernels' times in a batch, and their number."""
    return f"{kernels['ms']:.2f} in {kernels['launches']:.0f}"


def replay(record: Record) -> str:
    """Return the number of replays in a batch, the time from first to last kernel, and the number of kernels."""
    return f"{record['times']:g} x {record['ms']:.2f} ({record['kernels']})"


def gaps(move: Record) -> float:
    """Return the microseconds in which no kernel runs."""
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
    axes.scatter(
        times, list(moves), marker="|", s=900, color="black", zorder=3, label="end of the move (kernels overlap)"
    )
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=2, frameon=False, fontsize=8, markerscale=0.25)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})
