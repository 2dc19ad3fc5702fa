"""A network's modes, lent and given back."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for every module, each one's own mode restored."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def spread(mask: Tensor, like: Tensor) -> Tensor:
    """A per-example mask in a shape that broadcasts over whole examples."""
    return mask.view(-1, *[1] * (like.dim() - 1))
