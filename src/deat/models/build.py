"""Models by name: deat's own, those of timm and torchvision, and those in a file of the user's."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from deat.errors import UsageError, did_you_mean, unknown_name_error
from deat.models.normalize import add_normalization, get_input_std
from deat.utils.numbers import is_int_at_least
from deat.utils.user_code import get_qualified_name, is_file_spec, load_object

ModelBuilder = TypeVar("ModelBuilder", bound=Callable[..., nn.Module])
Normalization = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation by channel."""

OTHER_SOURCES_HINT = "Also timm:NAME, torchvision:NAME and file.py:NAME."


@dataclass(frozen=True)
class ModelInfo:
    """What a listing shows of a model: `parameters` are counted at `input` (CxHxW), None when not known."""

    name: str
    description: str
    parameters: int | None
    input: str


@dataclass(frozen=True)
class _RegisteredModel:
    info: ModelInfo
    builder: Callable[..., nn.Module]


_MODELS: dict[str, _RegisteredModel] = {}


def register_model(
    name: str, *, description: str = "", parameters: int | None = None, input: str = ""
) -> Callable[[ModelBuilder], ModelBuilder]:
    """A decorator that gives a function or class returning a network a name that `build` knows.

    It is called with those of num_classes, in_channels and image_size that its signature names.
    """

    def register(builder: ModelBuilder) -> ModelBuilder:
        """Register the builder, and give it back as it is."""
        _check_name_is_free(name, builder)
        _MODELS[name] = _RegisteredModel(ModelInfo(name, description, parameters, input), builder)
        return builder

    return register


def list_models() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_MODELS))


def list_model_infos() -> tuple[ModelInfo, ...]:
    """What a listing shows of each registered model, sorted by name."""
    return tuple(_MODELS[name].info for name in list_models())


def build_model(
    name: str,
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    normalize: Normalization | None = None,
) -> nn.Module:
    """A freshly initialised network: a registered name, `timm:NAME`, `torchvision:NAME` or `file.py:NAME`.

    `normalize` is a pair (mean, std) put in front of it, unless the network already holds a Normalize.
    """
    given = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    _check_sizes(given)
    shape = {what: int(value) for what, value in given.items()}
    if not isinstance(name, str):
        raise UsageError(
            f"a model is built by its name, such as 'small', not {name!r}; one of your own needs no building"
        )
    net = _build_network(name, shape)
    if normalize is None or get_input_std(net) is not None:
        return net
    mean, std = normalize
    if len(mean) != in_channels:
        raise UsageError(f"normalize has {len(mean)} channels, the images have {in_channels}: give one number each")
    return add_normalization(net, mean, std)


def _check_name_is_free(name: str, builder: Callable[..., nn.Module]) -> None:
    """Refuse a name that is taken, except by an earlier run of the same definition, as notebooks do."""
    if not name or ":" in name or name != name.lower():
        raise UsageError(f"model name {name!r} must be lower case, not empty and without a colon: choose another")
    old = _MODELS.get(name)
    if old is not None and get_qualified_name(old.builder) != get_qualified_name(builder):
        raise UsageError(f"model name {name!r} is already registered: choose another")


def _check_sizes(sizes: dict[str, int]) -> None:
    for what, value in sizes.items():
        if not is_int_at_least(value, 1):
            raise UsageError(f"{what} {value!r} is not accepted: give a whole number of at least 1")


def _build_network(name: str, sizes: dict[str, int]) -> nn.Module:
    if is_file_spec(name):
        return _build_from_file(name, sizes)
    package, colon, inner = name.partition(":")
    if colon and package.lower() in _PACKAGE_BUILDERS:
        return _PACKAGE_BUILDERS[package.lower()](inner, sizes)
    entry = _MODELS.get(name.lower())
    if entry is None:
        raise unknown_name_error("model", name, list_models(), OTHER_SOURCES_HINT)
    return entry.builder(**_select_accepted(entry.builder, sizes))


def _select_accepted(builder: Callable[..., object], sizes: dict[str, int]) -> dict[str, int]:
    """The part of `shape` a builder's signature takes; of **options only num_classes can be trusted."""
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
    thing = load_object(spec)
    if isinstance(thing, nn.Module):
        return thing
    if not callable(thing):
        raise _not_a_model_error(spec, thing)
    net = _call_builder(spec, thing, **_select_accepted(thing, sizes))
    if not isinstance(net, nn.Module):
        raise _not_a_model_error(f"{spec}(...)", net)
    return net


def _call_builder(name: str, builder: Callable[..., Any], **options: object) -> Any:
    try:
        return builder(**options)
    except Exception as error:
        raise UsageError(
            f"{name} could not be built with {options}: {type(error).__name__}: {error}. "
            "A model is given those of num_classes, in_channels and image_size that it has parameters for; the others "
            "need defaults, or a function that calls it with them. Correct it where it is defined, or choose one that "
            "takes such images"
        ) from error


def _not_a_model_error(spec: str, thing: object) -> UsageError:
    return UsageError(
        f"{spec} is a {type(thing).__name__}, not a model: name an nn.Module, its class, or a function that returns one"
    )


def _build_from_timm(name: str, sizes: dict[str, int]) -> nn.Module:
    timm = _import_package("timm")
    if not timm.is_model(name):
        raise _unknown_model_error("timm", name, timm.list_models())
    options: dict[str, Any] = {"num_classes": sizes["num_classes"], "in_chans": sizes["in_channels"]}
    # Transformers are built for one image size, the others refuse to be told it.
    if getattr(timm.get_pretrained_cfg(name, allow_unregistered=True), "fixed_input_size", False):
        options["img_size"] = sizes["image_size"]
    net: nn.Module = _call_builder(f"timm:{name}", timm.create_model, model_name=name, **options)
    return net


def _build_from_torchvision(name: str, sizes: dict[str, int]) -> nn.Module:
    models = _import_package("torchvision").models
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


_PACKAGE_BUILDERS: dict[str, Callable[[str, dict[str, int]], nn.Module]] = {
    "timm": _build_from_timm,
    "torchvision": _build_from_torchvision,
}


def _import_package(name: str) -> ModuleType:
    """The package, imported now: it is optional, slow to import, and broken beside some builds of torch."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in _PACKAGE_BUILDERS:
            raise UsageError(
                f"{name}:NAME needs {error.name}, which is not installed: pip install {error.name}"
            ) from error
        raise UsageError(
            f"{name} is installed but cannot be imported ({type(error).__name__}: {error}): install builds "
            "of torch and torchvision that belong together, or use one of deat's own models"
        ) from error


def _unknown_model_error(package: str, name: str, known: Sequence[str]) -> UsageError:
    where = "timm.list_models()" if package == "timm" else "torchvision.models.list_models()"
    return UsageError(f"unknown {package} model {name!r}.{did_you_mean(name, known)} {where} lists all {len(known)}.")
