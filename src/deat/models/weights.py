"""Weights in safetensors files, which cannot contain code; a file is written whole or not at all."""

import os
from collections.abc import Iterable
from pathlib import Path
from shlex import quote

import safetensors
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deat.errors import CheckpointError, check_is_instance
from deat.models.normalize import Normalized
from deat.utils.safe_write import write_atomic
from deat.utils.safetensors_files import (
    INDEX_FILE_NAME,
    Tensors,
    encode_tensors,
    is_safetensors_file,
    pickle_error,
    read_tensors,
    tensor_identity,
)

PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".tar"})
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
        raise CheckpointError(f"{target} has the name of a pickle, and weights are safetensors: end it in .safetensors")
    if not _can_overwrite(target):
        raise CheckpointError(f"{target} exists and is no safetensors file, so it is not replaced: choose another name")
    _write_weights(get_state_dict(model), target)


def _can_overwrite(target: Path) -> bool:
    """Whether a file does not exist, is empty, or is one of weights."""
    has_suffix = target.suffix.lower() == ".safetensors"
    return has_suffix or not target.is_file() or not target.stat().st_size or is_safetensors_file(target)


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True, *, fresh_head: bool = False
) -> list[str]:
    """Load weights into a model.

    Weights of a bare network fit its Normalized wrapper, which keeps its own normalisation, and vice versa. Weights
    that do not fit leave the model unchanged.

    Args:
        model: Network, or a wrapper of torch.compile or data-parallel training around one.
        path: A safetensors file, a run folder (its best weights, or else its last ones), or a folder of sharded
            weights with an index.
        strict: Refuse names that only the file or only the model has. Shapes must always agree.
        fresh_head: Let one layer whose number of outputs differs, as with other classes, keep the model's own weights.

    Returns:
        The names of the tensors that keep the model's own weights because of fresh_head.

    Raises:
        CheckpointError: If there are no weights, the file is damaged or a pickle, or the weights do not fit.

    Example:
        >>> deat.load_weights(model, "runs/digits-m+deat")
        []
    """
    file = find_weights_file(Path(path))
    inner = unwrap_model(model)
    expected = get_state_dict(inner)
    loaded = _restore_tied_weights(_match_wrapper_keys(read_tensors(file), inner, expected), expected)
    head = _find_resized_head(loaded, expected) if fresh_head else []
    loaded = {key: expected[key] if key in head else tensor for key, tensor in loaded.items()}
    _check_fit(loaded, expected, file, strict)
    inner.load_state_dict({key: loaded[key] for key in expected if key in loaded}, strict=False)
    return head


def _find_resized_head(loaded: Tensors, expected: Tensors) -> list[str]:
    """The tensors of the layer that differs in its number of outputs alone, if there is exactly one."""
    differ = [key for key in expected if key in loaded and loaded[key].shape != expected[key].shape]
    rows_only = all(loaded[key].shape[1:] == expected[key].shape[1:] for key in differ)
    return differ if rows_only and len({key.rpartition(".")[0] for key in differ}) == 1 else []


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the network inside wrappers of torch.compile and data-parallel training, which prefix every key.

    Args:
        model: Network or wrapper.

    Returns:
        The network itself.
    """
    check_is_instance(model)
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
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
        CheckpointError: If there is no such file, or it has the name of a pickle.
    """
    if path.is_dir():
        file = next((path / name for name in WEIGHTS_FILES if (path / name).is_file()), None)
        if file is None:
            hint = (
                f". Export those of its checkpoints: deat export {quote(str(path))}" if any(path.glob("ckpt-*")) else ""
            )
            raise CheckpointError(f"no weights in folder {path}: it has none of {', '.join(WEIGHTS_FILES)}{hint}")
        return file
    if not path.is_file():
        raise CheckpointError(f"no weights at {path}: give a .safetensors file or a run folder")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise pickle_error(path)
    return path


def _match_wrapper_keys(loaded: Tensors, model: nn.Module, expected: Tensors) -> Tensors:
    """The tensors under the model's own keys, whether the model or the saved one is Normalized or not."""
    normalization = {key: tensor for key, tensor in expected.items() if key.startswith("normalize.")}
    wrapped = {f"net.{key}": tensor for key, tensor in loaded.items()} | normalization
    unwrapped = {key.removeprefix("net."): t for key, t in loaded.items() if not key.startswith("normalize.")}
    other = wrapped if isinstance(model, Normalized) else unwrapped
    # The file's own keys win a tie, so that weights that fit are never renamed.
    return max(loaded, other, key=lambda tensors: len((tensors.keys() & expected.keys()) - normalization.keys()))


def _check_fit(loaded: Tensors, expected: Tensors, file: Path, strict: bool) -> None:
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
            f"{file} does not fit the model ({'; '.join(lines)}): build the model of these weights, "
            "with the same number of classes, channels and image size"
        )


def _shorten_key_list(keys: Iterable[str]) -> str:
    """The first keys, and how many more there are."""
    keys = list(keys)
    more = f" and {len(keys) - MAX_LISTED_KEYS} more" if len(keys) > MAX_LISTED_KEYS else ""
    return ", ".join(keys[:MAX_LISTED_KEYS]) + more
