"""Save weights as safetensors files, and load them into networks with the normalisation they were trained behind."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deat.errors import CheckpointError, check_is_instance
from deat.models.logits_wrapper import LogitsModel
from deat.models.normalize import Normalize, Normalized, get_input_std
from deat.models.pt_files import PICKLE_SUFFIXES, describe_name_parts, get_shared_prefix, read_pt_file
from deat.models.saved_normalization import (
    NETWORK_PREFIX,
    NORMALIZE_PREFIX,
    parse_normalization_note,
    split_normalization,
)
from deat.utils.safe_write import write_atomic
from deat.utils.safetensors_files import (
    INDEX_FILE_NAME,
    Tensors,
    encode_tensors,
    is_safetensors_file,
    read_note,
    read_tensors,
    tensor_identity,
)
from deat.utils.text import quote_for_shell

WEIGHTS_FILES = ("best/model.safetensors", "last/model.safetensors", "model.safetensors", INDEX_FILE_NAME)
"""Files of weights in a folder, in the order of preference."""
MAX_LISTED_KEYS = 5


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's parameters and buffers to a safetensors file, whole or not at all.

    A tensor with several names is written once; the file's metadata contains the other names.

    Args:
        model: Network, or a wrapper of torch.compile or data-parallel training around one.
        path: File to write. An existing file is replaced only if it is empty or contains safetensors weights.

    Raises:
        CheckpointError: If the file cannot be written, must not be replaced, or has the name of a pickle.

    Example:
        >>> deat.save_weights(model, "robust.safetensors")
    """
    target = Path(path)
    if target.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{target} has the name of a pickle, and weights are safetensors: end it in .safetensors, or write it with "
            "deat.export"
        )
    if not _can_overwrite(target):
        raise CheckpointError(f"{target} exists and is no safetensors file, so it is not replaced: choose another name")
    _write_weights(get_state_dict(model), target)


def _can_overwrite(target: Path) -> bool:
    """Whether a file does not exist, is empty, or is one of weights."""
    has_suffix = target.suffix.lower() == ".safetensors"
    return has_suffix or not target.is_file() or not target.stat().st_size or is_safetensors_file(target)


@dataclass(frozen=True)
class SavedWeights:
    """The weights in a file.

    Attributes:
        file: The file, or the index of several.
        tensors: The tensors by their names in the file.
        normalization: The mean and std that the network was trained behind; {} where the file records none.
    """

    file: Path
    tensors: Tensors
    normalization: dict[str, Any]


def read_weights(path: str | os.PathLike[str]) -> SavedWeights:
    """Read weights.

    Args:
        path: A safetensors file, a .pt or .pth file, which is read without running code in it, a run folder (its best
            weights, or else its last ones), or a folder of sharded weights with an index.

    Returns:
        The weights, and the normalisation that the file records.

    Raises:
        CheckpointError: If there are no weights, or the file is damaged or contains other objects.
    """
    file = find_weights_file(Path(path))
    if file.suffix.lower() in PICKLE_SUFFIXES:
        tensors, note = read_pt_file(file)
    else:
        tensors, note = read_tensors(file), read_note(file)
    normalization = split_normalization(_remove_shared_prefix(tensors))[1] or parse_normalization_note(note)
    return SavedWeights(file, tensors, normalization)


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    strict: bool = True,
    *,
    fresh_head: bool = False,
    ignore_normalization: bool = False,
) -> list[str]:
    """Load weights into a model, with the normalisation that they were trained behind.

    What all names in the file or in the model begin with does not count, so that weights saved from inside a wrapper
    ("module.", "model.", "net.") fit. If the weights record a normalisation, a model of add_normalization takes it
    over, and a network without one is refused: it would answer wrongly. Weights that record none leave the model's
    normalisation as it is. Weights that do not fit leave the model unchanged.

    Args:
        model: Network, or a wrapper of torch.compile or data-parallel training around one.
        path: A safetensors file, a .pt or .pth file, which is read without running code in it, a run folder (its best
            weights, or else its last ones), or a folder of sharded weights with an index.
        strict: Refuse names that only the file or only the model has. Shapes must always agree.
        fresh_head: Let one layer whose number of outputs differs, as with other classes, keep the model's own weights.
        ignore_normalization: Load the network's weights alone, and leave the model's normalisation as it is, or
            missing: for a network that normalises images in a way of its own.

    Returns:
        The names of the tensors that keep the model's own weights because of fresh_head.

    Raises:
        CheckpointError: If there are no weights, the file is damaged, or the weights do not fit.

    Example:
        >>> deat.load_weights(model, "runs/digits-m+deat")
        []
    """
    return load_saved_weights(
        model, read_weights(path), strict, fresh_head=fresh_head, ignore_normalization=ignore_normalization
    )


