"""95 % intervals: of an accuracy (Wilson), a difference (Newcombe), any metric (bootstrap); McNemar's paired test."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deat.utils.seeding import derive_seed

Z_95 = 1.959963984540054
BOOTSTRAP_SAMPLES = 1000


def wilson_interval(hits: int, n: int) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share.

    Args:
        hits: How many of the images count as successes.
        n: The number of images.

    Returns:
        Lower and upper bound; (0, 1) for no images.

    Example:
        >>> wilson_interval(5, 10)
        (0.2365..., 0.7634...)
    """
    return wilson_interval_of_share(hits / n, n) if n else (0.0, 1.0)


def wilson_interval_of_share(share: float, n: int) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share that need not be of whole images, such as a mean over seeds.

    Args:
        share: The share, in [0, 1].
        n: The number of images, at least 1.

    Returns:
        Lower and upper bound.
    """
    centre = (share + Z_95 * Z_95 / (2 * n)) / (1 + Z_95 * Z_95 / n)
    half = Z_95 / (1 + Z_95 * Z_95 / n) * math.sqrt(share * (1 - share) / n + Z_95 * Z_95 / (4 * n * n))
    # Rounding would miss 0 and 1 slightly.
    return centre - half if share > 0 else 0.0, centre + half if share < 1 else 1.0


def newcombe_interval(one: float, other: float, n: int) -> tuple[float, float]:
    """Compute Newcombe's 95 % interval of the difference `one - other` of two shares.

    It is for independent samples; for two shares of the same images it is too wide, if anything.

    Args:
        one: A share of n images.
        other: Another share of n images.
        n: The number of images, at least 1.

    Returns:
        Lower and upper bound of the difference.
    """
    (one_low, one_high), (other_low, other_high) = wilson_interval_of_share(one, n), wilson_interval_of_share(other, n)
    below, above = math.hypot(one - one_low, other_high - other), math.hypot(one_high - one, other - other_low)
    return one - other - below, one - other + above


def bootstrap_intervals(
    summarize: Callable[[Tensor], dict[str, float]], rows: Tensor
) -> dict[str, tuple[float, float]]:
    """Compute the 95 % percentile bootstrap interval of metrics of a set, by drawing its examples again.

    Args:
        summarize: Computes the metrics of some rows.
        rows: One row for each example, (N, S).

    Returns:
        Lower and upper bound of each metric. The draws are the same every time.
    """
    generator = torch.Generator().manual_seed(derive_seed(0, "bootstrap"))
    draws = [
        summarize(rows[torch.randint(len(rows), (len(rows),), generator=generator)]) for _ in range(BOOTSTRAP_SAMPLES)
    ]
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    quantiles = {
        name: torch.tensor([draw[name] for draw in draws], dtype=torch.float64).quantile(bounds) for name in draws[0]
    }
    return {name: (float(low), float(high)) for name, (low, high) in quantiles.items()}


def one_sided_p_value(gained: int, lost: int) -> float:
    """Return the exact one-sided p-value of a sign test, computed in integers.

    Args:
        gained: Images that only the first of two models classifies correctly.
        lost: Images that only the second one classifies correctly.

    Returns:
        The probability of at most `lost` tails in `gained + lost` throws of a fair coin.
    """
    n = gained + lost
    term = total = 1
    for i in range(lost):
        term = term * (n - i) // (i + 1)
        total += term
    return float(total / 2**n)


def mcnemar_p_value(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test of two models on the same images.

    Args:
        gained: Images that only the first model classifies correctly.
        lost: Images that only the second one classifies correctly.

    Returns:
        The p-value, at most 1.

    Example:
        >>> mcnemar_p_value(0, 6)
        0.03125
    """
    return min(1.0, 2 * one_sided_p_value(max(gained, lost), min(gained, lost)))
