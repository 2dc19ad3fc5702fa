"""l_X, the gradient magnitude that M+ watches: which gradient it is of, and how it is measured."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from deat.threat import ThreatModel


@dataclass(frozen=True)
class MagnitudeProbe:
    """Which gradient is measured as l_X, the gradient magnitude that DEAT's schedule watches.

    Args:
        move: The move whose gradient is measured: the last "joint" (J) or the last "ascend" (A) of a batch.
        over: Whether l_X is summed over the "epoch" or taken from its "last_batch".
        space: Whether the gradient is with respect to pixels or to "normalised" inputs, as in the paper's released
            code.
    """

    move: Literal["joint", "ascend"] = "joint"
    over: Literal["epoch", "last_batch"] = "epoch"
    space: Literal["pixel", "normalised"] = "pixel"

    def measure(self, grad: Tensor, threat: ThreatModel, pixel_scale: Tensor | None) -> Tensor:
        """Return each example's share of l_X: the dual norm of its loss's gradient.

        Args:
            grad: The gradient of each example's own loss with respect to its own delta.
            threat: The threat model, whose dual norm is taken.
            pixel_scale: The std by which the network normalises its input; used where `space` is "normalised".
        """
        if self.space == "normalised" and pixel_scale is not None:
            grad = grad * pixel_scale
        return threat.dual_norm(grad)
