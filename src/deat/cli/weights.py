"""`deat import` and `deat export`: weights from elsewhere, and to elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from deat.cli.flags import MaybeText
from deat.cli.train import in_words
from deat.data.statistics import Statistics
from deat.errors import CheckpointError, UsageError
from deat.models.import_export import check_there, larger_than, note, own, read_foreign, size_of, write_sharded
from deat.runs.execute import kept_weights
from deat.runs.run_dir import WEIGHTS, has_checkpoint
from deat.utils.files import write_whole
from deat.utils.tensor_files import Tensors, dump, read


@dataclass(frozen=True)
class ImportCommand:
    """Convert a .pt or .pth file of weights to safetensors, once; nothing in it is run."""

    file: Annotated[Positional[str], arg(metavar="FILE")]
    """The file: a state dict, or a checkpoint that holds one."""
    out: MaybeText = None
    """The new file (FILE with the ending .safetensors)."""

    def run(self) -> int:
        """Convert."""
        return run_import(self)


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's weights, or those of fit's checkpoints, under the network's own names, for use without deat."""

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder, or that of fit's checkpoints."""
    out: MaybeText = None
    """The new file (RUN.safetensors), or with --shard-size the new folder."""
    epoch: Literal["best", "last"] = "best"
    """Which of the run's weights."""
    shard_size: MaybeText = None
    """Several files of at most this size, such as 500MB or 2GB, with an index."""

    def run(self) -> int:
        """Export."""
        return run_export(self)


def run_import(order: ImportCommand) -> int:
    """Convert a file of weights to safetensors."""
    source = Path(order.file).expanduser()
    check_there(source)
    target = Path(order.out).expanduser() if order.out else source.with_suffix(".safetensors")
    _check_new(target)
    if target.suffix != ".safetensors":
        raise UsageError(f"--out {str(target)!r} must end in .safetensors.")
    tensors = read_foreign(source)
    _write(target, dump(tensors))
    print(f"{len(tensors)} tensors are in {target}; use it with --init, or with deat evaluate")
    return 0


def run_export(order: ExportCommand) -> int:
    """Write a run's weights under the network's own names."""
    most = size_of(order.shard_size) if order.shard_size else None
    folder = Path(order.run_folder).expanduser()
    tensors, normalization = own(_weights(folder, order))
    usual = f"{folder.resolve().name}.safetensors" if most is None else f"{folder.resolve().name}-weights"
    target = Path(order.out or usual).expanduser()
    _check_new(target)
    if most is None:
        _write(target, dump(tensors, note(normalization)))
        print(f"{len(tensors)} tensors are in {target}")
    else:
        _write_parts(tensors, target, most, note(normalization))
    if normalization:
        print(f"the network expects images normalised by {in_words(Statistics(**normalization))}")
    return 0


def _weights(folder: Path, order: ExportCommand) -> Tensors:
    """The weights of the epoch that was asked for: those that have a name of their own, or a checkpoint's."""
    file = folder / order.epoch / WEIGHTS
    if file.is_file():
        return read(file)
    if has_checkpoint(folder):
        return kept_weights(folder, order.epoch)
    raise CheckpointError(
        f"{order.run_folder!r} has no {order.epoch} weights: give a run's folder, with --epoch best or last, or one of "
        "fit's checkpoints."
    )


def _write_parts(tensors: Tensors, target: Path, most: int, about: str | None) -> None:
    try:
        parts = write_sharded(tensors, target, most, about)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(target)!r}: {error.strerror}.") from None
    print(f"{len(tensors)} tensors are in {target}, in {parts} files with an index")
    for name, size in larger_than(tensors, most).items():
        print(f"{name} alone is {size:,} bytes, more than the {most:,} of --shard-size: its file is larger")


def _check_new(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{str(path)!r} exists already. Choose another --out.")


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror}.") from None
