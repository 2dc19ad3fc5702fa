"""Networks by name, normalisation inside them, and their weights in files."""

# These modules register their models.
from deat.models import densenet, imagenet_resnet, preact_resnet, small_networks, wide_resnet  # noqa: F401
from deat.models.logits_wrapper import LogitsModel
from deat.models.model_registry import build_model, list_model_infos, list_models, register_model
from deat.models.normalize import Normalize, add_normalization, get_input_std
from deat.models.pretrained import fetch_pretrained
from deat.models.weights import load_weights, save_weights

__all__ = [
    "LogitsModel",
    "Normalize",
    "add_normalization",
    "build_model",
    "fetch_pretrained",
    "get_input_std",
    "list_model_infos",
    "list_models",
    "load_weights",
    "register_model",
    "save_weights",
]
