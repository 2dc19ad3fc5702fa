"""Read the weights in .pt, .pth and .ckpt files of torch without running code in them."""

import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deat.errors import CheckpointError, UsageError
from deat.utils.safetensors_files import Tensors, check_finite_tensors, tensor_identity

PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".tar"})
"""The names of files that torch writes."""
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net", "weights")
"""Keys under which checkpoints of other programs have their weights, besides a single key of another name."""
DATA_PARALLEL_PREFIX = "module."
"""What DataParallel, DistributedDataParallel, Accelerate and AveragedModel put before all names."""
INNER_WRAPPER_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What torch.compile, FSDP and activation checkpointing put into names, wherever a part of a network is wrapped."""
LIGHTNING_KEY = "pytorch-lightning_version"
"""What a checkpoint of Lightning has; its weights begin with the name of the network in the LightningModule."""
AVERAGE_COUNTER = "n_averaged"
"""The counter that torch's AveragedModel has beside the averaged weights."""
NOTE_KEY = "deat"
"""The key of deat's note in the `_metadata` of a state dict, which torch saves with it."""
MAX_NESTING_DEPTH = 4
"""Levels at which weights are searched: a checkpoint may contain itself."""
MAX_EXPANSION = 4
"""Bytes of all tensors over bytes of the file, above which the file is refused as a decompression bomb."""
MAX_LISTED_PARTS = 6


class PtFile(NamedTuple):
    """What a .pt file has.

    Attributes:
        tensors: The weights under the network's own names.
        note: What `deat export` wrote about them; None in files of other programs.
    """

    tensors: Tensors
    note: str | None


def read_pt_file(file: Path, part: str | None = None) -> PtFile:
    """Read a .pt file with torch's weights-only loader.

    The checksums in the file are compared first. A file without them, as torch wrote before version 1.6, is read with
    a warning.

    Args:
        file: A state dict, or a checkpoint that contains one.
        part: Which weights, where the file has several: a key of the checkpoint, such as "state_dict_ema", or what
            the names begin with, such as "model." or "ema_model.module.".

    Returns:
        The weights, and the note about them.

    Raises:
        CheckpointError: If the file is damaged, contains other objects than weights, or numbers that are not finite.
        UsageError: If the file has no such part.
    """
    check_file_exists(file)
    has_checksums = _check_archive(file)
    checkpoint = _load_pt_file(file)
    tensors = _find_part(checkpoint, part, file) if part else _find_state_dict(checkpoint, file.name)
    if tensors is None:
        raise CheckpointError(
            f"{str(file)!r} contains a {type(checkpoint).__name__} and no state dict, nor one under "
            f"{', '.join(STATE_DICT_KEYS)}.{_describe_state_dicts(checkpoint, file)} Save model.state_dict() and "
            "import that."
        )
    _check_tensors(file, tensors)
    if not has_checksums:
        warnings.warn(
            f"{file.name} has no checksums, so that damage in it cannot be seen. torch 1.6 or later writes them: save "
            "the weights again, or compare the file with its source.",
            stacklevel=3,
        )
    metadata = getattr(checkpoint, "_metadata", None)
    note = metadata.get(NOTE_KEY) if isinstance(metadata, Mapping) else None
    is_lightning = part is None and isinstance(checkpoint, Mapping) and LIGHTNING_KEY in checkpoint
    return PtFile(_strip_wrapper_names(tensors, is_lightning), note if isinstance(note, str) else None)


def check_file_exists(file: Path) -> None:
    """Refuse a path without a file.

    Args:
        file: Path of the file.

    Raises:
        CheckpointError: If there is no such file.
    """
    if not file.is_file():
        raise CheckpointError(f"there is no file {str(file)!r}.")


def get_shared_prefix(names: Iterable[str]) -> str:
    """Return what all names of tensors begin with, in whole parts between dots.

    Args:
        names: Names, such as those of a state dict.

    Returns:
        Such as "model.net.", or "" where the names differ from their first part on. The last part of a name is never
        in it.
    """
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(f"{parts[0]}.")
    return "".join(shared)


def _strip_wrapper_names(tensors: Tensors, is_lightning: bool) -> Tensors:
    """The weights without what wrappers of torch, and with `is_lightning` a LightningModule, add to their names."""
    plain = {".".join(part for part in name.split(".") if part not in INNER_WRAPPER_NAMES): name for name in tensors}
    names = plain if len(plain) == len(tensors) else {name: name for name in tensors}
    if is_lightning:
        names = _strip_prefix(names, f"{get_shared_prefix(names).partition('.')[0]}.")
    while (shorter := _strip_prefix(names, DATA_PARALLEL_PREFIX)) != names:
        names = shorter
    return {name: tensors[full_name] for name, full_name in names.items()}


