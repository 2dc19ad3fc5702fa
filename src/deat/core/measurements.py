"""Measurements: further numbers of an epoch, from passes that are made anyway.

A method declares them, and a schedule reads their means in `EpochRecord.measured`. They cost no pass: each is a few
operations on the buffers of a batch, right after an update of the weights, on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from deat.core.batch_buffers import Buffers
from deat.threat import ThreatModel


@dataclass(frozen=True)
class Measurement:
    """A number of each example, whose mean over the epoch is in the epoch's record.

    Args:
        name: Its name in `EpochRecord.measured`.
        compute: A function of the batch's buffers and its threat model that returns a value for each example, (B,), or
            their mean, (). It must not read the device, so that it can be recorded as a CUDA graph.
        update: The update of a batch after which it is computed, the "first" or the "last" one. Methods that craft have
            one update.

    Example:
        >>> deat.Measurement("clipped", lambda buffers, threat: (buffers.delta.abs() >= threat.eps).flatten(1).float().mean(1))
    """

    name: str
    compute: Callable[[Buffers, ThreatModel], Tensor]
    update: Literal["first", "last"] = "last"

    def write(self, buffers: Buffers, threat: ThreatModel, column: int) -> None:
        """Compute it, as a part of a move.

        Args:
            buffers: The batch's buffers.
            threat: The threat model of the batch.
            column: The column of `buffers.measured` to write to.
        """
        buffers.measured[:, column] = self.compute(buffers, threat).detach()


def loss(buffers: Buffers, threat: ThreatModel) -> Tensor:
    """Return the mean training loss of the update."""
    return buffers.loss


def accuracy(buffers: Buffers, threat: ThreatModel) -> Tensor:
    """Return the share of examples that the network was right about in the update."""
    return buffers.num_correct / len(buffers)


def reached_rise(buffers: Buffers, threat: ThreatModel) -> Tensor:
    """Return how far delta raises the loss to first order: its inner product with the gradient at its end.

    Examples that a stop rule has stopped count as 0, here and in `largest_rise`.
    """
    return _of_active(buffers, buffers.grad * buffers.delta)


def largest_rise(buffers: Buffers, threat: ThreatModel) -> Tensor:
    """Return how far the steepest perturbation of ball and box would raise the loss along the same gradient."""
    return _of_active(buffers, buffers.grad * threat.steepest_delta(buffers.x, buffers.grad))


def _of_active(buffers: Buffers, products: Tensor) -> Tensor:
    return products.flatten(1).sum(1) * buffers.active


FIRST_LOSS = Measurement("first_loss", loss, "first")
"""The loss of a batch's first update: for methods that replay, at the start of delta."""
FIRST_ACCURACY = Measurement("first_accuracy", accuracy, "first")
"""The accuracy of a batch's first update: for methods that replay, at the start of delta, and so almost the clean one."""
REACHED_RISE = Measurement("reached_rise", reached_rise)
"""What delta reaches of the first-order rise of the loss, in the last update."""
LARGEST_RISE = Measurement("largest_rise", largest_rise)
"""The largest first-order rise of the loss, in the last update. 1 - reached / largest is 0 where delta is stationary."""
