"""`deat import` and `deat export`: weights from elsewhere, and to elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from deat.cli.flags import OptionalStr
from deat.data.statistics import ChannelStats
from deat.errors import CheckpointError, UsageError
from deat.models.import_export import (
    check_file_exists,
    find_oversized_tensors,
    format_normalization_note,
    parse_byte_size,
    read_pt_weights,
    split_normalization,
    write_sharded,
)
from deat.runs.run_dir import has_checkpoint
from deat.runs.schema import WEIGHTS_FILE, EpochChoice
from deat.training.checkpoints import load_checkpoint_weights
from deat.utils.files import write_atomic
from deat.utils.tensor_files import Tensors, encode_tensors, read_tensors


@dataclass(frozen=True)
class ImportCommand:
    """Convert a .pt or .pth file of weights to safetensors, once; nothing in it is run."""

    file: Annotated[Positional[str], arg(metavar="FILE")]
    """The file: a state dict, or a checkpoint that holds one."""
    out: OptionalStr = None
    """The new file (FILE with the ending .safetensors)."""

    def run(self) -> int:
        """Convert."""
        return run_import(self)


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's weights, or those of fit's checkpoints, under the network's own names, for use without deat."""

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder, or that of fit's checkpoints."""
    out: OptionalStr = None
    """The new file (RUN.safetensors), or with --shard-size the new folder."""
    epoch: EpochChoice = "best"
    """Which of the run's weights."""
    shard_size: OptionalStr = None
    """Several files of at most this size, such as 500MB or 2GB, with an index."""

    def run(self) -> int:
        """Export."""
        return run_export(self)


def run_import(args: ImportCommand) -> int:
    """Convert a file of weights to safetensors."""
    source = Path(args.file).expanduser()
    check_file_exists(source)
    target = Path(args.out).expanduser() if args.out else source.with_suffix(".safetensors")
    _check_does_not_exist(target)
    if target.suffix != ".safetensors":
        raise UsageError(f"--out {str(target)!r} must end in .safetensors.")
    tensors = read_pt_weights(source)
    _write_file(target, encode_tensors(tensors))
    print(f"{len(tensors)} tensors are in {target}; use it with --init, or with deat evaluate")
    return 0


def run_export(args: ExportCommand) -> int:
    """Write a run's weights under the network's own names."""
    most = parse_byte_size(args.shard_size) if args.shard_size else None
    folder = Path(args.run_folder).expanduser()
    tensors, normalization = split_normalization(_read_weights(folder, args))
    usual = f"{folder.resolve().name}.safetensors" if most is None else f"{folder.resolve().name}-weights"
    target = Path(args.out or usual).expanduser()
    _check_does_not_exist(target)
    if most is None:
        _write_file(target, encode_tensors(tensors, format_normalization_note(normalization)))
        print(f"{len(tensors)} tensors are in {target}")
    else:
        _write_shards(tensors, target, most, format_normalization_note(normalization))
    if normalization:
        print(f"the network expects images normalised by {ChannelStats(**normalization).describe()}")
    return 0


def _read_weights(folder: Path, args: ExportCommand) -> Tensors:
    """The weights of the epoch that was asked for: those that have a name of their own, or a checkpoint's."""
    file = folder / args.epoch / WEIGHTS_FILE
    if file.is_file():
        return read_tensors(file)
    if has_checkpoint(folder):
        return load_checkpoint_weights(folder, args.epoch)
    raise CheckpointError(
        f"{args.run_folder!r} has no {args.epoch} weights: give a run's folder, with --epoch best or last, or one of "
        "fit's checkpoints."
    )


def _write_shards(tensors: Tensors, target: Path, max_bytes: int, metadata: str | None) -> None:
    try:
        parts = write_sharded(tensors, target, max_bytes, metadata)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(target)!r}: {error.strerror}.") from None
    print(f"{len(tensors)} tensors are in {target}, in {parts} files with an index")
    for name, size in find_oversized_tensors(tensors, max_bytes).items():
        print(f"{name} alone is {size:,} bytes, more than the {max_bytes:,} of --shard-size: its file is larger")


def _check_does_not_exist(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{str(path)!r} exists already. Choose another --out.")


def _write_file(path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror}.") from None
