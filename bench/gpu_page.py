"""The GPU benchmark's result as a page of Markdown."""

from gpu_source import describe_source
from shared import Record, command_block, paragraph


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    machine = result["machine"]
    where = f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}"
    return "\n".join(
        [
            "# Training speed on a GPU",
            "",
            *command_block("python bench/gpu.py --out docs/results/speed.json"),
            "",
            *paragraph(
                f"Machine: {where}. The docstring of `bench/gpu.py` describes the measurement. `plain` is a loop as "
                "paper repositories have it. A backprop is one forward and one backward pass over a batch. Times "
                "include data and augmentation, but not the warm-up. Images/s is the speed of a training that makes "
                "this number of backprops per batch. The peak is the speed that the device reached on a large bf16 "
                "matrix product in the same call."
            ),
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
        "| network | method | batch | engine | ms per backprop | speed-up over plain | backprops per batch | images/s "
        "| TFLOP/s | share of peak | peak memory, GiB | warm-up, s |",
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
    """Return a row for the cells that were measured with the same peak by the same version of deat."""
    by_version: dict[tuple[float, str], list[str]] = {}
    for name, cell in cells.items():
        groups = by_version.setdefault((cell.get("peak_tflops", peak), describe_source(cell.get("made"))), [])
        if (group := name.rpartition("/")[0]) not in groups:
            groups.append(group)
    head = ["| peak, TFLOP/s | version of deat | cells |", "|---|---|---|"]
    return head + [f"| {peak} | {made} | {', '.join(groups)} |" for (peak, made), groups in by_version.items()]
