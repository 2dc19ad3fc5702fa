"""The CUDA build of torchvision beside a CPU build of torch, which lightning, transformers and timm import."""

import importlib.util
import sys

import torch

OPERATORS = ("nms(Tensor dets, Tensor scores, float iou) -> Tensor", "qnms(Tensor d, Tensor s, float i) -> Tensor")
"""The operators whose schemas that build misses where its library cannot be loaded."""

_KEPT: list[torch.library.Library] = []


def make_torchvision_importable() -> None:
    """Declare what torchvision misses in this process, if it is installed and cannot be imported."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in OPERATORS:
            library.define(schema)
        _KEPT.append(library)
