"""How sure an accuracy is: Wilson's 95 % interval."""

import math

Z = 1.959963984540054


def wilson(hits: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of `hits` in `n`; (0, 1) where nothing was counted."""
    if n == 0:
        return 0.0, 1.0
    share = hits / n
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return centre - half if hits else 0.0, centre + half if hits < n else 1.0  # rounding would miss these by a hair
