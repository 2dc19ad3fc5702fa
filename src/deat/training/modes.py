"""torch's own settings, lent to a training and given back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def lent(threads: int, *, search: bool, deterministic: bool) -> Iterator[None]:
    """Inside: so many threads, a search for the fastest convolutions, and the same bits every time, as asked for."""
    before = torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = (before[1] or search) and not deterministic
        torch.use_deterministic_algorithms(before[2] or deterministic)
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.use_deterministic_algorithms(before[2])
