"""The two sides of the CPU benchmark, set up alike: a plain loop and deat's trainer, for the same method."""

import platform
from typing import Any

import torch
from plain import Images, Script
from shared import Record, cpu_name
from torch import nn

import deat
from deat.data import Augment, ImageSet
from deat.engine.precision import has_native_cpu_bf16

CORES = 2
BATCH = 64
NETWORK = "preact_resnet18"
ALPHA = {"pgd-7": 0.25, "free-8": 1.0}  # in units of eps, as the library has them


def plain_script(
    net: nn.Module,
    data: ImageSet,
    name: str,
    eps: float = 8 / 255,
    lr: float = 0.1,
    epochs: int = 1,
    pad: int = 0,
    **options: Any,
) -> Script:
    """The plain loop's state for a method."""
    images = Images(data.images, data.labels, pad)
    return Script(net, images, BATCH, epochs, lr, eps, ALPHA[name] * eps, **options)


def deat_trainer(
    net: nn.Module,
    data: ImageSet,
    name: str,
    eps: float = 8 / 255,
    lr: float = 0.1,
    epochs: int = 1,
    augment: Augment | None = None,
    lr_schedule: str = "flat",
    **options: Any,
) -> deat.Trainer:
    """The library's trainer, as everybody gets it."""
    settings = deat.TrainConfig(
        epochs=epochs, batch_size=BATCH, lr=lr, lr_schedule=lr_schedule, threads=torch.get_num_threads(), **options
    )
    return deat.make_trainer(net, data, method=name, threat=deat.Linf(eps), config=settings, augment=augment)


def machine() -> Record:
    """What the numbers depend on besides the code."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "bf16_in_hardware": has_native_cpu_bf16(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deat": deat.__version__,
        "network": NETWORK,
        "batch_size": BATCH,
    }
