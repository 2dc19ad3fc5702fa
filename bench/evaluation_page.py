"""The evaluation benchmark's result as a page of Markdown."""

from collections.abc import Iterable

from shared import Record, command_block, paragraph

REFERENCE = "fp32"
ATTACKS = ("fgsm", "pgd-20", "pgd-100", "cw-20")
DEAT: dict[str, tuple[str, int, str]] = {
    "default": ("auto", 500, "auto"),
    "fp32": ("fp32", 10000, "graph"),
    "tf32": ("tf32", 10000, "graph"),
    "bf16": ("bf16", 10000, "graph"),
    "fp16": ("fp16", 10000, "graph"),
    "fp16-compiled": ("fp16", 10000, "compile"),
    "fp16-compiled-2500": ("fp16", 2500, "compile"),
    "fp16-compiled-500": ("fp16", 500, "compile"),
}
"""deat's rows: --precision, --block and --engine."""


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    cells, machine = result["cells"], result["machine"]
    where = f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}"
    return "\n".join(
        [
            "# Evaluation speed on a GPU",
            "",
            *command_block("python bench/evaluation.py"),
            "",
            *paragraph(
                f"Machine: {where}. Network: PreAct-ResNet 18, trained by M+DEAT in the FAST setup. Images: CIFAR-10's "
                "10,000 test images, linf 8/255. There are no sanity checks. The docstring of `bench/evaluation.py` "
                "describes the rows and the options that the command needs."
            ),
            "",
            *attack_table(cells),
            "",
            *paragraph(
                "`plain` runs in torch's default precision: float32, in which convolutions may use TF32. The reference "
                f"is `{REFERENCE}`: float32 without TF32. With the same block size a row may differ from it by "
                'at most 0.1 points and 0.3 % of the verdicts. Accuracies are in %. "Points" is the largest difference '
                'in accuracy over the four attacks. "Verdicts" is the largest share of images with another verdict. '
                "With another block size the attacks start at other points, which changes accuracies too; verdicts are "
                "not compared there."
            ),
            "",
            *paragraph(
                'Seconds are those of a process that has already loaded and built what it needs. "Run before" is the '
                "time of a run of PGD-20 directly before, and its number of images. It includes all preparation that no "
                "earlier row had needed."
            ),
            "",
            *fastest(cells),
            *unmeasured(cells),
            "## AutoAttack",
            "",
            *autoattack_table(cells),
            "",
        ]
    )


def attack_table(cells: Record) -> list[str]:
    """FGSM, PGD-20, PGD-100 and CW-20 by precision and block."""
    shown = [name for name in cells if not name.startswith("aa-")]
    titles = "| | seconds | speed-up over plain | FGSM | PGD-20 | PGD-100 | CW-20 | points | verdicts | run before |"
    rows = [titles, "|---" * 10 + "|"]
    for name in sorted(shown, key=lambda name: -cells[name]["seconds"]):
        cell = cells[name]
        ratio = f"{cells['plain']['seconds'] / cell['seconds']:.1f}" if "plain" in cells else ""
        shares = " | ".join(f"{100 * share(cell, how):.2f}" for how in ATTACKS)
        ending = f"{points(cells, name)} | {differs(cells, name)} | {before(cell)}"
        rows.append(f"| {name} | {cell['seconds']:.1f} | {ratio} | {shares} | {ending} |")
    return rows


def fastest(cells: Record) -> list[str]:
    """Return the fastest row's options, and the time of the run before it."""
    mine = [name for name in cells if name in DEAT]
    if not mine:
        return []
    name = min(mine, key=lambda name: cells[name]["seconds"])
    (precision, block, engine), cell = DEAT[name], cells[name]
    usual = "" if name == "default" else ", not the default"
    text = (
        f"The fastest row, `{name}`, is `--precision {precision} --block {block} --engine {engine}`{usual}. It took "
        f"{cell['seconds']:.1f} s. Directly before, in the same process, PGD-20 took {cell['first_before']:.1f} s; "
        f"within the row it took {cell['each']['pgd-20']:.1f} s. A single command takes longer by the difference."
    )
    return [*paragraph(text), ""]


def unmeasured(cells: Record) -> list[str]:
    """Return the names of the rows that were not measured."""
    missing = [f"`{name}`" for name in DEAT if name not in cells]
    return [*paragraph(f"Not measured: {', '.join(missing)}."), ""] if missing else []


def points(cells: Record, name: str) -> str:
    """The largest difference of an accuracy from the reference's, in points."""
    if REFERENCE not in cells:
        return ""
    return f"{max(100 * abs(share(cells[name], how) - share(cells[REFERENCE], how)) for how in ATTACKS):.2f}"


def before(cell: Record) -> str:
    """Return the seconds and images of the run before a cell."""
    return f"{cell['first_before']:.1f} s, {cell['first_images']:,}" if "first_before" in cell else ""


def autoattack_table(cells: Record) -> list[str]:
    """The library and deat."""
    rows = [
        "| | images | seconds | seconds per 1,000 | speed-up over the library | AutoAttack | run before |",
        "|---" * 7 + "|",
    ]
    base = cells.get("aa-library-tenth")
    for name in [name for name in cells if name.startswith("aa-")]:
        cell = cells[name]
        images = len(unpack(cell["verdicts"]["aa"]))
        pace = 1000 * cell["seconds"] / images
        ratio = f"{base['seconds'] / pace:.1f}" if base else ""
        numbers = f"{cell['seconds']:.1f} | {pace:.1f} | {ratio} | {100 * share(cell, 'aa'):.2f}"
        rows.append(f"| {name} | {images:,} | {numbers} | {before(cell)} |")
    return [*rows, *same_images(cells)]


def same_images(cells: Record) -> list[str]:
    """Compare deat's verdicts with the library's on the library's images."""
    if "aa-library-tenth" not in cells or "aa-fp16-compiled" not in cells:
        return []
    one = unpack(cells["aa-library-tenth"]["verdicts"]["aa"])
    other = unpack(cells["aa-fp16-compiled"]["verdicts"]["aa"])[::10]
    changed = sum(a != b for a, b in zip(one, other, strict=True))
    return [
        "",
        *paragraph(
            f"On the library's {len(one):,} images, `aa-fp16-compiled` gives {100 * mean(other):.2f} and the library "
            f"{100 * mean(one):.2f}; {changed} verdicts differ. The library ran in batches of 500, and drew its starts "
            "batch by batch."
        ),
    ]


def differs(cells: Record, name: str) -> str:
    """The largest share of other verdicts than the reference's, where starts are the same."""
    if REFERENCE not in cells or name not in DEAT or DEAT[name][1] != DEAT[REFERENCE][1]:
        return ""
    one, other = cells[name]["verdicts"], cells[REFERENCE]["verdicts"]
    shares = [mean(a != b for a, b in zip(unpack(one[how]), unpack(other[how]), strict=True)) for how in one]
    return f"{max(shares):.2%}"


def share(cell: Record, how: str) -> float:
    """The accuracy under an attack."""
    return mean(unpack(cell["verdicts"][how]))


def mean(hits: Iterable[bool]) -> float:
    """The share of true values."""
    values = list(hits)
    return sum(values) / len(values)


def unpack(text: str) -> list[bool]:
    """Packed verdicts."""
    count, _, digits = text.partition(":")
    bits = bin(int(digits, 16))[3:]
    assert len(bits) == int(count)
    return [bit == "1" for bit in bits]
