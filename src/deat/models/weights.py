"""Weights in safetensors files: nothing in them can run, and a write is whole or not there at all."""

import os
from collections.abc import Iterable
from pathlib import Path
from shlex import quote

import safetensors
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deat.errors import CheckpointError, check_is_instance
from deat.models.normalize import Normalized
from deat.utils.files import write_atomic
from deat.utils.tensor_files import (
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
MAX_LISTED_KEYS = 5


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's parameters and buffers to a safetensors file, whole or not at all.

    A tensor with several names is written once; the file's metadata holds the other names. A file that is there is
    replaced if it is empty or one of weights, by its content or its name; any other is refused.
    """
    target = Path(path)
    if target.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(f"{target} would hold safetensors under a pickle's name: end it in .safetensors")
    if not _can_overwrite(target):
        raise CheckpointError(f"{target} exists and holds no safetensors weights, so it is not replaced: name another")
    _write_weights(get_state_dict(model), target)


def _can_overwrite(target: Path) -> bool:
    """Whether nothing is lost but weights where a file of them is written."""
    named = target.suffix.lower() == ".safetensors"
    return named or not target.is_file() or not target.stat().st_size or is_safetensors_file(target)


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True, *, fresh_head: bool = False
) -> list[str]:
    """Fill the model from a safetensors file, a run folder's best (else last) weights, or a folder that holds parts.

    Weights of a bare network fit its Normalized wrapper, which keeps its own normalisation, and the other
    way round. Without `strict`, keys that only one of the two has are skipped; shapes must always agree.
    Weights that do not fit leave the model as it was. With fresh_head, one layer whose number of outputs differs, as it
    does for other classes, keeps the model's own weights; their names are returned.
    """
    file = find_weights_file(Path(path))
    inner = unwrap_model(model)
    expected = get_state_dict(inner)
    found = _restore_tied_weights(_match_wrapper_keys(read_tensors(file), inner, expected), expected)
    left = _find_resized_head(found, expected) if fresh_head else []
    found = {key: expected[key] if key in left else tensor for key, tensor in found.items()}
    _check_fit(found, expected, file, strict)
    inner.load_state_dict({key: found[key] for key in expected if key in found}, strict=False)
    return left


def _find_resized_head(loaded: Tensors, expected: Tensors) -> list[str]:
    """The tensors of the one layer that differs in its number of outputs alone, if there is just one."""
    differ = [key for key in expected if key in loaded and loaded[key].shape != expected[key].shape]
    rows_only = all(loaded[key].shape[1:] == expected[key].shape[1:] for key in differ)
    return differ if rows_only and len({key.rpartition(".")[0] for key in differ}) == 1 else []


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and the data-parallel wrappers, which prefix every key."""
    check_is_instance(model)
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def get_state_dict(model: nn.Module) -> Tensors:
    """The model's parameters and buffers under its own names, whatever it is wrapped in."""
    state = unwrap_model(model).state_dict()
    others = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(
            f"the model's state holds more than tensors ({_shorten_key_list(others)}), which safetensors cannot: "
            "keep it in a buffer"
        )
    if any(is_lazy(value) for value in state.values()):
        raise CheckpointError("the model has lazy layers without weights yet: run one batch through it first")
    return dict(state)


def _restore_tied_weights(loaded: Tensors, expected: Tensors) -> Tensors:
    """The found tensors, and the same again for every name the model ties to one of theirs."""
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
    """The file of weights that a path means: itself, a run's best (else last) one, or the index of parts."""
    if path.is_dir():
        file = next((path / name for name in WEIGHTS_FILES if (path / name).is_file()), None)
        if file is None:
            exported = f". Those of its checkpoints: deat export {quote(str(path))}" if any(path.glob("ckpt-*")) else ""
            raise CheckpointError(f"no weights in folder {path}: it has none of {', '.join(WEIGHTS_FILES)}{exported}")
        return file
    if not path.is_file():
        raise CheckpointError(f"no weights at {path}: give a .safetensors file or a run folder")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise pickle_error(path)
    return path


def _match_wrapper_keys(loaded: Tensors, model: nn.Module, expected: Tensors) -> Tensors:
    """The tensors under the model's own keys, whether either of the two is Normalized or not."""
    own = {key: tensor for key, tensor in expected.items() if key.startswith("normalize.")}
    wrapped = {f"net.{key}": tensor for key, tensor in loaded.items()} | own
    unwrapped = {key.removeprefix("net."): t for key, t in loaded.items() if not key.startswith("normalize.")}
    other = wrapped if isinstance(model, Normalized) else unwrapped
    # Its own keys win a tie, so that a model that fits as it is never gets renamed.
    return max(loaded, other, key=lambda tensors: len((tensors.keys() & expected.keys()) - own.keys()))


def _check_fit(loaded: Tensors, expected: Tensors, file: Path, strict: bool) -> None:
    common = [key for key in expected if key in loaded]
    misshapen = [
        f"{key} {tuple(loaded[key].shape)} for {tuple(expected[key].shape)}"
        for key in common
        if loaded[key].shape != expected[key].shape
    ]
    problems = {"wrong shape": misshapen}
    if strict or not common:
        problems["missing"] = [key for key in expected if key not in loaded]
        problems["not in the model"] = [key for key in loaded if key not in expected]
    told = [f"{what}: {_shorten_key_list(keys)}" for what, keys in problems.items() if keys]
    if told:
        raise CheckpointError(
            f"{file} does not fit the model ({'; '.join(told)}): build the model the weights were made with, "
            "with the same number of classes, channels and image size"
        )


def _shorten_key_list(keys: Iterable[str]) -> str:
    """A few of the keys and how many more there are."""
    keys = list(keys)
    rest = f" and {len(keys) - MAX_LISTED_KEYS} more" if len(keys) > MAX_LISTED_KEYS else ""
    return ", ".join(keys[:MAX_LISTED_KEYS]) + rest
