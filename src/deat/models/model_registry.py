"""Models by name: deat's own, those of timm and torchvision, and those in a file of your own."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from deat.errors import UsageError, did_you_mean, unknown_name_error
from deat.models.logits_wrapper import LogitsModel
from deat.models.normalize import add_normalization, get_input_std
from deat.utils.numbers import is_int_at_least
from deat.utils.plugins import load_plugins
from deat.utils.user_code import get_qualified_name, is_file_spec, load_object

PLUGIN_GROUP = "deat.models"
ModelBuilder = TypeVar("ModelBuilder", bound=Callable[..., nn.Module])
Normalization = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation by channel."""

OTHER_SOURCES_HINT = "Also timm:NAME, torchvision:NAME, hf:NAME and file.py:NAME."


@dataclass(frozen=True)
class ModelInfo:
    """What a listing shows of a model.

    Args:
        name: Name of the model.
        description: One line.
        parameters: Number of parameters at `input`; None where it is not known.
        input: Shape of an image, such as "3x32x32".
    """

    name: str
    description: str
    parameters: int | None
    input: str


@dataclass(frozen=True)
class _RegisteredModel:
    info: ModelInfo
    builder: Callable[..., nn.Module]
    origin: str = ""
    """The package that it comes from, if it is a plugin's."""


_MODELS: dict[str, _RegisteredModel] = {}


def register_model(
    name: str, *, description: str = "", parameters: int | None = None, input: str = ""
) -> Callable[[ModelBuilder], ModelBuilder]:
    """Register a model under a name: a decorator for a function or class that returns a network.

    build_model calls it with those of num_classes, in_channels and image_size that its signature names.

    Args:
        name: Name for build_model, in lower case and without a colon.
        description: One line for listings.
        parameters: Number of parameters, for listings.
        input: Shape of an image, such as "3x32x32", for listings.

    Returns:
        The decorator, which returns the function or class unchanged.

    Raises:
        UsageError: If the name is not accepted or already registered.

    Example:
        >>> @deat.register_model("tiny", description="one layer")
        ... def tiny(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
        ...     return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
    """

    def register(builder: ModelBuilder) -> ModelBuilder:
        """Register the builder and return it."""
        _check_name_is_free(name, builder)
        _MODELS[name] = _RegisteredModel(ModelInfo(name, description, parameters, input), builder)
        return builder

    return register


def list_models() -> tuple[str, ...]:
    """List the registered names, also those of installed plugins.

    Returns:
        The names, sorted.
    """
    load_plugins(PLUGIN_GROUP, _add_plugin)
    return tuple(sorted(_MODELS))


def list_model_infos() -> tuple[ModelInfo, ...]:
    """List what a listing shows of each registered model.

    Returns:
        The models, sorted by name.
    """
    return tuple(_MODELS[name].info for name in list_models())


def build_model(
    name: str,
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    normalize: Normalization | None = None,
) -> nn.Module:
    """Build a network with new weights.

    Args:
        name: A registered name, timm:NAME, torchvision:NAME, hf:NAME (a folder or repository of Hugging Face
            transformers) or my_file.py:NAME. Weights are new; `fetch_pretrained` has those that are published.
        num_classes: Number of classes.
        in_channels: Number of channels of an image.
        image_size: Height and width of an image in pixels.
        normalize: (mean, std), one number per channel each, which become the first layer, unless the network already
            contains a Normalize.

    Returns:
        The network.

    Raises:
        UsageError: If the name is unknown, or the model cannot be built for such images.

    Example:
        >>> deat.build_model("preact_resnet18", num_classes=100)
    """
    sizes = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    _check_sizes(sizes)
    if not isinstance(name, str):
        raise UsageError(
            f"a model is built by its name, such as 'small', not {name!r}; a network of your own is passed as it is"
        )
    net = _build_network(name, {size_name: int(value) for size_name, value in sizes.items()})
    if normalize is None or get_input_std(net) is not None:
        return net
    mean, std = normalize
    if len(mean) != in_channels:
        raise UsageError(f"normalize has {len(mean)} channels, the images have {in_channels}: give one number each")
    return add_normalization(net, mean, std)


