"""How sure an accuracy is, and a difference between two: Wilson's and Newcombe's 95 % intervals."""

import math

Z_95 = 1.959963984540054


def wilson_interval(hits: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of `hits` in `n`; (0, 1) where nothing was counted."""
    return wilson_interval_of_share(hits / n, n) if n else (0.0, 1.0)


def wilson_interval_of_share(share: float, n: int) -> tuple[float, float]:
    """The same of a share that need not be of whole images, such as a mean over seeds."""
    centre = (share + Z_95 * Z_95 / (2 * n)) / (1 + Z_95 * Z_95 / n)
    half = Z_95 / (1 + Z_95 * Z_95 / n) * math.sqrt(share * (1 - share) / n + Z_95 * Z_95 / (4 * n * n))
    # Rounding would miss 0 and 1 by a hair.
    return centre - half if share > 0 else 0.0, centre + half if share < 1 else 1.0


def newcombe_interval(one: float, other: float, n: int) -> tuple[float, float]:
    """The 95 % interval of one share less another, each of n images; of the same images it is narrower, if anything."""
    (one_low, one_high), (other_low, other_high) = wilson_interval_of_share(one, n), wilson_interval_of_share(other, n)
    below, above = math.hypot(one - one_low, other_high - other), math.hypot(one_high - one, other - other_low)
    return one - other - below, one - other + above
