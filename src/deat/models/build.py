"""Models by name: deat's own, those of timm and torchvision, and those in a file of the user's."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from deat.errors import UsageError, guess, unknown
from deat.models.normalize import normalized, pixel_scale
from deat.utils.numbers import is_whole
from deat.utils.user_code import is_file_spec, load_object, origin

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])
Normalization = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation by channel."""

ELSEWHERE = "Also timm:NAME, torchvision:NAME and file.py:NAME."


@dataclass(frozen=True)
class ModelInfo:
    """What a listing shows of a model: `parameters` are counted at `input` (CxHxW), None when not known."""

    name: str
    description: str
    parameters: int | None
    input: str


@dataclass(frozen=True)
class _Entry:
    info: ModelInfo
    builder: Callable[..., nn.Module]


_entries: dict[str, _Entry] = {}


def register_model(
    name: str, *, description: str = "", parameters: int | None = None, input: str = ""
) -> Callable[[Builder], Builder]:
    """A decorator that gives a function or class returning a network a name that `build` knows.

    It is called with those of num_classes, in_channels and image_size that its signature names.
    """

    def register(builder: Builder) -> Builder:
        """Register the builder, and give it back as it is."""
        _check_free(name, builder)
        _entries[name] = _Entry(ModelInfo(name, description, parameters, input), builder)
        return builder

    return register


def names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_entries))


def infos() -> tuple[ModelInfo, ...]:
    """What a listing shows of each registered model, sorted by name."""
    return tuple(_entries[name].info for name in names())


def build(
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
    _check_shape(given)
    shape = {what: int(value) for what, value in given.items()}
    if not isinstance(name, str):
        raise UsageError(
            f"a model is built by its name, such as 'small', not {name!r}; one of your own needs no building"
        )
    net = _net(name, shape)
    if normalize is None or pixel_scale(net) is not None:
        return net
    mean, std = normalize
    if len(mean) != in_channels:
        raise UsageError(f"normalize has {len(mean)} channels, the images have {in_channels}: give one number each")
    return normalized(net, mean, std)


def _check_free(name: str, builder: Callable[..., nn.Module]) -> None:
    """Refuse a name that is taken, except by an earlier run of the same definition, as notebooks do."""
    if not name or ":" in name or name != name.lower():
        raise UsageError(f"model name {name!r} must be lower case, not empty and without a colon: choose another")
    old = _entries.get(name)
    if old is not None and origin(old.builder) != origin(builder):
        raise UsageError(f"model name {name!r} is already registered: choose another")


def _check_shape(shape: dict[str, int]) -> None:
    for what, value in shape.items():
        if not is_whole(value, 1):
            raise UsageError(f"{what} {value!r} is not accepted: give a whole number of at least 1")


def _net(name: str, shape: dict[str, int]) -> nn.Module:
    if is_file_spec(name):
        return _from_file(name, shape)
    package, colon, inner = name.partition(":")
    if colon and package.lower() in _packages:
        return _packages[package.lower()](inner, shape)
    entry = _entries.get(name.lower())
    if entry is None:
        raise unknown("model", name, names(), ELSEWHERE)
    return entry.builder(**_accepted(entry.builder, shape))


def _accepted(builder: Callable[..., object], shape: dict[str, int]) -> dict[str, int]:
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
    return {name: value for name, value in shape.items() if name in named}


def _from_file(spec: str, shape: dict[str, int]) -> nn.Module:
    thing = load_object(spec)
    if isinstance(thing, nn.Module):
        return thing
    if not callable(thing):
        raise _not_a_model(spec, thing)
    net = _called(spec, thing, **_accepted(thing, shape))
    if not isinstance(net, nn.Module):
        raise _not_a_model(f"{spec}(...)", net)
    return net


def _called(name: str, builder: Callable[..., Any], **options: object) -> Any:
    try:
        return builder(**options)
    except Exception as error:
        raise UsageError(
            f"{name} could not be built with {options}: {type(error).__name__}: {error}. "
            "A model is given those of num_classes, in_channels and image_size that it has parameters for; the others "
            "need defaults, or a function that calls it with them. Correct it where it is defined, or choose one that "
            "takes such images"
        ) from error


def _not_a_model(spec: str, thing: object) -> UsageError:
    return UsageError(
        f"{spec} is a {type(thing).__name__}, not a model: name an nn.Module, its class, or a function that returns one"
    )


def _from_timm(name: str, shape: dict[str, int]) -> nn.Module:
    timm = _package("timm")
    if not timm.is_model(name):
        raise _unknown_in("timm", name, timm.list_models())
    options: dict[str, Any] = {"num_classes": shape["num_classes"], "in_chans": shape["in_channels"]}
    # Transformers are built for one image size, the others refuse to be told it.
    if getattr(timm.get_pretrained_cfg(name, allow_unregistered=True), "fixed_input_size", False):
        options["img_size"] = shape["image_size"]
    net: nn.Module = _called(f"timm:{name}", timm.create_model, model_name=name, **options)
    return net


def _from_torchvision(name: str, shape: dict[str, int]) -> nn.Module:
    models = _package("torchvision").models
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown_in("torchvision", name, known)
    if shape["in_channels"] != 3:
        raise UsageError(
            f"torchvision:{name} takes 3 channels, the images have {shape['in_channels']}: "
            "use timm:NAME or one of deat's own models"
        )
    options = {"weights": None, "num_classes": shape["num_classes"]}
    net: nn.Module = _called(f"torchvision:{name}", models.get_model_builder(name), **options)
    return net


_packages: dict[str, Callable[[str, dict[str, int]], nn.Module]] = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
}


def _package(name: str) -> ModuleType:
    """The package, imported now: it is optional, slow to import, and broken beside some builds of torch."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in _packages:
            raise UsageError(
                f"{name}:NAME needs {error.name}, which is not installed: pip install {error.name}"
            ) from error
        raise UsageError(
            f"{name} is installed but cannot be imported ({type(error).__name__}: {error}): install builds "
            "of torch and torchvision that belong together, or use one of deat's own models"
        ) from error


def _unknown_in(package: str, name: str, known: Sequence[str]) -> UsageError:
    where = "timm.list_models()" if package == "timm" else "torchvision.models.list_models()"
    return UsageError(f"unknown {package} model {name!r}.{guess(name, known)} {where} lists all {len(known)}.")
