"""Outputs that are probabilities where a task reads logits: a mistake that hides, since training and attacks still run."""

from torch import Tensor

_RESHAPING = {
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "Select",
    "Slice",
    "T",
    "Transpose",
    "Permute",
}
_RESHAPING |= {"Alias", "Clone", "ToCopy"}


def are_softmax(outputs: Tensor) -> bool:
    """Return whether no output is negative and every row of several sums to one, as after a softmax.

    Args:
        outputs: What a network has returned, (B, classes, ...).
    """
    values = outputs.detach().double()
    if values.dim() < 2 or values.shape[1] < 2:
        return False
    return bool((values >= 0).all()) and bool(((values.sum(1) - 1).abs() < 1e-4).all())


def are_sigmoid(outputs: Tensor) -> bool:
    """Return whether outputs come out of a sigmoid, by their autograd graph: logits may all be from 0 to 1 as well.

    Args:
        outputs: What a network has returned, with its graph.
    """
    node = outputs.grad_fn
    while node is not None and node.name().rstrip("0123456789").removesuffix("Backward") in _RESHAPING:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "SigmoidBackward0"
