"""The CPU benchmark's result as a page of Markdown."""

from statistics import mean

from shared import Record, command_block, paragraph


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    kinds = {"speed": speed_page, "compiled": compiled_page, "accuracy": accuracy_page}
    pages = [page(result[part]) for part, page in kinds.items() if part in result]
    return "\n".join(["# Training speed on two CPU cores", "", *(line for lines in pages for line in lines)])


def head(part: Record, text: str) -> list[str]:
    """Return the command, and a paragraph that begins with the machine."""
    where = f"{part['cpu']}, {part['threads']} threads, torch {part['torch']}, Python {part['python']}"
    about = f"Machine: {where}. Network: {part['network']}, batch {part['batch_size']}."
    return [*command_block(part["command"]), "", *paragraph(f"{about} {text}"), ""]


def speed_page(part: Record) -> list[str]:
    """The plain loop and deat in turns."""
    speed = part["methods"]
    return [
        *head(
            part,
            "`plain` is a loop as paper repositories have it: float32, a DataLoader, and a full backward pass in every "
            "attack step. Both loops ran in turns, in one process, on the same two cores.",
        ),
        *speed_table(speed),
        "",
        *paragraph(
            "Times are medians over the rounds. A speed-up is the median (and the range) of the rounds' speed-ups. A round in "
            f"which other processes took 5 % of the cores was repeated. {rounds(speed)} The speed-ups are valid for "
            "two free cores."
        ),
        "",
    ]


def compiled_page(part: Record) -> list[str]:
    """Whether torch's compiler pays on a CPU."""
    rows = [
        f"| {s['method']} | {s['eager']['backprops_per_round']} | {s['eager']['median']:.2f} "
        f"| {s['compile']['median']:.2f} | {spread(s['ratio'])} | {s['warm_up_seconds']:.0f} |"
        for s in part["methods"]
    ]
    return [
        "## Compiled",
        "",
        *head(
            part,
            "deat's trainer with its default engine and with `--engine compile`, in turns as above. The wait is the "
            f"additional time of the first compiled round. {rounds(part['methods'])}",
        ),
        "| method | backprops | eager, s | compiled, s | speed-up over eager | wait, s |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def accuracy_page(part: Record) -> list[str]:
    """The same training by both."""
    rates = "; ".join(
        f"{a['method']}: plain {a['lr']['plain']} out of {', '.join(a['held_out_pgd20']['plain'])}, "
        f"deat {a['lr']['deat']}"
        for a in part["methods"]
    )
    machines = "; ".join(f"{a['method']}: {', '.join(a['trained_on'])}" for a in part["methods"])
    return [
        "## Accuracy",
        "",
        *head(
            part,
            "The network is trained on the 8x8 digits from the same initial weights, by the plain loop in float32 and by "
            "deat in bfloat16. Each side chose its learning rate on held-out training images, in a run with another seed "
            f"({rates}). Nothing was chosen on the test images. Both sides are evaluated in float32. The table has "
            f"natural / PGD-20 accuracy in %, one column per seed. Trained on: {machines}.",
        ),
        *accuracy_table(part["methods"]),
        "",
    ]


def rounds(speed: list[Record]) -> str:
    """Return how many rounds count."""
    notes = [f"{s['rounds']['undisturbed']} of {s['rounds']['played']} for {s['method']}" for s in speed]
    noisy = [s["method"] for s in speed if not s["rounds"]["undisturbed"]]
    warning = f" No round of {' and '.join(noisy)} was undisturbed, so all are shown." if noisy else ""
    return f"Rounds that count: {', '.join(notes)}.{warning}"


def spread(ratio: Record) -> str:
    """The median of the rounds' ratios, and their range."""
    return f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def speed_table(speed: list[Record]) -> list[str]:
    """Rows of the speed table."""
    rows = [
        "| method | backprops | plain, s | deat, s | plain, s/backprop | deat, s/backprop | speed-up | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for s in speed:
        plain, ours = s["plain"], s["deat"]
        count = plain["backprops_per_round"]
        rows.append(
            f"| {s['method']} | {count} | {plain['median']:.2f} | {ours['median']:.2f} "
            f"| {plain['median'] / count:.3f} | {ours['median'] / ours['backprops_per_round']:.3f} "
            f"| {spread(s['ratio'])} | {s['goal']} |"
        )
    return rows


def accuracy_table(accuracy: list[Record]) -> list[str]:
    """Rows of the accuracy table, and the differences in words."""
    seeds = range(len(accuracy[0]["plain"]))
    rows = [f"| | {' | '.join(str(seed) for seed in seeds)} | mean |", "|---" * (len(seeds) + 2) + "|"]
    notes = []
    for a in accuracy:
        for who in ("plain", "deat"):
            cells = [f"{100 * r['natural']:.1f} / {100 * r['pgd-20']:.1f}" for r in a[who]]
            means = [100 * mean(r[how] for r in a[who]) for how in ("natural", "pgd-20")]
            rows.append(f"| {a['method']}, {who} | {' | '.join(cells)} | {means[0]:.1f} / {means[1]:.1f} |")
        notes.append(f"{a['method']} ({a['epochs']} epochs) {in_words(a['difference'])}")
    text = "deat minus plain, in points, as mean +- standard error over the seeds: "
    return [*rows, "", *paragraph(f"{text}{'; '.join(notes)}.")]


def in_words(differences: dict[str, Record]) -> str:
    """Differences of accuracy in points, with their standard errors."""
    parts = []
    for how, d in differences.items():
        error = "" if d["standard_error"] is None else f" +- {100 * d['standard_error']:.1f}"
        parts.append(f"{how} {100 * d['mean']:+.1f}{error}")
    return ", ".join(parts)
