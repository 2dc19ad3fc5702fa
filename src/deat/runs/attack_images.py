"""deat.attack_images: adversarial images of image files, written without loss and verified after writing."""

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from deat.data.input_images import ImageFile, InputImage, list_image_files, read_image_file, unreadable_error
from deat.errors import CheckpointError, DataError, UsageError
from deat.evaluation.attack_registry import describe_attack, get_attack
from deat.evaluation.attack_verifier import AttackLike, derive_block_seed
from deat.evaluation.attacks import as_evaluated, call_attack, is_natural
from deat.evaluation.image_rounding import round_to_8_bits
from deat.radius_checks import check_radius
from deat.runs.predict import Paths, check_classifies_images, class_name, classify, find_crop_fraction
from deat.runs.record_files import EpochChoice
from deat.runs.saved_run import SavedRun, load_run
from deat.tasks.classification import as_class_logits
from deat.threat import ThreatModel, parse_threat
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.fingerprints import fingerprint_model
from deat.utils.float32_precision import exact_float32
from deat.utils.numbers import is_int_at_least
from deat.utils.safe_write import check_no_symlinks, write_atomic, write_json
from deat.utils.text import format_names
from deat.utils.torch_contexts import broadcast_mask, device_of, eval_mode
from deat.version import VERSION

SUMMARY_FILE = "attack.json"
DEFAULT_ATTACK = "pgd-20"
DEFAULT_BLOCK_SIZE = 100
ImageFormat = Literal["auto", "png", "npy"]
LABELS_FROM_FOLDERS, LABELS_PREDICTED = "folders", "predicted"
Status = Literal["fooled", "resisted", "wrong without attack"]


@dataclass(frozen=True)
class AttackedImage:
    """What an attack did to one image.

    Attributes:
        file: The image's file.
        label: The class that the attack turns the network away from.
        before: The predicted class without attack.
        after: The predicted class of the written file; None for an image that was not attacked.
        status: Whether the written image fools the network.
        written: The file with the adversarial image, in the output folder. None for an image that the network
            misclassifies without an attack: it is not attacked.
        distance: The norm of the written perturbation.
        probability: The probability of `after`.
        lost_to_rounding: True if the image fooled the network before its values were rounded to 8 bits, and no more.
        resized_from: Width and height of the file's image, if it was resized.
    """

    file: str
    label: str
    before: str
    after: str | None
    status: Status
    written: str | None = None
    distance: float | None = None
    probability: float | None = None
    lost_to_rounding: bool = False
    resized_from: tuple[int, int] | None = None


@dataclass(frozen=True)
class AttackedImages:
    """The adversarial images of an output folder.

    Attributes:
        folder: The output folder; `attack.json` in it has all of this.
        images: What the attack did to each image.
        settings: The run, the threat model, the attack, where the labels come from, and the format.
    """

    folder: Path
    images: tuple[AttackedImage, ...] = field(repr=False)
    settings: dict[str, Any] = field(repr=False)

    def count(self, status: Status) -> int:
        """Return how many images have a status.

        Args:
            status: One of the statuses of `AttackedImage`.
        """
        return sum(image.status == status for image in self.images)

    @property
    def num_lost_to_rounding(self) -> int:
        """How many images fooled the network only before rounding."""
        return sum(image.lost_to_rounding for image in self.images)

    def as_json(self) -> dict[str, Any]:
        """Return the content of attack.json."""
        counts = {
            "images": len(self.images),
            "fooled": self.count("fooled"),
            "resisted": self.count("resisted"),
            "wrong_without_attack": self.count("wrong without attack"),
            "lost_to_rounding": self.num_lost_to_rounding,
        }
        return {**self.settings, **counts, "results": [asdict(image) for image in self.images]}


