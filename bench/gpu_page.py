"""The GPU benchmark's result as a page of Markdown."""

from gpu_source import told
from shared import Record


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    machine = result["machine"]
    where = f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}"
    return "\n".join(
        [
            "# Training speed on a GPU",
            "",
            f"`python bench/gpu.py --out docs/results/speed.json` on {where}.",
            "Its head says what is measured. A backprop is one forward and backward over a batch; times hold data and",
            "augmentation, and not the warm-up. Images/s are those of a training that makes so many backprops of each",
            "batch. The peak is what the device reached on a large bf16 matrix product in the same call.",
            "",
            *table(result["cells"], machine["peak_tflops"]),
            "",
            *calls(result["cells"], machine["peak_tflops"]),
            "",
        ]
    )


def table(cells: dict[str, Record], peak: float) -> list[str]:
    """A row for each cell."""
    rows = [
        "| network | method | batch | engine | ms a backprop | times plain | backprops | images/s | TFLOP/s "
        "| of the peak | GiB | warm-up, s |",
        "|---" * 12 + "|",
    ]
    for name, cell in cells.items():
        network, method, size, engine = name.split("/")
        ran = cell.get("ran", engine)
        head = f"| {network} | {method} | {size} | {engine}{f', fell back: {ran}' * (ran != engine)} "
        if "failed" in cell:
            rows.append(f"{head}| failed: {cell['failed'].replace('|', '/')} |" + " |" * 7)
            continue
        plain = cells.get(f"{network}/{method}/{size}/plain", {}).get("ms_per_backprop")
        ratio = f"{plain / cell['ms_per_backprop']:.1f}" if plain else ""
        rows.append(
            f"{head}| {cell['ms_per_backprop']:.2f} | {ratio} | {cell['backprops_per_batch']} "
            f"| {cell['images_per_second']:,} | {cell['tflops']:.0f} "
            f"| {cell['tflops'] / cell.get('peak_tflops', peak):.0%} | {cell['peak_memory_gib']:.1f} "
            f"| {cell['warm_up_seconds']:.1f}{', first' * cell.get('first', False)} |"
        )
    return rows


def calls(cells: dict[str, Record], peak: float) -> list[str]:
    """A row for what was measured with the same peak by the same deat."""
    found: dict[tuple[float, str], list[str]] = {}
    for name, cell in cells.items():
        groups = found.setdefault((cell.get("peak_tflops", peak), told(cell.get("made"))), [])
        if (group := name.rpartition("/")[0]) not in groups:
            groups.append(group)
    head = ["| the peak, TFLOP/s | deat | measured then |", "|---|---|---|"]
    return head + [f"| {peak} | {made} | {', '.join(groups)} |" for (peak, made), groups in found.items()]
