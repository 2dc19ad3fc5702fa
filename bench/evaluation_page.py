"""The evaluation benchmark's result as a page of Markdown."""

from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]
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
            f"`python bench/evaluation.py` on {where}; its head says what each row is. PreAct-ResNet 18,",
            "trained by M+DEAT in the FAST setup, CIFAR-10's 10,000 test images, linf 8/255. No sanity checks.",
            "",
            *attack_table(cells),
            "",
            "`plain` runs in torch's default precision: float32 whose convolutions may use TF32. The reference is",
            f"`{REFERENCE}`, float32 without TF32 anywhere: from it a row may be at most 0.1 points and 0.3 % of",
            'verdicts away. Accuracies are in %. "Points" is the largest difference of one, over the four attacks;',
            '"differ" is the largest share of images whose verdict is another. Attacks in another block start at other',
            "points, which moves accuracies too; verdicts are not compared there. Seconds are those of a process that",
            "has loaded and built what it needs;",
            '"before" is how long PGD-20 took just before, and on how many, which holds what no cell before it had',
            "needed.",
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
    titles = "| | seconds | times plain | FGSM | PGD-20 | PGD-100 | CW-20 | points | differ | before |"
    rows = [titles, "|---" * 10 + "|"]
    for name in sorted(shown, key=lambda name: -cells[name]["seconds"]):
        cell = cells[name]
        ratio = f"{cells['plain']['seconds'] / cell['seconds']:.1f}" if "plain" in cells else ""
        shares = " | ".join(f"{100 * share(cell, how):.2f}" for how in ATTACKS)
        ending = f"{points(cells, name)} | {differs(cells, name)} | {before(cell)}"
        rows.append(f"| {name} | {cell['seconds']:.1f} | {ratio} | {shares} | {ending} |")
    return rows


def fastest(cells: Record) -> list[str]:
    """The fastest row, as one asks for it, and what went before it."""
    mine = [name for name in cells if name in DEAT]
    if not mine:
        return []
    name = min(mine, key=lambda name: cells[name]["seconds"])
    (precision, block, engine), cell = DEAT[name], cells[name]
    usual = "" if name == "default" else ", not the default"
    return [
        f"The fastest row, `{name}`, is `--precision {precision} --block {block} --engine {engine}`{usual}.",
        f"Just before its {cell['seconds']:.1f} s, in the same process, PGD-20 took {cell['first_before']:.1f} s, and"
        f" {cell['each']['pgd-20']:.1f} s then: who gives one such",
        "command waits for the difference too.",
        "",
    ]


def unmeasured(cells: Record) -> list[str]:
    """Rows that the command knows and this machine has not been asked for."""
    missing = [f"`{name}`" for name in DEAT if name not in cells]
    return [f"Not measured here: {', '.join(missing)}.", ""] if missing else []


def points(cells: Record, name: str) -> str:
    """The largest difference of an accuracy from the reference's, in points."""
    if REFERENCE not in cells:
        return ""
    return f"{max(100 * abs(share(cells[name], how) - share(cells[REFERENCE], how)) for how in ATTACKS):.2f}"


def before(cell: Record) -> str:
    """What went before a cell."""
    return f"{cell['first_before']:.1f} s, {cell['first_images']:,}" if "first_before" in cell else ""


def autoattack_table(cells: Record) -> list[str]:
    """The library and deat."""
    rows = ["| | images | seconds | seconds per 1,000 | times the library | AutoAttack | before |", "|---" * 7 + "|"]
    base = cells.get("aa-library-tenth")
    for name in [name for name in cells if name.startswith("aa-")]:
        cell = cells[name]
        images = len(unpack(cell["verdicts"]["aa"]))
        pace = 1000 * cell["seconds"] / images
        ratio = f"{base['seconds'] / pace:.1f}" if base else ""
        found = f"{cell['seconds']:.1f} | {pace:.1f} | {ratio} | {100 * share(cell, 'aa'):.2f}"
        rows.append(f"| {name} | {images:,} | {found} | {before(cell)} |")
    return [*rows, *same_images(cells)]


def same_images(cells: Record) -> list[str]:
    """What deat says of the library's images."""
    if "aa-library-tenth" not in cells or "aa-fp16-compiled" not in cells:
        return []
    one = unpack(cells["aa-library-tenth"]["verdicts"]["aa"])
    other = unpack(cells["aa-fp16-compiled"]["verdicts"]["aa"])[::10]
    changed = sum(a != b for a, b in zip(one, other, strict=True))
    return [
        "",
        f"On the library's {len(one):,} images `aa-fp16-compiled` says {100 * mean(other):.2f} and the library",
        f"{100 * mean(one):.2f}; {changed} verdicts differ. The library ran in batches of 500, so its starts did too.",
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