def attack_images(
    run: SavedRun | str | os.PathLike[str],
    images: Paths,
    out: str | os.PathLike[str],
    *,
    attack: str | AttackLike = DEFAULT_ATTACK,
    threat: str | ThreatModel | None = None,
    labels: str | Mapping[str, str] | None = None,
    format: ImageFormat = "auto",
    seed: int = 0,
    block: int = DEFAULT_BLOCK_SIZE,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    model: nn.Module | str | None = None,
    epoch: EpochChoice = "best",
    device: str = "auto",
) -> AttackedImages:
    """Attack image files and write the adversarial images.

    Every adversarial image is verified: it is read again from its file, must be in the ball around the image that the
    network takes, and is classified again. PNG files have 8 bits: values are rounded inside the ball, and `status` is
    that of the rounded image. NPY files have the float32 values themselves.

    Args:
        run: A run's folder, or what `load_run` returns.
        images: Image files, .npy files of arrays, and folders of them. Images of another size than the network's are
            resized as `predict` does, and written in the network's size.
        out: The output folder. It must be new or empty, unless `overwrite`.
        attack: A name, such as "pgd-20", "apgd-ce" or "aa", or an attack.
        threat: Norm and radius, such as "linf:8/255"; by default those that the run was trained against.
        labels: The class of each image. "folders": the name of its folder. "predicted": what the network predicts.
            Or a CSV file with lines FILE,CLASS, or a dict from files or their names to classes. By default
            "folders" if every image is in a folder named after a class, and else "predicted".
        format: "png", "npy", or "auto" for png unless an image is not of 8 bits or has no 1 or 3 channels.
        seed: The seed of random draws.
        block: How many images are attacked at once; random draws depend on it.
        overwrite: Replace files in the output folder.
        progress: Called after each block with the number of images done and of all.
        model: The network of a folder, where it is code.
        epoch: Which weights of a folder: "best" or "last".
        device: Where the network of a folder runs.

    Returns:
        What the attack did to each image.

    Raises:
        DataError: If a file cannot be read, or a label is missing or no class.
        UsageError: If an argument is not accepted.
        CheckpointError: If the output cannot be written.

    Example:
        >>> deat.attack_images("runs/photos", "holiday/", "attacked", threat="linf:4/255").count("fooled")
        12
    """
    chosen = as_evaluated(get_attack(attack))
    if is_natural(chosen):
        raise UsageError("natural is no attack: it changes no image. Choose one of deat list attacks.")
    for name, value, least in (("seed", seed, 0), ("block", block, 1)):
        if not is_int_at_least(value, least):
            raise UsageError(f"{name} {value!r} is not accepted: give a whole number of at least {least}.")
    if format not in ("auto", "png", "npy"):
        raise UsageError(f"format {format!r} is not accepted: auto, png (8 bits) or npy (float32).")
    folder = Path(out).expanduser()
    _check_output_folder(folder, overwrite)
    loaded = run if isinstance(run, SavedRun) else load_run(run, model=model, epoch=epoch, device=device)
    threat = choose_threat(loaded, threat)
    if callable(check := getattr(chosen, "check_threat", None)):
        check(threat, loaded.image_shape)
    files = list_image_files([images] if isinstance(images, str | os.PathLike) else list(images))
    check_classifies_images(loaded, files)
    inputs = _read_all(files, loaded)
    numbers, origin = _find_labels(files, labels, loaded.classes)
    file_format = _choose_format(format, files, inputs, loaded.image_shape)
    names = _output_names(files, file_format)
    _check_outputs(folder, names, files)
    settings = {
        "deat": VERSION,
        "run": anonymize_paths(str(loaded.path)),
        "epoch": loaded.epoch,
        "weights": fingerprint_model(loaded.model),
        "threat": threat.describe(),
        "attack": {"name": chosen.name, **describe_attack(chosen, threat, len(loaded.classes))},
        "labels": origin,
        "format": "png, 8 bits" if file_format == "png" else "npy, float32",
        "input": list(loaded.image_shape),
        "seed": int(seed),
        "block": int(block),
    }
    results: list[AttackedImage] = []
    for number, start in enumerate(range(0, len(files), block)):
        part = slice(start, start + block)
        attacked = _attack_block(
            loaded,
            inputs[part],
            None if numbers is None else numbers[part],
            chosen,
            threat,
            seed,
            number,
            file_format == "png",
        )
        results += _write_block(loaded, folder, files[part], inputs[part], names[part], attacked, threat)
        if progress:
            progress(len(results), len(files))
    found = AttackedImages(folder, tuple(results), settings)
    _write(lambda: write_json(folder / SUMMARY_FILE, found.as_json()), folder / SUMMARY_FILE)
    return found


def choose_threat(run: SavedRun, threat: str | ThreatModel | None) -> ThreatModel:
    """Return the threat model of an attack on a run's images, checked against their shape.

    Args:
        run: The run, whose own threat model is the default.
        threat: Another one, such as "linf:8/255"; a text keeps the box and the fixed features of the run's.

    Raises:
        UsageError: If it is not accepted.
    """
    if threat is None:
        chosen = run.threat
    elif isinstance(threat, str):
        chosen = parse_threat(threat, box=run.threat.box)
        if {ball.name for ball in chosen.balls} <= {ball.name for ball in run.threat.balls}:
            features: dict[str, Any] = {"scale": run.threat.scale, "mutable": run.threat.mutable}
            chosen = parse_threat(threat, box=run.threat.box, **features)
    else:
        chosen = threat
    check_radius(chosen, run.image_shape)
    if not chosen.eps:
        raise UsageError("eps is 0, so an attack changes nothing: give a radius, such as linf:8/255.")
    return chosen


