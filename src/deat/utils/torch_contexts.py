"""Context managers for the modes of a model and the threads of torch, and small helpers for models and tensors."""

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SMALL_MODEL_PARAMETERS = 500_000
"""A model with fewer parameters is not faster on a CPU with a second thread or in half precision."""


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set all modules of a model to eval mode, and restore the mode of each at the end of the with statement."""
    former_modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in former_modes:
            module.training = training


@contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Switch off the gradients of a model's parameters, and restore them at the end of the with statement."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trainable:
            p.requires_grad_(False)
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)


def choose_threads(model: nn.Module) -> int:
    """Return how many CPU threads to use: one for a small model, which a second thread makes slower."""
    return 1 if sum(p.numel() for p in model.parameters()) < SMALL_MODEL_PARAMETERS else torch.get_num_threads()


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Set the number of CPU threads of torch, and restore it at the end of the with statement."""
    former_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(former_threads)


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one inside, since recordings and our own kernels are launched on the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Leave the caller's `torch.autocast` contexts, and enter them again at the end of the with statement.

    A nested `torch.autocast(enabled=False)` would not do: torch drops its copies of cast weights only at the end of the
    outermost context, so a training inside that casts weights itself would keep those of its first step.

    Args:
        device_type: "cpu" or "cuda".
    """
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    enabled = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def broadcast_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Reshape a mask to broadcast over whole examples.

    Args:
        mask: One value per example, (B,).
        like: A batch of examples, (B, ...).

    Returns:
        The mask with as many dimensions as the batch.
    """
    return mask.view(-1, *[1] * (like.dim() - 1))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@cache
def cpu_model() -> str:
    """Return the maker, family and model of the CPU, such as "GenuineIntel 6 143"; "unknown" where no file has them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or "unknown"
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return " ".join(values[name] for name in ("vendor_id", "cpu family", "model") if name in values) or "unknown"
