"""Checks and advice about a radius that is legal but unusual: larger than any image, zero or tiny.

A radius that is no number, negative or outside the box, such as `--eps 8`, is refused where the threat model is made:
`threat.py`, `ThreatModel.__post_init__` and `Linf.__post_init__`.
"""

import math
from collections.abc import Sequence

from deat.errors import UsageError
from deat.threat import ThreatModel
from deat.utils.text import format_eps

USUAL_RADII = {"linf": "4/255 to 8/255, or 0.1 to 0.3 for digits", "l2": "0.5 to 3", "l1": "12 and more"}
"""Radii that are commonly defended against, by norm."""
MIN_USUAL_RADII = {"linf": 0.25 / 255, "l2": 0.1, "l1": 1.0}
"""Smaller radii are not commonly defended against, by norm."""


def max_image_distance(threat: ThreatModel, shape: Sequence[int]) -> float:
    """Return the largest distance between two images of a shape, in the norm of a threat model.

    For a union: the smallest over its balls, each in units of its own radius.
    """
    return 2 * threat.grey_radius(math.prod(shape))


def check_radius(threat: ThreatModel, shape: Sequence[int]) -> None:
    """Check that the radius is smaller than the largest distance between two images.

    Args:
        threat: The threat model.
        shape: The shape of the images, without the batch.

    Raises:
        UsageError: If the adversary could turn every image into any other, or the threat model is for examples of
            another shape.
    """
    for ball in threat.balls:
        _check_radius_of_ball(ball, shape)


def _check_radius_of_ball(threat: ThreatModel, shape: Sequence[int]) -> None:
    threat.check_shape(shape)
    widest = max_image_distance(threat, shape)
    if threat.eps and threat.eps >= widest * (1 - 1e-9):
        size = "x".join(map(str, shape))
        raise UsageError(
            f"{threat.name} eps {format_eps(threat.eps)} reaches every image of {size} from any other: their largest distance is "
            f"{widest:.4g}. Use a smaller radius; usual is {_usual_radii_text(threat)}."
        )


def get_radius_warnings(threat: ThreatModel, has_adversary: bool) -> list[str]:
    """Describe what is unusual about the radius of a training.

    Args:
        threat: The threat model.
        has_adversary: Whether the training method attacks at all.

    Returns:
        Messages for the user, empty if the radius is usual.
    """
    if all(ball.eps > 0 for ball in threat.balls):
        return get_tiny_radius_warnings(threat)
    if not has_adversary:
        return []
    return [
        "eps is 0, so the adversary cannot change anything: this is natural training at a higher price. Use method "
        f"natural, or a radius; usual for {threat.name} is {_usual_radii_text(threat)}."
    ]


def get_tiny_radius_warnings(threat: ThreatModel) -> list[str]:
    """Warn of a radius that is too small to measure robustness, such as 8/255, which is meant for linf, in L2.

    Args:
        threat: The threat model.

    Returns:
        Messages for the user, empty if the radius is 0 or large enough.
    """
    return [warning for ball in threat.balls for warning in _get_tiny_radius_warnings_of_ball(ball)]


def _get_tiny_radius_warnings_of_ball(threat: ThreatModel) -> list[str]:
    if threat.eps == 0 or not threat.is_plain or threat.eps >= MIN_USUAL_RADII.get(threat.name, 0.0):
        return []
    other = ", and looks like one for linf" if threat.name != "linf" else ""
    return [
        f"{threat.name} eps {format_eps(threat.eps)} is less than usual{other}: usual is {_usual_radii_text(threat)}. "
        "It is used as it is."
    ]


def _usual_radii_text(threat: ThreatModel) -> str:
    return USUAL_RADII.get(threat.name, "well above 0 and below the largest distance")