@dataclass(frozen=True)
class _AttackedBlock:
    """A block of images and their adversarial images, as they will be written, on the CPU."""

    x: Tensor
    adv: Tensor
    labels: list[int]
    before: list[int]
    is_attacked: list[bool]
    fooled_unrounded: list[bool]


def _attack_block(
    run: SavedRun,
    inputs: Sequence[InputImage],
    labels: Sequence[int] | None,
    attack: AttackLike,
    threat: ThreatModel,
    seed: int,
    block_index: int,
    rounds: bool,
) -> _AttackedBlock:
    device = device_of(run.model)
    x = torch.stack([image.pixels for image in inputs]).to(device)
    with exact_float32(device), eval_mode(run.model):
        before = _predict(run.model, x)
        y = before if labels is None else torch.tensor(labels, device=device)
        index = (before == y).nonzero().squeeze(1)
        adv = x.clone()
        fooled = torch.zeros_like(y, dtype=torch.bool)
        generator = torch.Generator(device).manual_seed(derive_block_seed(seed, attack.name, block_index))
        for ball in threat.balls:  # each ball of a union attacks what those before it did not fool
            if not len(index):
                break
            clean, target = x[index], y[index]
            adversarial = call_attack(
                attack, run.model, clean.clone(), target.clone(), ball, generator, run.task
            ).detach()
            run.model.eval()  # the attack may have changed the mode
            if adversarial.shape != clean.shape or adversarial.dtype != clean.dtype:
                raise UsageError(f"{attack.name} returned other tensors than images of shape {tuple(clean.shape)}.")
            adversarial = torch.where(broadcast_mask(ball.contains(clean, adversarial), clean), adversarial, clean)
            fooled[index] |= _predict(run.model, adversarial) != target
            adv[index] = round_to_8_bits(clean, adversarial, ball) if rounds else adversarial
            index = index[_predict(run.model, adv[index]) == target]
    return _AttackedBlock(x.cpu(), adv.cpu(), y.tolist(), before.tolist(), (before == y).tolist(), fooled.tolist())


@torch.no_grad()
def _predict(model: nn.Module, x: Tensor) -> Tensor:
    return as_class_logits(model(x)).argmax(1)


def _write_block(
    run: SavedRun,
    folder: Path,
    files: Sequence[ImageFile],
    inputs: Sequence[InputImage],
    names: Sequence[PurePath],
    block: _AttackedBlock,
    threat: ThreatModel,
) -> Iterator[AttackedImage]:
    """Write the attacked images of a block, read them again, and classify what was read."""
    attacked = [i for i, is_attacked in enumerate(block.is_attacked) if is_attacked]
    for i in attacked:
        target, pixels = folder / names[i], block.adv[i]
        data = _encode_npy(pixels) if target.suffix == ".npy" else _encode_png(pixels)
        _write(lambda target=target, data=data: write_atomic(target, data), target)
    read = [read_image_file(_written_file(folder / names[i]), run.image_shape).pixels for i in attacked]
    places = {i: place for place, i in enumerate(attacked)}
    if attacked:
        written, clean = torch.stack(read), block.x[attacked]
        if not torch.equal(written, block.adv[attacked]) or not bool(threat.contains(clean, written).all()):
            raise CheckpointError(f"the images in {str(folder)!r} are not those that were written, or left the ball.")
        shares = classify(run, written)
        distances = threat.norm((written - clean).double()).tolist()
    for i, (file, image) in enumerate(zip(files, inputs, strict=True)):
        label, before = (class_name(run.classes, n) for n in (block.labels[i], block.before[i]))
        if i not in places:
            yield AttackedImage(file.name, label, before, None, "wrong without attack", resized_from=image.resized_from)
            continue
        probability, after = shares[places[i]].max(0)
        is_fooled = int(after) != block.labels[i]
        yield AttackedImage(
            file.name,
            label,
            before,
            class_name(run.classes, int(after)),
            "fooled" if is_fooled else "resisted",
            names[i].as_posix(),
            distances[places[i]],
            round(float(probability), 6),
            block.fooled_unrounded[i] and not is_fooled,
            image.resized_from,
        )


def _written_file(path: Path) -> ImageFile:
    return ImageFile(path, 0 if path.suffix == ".npy" else None)


def _encode_png(image: Tensor) -> bytes:
    import PIL.Image

    levels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    PIL.Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels).save(buffer, "PNG")
    return buffer.getvalue()


def _encode_npy(image: Tensor) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, image.numpy())
    return buffer.getvalue()


def _write(write: Any, path: Path) -> None:
    try:
        write()
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror or error}.") from None


def _read_all(files: Sequence[ImageFile], run: SavedRun) -> list[InputImage]:
    crop, inputs, errors = find_crop_fraction(run.path), [], []
    for file in files:
        try:
            inputs.append(read_image_file(file, run.image_shape, crop))
        except DataError as error:
            errors.append(error)
    if errors:
        raise unreadable_error(errors)
    return inputs


