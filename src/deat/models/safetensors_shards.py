"""Write weights as several safetensors files of a limited size, with an index."""

import re
from pathlib import Path

from deat.errors import UsageError
from deat.utils.safe_write import write_atomic, write_json
from deat.utils.safetensors_files import INDEX_FILE_NAME, Tensors, encode_tensors

BYTES_PER_UNIT = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


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
    metadata = {"total_size": sum(tensor.nbytes for tensor in tensors.values()), **notes}
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
    return {name: tensor.nbytes for name, tensor in tensors.items() if tensor.nbytes > max_bytes}


def _split_into_shards(tensors: Tensors, max_bytes: int) -> list[Tensors]:
    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > max_bytes:
            shards.append({})
        shards[-1][name] = tensor
    return shards


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
