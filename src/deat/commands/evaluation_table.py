"""What `deat evaluate` prints: whose numbers these are, the tables, and what keeps them from being believed."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from deat.evaluation.evaluation import Evaluation
from deat.evaluation.sanity import SLICE, Flag
from deat.live import Screen, is_terminal
from deat.numbers import level, short_seconds
from deat.plain import plain

MOST_CLASSES = 20
"""Classes above which the table by class stays in the file."""
FROM_THE_START = "first to fool counts images that are wrong without any attack; name natural first to count them apart"
"""What is said where the first attack is given images that it did not have to fool."""
FEW_CLASSES = (
    "with fewer than four classes its targeted DLR loss is undefined and cross-entropy takes its place, "
    "so this is not the standard AutoAttack"
)
"""What is said of AutoAttack on two or three classes."""


def show(found: Evaluation, out: Path, told: Sequence[Flag] = ()) -> None:
    """Print what was judged, the tables, and what a reader must know to believe them; flags told above, by name."""
    console = Screen(soft_wrap=not is_terminal())
    console.print(plain(_judged_what(found)))
    console.print(_table(found))
    if len(found.classes) <= MOST_CLASSES:
        console.print(_class_table(found))
    if found.results[0].name != "natural":
        console.print(FROM_THE_START)
    if found.settings["sample"]:
        console.print(f"a sample of {len(found.labels):,} images: not comparable with numbers on the whole test set")
    for name, how in found.settings["attacks"].items():
        if how.get("targeted_loss") == "ce" and "apgd-t" in how["parts"]:
            console.print(f"{name}: {FEW_CLASSES}")
    for text in _time(found):
        console.print(text)
    for flag in found.flags:
        console.print(f"FLAG {flag.name}, as said above" if flag in told else flag.line, style="bold red")
    console.print(f"every setting and verdict is in {out}")


def _time(found: Evaluation) -> list[str]:
    """How the time was split, where most of it did not go into attacks."""
    attacks = sum(r.seconds for r in found.results)
    if found.check_seconds <= attacks:
        return []
    images = len(found.labels)
    seen = f"all {images} images" if images <= SLICE else f"{SLICE} images from all over the set"
    return [
        f"sanity checks took {short_seconds(found.check_seconds)} s and the attacks {short_seconds(attacks)} s: the "
        f"checks look at {seen}, and at no more than {SLICE} however many are judged"
    ]


def _judged_what(found: Evaluation) -> str:
    """Whose weights the numbers are about, and on which images."""
    about = found.settings["about"]
    whose = f"the {about['epoch']} epoch's weights, " if about["epoch"] else ""
    return f"judged: {whose}{about['weights']}, on {len(found.labels):,} test images of {about['data']}"


def _table(found: Evaluation) -> Table:
    settings = found.settings
    norm, eps = (settings["threat"][name] for name in ("norm", "eps"))
    sample = f" (a sample of {settings['available']:,})" if settings["sample"] else ""
    title = f"{norm} eps {level(eps)}, {len(found.labels):,} images{sample}, seed {settings['seed']}"
    title += ", cascade: each attack saw survivors only" if settings["cascade"] else ""
    table = Table(
        "attack", "accuracy", "95 % interval", "first to fool", "seconds", title=title, box=None, pad_edge=False
    )
    for r in found.results:
        shown = r.name in found.accuracy
        share = [f"{found.accuracy[r.name]:.2%}", _interval(found.intervals[r.name])] if shown else ["", ""]
        table.add_row(r.name, *share, f"{found.added[r.name]:,}", f"{r.seconds:.1f}")
    table.add_row("worst of all", f"{found.worst:.2%}", _interval(found.intervals["worst"]), "", "", style="bold")
    return table


def _class_table(found: Evaluation) -> Table:
    table = Table("class", "worst of all", "95 % interval", "images", box=None, pad_edge=False)
    for name, (hits, images, pair) in found.per_class().items():
        table.add_row(Text(plain(name)), f"{hits / images:.1%}" if images else "", _interval(pair), f"{images:,}")
    return table


def _interval(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1%} to {pair[1]:.1%}"
