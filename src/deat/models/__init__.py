"""Networks by name, normalisation inside them, and their weights in files."""

# These are imported for the models they register.
from deat.models import densenet, preact_resnet, resnet, small_cnn, wide_resnet  # noqa: F401
from deat.models.build import build, infos, names, register_model
from deat.models.normalize import Normalize, normalized, pixel_scale
from deat.models.weights import load_weights, save_weights

__all__ = [
    "Normalize",
    "build",
    "infos",
    "load_weights",
    "names",
    "normalized",
    "pixel_scale",
    "register_model",
    "save_weights",
]
