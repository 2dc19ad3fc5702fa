"""Published weights of timm, torchvision and Hugging Face transformers, as files of weights with their normalisation."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import nn

from deat.errors import CheckpointError, UsageError
from deat.models.logits_wrapper import LogitsModel
from deat.models.model_registry import Normalization, import_package
from deat.models.normalize import add_normalization
from deat.models.weights import save_weights

Pretrained = tuple[nn.Module, Normalization | None]
"""A network with published weights, and the mean and standard deviation of its inputs."""


def is_pretrained_spec(spec: str) -> bool:
    """Return whether a text names published weights, such as "timm:resnet18.a1_in1k", and not a file."""
    package, colon, name = spec.partition(":")
    return bool(colon and name) and package.lower() in _LOADERS and not os.path.exists(spec)


def fetch_pretrained(spec: str, folder: str | os.PathLike[str] | None = None, *, download: bool = False) -> Path:
    """Return a file with the published weights of a network, for `load_weights(..., fresh_head=True)` and `--init`.

    The file is made once, from what the package has in its own cache, and records the normalisation that the weights
    were trained behind.

    Args:
        spec: "timm:NAME" or "timm:NAME.TAG", "torchvision:NAME", or "hf:NAME", a repository of the Hub or a folder of
            `save_pretrained`.
        folder: Where the file is kept; by default pretrained/ in $DEAT_DATA or ~/.cache/deat.
        download: Whether the package may fetch weights that it has not in its cache.

    Returns:
        A safetensors file.

    Raises:
        UsageError: The name is unknown, has no published weights, or the package is not installed.
        CheckpointError: The weights are not in the package's cache and `download` is False, or cannot be read.

    Example:
        >>> weights = deat.models.fetch_pretrained("timm:resnet18.a1_in1k", download=True)
        >>> model = deat.add_normalization(deat.build_model("timm:resnet18", num_classes=5), [0.5] * 3, [0.5] * 3)
        >>> deat.load_weights(model, weights, fresh_head=True)
        ['fc.weight', 'fc.bias']
    """
    if not is_pretrained_spec(spec):
        raise UsageError(f"{spec!r} names no published weights: timm:NAME, torchvision:NAME or hf:NAME.")
    package, _, name = spec.partition(":")
    root = Path(folder) if folder is not None else _default_folder()
    file = root / f"{package.lower()}-{re.sub(r'[^A-Za-z0-9._-]+', '--', name).strip('.-')}.safetensors"
    if file.is_file() and not Path(name).is_dir():  # a folder's weights may change, published ones do not
        return file
    model, normalization = _LOADERS[package.lower()](name, download)
    model = add_normalization(model, *normalization) if normalization else model
    root.mkdir(parents=True, exist_ok=True)
    save_weights(model, file)
    return file


def fetch_architecture(spec: str) -> None:
    """Let a package fetch what it needs to build a network by its name: for "hf:NAME" the configuration.

    Args:
        spec: A model's name; those of other packages need nothing.

    Raises:
        CheckpointError: It cannot be fetched.
    """
    package, _, name = spec.partition(":")
    if package.lower() != "hf" or Path(name).is_dir():
        return
    configurations = import_package("transformers", "AutoConfig")
    try:
        configurations.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{spec} cannot be fetched ({str(error).splitlines()[0]}).") from error


def _default_folder() -> Path:
    return Path(os.environ.get("DEAT_DATA") or Path.home() / ".cache" / "deat") / "pretrained"


def _from_timm(name: str, download: bool) -> Pretrained:
    timm = import_package("timm")
    if not timm.is_model(name.partition(".")[0]):
        raise UsageError(f"unknown timm model {name!r}. timm.list_models(pretrained=True) lists those with weights.")
    cfg = timm.get_pretrained_cfg(name)
    if cfg is None or not (cfg.hf_hub_id or cfg.url):
        raise UsageError(f"timm:{name} has no published weights. timm.list_pretrained() lists names that have.")
    file = None if download else _find_in_hub_cache(str(cfg.hf_hub_id), ("model.safetensors", "pytorch_model.bin"))
    if file is None and not download:
        raise _not_cached_error(f"timm:{name}")
    overlay = {"file": str(file)} if file else None
    net = _load(f"timm:{name}", timm.create_model, name, pretrained=True, pretrained_cfg_overlay=overlay)
    return net, (cfg.mean, cfg.std)


def _from_torchvision(name: str, download: bool) -> Pretrained:
    models = import_package("torchvision").models
    if name not in models.list_models(module=models):
        raise UsageError(f"unknown torchvision model {name!r}. torchvision.models.list_models() lists all.")
    weights = models.get_model_weights(name).DEFAULT
    cached = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(weights.url).path).name
    if not cached.is_file() and not download:
        raise _not_cached_error(f"torchvision:{name}")
    net = _load(f"torchvision:{name}", models.get_model, name, weights=weights)
    transforms = weights.transforms()
    return net, (transforms.mean, transforms.std)


def _from_transformers(name: str, download: bool) -> Pretrained:
    loader = import_package("transformers", "AutoModelForImageClassification").from_pretrained
    processors = import_package("transformers", "image_processing_base").ImageProcessingMixin
    try:
        net = loader(name, local_files_only=not download)
        image_processor, _ = processors.get_image_processor_dict(name, local_files_only=not download)
    except OSError as error:
        if Path(name).is_dir() or download:
            raise CheckpointError(f"hf:{name} cannot be read ({str(error).splitlines()[0]}).") from error
        raise _not_cached_error(f"hf:{name}") from error
    mean, std = image_processor.get("image_mean"), image_processor.get("image_std")
    return LogitsModel(net), (mean, std) if mean and std and image_processor.get("do_normalize", True) else None


def _find_in_hub_cache(repository: str, names: tuple[str, ...]) -> str | None:
    hub = import_package("huggingface_hub")
    cached_files = (hub.try_to_load_from_cache(repository, name) for name in names)
    return next((path for path in cached_files if isinstance(path, str)), None)


def _load(spec: str, function: Callable[..., Any], *args: Any, **options: Any) -> nn.Module:
    try:
        net: nn.Module = function(*args, **options)
    except Exception as error:
        raise CheckpointError(f"the weights of {spec} cannot be loaded ({type(error).__name__}: {error}).") from error
    return net


def _not_cached_error(spec: str) -> CheckpointError:
    return CheckpointError(
        f"the weights of {spec} are not in its package's cache here. Fetch them: --download, or "
        f'deat.models.fetch_pretrained("{spec}", download=True).'
    )


_LOADERS: dict[str, Callable[[str, bool], Pretrained]] = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
    "hf": _from_transformers,
}
