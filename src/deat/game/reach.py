"""How far from its start an adversary takes its first gradient, where rounding would hide the start itself.

TRADES starts within 0.001 of the clean image, where the divergence is zero: its gradient there is a difference of two
almost equal answers, which half precision rounds away. Near its zero a divergence's gradient grows in proportion to
the distance, so it is taken FAR times further out and divided by as much.
"""

import torch
from torch import Tensor

FAR = 16.0
"""So that noise of 0.001 is 0.016: several steps of bf16 between 1/2 and 1, and still near. A power of two is exact."""


class Reach:
    """How often the start's distance the next gradient is taken at: FAR times for the first one, then once.

    It is a device value, so that a recorded ascent follows it. Where it is not `wanted`, nothing is computed.
    """

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self.times = torch.ones((), device=device) if wanted else None

    def extend(self) -> None:
        """A batch begins: look far."""
        if self.times is not None:
            self.times.fill_(FAR)

    def retract(self) -> None:
        """Delta has moved: the next ascent looks where it stands."""
        if self.times is not None:
            self.times.fill_(1.0)

    def point(self, delta: Tensor) -> Tensor:
        """Where to take the gradient, as a leaf."""
        return (delta if self.times is None else delta * self.times).detach().requires_grad_()

    def undo(self, grad: Tensor) -> None:
        """Make a gradient that was taken there, in its place, the one at delta."""
        if self.times is not None:
            grad.div_(self.times)
