"""A network's modes and threads, lent and given back, and where it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

SMALL_MODEL_PARAMETERS = 500_000
"""Parameters below which a network gains nothing on a CPU from a second thread, or from half precision."""


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for every module, each one's own mode restored."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Weights that get no gradient; those that did before do so again afterwards."""
    learning = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in learning:
            p.requires_grad_(False)
        yield
    finally:
        for p in learning:
            p.requires_grad_(True)


def choose_threads(model: nn.Module) -> int:
    """How many CPU threads to use: one for small networks, where a second costs more than it gives."""
    return 1 if sum(p.numel() for p in model.parameters()) < SMALL_MODEL_PARAMETERS else torch.get_num_threads()


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Inside, so many threads compute."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


def broadcast_mask(mask: Tensor, like: Tensor) -> Tensor:
    """A per-example mask in a shape that broadcasts over whole examples."""
    return mask.view(-1, *[1] * (like.dim() - 1))


def device_of(model: nn.Module) -> torch.device:
    """Where a network's parameters are; one without any is on the CPU."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
