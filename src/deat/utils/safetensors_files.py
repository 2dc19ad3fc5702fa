"""Named tensors in safetensors files, which contain no code."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from deat.errors import CheckpointError
from deat.utils.safe_read import read_plain_text
from deat.utils.text import quote_for_shell

Tensors = dict[str, Tensor]

PICKLE_SIGNATURES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of files that torch.save writes, and of pickles."""
HASH_KEY = "deat.sha256"
"""The key of the hash of all numbers in a file's metadata."""
RESERVED_METADATA_KEYS = ("format", "deat", HASH_KEY)
"""The keys of a file's metadata that are not further names of tensors."""
INDEX_FILE_NAME = "model.safetensors.index.json"
"""The index of weights in several files, as Hugging Face names it."""
MAX_INDEX_BYTES = 64 << 20


def encode_tensors(tensors: Tensors, note: str | None = None) -> bytes:
    """Encode tensors as a safetensors file.

    A tensor with several names is stored once, and the metadata has its other names. The metadata also has a hash of
    the numbers, since the format itself does not detect a changed bit.

    Args:
        tensors: The tensors by name.
        note: A text about the file, stored as "deat" in its metadata.

    Returns:
        The bytes of the file.
    """
    unique, aliases = _split_tied_tensors(tensors)
    metadata = {"format": "pt"} if note is None else {"format": "pt", "deat": note}
    return _add_hash(safetensors.torch.save(unique, {**aliases, **metadata}))


def read_tensors(file: str | os.PathLike[str]) -> Tensors:
    """Read a safetensors file, or all files that an index names.

    Args:
        file: The file, or an index, whose name ends in "model.safetensors.index.json".

    Returns:
        The tensors by all their names.

    Raises:
        CheckpointError: If the file is missing, damaged or a pickle.
    """
    path = Path(file)
    return _read_sharded(path) if path.name.endswith(INDEX_FILE_NAME) else _read_file(path)


def _read_sharded(index: Path) -> Tensors:
    file_names = _read_index(index).get("weight_map")  # by the name of the tensor
    # A name with a folder in it could lead anywhere.
    is_valid = isinstance(file_names, dict) and all(
        isinstance(name, str) and Path(name).name == name for name in file_names.values()
    )
    if not file_names or not is_valid:
        raise CheckpointError(f"{index} does not name files of weights in its folder: download or write it again")
    files = [index.parent / name for name in sorted(set(file_names.values()))]
    missing_files = [file.name for file in files if not file.is_file()]
    if missing_files:
        raise CheckpointError(f"{index} names {missing_files[0]!r}, which is missing: download or write it again")
    tensors = {key: tensor for file in files for key, tensor in _read_file(file).items()}
    missing = sorted(file_names.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"the files that {index} names lack {missing[0]!r}: download or write them again")
    return tensors


def _read_index(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"it is larger than {MAX_INDEX_BYTES >> 20} MB")
        return dict(json.loads(read_plain_text(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of weights ({error}): download or write it again") from None


def _read_file(path: Path) -> Tensors:
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            tensors: Tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            metadata = dict(opened.metadata() or {})
    except Exception as error:  # of many kinds, since the file may contain anything
        if _looks_like_pickle(path):
            raise pickle_error(path) from error
        raise CheckpointError(
            f"{path} is damaged, not a complete safetensors file ({error}): download or write it again"
        ) from error
    if HASH_KEY in metadata and metadata[HASH_KEY] != _hash_tensor_data(path):
        raise CheckpointError(f"{path} is damaged: its numbers do not match their hash. Download or write it again")
    aliases = {alias: name for alias, name in metadata.items() if alias not in RESERVED_METADATA_KEYS}
    return {alias: tensors[name] for alias, name in aliases.items() if name in tensors} | tensors


def _hash_tensor_data(path: Path) -> str:
    """Hash the numbers of a file, which follow its header."""
    with path.open("rb") as opened:
        opened.seek(8 + int.from_bytes(opened.read(8), "little"))
        return hashlib.file_digest(opened, "sha256").hexdigest()


def is_safetensors_file(path: Path) -> bool:
    """Return whether a file has a valid safetensors header. Its numbers are not read."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            return True
    except Exception:  # of many kinds, since the file may contain anything
        return False


def read_note(file: str | os.PathLike[str]) -> str | None:
    """Read the note that `encode_tensors` stored in a file, or in an index.

    Args:
        file: The file or the index.

    Returns:
        The note, or None if there is none or the file cannot be read.
    """
    path = Path(file)
    try:
        if path.name.endswith(INDEX_FILE_NAME):
            note = _read_index(path)["metadata"]["deat"]
            return note if isinstance(note, str) else None
        with safetensors.safe_open(path, framework="pt") as opened:
            return (opened.metadata() or {}).get("deat")
    except Exception:  # reading the tensors will raise an error that explains it
        return None


def read_weights_hash(file: str | os.PathLike[str]) -> str | None:
    """Read the hash of all numbers that `encode_tensors` stored in a file, or None."""
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            return (opened.metadata() or {}).get(HASH_KEY)
    except Exception:  # reading the tensors will raise an error that explains it
        return None


def check_finite_tensors(tensors: Tensors, file: str | os.PathLike[str]) -> None:
    """Check that weights contain no NaN and no infinity, from which training cannot recover.

    Args:
        tensors: The weights by name.
        file: The file that they come from, for the message.

    Raises:
        CheckpointError: If they contain one.
    """
    for name, tensor in {tensor_identity(tensor): (name, tensor) for name, tensor in tensors.items()}.values():
        if not _is_finite(tensor):
            raise CheckpointError(
                f"{name!r} in {str(file)!r} has numbers that are not finite (NaN or infinity): use earlier weights, "
                "which have none."
            )


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no isfinite for some 8-bit types
    return bool(wide.isfinite().all())


def tensor_identity(tensor: Tensor) -> tuple[object, ...]:
    """Return what is equal for two names of one tensor, and different for different tensors."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def pickle_error(file: Path) -> CheckpointError:
    """Make the error for a file that looks like a pickle.

    Args:
        file: The file.

    Returns:
        The error, to be raised.
    """
    return CheckpointError(
        f"{file} looks like a pickle, which can run code when opened, and is not named like one. If it has weights of "
        f"torch's, name it .pt, or convert it: deat import {quote_for_shell(str(file))} --out NEW.safetensors"
    )


def _split_tied_tensors(state: Tensors) -> tuple[Tensors, dict[str, str]]:
    """Return each tensor under its first name, and the first name of each further one."""
    first_names: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for key, tensor in state.items():
        first_name = first_names.setdefault(tensor_identity(tensor), key)
        if first_name != key:
            aliases[key] = first_name
    return {key: _copy_to_cpu(tensor) for key, tensor in state.items() if key not in aliases}, aliases


def _add_hash(data: bytes) -> bytes:
    """Add the hash to a file's metadata, and sort it, since its order differs between processes."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = {**header["__metadata__"], HASH_KEY: hashlib.sha256(memoryview(data)[end:]).hexdigest()}
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _looks_like_pickle(file: Path) -> bool:
    """Return whether a file begins like a pickle. The length of a safetensors header may have the same bytes."""
    try:
        with file.open("rb") as opened:
            start = opened.read(9)
            fits = 8 + int.from_bytes(start[:8], "little") <= file.stat().st_size
    except OSError:
        return False
    has_header = start[8:] == b"{" or (fits and not start.startswith(b"PK"))
    return start.startswith(PICKLE_SIGNATURES) and not has_header
