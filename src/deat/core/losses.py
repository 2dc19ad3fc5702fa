"""Per-example losses of logits.

Logits are (B, classes), labels (B,) int64, losses (B,). Half-precision logits are widened to float32 first,
where the small constants below do not underflow; float64 stays float64.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Surprise at the true class: -log p[y]."""
    return F.cross_entropy(_at_least_float32(logits), y, reduction="none")


def kl_divergence(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """Divergence of a prediction from its reference: KL(p_reference || p), differentiable in both."""
    log_reference, log_p = (
        F.log_softmax(_at_least_float32(reference_logits), 1),
        F.log_softmax(_at_least_float32(logits), 1),
    )
    return (log_reference.exp() * (log_reference - log_p)).sum(1)


def margin_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Lead of the strongest wrong class over the true one, in logits; positive means misclassified (CW)."""
    logits = _at_least_float32(logits)
    return _largest_wrong_value(logits, y) - _value_at_label(logits, y)


def boosted_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """MART's cross-entropy, which also pushes the strongest wrong class w down.

    -log p[y] - log(1.0001 - p[w] + 1e-12)
    """
    wrong = _largest_wrong_value(F.softmax(_at_least_float32(logits), 1), y)
    return cross_entropy(logits, y) - torch.log(1.0001 - wrong + 1e-12)


def mart_regulariser(natural_logits: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """MART's divergence, weighted by how unsure the network is of the clean example.

    KL(p_nat || p_adv) (1.0000001 - p_nat[y]), with log(p_adv + 1e-12) for the log of p_adv
    """
    log_natural, p_adv = F.log_softmax(_at_least_float32(natural_logits), 1), F.softmax(_at_least_float32(logits), 1)
    natural = log_natural.exp()
    divergence = (natural * (log_natural - torch.log(p_adv + 1e-12))).sum(1)
    return divergence * (1.0000001 - _value_at_label(natural, y))


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _value_at_label(values: Tensor, y: Tensor) -> Tensor:
    """Each row's value at its label, (B,)."""
    return values.gather(1, y.unsqueeze(1)).squeeze(1)


def _largest_wrong_value(values: Tensor, y: Tensor) -> Tensor:
    """Each row's largest value away from its label, (B,); of equals, one takes the gradient."""
    return values.scatter(1, y.unsqueeze(1), -torch.inf).max(1).values
