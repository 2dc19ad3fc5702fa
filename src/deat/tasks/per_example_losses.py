"""Per-example losses of logits.

Classes are on axis 1. Logits may have further axes, such as (batch, classes, H, W) for a mask of labels (batch, H, W);
each position has a loss of its own then.

Half-precision logits are converted to float32 first, where the small constants below do not underflow; float64 stays
float64.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Compute the cross-entropy: -log p[y].

    Args:
        logits: The logits, of shape (batch, classes).
        y: The labels, of shape (batch,).

    Returns:
        The losses, of shape (batch,).
    """
    return F.cross_entropy(_at_least_float32(logits), y, reduction="none")


def kl_divergence(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """Compute KL(p_reference || p), differentiable in both arguments.

    Args:
        reference_logits: The logits of the reference, of shape (batch, classes).
        logits: The logits of p, of shape (batch, classes).

    Returns:
        The divergences, of shape (batch,).
    """
    log_reference, log_p = (
        F.log_softmax(_at_least_float32(reference_logits), 1),
        F.log_softmax(_at_least_float32(logits), 1),
    )
    return (log_reference.exp() * (log_reference - log_p)).sum(1)


def margin_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Compute the margin of Carlini and Wagner: the largest wrong logit minus the true one.

    It is positive where the example is misclassified.

    Args:
        logits: The logits, of shape (batch, classes).
        y: The labels, of shape (batch,).

    Returns:
        The losses, of shape (batch,).
    """
    logits = _at_least_float32(logits)
    return _largest_wrong_value(logits, y) - _value_at_label(logits, y)


def boosted_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Compute MART's cross-entropy, which also lowers the largest wrong probability p[w].

    -log p[y] - log(1.0001 - p[w] + 1e-12)

    Args:
        logits: The logits, of shape (batch, classes).
        y: The labels, of shape (batch,).

    Returns:
        The losses, of shape (batch,).
    """
    wrong = _largest_wrong_value(F.softmax(_at_least_float32(logits), 1), y)
    return cross_entropy(logits, y) - torch.log(1.0001 - wrong + 1e-12)


def mart_regulariser(natural_logits: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Compute MART's divergence, weighted by how uncertain the network is about the clean example.

    KL(p_nat || p_adv) (1.0000001 - p_nat[y]), with log(p_adv + 1e-12) for the log of p_adv

    Args:
        natural_logits: The logits of the clean examples, of shape (batch, classes).
        logits: The logits of the perturbed examples, of shape (batch, classes).
        y: The labels, of shape (batch,).

    Returns:
        The losses, of shape (batch,).
    """
    log_natural, p_adv = F.log_softmax(_at_least_float32(natural_logits), 1), F.softmax(_at_least_float32(logits), 1)
    natural = log_natural.exp()
    divergence = (natural * (log_natural - torch.log(p_adv + 1e-12))).sum(1)
    return divergence * (1.0000001 - _value_at_label(natural, y))


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _value_at_label(values: Tensor, y: Tensor) -> Tensor:
    """The value of each row at its label."""
    return values.gather(1, y.unsqueeze(1)).squeeze(1)


def _largest_wrong_value(values: Tensor, y: Tensor) -> Tensor:
    """The largest value of each row except at its label; among equal ones, one receives the gradient."""
    return values.scatter(1, y.unsqueeze(1), -torch.inf).max(1).values