def load_saved_weights(
    model: nn.Module,
    saved: SavedWeights,
    strict: bool = True,
    *,
    fresh_head: bool = False,
    ignore_normalization: bool = False,
) -> list[str]:
    """Load weights that were read already into a model; see `load_weights`."""
    inner = unwrap_model(model)
    expected = get_state_dict(inner)
    loaded = _match_names(saved, inner, expected)
    if ignore_normalization and isinstance(inner, Normalized):
        loaded |= {key: tensor for key, tensor in expected.items() if key.startswith(NORMALIZE_PREFIX)}
    loaded = _restore_tied_weights(loaded, expected)
    head = _find_resized_head(loaded, expected) if fresh_head else []
    loaded = {key: expected[key] if key in head else tensor for key, tensor in loaded.items()}
    _check_fit(loaded, expected, saved, strict)
    if not ignore_normalization:
        _check_normalization_is_loaded(saved, inner, loaded, expected)
    inner.load_state_dict({key: loaded[key] for key in expected if key in loaded}, strict=False)
    return head


def _find_resized_head(loaded: Tensors, expected: Tensors) -> list[str]:
    """The tensors of the layer that differs in its number of outputs alone, if there is exactly one."""
    differ = [key for key in expected if key in loaded and loaded[key].shape != expected[key].shape]
    rows_only = all(loaded[key].shape[1:] == expected[key].shape[1:] for key in differ)
    return differ if rows_only and len({key.rpartition(".")[0] for key in differ}) == 1 else []


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the network inside a LogitsModel and wrappers of torch.compile and data-parallel training.

    These prefix every key.

    Args:
        model: Network or wrapper.

    Returns:
        The network itself.
    """
    check_is_instance(model)
    while True:
        if isinstance(model, LogitsModel | nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def get_state_dict(model: nn.Module) -> Tensors:
    """Return a model's parameters and buffers under the network's own names.

    Args:
        model: Network, or a wrapper of torch.compile or data-parallel training around one.

    Returns:
        The tensors by name.

    Raises:
        CheckpointError: If the model's state contains other things than tensors, or lazy layers without weights.
    """
    state = unwrap_model(model).state_dict()
    others = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(
            f"the model's state contains more than tensors ({_shorten_key_list(others)}), which safetensors cannot "
            "store: keep it in a buffer"
        )
    if any(is_lazy(value) for value in state.values()):
        raise CheckpointError("the model has lazy layers without weights yet: run one batch through it first")
    return dict(state)


def _restore_tied_weights(loaded: Tensors, expected: Tensors) -> Tensors:
    """The loaded tensors, also under the other names that the model has for them."""
    by_identity = {tensor_identity(expected[key]): tensor for key, tensor in loaded.items() if key in expected}
    tied = {key: by_identity[i] for key, tensor in expected.items() if (i := tensor_identity(tensor)) in by_identity}
    return tied | loaded


def _write_weights(tensors: Tensors, target: Path) -> None:
    try:
        # Not save_file: it makes the file readable by its owner alone.
        write_atomic(target, encode_tensors(tensors))
    except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"cannot write weights to {target}: {error}. Check the folder, its permissions and the disk space"
        ) from error


def find_weights_file(path: Path) -> Path:
    """Return the file of weights that a path means.

    Args:
        path: A file, a run folder, or a folder of sharded weights.

    Returns:
        The file itself, the run's best weights (or else its last ones), or the index of the shards.

    Raises:
        CheckpointError: If there is no such file.
    """
    if path.is_dir():
        file = next((path / name for name in WEIGHTS_FILES if (path / name).is_file()), None)
        if file is None:
            hint = (
                f". Export those of its checkpoints: deat export {quote_for_shell(str(path))}"
                if any(path.glob("ckpt-*"))
                else ""
            )
            raise CheckpointError(f"no weights in folder {path}: it has none of {', '.join(WEIGHTS_FILES)}{hint}")
        return file
    if not path.is_file():
        raise CheckpointError(f"no weights at {path}: give a .safetensors or .pt file, or a run folder")
    return path


def _match_names(saved: SavedWeights, model: nn.Module, expected: Tensors) -> Tensors:
    """The tensors under the model's own names, whatever wrappers are around the model or were around the saved one."""
    network, _ = split_normalization(_remove_shared_prefix(saved.tensors))
    own_names, normalization = set(expected), Tensors()
    if isinstance(model, Normalized):
        normalization = {key: tensor for key, tensor in expected.items() if key.startswith(NORMALIZE_PREFIX)}
        own_names = {key for key in expected if key.startswith(NETWORK_PREFIX)}
        if saved.normalization:
            layer = Normalize(
                **saved.normalization, unit_range=False
            )  # raises for values that are no mean and standard deviation
            normalization = {f"{NORMALIZE_PREFIX}{key}": tensor for key, tensor in layer.state_dict().items()}
    prefix = get_shared_prefix(own_names)
    renamed = {f"{prefix}{name}": tensor for name, tensor in _remove_shared_prefix(network).items()}
    # The file's own names win a tie, so that weights that fit are never renamed.
    named = min(
        saved.tensors, renamed, key=lambda tensors: (len(own_names - tensors.keys()), len(tensors.keys() - own_names))
    )
    return normalization | named