def _strip_prefix(names: dict[str, str], prefix: str) -> dict[str, str]:
    """The names without a prefix, if all have it but the counter of averaged weights, which is then left out."""
    weights = [name for name in names if name != AVERAGE_COUNTER]
    if not weights or not all(name.startswith(prefix) and name != prefix for name in weights):
        return names
    return {name.removeprefix(prefix): names[name] for name in weights}


def _load_pt_file(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # the file may be anything, and nothing else opens it
        raise CheckpointError(
            f"{str(file)!r} is not a file of weights alone: it is damaged, or it contains a whole model or other "
            "objects, which can run code when opened. A state dict is accepted. In the program that made the file, use "
            "torch.save(model.state_dict(), 'weights.pt'), and import that."
        ) from None


def _check_archive(file: Path) -> bool:
    """Refuse a file that is compressed, since torch stores numbers uncompressed, or has other bytes than were written.

    Returns:
        Whether the file has checksums.
    """
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"PK\x03\x04":
                return False  # torch unpacks nothing else
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            is_compressed = any(m.compress_type != zipfile.ZIP_STORED for m in members)
            if is_compressed or sum(m.file_size for m in members) > file.stat().st_size:
                raise CheckpointError(
                    f"{str(file)!r} is compressed or would unpack to more than its own size, unlike files that torch "
                    "saves. In the program that made it, save model.state_dict() again."
                )
            has_checksums = any(member.CRC for member in members)
            damaged = archive.testzip() if has_checksums else None
    except CheckpointError:
        raise
    except Exception as error:  # of many kinds, since the file may contain anything
        raise CheckpointError(
            f"{str(file)!r} is not a complete file of weights ({error}): fetch or write it again."
        ) from None
    if damaged is not None:
        raise CheckpointError(
            f"{str(file)!r} is damaged: {damaged[:80]!r} in it does not match its checksum. Fetch or write it again."
        )
    return has_checksums


def _check_tensors(file: Path, tensors: Tensors) -> None:
    """Refuse weights that safetensors cannot store, that are much larger than their file, or that are not finite."""
    for name, tensor in tensors.items():
        _check_tensor(file, name, tensor)
    if (
        sum({tensor_identity(tensor): tensor.nbytes for tensor in tensors.values()}.values())
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
    known = [key for key in STATE_DICT_KEYS if isinstance(checkpoint.get(key), Mapping)]
    keys = known or [key for key, value in checkpoint.items() if isinstance(key, str) and _is_state_dict(value)]
    if len(keys) != 1:
        return None
    _warn_of_other_weights(checkpoint, keys[0], file)
    return _find_state_dict(checkpoint[keys[0]], file, depth + 1)


def _find_part(checkpoint: Any, part: str, file: Path) -> Tensors:
    """The weights under a key of a checkpoint, or those of a state dict whose names begin with a prefix."""
    if isinstance(checkpoint, Mapping) and isinstance(checkpoint.get(part), Mapping):
        tensors = _find_state_dict(checkpoint[part], file.name)
        if tensors is not None:
            return tensors
    prefix = f"{part.removesuffix('.')}."
    candidates = _find_state_dict(checkpoint, file.name) or {}
    chosen = {name.removeprefix(prefix): t for name, t in candidates.items() if name.startswith(prefix)}
    if not chosen:
        listed = _describe_state_dicts(checkpoint, file) or f" Its names begin with {describe_name_parts(candidates)}."
        raise UsageError(f"{str(file)!r} has no part {part!r}.{listed}")
    return chosen


def describe_name_parts(names: Iterable[str]) -> str:
    """Describe what names of tensors begin with, and how many do so.

    Example:
        >>> describe_name_parts(["model.a.weight", "model.a.bias", "loss.weight"])
        "'model.' (2), 'loss.' (1)"
    """
    counts = Counter(f"{name.partition('.')[0]}." if "." in name else name for name in names)
    listed = [f"{start!r} ({count})" for start, count in counts.most_common(MAX_LISTED_PARTS)]
    return ", ".join(listed) + (", ..." if len(counts) > MAX_LISTED_PARTS else "")


def _describe_state_dicts(checkpoint: Any, file: Path) -> str:
    """A sentence that names the keys of a checkpoint with weights under them, where there are several."""
    if not isinstance(checkpoint, Mapping):
        return ""
    keys = [repr(key[:40]) for key, value in checkpoint.items() if isinstance(key, str) and _is_state_dict(value)]
    return f" It has weights under {', '.join(keys)}: choose with deat import {file.name} --part." if keys else ""


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
            f"are used. For others: deat import {file} --part {others[0]}.",
            stacklevel=5,
        )


def _parameter_names(weights: Mapping[str, Any]) -> set[str]:
    return {str(name).removeprefix(DATA_PARALLEL_PREFIX) for name in weights}
