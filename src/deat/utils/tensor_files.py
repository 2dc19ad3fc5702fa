"""Named tensors as safetensors: nothing in such a file can run."""

import hashlib
import json
import os
from pathlib import Path
from shlex import quote
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from deat.errors import CheckpointError

Tensors = dict[str, Tensor]

PICKLE_SIGNATURES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
HASH_KEY = "deat.sha256"
RESERVED_METADATA_KEYS = ("format", "deat", HASH_KEY)
"""What a file's metadata holds beside the other names of its tensors."""
INDEX_FILE_NAME = "model.safetensors.index.json"
"""What names the files of weights that lie in several, as others call it too."""
MAX_INDEX_BYTES = 64 << 20


def encode_tensors(tensors: Tensors, note: str | None = None) -> bytes:
    """The bytes of a safetensors file. A tensor with several names is held once; its metadata has the other names.

    It also has a hash of the numbers, in which the format itself would not notice another bit.
    """
    kept, aliases = _split_tied_tensors(tensors)
    notes = {"format": "pt"} if note is None else {"format": "pt", "deat": note}
    return _add_hash(safetensors.torch.save(kept, {**aliases, **notes}))


def read_tensors(file: str | os.PathLike[str]) -> Tensors:
    """A file's tensors, or those of the files that an index names, by all their names; one error for what is wrong."""
    path = Path(file)
    return _read_sharded(path) if path.name.endswith(INDEX_FILE_NAME) else _read_file(path)


def _read_sharded(index: Path) -> Tensors:
    """The tensors of the files that lie beside their index, each whole."""
    places = _read_index(index).get("weight_map")
    named = isinstance(places, dict) and all(isinstance(n, str) and Path(n).name == n for n in places.values())
    if not places or not named:
        raise CheckpointError(f"{index} does not name files of weights beside it: fetch or write it again")
    files = [index.parent / name for name in sorted(set(places.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{absent[0]!r}, which {index} names, is not beside it: fetch or write it again")
    tensors = {key: tensor for file in files for key, tensor in _read_file(file).items()}
    lacking = sorted(places.keys() - tensors.keys())
    if lacking:
        raise CheckpointError(f"the files that {index} names lack {lacking[0]!r}: fetch or write them again")
    return tensors


def _read_index(path: Path) -> dict[str, Any]:
    """What an index says, believed as data."""
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("it is too large")
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of weights ({error}): fetch or write it again") from None


def _read_file(path: Path) -> Tensors:
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            tensors: Tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            aliases = dict(opened.metadata() or {})
    except Exception as error:  # the file may come from anywhere, and its reader fails in many ways
        if _looks_like_pickle(path):
            raise pickle_error(path) from error
        raise CheckpointError(
            f"{path} is damaged, not a whole safetensors file ({error}): fetch or write it again"
        ) from error
    if HASH_KEY in aliases and aliases[HASH_KEY] != _hash_tensor_data(path):
        raise CheckpointError(
            f"{path} is damaged: its numbers are not those that were written, by their hash. Fetch or write it again"
        )
    names = {alias: kept for alias, kept in aliases.items() if alias not in RESERVED_METADATA_KEYS}
    return {alias: tensors[kept] for alias, kept in names.items() if kept in tensors} | tensors


def _hash_tensor_data(path: Path) -> str:
    """The hash of a file's numbers, which follow its header."""
    with path.open("rb") as opened:
        opened.seek(8 + int.from_bytes(opened.read(8), "little"))
        return hashlib.file_digest(opened, "sha256").hexdigest()


def is_safetensors_file(path: Path) -> bool:
    """Whether a file has the form of safetensors; its numbers are not looked at."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            return True
    except Exception:  # which its reader raises in many kinds, as for any file of others
        return False


def read_note(file: str | os.PathLike[str]) -> str | None:
    """What the file, or an index, says about itself, if it says anything."""
    path = Path(file)
    try:
        if path.name.endswith(INDEX_FILE_NAME):
            said = _read_index(path)["metadata"]["deat"]
            return said if isinstance(said, str) else None
        with safetensors.safe_open(path, framework="pt") as opened:
            return (opened.metadata() or {}).get("deat")
    except Exception:  # whoever reads the tensors will say what is wrong
        return None


def check_finite_tensors(tensors: Tensors, file: str | os.PathLike[str]) -> None:
    """Refuse weights from elsewhere that hold a NaN or an infinity, from which no training recovers."""
    for name, tensor in {tensor_identity(tensor): (name, tensor) for name, tensor in tensors.items()}.values():
        if not _is_finite(tensor):
            raise CheckpointError(
                f"{name!r} in {str(file)!r} holds numbers that are not finite (NaN or infinity): use weights from "
                "before they went wrong."
            )


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # torch cannot tell for some 8-bit kinds
    return bool(wide.isfinite().all())


def tensor_identity(tensor: Tensor) -> tuple[object, ...]:
    """What two names of one tensor have in common."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def pickle_error(file: Path) -> CheckpointError:
    """The refusal of a pickle."""
    return CheckpointError(
        f"{file} looks like a pickle, which can run code when opened; only safetensors weights are read. "
        f"Convert it once: deat import {quote(str(file))}"
    )


def _split_tied_tensors(state: Tensors) -> tuple[Tensors, dict[str, str]]:
    """Each tensor once, in memory of its own, and the names (alias: kept) left out."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for key, tensor in state.items():
        kept = first.setdefault(tensor_identity(tensor), key)
        if kept != key:
            aliases[key] = kept
    return {key: _copy_to_cpu(tensor) for key, tensor in state.items() if key not in aliases}, aliases


def _add_hash(data: bytes) -> bytes:
    """The same file with its hash, and its metadata sorted: the writer's own order changes between processes."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    notes = {**header["__metadata__"], HASH_KEY: hashlib.sha256(memoryview(data)[end:]).hexdigest()}
    header["__metadata__"] = dict(sorted(notes.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """The values alone: on the CPU, row-major, sharing memory with no other tensor."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _looks_like_pickle(file: Path) -> bool:
    """Whether a file begins like a pickle, and not like a safetensors header whose length has the same bytes."""
    try:
        with file.open("rb") as opened:
            start = opened.read(9)
            fits = 8 + int.from_bytes(start[:8], "little") <= file.stat().st_size
    except OSError:
        return False
    has_header = start[8:] == b"{" or (fits and not start.startswith(b"PK"))
    return start.startswith(PICKLE_SIGNATURES) and not has_header