def find_model_plugin(name: str) -> str:
    """Return the package and version of the plugin that a model's name is of; empty for any other name."""
    entry = _MODELS.get(name.lower())
    return entry.origin if entry else ""


def _add_plugin(name: str, value: object, origin: str) -> None:
    """Register the model of an entry point under its name; a name that is taken is refused."""
    if not callable(value):
        raise UsageError(f"it is a {type(value).__name__}, and not a function or class that returns a network.")
    if name.lower() in _MODELS:
        raise UsageError(f"the name {name} is taken by {_MODELS[name.lower()].origin or 'deat or this program'}.")
    _check_name_is_free(name, value)
    description = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
    _MODELS[name] = _RegisteredModel(ModelInfo(name, description, None, ""), value, origin)


def _check_name_is_free(name: str, builder: Callable[..., nn.Module]) -> None:
    """Refuse a name that is taken, except by an earlier run of the same definition, as in a notebook."""
    if not name or ":" in name or name != name.lower():
        raise UsageError(f"model name {name!r} must be lower case, not empty and without a colon: choose another")
    known = _MODELS.get(name)
    if known is not None and get_qualified_name(known.builder) != get_qualified_name(builder):
        raise UsageError(f"model name {name!r} is already registered: choose another")


def _check_sizes(sizes: dict[str, int]) -> None:
    for size_name, value in sizes.items():
        if not is_int_at_least(value, 1):
            raise UsageError(f"{size_name} {value!r} is not accepted: give a whole number of at least 1")


def _build_network(name: str, sizes: dict[str, int]) -> nn.Module:
    if is_file_spec(name):
        return _build_from_file(name, sizes)
    package, colon, inner = name.partition(":")
    if colon and package.lower() in _PACKAGE_BUILDERS:
        return _PACKAGE_BUILDERS[package.lower()](inner, sizes)
    if name.lower() not in _MODELS:
        load_plugins(PLUGIN_GROUP, _add_plugin)
    entry = _MODELS.get(name.lower())
    if entry is None:
        raise unknown_name_error("model", name, list_models(), OTHER_SOURCES_HINT)
    if not entry.origin:
        return entry.builder(**_select_accepted(entry.builder, sizes))
    net = _call_builder(name, entry.builder, **_select_accepted(entry.builder, sizes))
    if not isinstance(net, nn.Module):
        raise _not_a_model_error(f"{name}(...) of {entry.origin}", net)
    return net


