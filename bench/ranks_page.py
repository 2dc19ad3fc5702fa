"""The result of bench/ranks.py as a page of Markdown, with a calculation of the traffic between more GPUs."""

from shared import Record, command_block, paragraph

from deat import models

NETWORKS = ("preact_resnet18", "resnet50", "wide_resnet34_10")
GPUS = (2, 8, 16, 64)
LINKS = {"NVLink, 450 GB/s": 450e9, "400 Gb/s a GPU": 50e9, "100 Gb/s for 8 GPUs": 100e9 / 8 / 8}
EPOCH = (50_000, 128)
"""CIFAR-10's images, and the batch that the epoch's traffic is worked out for."""


def render(result: Record) -> str:
    """The whole page."""
    return "\n".join([*measured(result), *on_paper(), ""])


def measured(result: Record) -> list[str]:
    """One process against two."""
    where = f"{result['cpu']}, {result['cores']} cores, torch {result['torch']}, Python {result['python']}"
    busy = max(case[side]["others"] for case in result["cases"] for side in ("one_process", "two_processes"))
    return [
        "# One process against two",
        "",
        *command_block(result["command"]),
        "",
        *paragraph(
            f"Machine: {where}. A round trains on batches of {result['batch_size']} noise images with the same network "
            "twice: first one process with one thread, while the other process waits; then two processes with one "
            "thread each, which share each batch. Efficiency is the first time divided by twice the second."
        ),
        "",
        "| network | method | batches | one process, s | two processes, s | efficiency | backprops : collectives |",
        "|---|---|---|---|---|---|---|",
        *(row(case) for case in result["cases"]),
        "",
        *paragraph(
            "Times are medians over the rounds. An efficiency is the median (and the range) of the rounds' efficiencies. "
            f"Other processes took up to {busy:.0%} of the two cores in a round"
            f"{', which disturbs these numbers' if busy > 0.05 else ''}."
        ),
        "",
    ]


def row(case: Record) -> str:
    """A line of the table."""
    each, steps = case["efficiency"], int(case["method"].split("-")[1])
    ratio = f"{steps + 1} : 1" if case["method"].startswith("pgd") else f"{steps} : {steps}"
    cells = (
        case["network"],
        case["method"],
        case["batches"],
        f"{case['one_process']['median']:.3f}",
        f"{case['two_processes']['median']:.3f}",
        f"{case['median_efficiency']:.2f} ({min(each):.2f} to {max(each):.2f})",
        ratio,
    )
    return f"| {' | '.join(map(str, cells))} |"


def on_paper() -> list[str]:
    """Calculate the bytes of a ring all-reduce of float32 gradients, and its time at a link's nominal speed."""
    images, batch = EPOCH
    steps = -(-images // batch)
    return [
        "# To 64 GPUs, by calculation",
        "",
        *paragraph(
            "Nothing below was measured. In a ring all-reduce over W GPUs, each GPU sends 2 (W - 1) / W times the bytes "
            "of the gradients, once per joint move. Times are these bytes divided by the link's nominal speed. They "
            "ignore latency, and the overlap of DDP's communication with the backward pass."
        ),
        "",
        f"| network | gradients | GPUs | sent per joint move | {' | '.join(f'ms, {link}' for link in LINKS)} |",
        f"|---|---|---|---|{'---|' * len(LINKS)}",
        *(paper_row(name, gpus) for name in NETWORKS for gpus in GPUS),
        "",
        *paragraph(
            f"An epoch of {images:,} images in batches of {batch} has {steps} batches. With preact_resnet18, each of 64 "
            "GPUs sends in an epoch:"
        ),
        "",
        "| method | joint moves | backprops | sent | sent per backprop |",
        "|---|---|---|---|---|",
        *(epoch_row(name, joints, backprops, steps) for name, joints, backprops in WORDS),
        "",
        *paragraph(
            "Besides the gradients, the processes send for each batch one flag of eight bytes (whether to stop). For "
            "each epoch they send one record of eight numbers per process, the number of correct predictions in "
            "validation, and the batch-norm buffers once."
        ),
    ]


WORDS = (
    ("pgd-7", 1, 8),
    ("m+pgd-7 at k = 3", 1, 4),
    ("free-8", 8, 8),
    ("m+deat at k = 3", 4, 4),
    ("yopo-5-3", 1, 5),
)
"""Methods, with their synchronised joint moves and their backprops per batch."""


def paper_row(name: str, gpus: int) -> str:
    """A network on some GPUs."""
    sent = ring(gradient_bytes(name), gpus)
    times = " | ".join(f"{1000 * sent / speed:.2f}" for speed in LINKS.values())
    return f"| {name} | {gradient_bytes(name) / 1e6:.1f} MB | {gpus} | {sent / 1e6:.1f} MB | {times} |"


def epoch_row(name: str, joints: int, backprops: int, steps: int) -> str:
    """A method's epoch."""
    once = ring(gradient_bytes("preact_resnet18"), 64)
    sent = f"{steps * joints * once / 1e9:.1f} GB | {joints * once / backprops / 1e6:.1f} MB"
    return f"| {name} | {steps * joints:,} | {steps * backprops:,} | {sent} |"


def gradient_bytes(name: str) -> int:
    """Four bytes a parameter."""
    return 4 * next(info.parameters or 0 for info in models.list_model_infos() if info.name == name)


def ring(size: float, gpus: int) -> float:
    """Bytes that each GPU sends."""
    return 2 * (gpus - 1) / gpus * size
