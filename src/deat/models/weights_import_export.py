"""Import weights from .pt files without running code in them, and export weights in several files."""

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
from deat.utils.safe_write import write_atomic, write_json
from deat.utils.safetensors_files import (
    INDEX_FILE_NAME,
    Tensors,
    check_finite_tensors,
    encode_tensors,
    read_note,
    read_tensors,
    tensor_identity,
)

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net", "weights")
"""Keys under which checkpoints of other programs have their weights."""
DATA_PARALLEL_PREFIX, COMPILED_MODULE_NAME = "module.", "_orig_mod"
"""What DataParallel and torch.compile add to the names of the weights."""
MAX_NESTING_DEPTH = 4
"""Levels at which weights are searched: a checkpoint may contain itself."""
MAX_EXPANSION = 4
"""Bytes of all tensors over bytes of the file, above which the file is refused as a decompression bomb."""
BYTES_PER_UNIT = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def read_pt_weights(file: Path) -> Tensors:
    """Read the weights of a .pt file with torch's weights-only loader.

    Args:
        file: A state dict, or a checkpoint that contains one.

    Returns:
        The tensors under the network's own names.

    Raises:
        CheckpointError: If the file is damaged, contains other objects than weights, or numbers that are not finite.
    """
    check_file_exists(file)
    _check_uncompressed(file)
    checkpoint = _load_pt_file(file)
    tensors = _find_state_dict(checkpoint, file.name)
    if tensors is None:
        raise CheckpointError(
            f"{str(file)!r} contains a {type(checkpoint).__name__} and no state dict, nor one under "
            f"{', '.join(STATE_DICT_KEYS)}. Save model.state_dict() and import that."
        )
    _check_tensors(file, tensors)
    return _strip_wrapper_names(tensors)


def check_file_exists(file: Path) -> None:
    """Refuse a path without a file.

    Args:
        file: Path of the file.

    Raises:
        CheckpointError: If there is no such file.
    """
    if not file.is_file():
        raise CheckpointError(f"there is no file {str(file)!r}.")


def _strip_wrapper_names(tensors: Tensors) -> Tensors:
    """The weights without what torch.compile and DataParallel add to their names."""
    plain = {".".join(part for part in name.split(".") if part != COMPILED_MODULE_NAME): name for name in tensors}
    names = plain if len(plain) == len(tensors) else {name: name for name in tensors}
    prefix = DATA_PARALLEL_PREFIX if all(name.startswith(DATA_PARALLEL_PREFIX) for name in names) else ""
    return {name.removeprefix(prefix): tensors[full_name] for name, full_name in names.items()}


