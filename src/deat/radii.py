"""Radii that mean nothing on the images at hand: refused, or remarked on before any work."""

import math
from collections.abc import Sequence

from deat.errors import UsageError
from deat.threat import ThreatModel

USUAL = {"linf": "4/255 to 8/255, or 0.1 to 0.3 for digits", "l2": "0.5 to 3", "l1": "12 and more"}
"""Radii that are commonly defended against, by norm."""
LEAST = {"linf": 0.25 / 255, "l2": 0.1, "l1": 1.0}
"""Radii below which nothing is defended against, by norm."""


def widest_of(threat: ThreatModel, shape: Sequence[int]) -> float:
    """How far apart images of this shape are at most, in a threat model's norm."""
    return 2 * threat.grey_radius(math.prod(shape))


def check_room(threat: ThreatModel, shape: Sequence[int]) -> None:
    """Refuse a radius that reaches from any image of this shape to any other."""
    widest = widest_of(threat, shape)
    if threat.eps and threat.eps >= widest * (1 - 1e-9):
        size = "x".join(map(str, shape))
        raise UsageError(
            f"{threat.name} eps {threat.eps:g} reaches every image of {size} from every other, which are at most "
            f"{widest:.4g} apart: nothing could be told apart. Use a smaller one; usual is {_usual(threat)}."
        )


def odd_radius(threat: ThreatModel, attacks: bool) -> list[str]:
    """What is strange about a radius: that it leaves an adversary no room, or looks like another norm's."""
    if threat.eps == 0:
        line = "eps is 0, so that the adversary can change nothing: this is natural training at a higher price"
        return [f"{line}. Use method natural, or a radius; usual for {threat.name} is {_usual(threat)}."] * attacks
    return tiny_radius(threat)


def tiny_radius(threat: ThreatModel) -> list[str]:
    """That a radius is too small to say anything of robustness, as one of linf is in another norm."""
    if threat.eps == 0 or threat.eps >= LEAST.get(threat.name, 0.0):
        return []
    other = ", and looks like one for linf" if threat.name != "linf" else ""
    return [
        f"{threat.name} eps {threat.eps:.3g} is less than anybody defends against{other}: usual is {_usual(threat)}. "
        "It is taken all the same."
    ]


def _usual(threat: ThreatModel) -> str:
    return USUAL.get(threat.name, "far from either end")
