"""`deat predict` and `deat attack`: use a run's network on image files."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from deat.cli.flag_types import IntFlag, NormChoice, OptionalFloat, OptionalStr
from deat.data.input_images import list_image_files
from deat.errors import DataError, UsageError
from deat.runs.attack_images import (
    DEFAULT_ATTACK,
    DEFAULT_BLOCK_SIZE,
    LABELS_PREDICTED,
    SUMMARY_FILE,
    AttackedImages,
    attack_images,
)
from deat.runs.predict import DEFAULT_BATCH_SIZE, Prediction, iter_predictions
from deat.runs.record_files import EpochChoice
from deat.runs.saved_run import SavedRun, load_run
from deat.threat import format_threat
from deat.utils.console import make_table_console, print_stderr
from deat.utils.text import make_printable

MAX_ATTACK_ROWS = 20
"""Images in the table of `deat attack`; attack.json has all."""


@dataclass(frozen=True)
class PredictCommand:
    """Classify image files with a run's network. Exits with 3 if a file cannot be read."""

    is_resumable: ClassVar[bool] = False

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder."""
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGES")]
    """Image files, .npy files of arrays (N, C, H, W), and folders of them. Images of another size than the network's
    are resized: their central square is cut out and scaled."""
    top: IntFlag = 1
    """How many classes to show for each image."""
    json: bool = False
    """Print one JSON document instead of a table."""
    epoch: EpochChoice = "best"
    """Which of the run's weights."""
    model: OptionalStr = None
    """The network, if it is code: my_file.py:NAME."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."""
    batch_size: IntFlag = DEFAULT_BATCH_SIZE
    """How many images pass through the network at once."""

    def run(self) -> int:
        """Classify the images."""
        return run_predict(self)


@dataclass(frozen=True)
class AttackCommand:
    """Attack image files with a run's network as the target, and write the adversarial images without loss."""

    is_resumable: ClassVar[bool] = False

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder."""
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGES")]
    """Image files, .npy files of arrays (N, C, H, W), and folders of them, as for predict."""
    out: OptionalStr = None
    """The folder to write to; required. It must be new or empty."""
    attack: str = DEFAULT_ATTACK
    """A name from `deat list attacks`: pgd-N, cw-N, apgd-ce, apgd-t, fab-t, square, aa, ..."""
    eps: OptionalFloat = None
    """The radius, if not that of the run."""
    norm: NormChoice = None
    """The norm, if not that of the run; it needs --eps."""
    labels: OptionalStr = None
    """The classes to turn the network away from: folders (the name of an image's folder), predicted (what the network
    takes it for), or a CSV file with lines FILE,CLASS. Default: folders if all are classes, else predicted."""
    format: Literal["auto", "png", "npy"] = "auto"
    """png has 8 bits, and values are rounded inside the ball; npy has the float32 values. auto: png where it fits."""
    seed: IntFlag = 0
    """The seed of random draws."""
    block: IntFlag = DEFAULT_BLOCK_SIZE
    """The number of images attacked at once; random draws depend on it."""
    overwrite: bool = False
    """Replace files in the output folder."""
    json: bool = False
    """Print the JSON of attack.json instead of a table."""
    epoch: EpochChoice = "best"
    """Which of the run's weights."""
    model: OptionalStr = None
    """The network, if it is code: my_file.py:NAME."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."""

    def run(self) -> int:
        """Attack the images."""
        return run_attack(self)


def run_predict(args: PredictCommand) -> int:
    """Print the classes of images.

    Args:
        args: The command.

    Returns:
        The exit status: that of `DataError` if a file cannot be read, else 0.

    Raises:
        UsageError: If the run does not classify images, or a flag is not accepted.
        DataError: If there is no such file, or none can be read.
    """
    files = list_image_files(args.images)
    run = _load(args.run_folder, args.model, args.epoch, args.device)
    rows = list(iter_predictions(run, files, top=args.top, batch_size=args.batch_size))
    errors = [row for row in rows if row.error is not None]
    if args.json:
        head = {"run": str(run.path), "epoch": run.epoch, "classes": list(run.classes), "input": list(run.image_shape)}
        print(json.dumps({**head, "images": [row.as_json() for row in rows]}, indent=2))
    else:
        _print_predictions(rows, run)
    for row in errors:
        print_stderr(str(row.error))
    return DataError.exit_code if errors else 0


