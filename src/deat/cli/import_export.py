"""`deat import` and `deat export`: convert weights from .pt files, and write them for use without deat."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import Positional, arg

from deat.cli.flag_types import OptionalStr
from deat.data.channel_stats import ChannelStats
from deat.errors import CheckpointError, UsageError
from deat.models.pt_files import check_file_exists, read_pt_file
from deat.models.safetensors_shards import find_oversized_tensors, parse_byte_size, write_sharded
from deat.models.saved_normalization import format_normalization_note, split_normalization
from deat.runs.export import export
from deat.runs.record_files import EpochChoice
from deat.runs.saved_run import read_run_weights
from deat.utils.safe_write import write_atomic
from deat.utils.safetensors_files import Tensors, encode_tensors
from deat.utils.text import make_printable
from deat.utils.user_paths import expand_path


@dataclass(frozen=True)
class ImportCommand:
    """Convert a .pt or .pth file of weights to safetensors. No code in the file is run."""

    is_resumable: ClassVar[bool] = False

    file: Annotated[Positional[str], arg(metavar="FILE")]
    """A state dict, or a checkpoint that contains one."""
    out: OptionalStr = None
    """File to write (FILE with the extension .safetensors)."""
    part: OptionalStr = None
    """Which weights, where FILE has several: a key such as state_dict_ema, or what names begin with, such as model."""

    def run(self) -> int:
        """Convert the file."""
        return run_import(self)


@dataclass(frozen=True)
class ExportCommand:
    """Write the network of a run, or of checkpoints of deat.fit, for use without deat, and check the written file."""

    is_resumable: ClassVar[bool] = False

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """Folder of the run, or of the checkpoints."""
    out: OptionalStr = None
    """The new file, whose suffix says the format (RUN.safetensors): .safetensors and .pt have the weights; .onnx, .pt2
    (torch.export) and .ts (TorchScript) the network, with its normalisation. With --shard-size the new folder."""
    epoch: EpochChoice = "best"
    """Which of the run's weights."""
    shard_size: OptionalStr = None
    """Write several safetensors files of at most this size, such as 500MB or 2GB, and an index."""
    model: OptionalStr = None
    """The network, if it is code: my_file.py:NAME. Needed for .onnx, .pt2 and .ts alone."""

    def run(self) -> int:
        """Write the weights."""
        return run_export(self)


def run_import(args: ImportCommand) -> int:
    """Convert a file of weights to safetensors.

    Args:
        args: The command.

    Returns:
        The exit status, 0.

    Raises:
        CheckpointError: If the file cannot be read or written.
        UsageError: If the output file exists or does not end in .safetensors, or the file has no such part.
    """
    source = expand_path(args.file)
    check_file_exists(source)
    target = expand_path(args.out) if args.out else source.with_suffix(".safetensors")
    _check_does_not_exist(target)
    if target.suffix != ".safetensors":
        raise UsageError(f"--out {str(target)!r} must end in .safetensors.")
    tensors, note = read_pt_file(source, args.part)
    _write_file(target, encode_tensors(tensors, note))
    print(f"wrote {len(tensors)} tensors to {target} ({make_printable(', '.join(list(tensors)[:2]))}, ...)")
    print("use it with --init or with deat evaluate")
    return 0


def run_export(args: ExportCommand) -> int:
    """Write a run's network, or its weights under the network's own parameter names.

    Args:
        args: The command.

    Returns:
        The exit status, 0.

    Raises:
        CheckpointError: If the weights cannot be read or written, or the file answers differently.
        UsageError: If the output exists or has no known suffix, or the shard size is not a size.
    """
    max_bytes = parse_byte_size(args.shard_size) if args.shard_size else None
    folder = expand_path(args.run_folder)
    name = folder.resolve().name
    if max_bytes is None:
        out = expand_path(args.out or f"{name}.safetensors")
        exported = export(folder, out, epoch=args.epoch, model=args.model)
        print(f"wrote {exported.format} to {exported.path}; {exported.note}")
        return 0
    target = expand_path(args.out or f"{name}-weights")
    _check_does_not_exist(target)
    tensors, normalization = split_normalization(read_run_weights(folder, args.epoch).tensors)
    _write_shards(tensors, target, max_bytes, format_normalization_note(normalization))
    if normalization:
        print(f"the network expects images normalised by {ChannelStats(**normalization).describe()}")
    return 0


def _write_shards(tensors: Tensors, target: Path, max_bytes: int, note: str | None) -> None:
    try:
        num_files = write_sharded(tensors, target, max_bytes, note)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(target)!r}: {error.strerror}.") from None
    print(f"wrote {len(tensors)} tensors to {target}, in {num_files} files and an index")
    for name, num_bytes in find_oversized_tensors(tensors, max_bytes).items():
        print(f"{name} alone has {num_bytes:,} bytes, more than the {max_bytes:,} of --shard-size: its file is larger")


def _check_does_not_exist(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{str(path)!r} exists already. Choose another --out.")


def _write_file(path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror}.") from None