def _load_pt_file(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # the file may be anything, and nothing else opens it
        raise CheckpointError(
            f"{str(file)!r} is not a file of weights alone: it is damaged, or it contains a whole model or other "
            "objects, which can run code when opened. A state dict is accepted. In the program that made the file, use "
            "torch.save(model.state_dict(), 'weights.pt'), and import that."
        ) from None


def _check_uncompressed(file: Path) -> None:
    """Refuse a compressed file: torch stores numbers uncompressed."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"PK\x03\x04":
                return  # torch unpacks nothing else
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{str(file)!r} is not a complete file of weights ({error}): fetch or write it again."
        ) from None
    is_compressed = any(m.compress_type != zipfile.ZIP_STORED for m in members)
    if is_compressed or sum(m.file_size for m in members) > file.stat().st_size:
        raise CheckpointError(
            f"{str(file)!r} is compressed or would unpack to more than its own size, unlike files that torch saves. "
            "In the program that made it, save model.state_dict() again."
        )


def _check_tensors(file: Path, tensors: Tensors) -> None:
    """Refuse weights that safetensors cannot store, that are much larger than their file, or that are not finite."""
    for name, tensor in tensors.items():
        _check_tensor(file, name, tensor)
    if (
        sum({tensor_identity(tensor): _count_bytes(tensor) for tensor in tensors.values()}.values())
        > MAX_EXPANSION * file.stat().st_size
    ):
        raise CheckpointError(f"the weights in {str(file)!r} repeat its numbers many times: save each tensor whole.")
    check_finite_tensors(tensors, file)


def _check_tensor(file: Path, name: str, tensor: Tensor) -> None:
    """Refuse a tensor that safetensors cannot store, or that has more elements than its storage."""
    if name == "__metadata__" or not name.isprintable():
        raise CheckpointError(f"{str(file)!r} has a tensor {name!r}, which is not accepted as a weight's name.")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(f"{name!r} in {str(file)!r} is no dense tensor of numbers: save it as one.")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{name!r} in {str(file)!r} repeats its numbers to {tensor.numel():,}: save it whole.")


def _find_state_dict(checkpoint: Any, file: str, depth: int = 0) -> Tensors | None:
    if not isinstance(checkpoint, Mapping) or not checkpoint or depth > MAX_NESTING_DEPTH:
        return None
    if _is_state_dict(checkpoint):
        return dict(checkpoint)
    keys = [key for key in STATE_DICT_KEYS if isinstance(checkpoint.get(key), Mapping)]
    if len(keys) != 1:
        return None
    _warn_of_other_weights(checkpoint, keys[0], file)
    return _find_state_dict(checkpoint[keys[0]], file, depth + 1)


def _is_state_dict(candidate: Any) -> bool:
    if not isinstance(candidate, Mapping) or not candidate:
        return False
    return all(isinstance(name, str) and isinstance(value, Tensor) for name, value in candidate.items())


def _warn_of_other_weights(checkpoint: Mapping[Any, Any], chosen_key: str, file: str) -> None:
    """Warn where a file contains other weights of the same network too, such as their average."""
    chosen_names = _parameter_names(checkpoint[chosen_key])
    others = [
        repr(key[:40])
        for key, value in checkpoint.items()
        if isinstance(key, str)
        and key != chosen_key
        and _is_state_dict(value)
        and chosen_names & _parameter_names(value)
    ]
    if others:
        warnings.warn(
            f"{file!r} contains weights under {chosen_key!r} and under {', '.join(others)}: those of {chosen_key!r} "
            "are used. To use others, save them alone: "
            f"torch.save(torch.load(FILE, weights_only=True)[{others[0]}], 'other.pt').",
            stacklevel=4,
        )


def _parameter_names(weights: Mapping[str, Any]) -> set[str]:
    return {str(name).removeprefix(DATA_PARALLEL_PREFIX) for name in weights}


def split_normalization(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Separate the weights of a Normalized network into those of the network and its normalisation.

    Args:
        tensors: Weights of a run.

    Returns:
        The weights under the network's own names, and mean and std, or {} where the network is not Normalized.
    """
    network = {name: t for name, t in tensors.items() if name.startswith("net.")}
    numbers = {name: t.flatten().tolist() for name, t in tensors.items() if name.startswith("normalize.")}
    if numbers.keys() != {"normalize.mean", "normalize.std"} or len(network) + len(numbers) != len(tensors):
        return tensors, {}
    normalization = {name.removeprefix("normalize."): values for name, values in numbers.items()}
    return {name.removeprefix("net."): tensor for name, tensor in network.items()}, normalization


def read_normalization(file: Path) -> dict[str, Any]:
    """Read the mean and std that a network was trained with from its file of weights.

    Args:
        file: Weights of a run, or exported ones.

    Returns:
        mean and std, or {} where the file does not have them.
    """
    normalization = split_normalization(read_tensors(file))[1]
    if not normalization:
        try:
            normalization = json.loads(read_note(file) or "{}").get("normalize", {})
        except (ValueError, AttributeError, RecursionError):  # a note of another program
            return {}
    return normalization if isinstance(normalization, dict) and normalization.keys() == {"mean", "std"} else {}


def write_sharded(tensors: Tensors, folder: Path, max_bytes: int, note: str | None) -> int:
    """Write weights in several files, and then the index that names them.

    Args:
        tensors: Weights by name.
        folder: Folder for the files.
        max_bytes: Largest number of bytes of tensors in a file; a tensor is never split.
        note: Note for the metadata of every file and of the index.

    Returns:
        The number of files without the index.
    """
    shards = _split_into_shards(tensors, max_bytes)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_atomic(folder / name, encode_tensors(shard, note))
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    notes = {} if note is None else {"deat": note}
    metadata = {"total_size": sum(map(_count_bytes, tensors.values())), **notes}
    write_json(folder / INDEX_FILE_NAME, {"metadata": metadata, "weight_map": weight_map})
    return len(shards)


def find_oversized_tensors(tensors: Tensors, max_bytes: int) -> dict[str, int]:
    """Find tensors that are larger than a file may be.

    Args:
        tensors: Weights by name.
        max_bytes: Largest number of bytes of tensors in a file.

    Returns:
        The bytes of these tensors by name.
    """
    return {name: _count_bytes(tensor) for name, tensor in tensors.items() if _count_bytes(tensor) > max_bytes}


def _split_into_shards(tensors: Tensors, max_bytes: int) -> list[Tensors]:
    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(map(_count_bytes, shards[-1].values())) + _count_bytes(tensor) > max_bytes:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def parse_byte_size(text: str) -> int:
    """Parse the value of --shard-size.

    Args:
        text: Such as "500MB" or "2GB".

    Returns:
        The number of bytes.

    Raises:
        UsageError: If the text is no size.
    """
    match = re.fullmatch(r"(\d{1,9})\s*([kmg]?)i?b?", text.strip().lower())
    if not match or int(match[1]) == 0:
        raise UsageError(f"--shard-size {text!r} is not a size. Write one such as 500MB or 2GB.")
    return int(match[1]) * BYTES_PER_UNIT[match[2]]


def format_normalization_note(normalization: dict[str, Any]) -> str | None:
    """Format a normalisation as the note of a file.

    Args:
        normalization: mean and std, or {}.

    Returns:
        The note, or None where there is no normalisation.
    """
    return json.dumps({"normalize": normalization}) if normalization else None
