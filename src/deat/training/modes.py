"""torch's own settings, lent to a training and given back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from deat.modes import choose_threads, threaded
from deat.training.settings import Settings


def threads_of(settings: Settings, model: nn.Module) -> int:
    """The threads that a network computes with: those asked for, or as many as do one of its size good."""
    return settings.threads or choose_threads(model)


@contextmanager
def torch_modes(threads: int, *, search: bool, deterministic: bool) -> Iterator[None]:
    """Inside: so many threads, a search for the fastest convolutions, and the same bits every time, as asked for."""
    before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    try:
        torch.backends.cudnn.benchmark = (before[0] or search) and not deterministic
        torch.use_deterministic_algorithms(before[1] or deterministic)
        with threaded(threads):
            yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.use_deterministic_algorithms(before[1])