def _select_accepted(builder: Callable[..., object], sizes: dict[str, int]) -> dict[str, int]:
    """The sizes that a builder's signature names; one with **options is given num_classes too."""
    try:
        parameters = inspect.signature(builder).parameters
    except ValueError:
        return {}
    kinds = {parameter.kind for parameter in parameters.values()}
    named = {
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if inspect.Parameter.VAR_KEYWORD in kinds:
        named.add("num_classes")
    return {name: value for name, value in sizes.items() if name in named}


def _build_from_file(spec: str, sizes: dict[str, int]) -> nn.Module:
    value = load_object(spec)
    if isinstance(value, nn.Module):
        return value
    if not callable(value):
        raise _not_a_model_error(spec, value)
    net = _call_builder(spec, value, **_select_accepted(value, sizes))
    if not isinstance(net, nn.Module):
        raise _not_a_model_error(f"{spec}(...)", net)
    return net


def _call_builder(name: str, builder: Callable[..., Any], **options: object) -> Any:
    try:
        return builder(**options)
    except Exception as error:
        raise UsageError(
            f"{name} could not be built with {options}: {type(error).__name__}: {error}. "
            "A model is called with those of num_classes, in_channels and image_size that it has parameters for. Other "
            "parameters need defaults, or a function that passes them. Correct the model's definition, or choose one for "
            "such images"
        ) from error


def _not_a_model_error(spec: str, value: object) -> UsageError:
    return UsageError(
        f"{spec} is a {type(value).__name__}, not a model: name an nn.Module, its class, or a function that returns one"
    )


def _build_from_timm(name: str, sizes: dict[str, int]) -> nn.Module:
    timm = import_package("timm")
    if not timm.is_model(name):
        raise _unknown_model_error("timm", name, timm.list_models())
    options: dict[str, Any] = {"num_classes": sizes["num_classes"], "in_chans": sizes["in_channels"]}
    # Transformers are built for one image size; other models refuse the argument.
    if getattr(timm.get_pretrained_cfg(name, allow_unregistered=True), "fixed_input_size", False):
        options["img_size"] = sizes["image_size"]
    net: nn.Module = _call_builder(f"timm:{name}", timm.create_model, model_name=name, **options)
    return net


def _build_from_torchvision(name: str, sizes: dict[str, int]) -> nn.Module:
    models = import_package("torchvision").models
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown_model_error("torchvision", name, known)
    if sizes["in_channels"] != 3:
        raise UsageError(
            f"torchvision:{name} takes 3 channels, the images have {sizes['in_channels']}: "
            "use timm:NAME or one of deat's own models"
        )
    options = {"weights": None, "num_classes": sizes["num_classes"]}
    net: nn.Module = _call_builder(f"torchvision:{name}", models.get_model_builder(name), **options)
    return net


def _build_from_transformers(name: str, sizes: dict[str, int]) -> nn.Module:
    configurations = import_package("transformers", "AutoConfig")
    models = import_package("transformers", "AutoModelForImageClassification")
    try:
        config = configurations.from_pretrained(
            name,
            num_labels=sizes["num_classes"],
            num_channels=sizes["in_channels"],
            image_size=sizes["image_size"],
            local_files_only=True,
        )
    except Exception as error:
        raise UsageError(
            f"hf:{name} has no configuration here ({str(error).splitlines()[0]}). Give a folder of save_pretrained, or "
            f"fetch it once: --download, or deat.models.fetch_pretrained('hf:{name}', download=True)."
        ) from error
    net: nn.Module = _call_builder(f"hf:{name}", models.from_config, config=config)
    return LogitsModel(net)


_PACKAGE_BUILDERS: dict[str, Callable[[str, dict[str, int]], nn.Module]] = {
    "timm": _build_from_timm,
    "torchvision": _build_from_torchvision,
    "hf": _build_from_transformers,
}
_PACKAGES = {"timm", "torchvision", "transformers"}


def import_package(name: str, attribute: str = "") -> Any:
    """Import an optional package, which is slow to import and fails with some builds of torch.

    Args:
        name: Such as "timm".
        attribute: What is needed of the package, where it imports its parts when they are used.

    Returns:
        The package, or the attribute.

    Raises:
        UsageError: It is not installed, or cannot be imported here.
    """
    try:
        package = importlib.import_module(name)
        return getattr(package, attribute) if attribute else package
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in _PACKAGES:
            prefix = "hf" if name == "transformers" else name
            raise UsageError(
                f"{prefix}:NAME needs {error.name}, which is not installed: pip install {error.name}"
            ) from error
        raise UsageError(
            f"{name} is installed but cannot be imported ({type(error).__name__}: {error}): install builds "
            "of torch and torchvision that match, or use one of deat's own models"
        ) from error


def _unknown_model_error(package: str, name: str, known: Sequence[str]) -> UsageError:
    listing = "timm.list_models()" if package == "timm" else "torchvision.models.list_models()"
    return UsageError(f"unknown {package} model {name!r}.{did_you_mean(name, known)} {listing} lists all {len(known)}.")
