"""Weights that come from elsewhere, and weights that go there: converted without running anything."""

import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deat.errors import CheckpointError, UsageError
from deat.utils.files import write_atomic, write_json
from deat.utils.tensor_files import (
    INDEX_FILE_NAME,
    Tensors,
    check_finite_tensors,
    encode_tensors,
    read_note,
    read_tensors,
    tensor_identity,
)

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net", "weights")
"""Where checkpoints of others keep their weights."""
DATA_PARALLEL_PREFIX, COMPILED_MODULE_NAME = "module.", "_orig_mod"
"""What DataParallel puts before every name, and torch.compile before the names of what it compiled."""
MAX_NESTING_DEPTH = 4
"""How far down they are looked for: a checkpoint may hold itself."""
MAX_EXPANSION = 4
"""How often weights may share a file's numbers before it is a trap."""
BYTES_PER_UNIT = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def read_pt_weights(file: Path) -> Tensors:
    """The weights of a .pt file, by torch's weights-only reader and no other."""
    check_file_exists(file)
    _check_uncompressed(file)
    found = _load_pt_file(file)
    tensors = _find_state_dict(found, file.name)
    if tensors is None:
        raise CheckpointError(
            f"{str(file)!r} holds a {type(found).__name__} and no state dict, nor one under {', '.join(STATE_DICT_KEYS)}."
        )
    _check_tensors(file, tensors)
    return _strip_wrapper_names(tensors)


def check_file_exists(file: Path) -> None:
    """Refuse what is no file."""
    if not file.is_file():
        raise CheckpointError(f"there is no file {str(file)!r}.")


def _strip_wrapper_names(tensors: Tensors) -> Tensors:
    """The weights under the network's own names, without those of torch.compile and DataParallel around it."""
    plain = {".".join(part for part in name.split(".") if part != COMPILED_MODULE_NAME): name for name in tensors}
    names = plain if len(plain) == len(tensors) else {name: name for name in tensors}
    prefix = DATA_PARALLEL_PREFIX if all(name.startswith(DATA_PARALLEL_PREFIX) for name in names) else ""
    return {name.removeprefix(prefix): tensors[held] for name, held in names.items()}


def _load_pt_file(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # whatever is in the file: it was not opened in any other way
        raise CheckpointError(
            f"{str(file)!r} is not a file of weights alone: it is damaged, or it holds a whole model or other objects, "
            "which can run code when opened. A state dict is accepted. Where the file was made, save one with "
            "torch.save(model.state_dict(), 'weights.pt'), and import that."
        ) from None


def _check_uncompressed(file: Path) -> None:
    """Refuse a file that would unpack to more than it is: torch stores its numbers as they are."""
    try:
        with file.open("rb") as opened:
            if opened.read(4) != b"PK\x03\x04":
                return  # torch unpacks nothing else
        with zipfile.ZipFile(file) as held:
            members = held.infolist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{str(file)!r} is not a whole file of weights ({error}): fetch or write it again."
        ) from None
    packed = any(m.compress_type != zipfile.ZIP_STORED for m in members)
    if packed or sum(m.file_size for m in members) > file.stat().st_size:
        raise CheckpointError(
            f"{str(file)!r} is compressed or would unpack to more than it is, which no file that torch saves does. "
            "Where it was made, save model.state_dict() again."
        )


def _check_tensors(file: Path, tensors: Tensors) -> None:
    """Refuse weights that no file can hold, that grow beyond their own file, or that are not finite."""
    for name, tensor in tensors.items():
        _check_tensor(file, name, tensor)
    if (
        sum({tensor_identity(tensor): _count_bytes(tensor) for tensor in tensors.values()}.values())
        > MAX_EXPANSION * file.stat().st_size
    ):
        raise CheckpointError(f"the weights in {str(file)!r} repeat its numbers over and over: save each one whole.")
    check_finite_tensors(tensors, file)


def _check_tensor(file: Path, name: str, tensor: Tensor) -> None:
    """Refuse what no safetensors file can hold, and a tensor that would unpack to more than the file has of it."""
    if name == "__metadata__" or not name.isprintable():
        raise CheckpointError(f"{str(file)!r} names a tensor {name!r}, which cannot be a weight's name.")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(f"{name!r} in {str(file)!r} is no plain tensor: save it as a dense one of numbers.")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{name!r} in {str(file)!r} repeats its numbers to {tensor.numel():,}: save it whole.")


