"""`deat import` and `deat export`: weights from elsewhere, and to elsewhere."""

from pathlib import Path

from deat.errors import CheckpointError, UsageError
from deat.models.portable import larger_than, note, read_foreign, read_own, size_of, write_sharded
from deat.tensorfile import dump
from deat.writing import write_whole


def run_import(file: str, out: str | None) -> int:
    """Convert a file of weights to safetensors."""
    source = Path(file).expanduser()
    target = Path(out).expanduser() if out else source.with_suffix(".safetensors")
    _check_new(target)
    if target.suffix != ".safetensors":
        raise UsageError(f"--out {str(target)!r} must end in .safetensors.")
    tensors = read_foreign(source)
    _write(target, dump(tensors))
    print(f"{len(tensors)} tensors are in {target}; use it with --init, or with deat evaluate")
    return 0


def run_export(run: str, out: str | None, epoch: str, shard_size: str | None) -> int:
    """Write a run's weights under the network's own names."""
    most = size_of(shard_size) if shard_size else None
    folder = Path(run).expanduser()
    file = folder / epoch / "model.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{run!r} has no {epoch} weights: give a run's folder, with --epoch best or last.")
    tensors, normalization = read_own(file)
    usual = Path(f"{folder.resolve().name}.safetensors" if most is None else f"{folder.resolve().name}-weights")
    target = Path(out).expanduser() if out else usual
    _check_new(target)
    parts = 1
    if most is None:
        _write(target, dump(tensors, note(normalization)))
    else:
        try:
            parts = write_sharded(tensors, target, most, note(normalization))
        except OSError as error:
            raise CheckpointError(f"cannot write {str(target)!r}: {error.strerror}.") from None
    print(f"{len(tensors)} tensors are in {target}" + (f", in {parts} files with an index" if most else ""))
    for name, size in larger_than(tensors, most).items() if most else ():
        print(f"{name} alone is {size:,} bytes, more than --shard-size {shard_size}: the file that holds it is larger")
    if normalization:
        print(f"the network expects images normalised by {normalization}")
    return 0


def _check_new(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{str(path)!r} exists already. Choose another --out.")


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror}.") from None