def _remove_shared_prefix(tensors: Tensors) -> Tensors:
    prefix = get_shared_prefix(tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _check_normalization_is_loaded(saved: SavedWeights, model: nn.Module, loaded: Tensors, expected: Tensors) -> None:
    """Refuse a model that has no place for the normalisation that the weights were trained behind."""
    has_place = get_input_std(model) is not None or (
        loaded.keys() <= expected.keys() and bool(split_normalization(loaded)[1])
    )
    if saved.normalization and not has_place:
        mean, std = ([float(f"{value:.6g}") for value in saved.normalization[name]] for name in ("mean", "std"))
        raise CheckpointError(
            f"{saved.file} was trained behind a normalisation, which this network lacks, so that its answers would be "
            f"wrong. Wrap the network first: model = deat.add_normalization(model, mean={mean}, std={std}). For a run, "
            "deat.load_run(folder, model=model) does so. If the network normalises images itself, pass "
            "ignore_normalization=True."
        )


def _check_fit(loaded: Tensors, expected: Tensors, saved: SavedWeights, strict: bool) -> None:
    common = [key for key in expected if key in loaded]
    wrong_shapes = [
        f"{key} {tuple(loaded[key].shape)} for {tuple(expected[key].shape)}"
        for key in common
        if loaded[key].shape != expected[key].shape
    ]
    problems = {"wrong shape": wrong_shapes}
    if strict or not common:
        problems["missing"] = [key for key in expected if key not in loaded]
        problems["not in the model"] = [key for key in loaded if key not in expected]
    lines = [f"{problem}: {_shorten_key_list(keys)}" for problem, keys in problems.items() if keys]
    if lines:
        raise CheckpointError(
            f"{saved.file} does not fit the model ({'; '.join(lines)}): build the model of these weights, "
            f"with the same number of classes, channels and image size{_describe_parts(saved.tensors, expected)}"
        )


def _describe_parts(tensors: Tensors, expected: Tensors) -> str:
    """What to do where one or several parts of a file have all tensors of the model, beside others."""
    shapes = {name: tensor.shape for name, tensor in _remove_shared_prefix(expected).items()}
    prefixes = {key[: len(key) - len(name)] for key in tensors for name in shapes if key.endswith(f".{name}")}
    parts = {
        prefix: {key.removeprefix(prefix): t.shape for key, t in tensors.items() if key.startswith(prefix)}
        for prefix in prefixes
    }
    fitting = sorted(prefix for prefix, part in parts.items() if shapes.items() <= part.items())
    if not fitting:
        return ""
    return (
        f". The names in the file begin with {describe_name_parts(tensors)}, and those under "
        f"{' or '.join(map(repr, fitting))} fit: take them "
        f"from the .pt file with deat import FILE --part {fitting[0]}"
    )


def _shorten_key_list(keys: Iterable[str]) -> str:
    """The first keys, and how many more there are."""
    keys = list(keys)
    more = f" and {len(keys) - MAX_LISTED_KEYS} more" if len(keys) > MAX_LISTED_KEYS else ""
    return ", ".join(keys[:MAX_LISTED_KEYS]) + more