def _find_state_dict(checkpoint: Any, file: str, depth: int = 0) -> Tensors | None:
    if not isinstance(checkpoint, Mapping) or not checkpoint or depth > MAX_NESTING_DEPTH:
        return None
    if _is_state_dict(checkpoint):
        return dict(checkpoint)
    holders = [name for name in STATE_DICT_KEYS if isinstance(checkpoint.get(name), Mapping)]
    if len(holders) != 1:
        return None
    _warn_of_other_weights(checkpoint, holders[0], file)
    return _find_state_dict(checkpoint[holders[0]], file, depth + 1)


def _is_state_dict(candidate: Any) -> bool:
    named = isinstance(candidate, Mapping) and len(candidate) > 0
    return named and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in candidate.items())


def _warn_of_other_weights(checkpoint: Mapping[Any, Any], chosen_key: str, file: str) -> None:
    """Say which weights are taken of a file that holds others of the same network, such as their average."""
    mine = _parameter_names(checkpoint[chosen_key])
    besides = {name: held for name, held in checkpoint.items() if isinstance(name, str) and name != chosen_key}
    others = [
        repr(name[:40]) for name, held in besides.items() if _is_state_dict(held) and mine & _parameter_names(held)
    ]
    if others:
        warnings.warn(
            f"{file!r} holds weights under {chosen_key!r} and under {', '.join(others)}: those of {chosen_key!r} are taken. For "
            f"others, save them alone: torch.save(torch.load(FILE, weights_only=True)[{others[0]}], 'other.pt').",
            stacklevel=4,
        )


def _parameter_names(weights: Mapping[str, Any]) -> set[str]:
    return {str(name).removeprefix(DATA_PARALLEL_PREFIX) for name in weights}


def split_normalization(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """A run's weights under the network's own names, and the normalisation that deat put before it."""
    inside = {name: t for name, t in tensors.items() if name.startswith("net.")}
    front = {name: t.flatten().tolist() for name, t in tensors.items() if name.startswith("normalize.")}
    if front.keys() != {"normalize.mean", "normalize.std"} or len(inside) + len(front) != len(tensors):
        return tensors, {}
    about = {name.removeprefix("normalize."): values for name, values in front.items()}
    return {name.removeprefix("net."): tensor for name, tensor in inside.items()}, about


def read_normalization(file: Path) -> dict[str, Any]:
    """The mean and std that a file of weights, a run's or an exported one, says its network was trained behind."""
    inside = split_normalization(read_tensors(file))[1]
    try:
        noted = json.loads(read_note(file) or "{}").get("normalize", {})
    except (ValueError, AttributeError, RecursionError):  # somebody else's note
        noted = {}
    found = inside or noted
    return found if isinstance(found, dict) and found.keys() == {"mean", "std"} else {}


def write_sharded(tensors: Tensors, folder: Path, max_bytes: int, note: str | None) -> int:
    """Write files with tensors of at most so many bytes, and then the index that names them; their number.

    Every file and the index hold the note, since any of them may be all that somebody reads.
    """
    parts = _split_into_shards(tensors, max_bytes)
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        write_atomic(folder / name, encode_tensors(part, note))
    places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    noted = {} if note is None else {"deat": note}
    metadata = {"total_size": sum(map(_count_bytes, tensors.values())), **noted}
    write_json(folder / INDEX_FILE_NAME, {"metadata": metadata, "weight_map": places})
    return len(parts)


def find_oversized_tensors(tensors: Tensors, max_bytes: int) -> dict[str, int]:
    """The tensors that are too large for any part, and their bytes; each makes its file larger."""
    return {name: _count_bytes(tensor) for name, tensor in tensors.items() if _count_bytes(tensor) > max_bytes}


def _split_into_shards(tensors: Tensors, max_bytes: int) -> list[Tensors]:
    """The tensors in order, a new part where one more would be too many; a tensor is never cut."""
    parts: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(map(_count_bytes, parts[-1].values())) + _count_bytes(tensor) > max_bytes:
            parts.append({})
        parts[-1][name] = tensor
    return parts


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def parse_byte_size(text: str) -> int:
    """Bytes, from a text such as 500MB."""
    found = re.fullmatch(r"(\d{1,9})\s*([kmg]?)i?b?", text.strip().lower())
    if not found or int(found[1]) == 0:
        raise UsageError(f"--shard-size {text!r} is not a size, such as 500MB or 2GB.")
    return int(found[1]) * BYTES_PER_UNIT[found[2]]


def format_normalization_note(normalization: dict[str, Any]) -> str | None:
    """The normalisation as a file's note, where there is one."""
    return json.dumps({"normalize": normalization}) if normalization else None