def _choose_format(
    format: ImageFormat, files: Sequence[ImageFile], inputs: Sequence[InputImage], shape: Sequence[int]
) -> Literal["png", "npy"]:
    """The format of the output; PNG needs images of 8 bits with 1 or 3 channels."""
    if format == "npy":
        return "npy"
    inexact = [file for file, image in zip(files, inputs, strict=True) if not image.has_8_bits]
    fits = len(shape) == 3 and shape[0] in (1, 3)
    if fits and not inexact:
        return "png"
    if format == "auto":
        return "npy"
    reason = f"{inexact[0].name!r} has values between the 256 levels" if fits else f"inputs have shape {tuple(shape)}"
    raise UsageError(f"png has 8 bits and 1 or 3 channels, and {reason}. Use the format npy.")


def _find_labels(
    files: Sequence[ImageFile], labels: str | Mapping[str, str] | None, classes: Sequence[str]
) -> tuple[list[int] | None, str]:
    """The class number of each image, None for the network's own predictions, and where they come from."""
    if labels == LABELS_PREDICTED:
        return None, LABELS_PREDICTED
    if labels is None or labels == LABELS_FROM_FOLDERS:
        names = [file.path.resolve().parent.name for file in files]
        if labels is None and not set(names) <= set(classes):
            return None, LABELS_PREDICTED
        return _to_numbers(files, names, classes, "its folder"), LABELS_FROM_FOLDERS
    by_file, origin = (_read_labels(Path(labels)), str(labels)) if isinstance(labels, str) else (labels, "given")
    found = [by_file.get(file.name, by_file.get(file.path.name)) for file in files]
    missing = [file.name for file, name in zip(files, found, strict=True) if name is None]
    if missing:
        raise DataError(f"{origin} has no class for {format_names(missing)}. Add a line FILE,CLASS for each.")
    return _to_numbers(files, [str(name) for name in found], classes, origin), anonymize_paths(origin)


def _to_numbers(files: Sequence[ImageFile], names: Sequence[str], classes: Sequence[str], origin: str) -> list[int]:
    for file, name in zip(files, names, strict=True):
        if name not in classes:
            raise DataError(
                f"{file.name!r} has the class {name!r} by {origin}, but the run's classes are {format_names(classes, 20)}. "
                f"Use labels {LABELS_PREDICTED} to attack what the network predicts."
            )
    return [classes.index(name) for name in names]


def _read_labels(path: Path) -> dict[str, str]:
    try:
        with path.expanduser().open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeError, csv.Error) as error:
        raise UsageError(
            f"labels {str(path)!r} cannot be read ({error}). Give {LABELS_FROM_FOLDERS}, {LABELS_PREDICTED} or a CSV file."
        ) from None
    if bad := next((row for row in rows if len(row) != 2), None):
        raise DataError(f"{str(path)!r} has a line with {len(bad)} columns: {bad}. Each line is FILE,CLASS.")
    return {file.strip(): name.strip() for file, name in rows}


def _output_names(files: Sequence[ImageFile], file_format: str) -> list[PurePath]:
    """A file in the output folder for each image: its path below the folder that all images share."""
    paths = [Path(os.path.abspath(file.path)) for file in files]
    root = os.path.commonpath([path.parent for path in paths])
    relative = [path.relative_to(root) for path in paths]
    stems = [
        path.with_suffix("") if file.index is None else path.with_name(f"{path.stem}-{file.index:05}")
        for file, path in zip(files, relative, strict=True)
    ]
    names = [stem.with_name(f"{stem.name}.{file_format}") for stem in stems]
    if len(set(names)) < len(names):  # cat.jpg and cat.png, or a file that is named twice
        names = [path.with_name(f"{path.name}-{number:05}.{file_format}") for number, path in enumerate(relative)]
    return [PurePath(name) for name in names]


def _check_output_folder(folder: Path, overwrite: bool) -> None:
    check_no_symlinks([folder])
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"out {str(folder)!r} is a file; name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UsageError(f"out {str(folder)!r} is not empty. Name a new folder, or allow to overwrite (--overwrite).")


def _check_outputs(folder: Path, names: Sequence[PurePath], files: Sequence[ImageFile]) -> None:
    """Refuse to replace the images themselves, and to write through links that lie in an output folder already."""
    targets = [folder / name for name in names]
    sources = {file.path.resolve() for file in files}
    if replaced := [target for target in targets if target.resolve() in sources]:
        raise UsageError(
            f"out {str(folder)!r} would replace {str(replaced[0])!r}, which is attacked. Name another folder."
        )
    check_no_symlinks([*targets, *(p for target in targets for p in target.parents if folder in p.parents)])