def run_attack(args: AttackCommand) -> int:
    """Attack images, write them, and print what became of them.

    Args:
        args: The command.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: If a flag is not accepted.
        DataError: If a file cannot be read, or a label is missing or no class.
        CheckpointError: If the output cannot be written.
    """
    if args.out is None:
        raise UsageError("--out is missing: name the folder for the adversarial images, such as --out attacked.")
    run = _load(args.run_folder, args.model, args.epoch, args.device)
    if args.norm is not None and args.eps is None:
        raise UsageError(f"--norm {args.norm} needs an --eps of its own: the run's is for {run.threat.name}.")
    if args.eps is not None and args.norm is None and len(run.threat.balls) > 1:
        raise UsageError(f"--eps needs a --norm of its own: the run's threat model is {format_threat(run.threat)}.")
    threat = None if args.eps is None else f"{args.norm or run.threat.name}:{args.eps!r}"
    attacked = attack_images(
        run,
        args.images,
        args.out,
        attack=args.attack,
        threat=threat,
        labels=args.labels,
        format=args.format,
        seed=args.seed,
        block=args.block,
        overwrite=args.overwrite,
        progress=lambda done, total: print_stderr(f"attacked {done:,} of {total:,} images"),
    )
    if args.json:
        print(json.dumps(attacked.as_json(), indent=2))
    else:
        _print_attacked(attacked, run)
    return 0


def _load(folder: str, model: str | None, epoch: EpochChoice, device: str) -> SavedRun:
    return load_run(Path(folder).expanduser(), model=model, epoch=epoch, device=device)


def _print_predictions(rows: list[Prediction], run: SavedRun) -> None:
    console = make_table_console()
    table = Table("image", "class", "probability", box=None, pad_edge=False)
    others = any(len(row.top) > 1 for row in rows)
    if others:
        table.add_column("then")
    for row in rows:
        if row.error is None:
            then = ", ".join(f"{name} {share:.1%}" for name, share in row.top[1:])
            label = Text(make_printable(str(row.label)))
            table.add_row(Text(make_printable(row.file)), label, f"{row.probability:.1%}", *([then] if others else []))
        else:
            table.add_row(Text(make_printable(row.file)), "cannot be read")
    console.print(table)
    if resized := Counter(row.resized_from for row in rows if row.resized_from):
        sizes = ", ".join(f"{w}x{h}" for w, h in list(resized)[:5]) + (", ..." if len(resized) > 5 else "")
        side = "x".join(map(str, run.image_shape[1:]))
        console.print(
            f"cropped to the central square and resized to {side}: {resized.total():,} of the images ({sizes})"
        )


def _print_attacked(found: AttackedImages, run: SavedRun) -> None:
    console = make_table_console()
    table = Table("image", "class", "without attack", "attacked", "status", "distance", box=None, pad_edge=False)
    for image in found.images[:MAX_ATTACK_ROWS]:
        names = [Text(make_printable(name or "")) for name in (image.label, image.before, image.after)]
        distance = "" if image.distance is None else f"{image.distance:.4g}"
        table.add_row(Text(make_printable(image.file)), *names, image.status, distance)
    console.print(table)
    if len(found.images) > MAX_ATTACK_ROWS:
        console.print(f"... and {len(found.images) - MAX_ATTACK_ROWS:,} more in {SUMMARY_FILE}")
    attack, threat = found.settings["attack"]["name"], found.settings["threat"]
    counts = f"{found.count('fooled'):,} of {len(found.images):,} images fool the network"
    wrong = found.count("wrong without attack")
    wrong_text = f"; {wrong:,} it takes for another class without attack, so they were not attacked" if wrong else ""
    console.print(f"{attack}, {format_threat(threat)}: {counts}{wrong_text}")
    if found.settings["labels"] == LABELS_PREDICTED:
        console.print(
            "labels: none were given, so the attack turns the network away from its own predictions; whether those are "
            "right is not known"
        )
    if found.settings["format"].startswith("png"):
        lost = f"; {found.num_lost_to_rounding:,} fooled it only before" if found.num_lost_to_rounding else ""
        console.print(f"values are rounded to 8 bits inside the ball, and the statuses are those of the files{lost}")
    if any(image.resized_from for image in found.images):
        side = "x".join(map(str, run.image_shape[1:]))
        console.print(f"images of other sizes were resized to {side}, the size in which they are attacked and written")
    console.print(f"wrote {len(found.images) - wrong:,} adversarial images and {SUMMARY_FILE} to {found.folder}")
