"""When single examples stop being attacked: once fooled for tau steps (FAT, F+), or once delta has converged (DAT)."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deat.core.batch_buffers import Buffers
from deat.threat import ThreatModel


class StopRule(Protocol):
    """A rule that stops single examples from moving, by a mask on the device (`Buffers.active`)."""

    def reset(self, buffers: Buffers, stop_threshold: Tensor) -> None:
        """Begin a batch: make every example active.

        Args:
            buffers: The batch's buffers, with delta at its start.
            stop_threshold: The budget's `stop_threshold`, as a device scalar.
        """

    def update(self, buffers: Buffers, is_right: Tensor, stop_threshold: Tensor, threat: ThreatModel) -> None:
        """Stop examples, by clearing their `buffers.active`.

        Args:
            buffers: The batch's buffers, with delta and its gradient before the step.
            is_right: Whether the network is right about each example at x + delta, by the task.
            stop_threshold: The budget's `stop_threshold`, as a device scalar.
            threat: The threat model.
        """


@dataclass(frozen=True)
class StopWhenFooled:
    """The rule of FAT: an example that the network is wrong about may make tau more steps, then it is stopped.

    The budget's `stop_threshold` is tau.
    """

    def reset(self, buffers: Buffers, stop_threshold: Tensor) -> None:
        """Make every example active, with tau steps left."""
        buffers.active.fill_(True)
        buffers.steps_left.copy_(stop_threshold.expand_as(buffers.steps_left))

    def update(self, buffers: Buffers, is_right: Tensor, stop_threshold: Tensor, threat: ThreatModel) -> None:
        """Stop wrong examples without steps left; charge one step to the other wrong ones."""
        fooled = ~is_right
        buffers.active.logical_and_(~(fooled & (buffers.steps_left <= 0)))
        buffers.steps_left.sub_((fooled & buffers.active).to(buffers.steps_left.dtype))


@dataclass(frozen=True)
class StopWhenConverged:
    """The rule of DAT: an example is stopped once its first-order stationarity (FOSC) is at most c_t.

    FOSC = eps * ||g||_dual - <delta - delta_0, g>, with delta_0 the random start, as in the authors' code. The budget's
    `stop_threshold` is c_t.
    """

    def reset(self, buffers: Buffers, stop_threshold: Tensor) -> None:
        """Make every example active, and copy the start."""
        buffers.active.fill_(True)
        buffers.initial_delta.copy_(buffers.delta)

    def update(self, buffers: Buffers, is_right: Tensor, stop_threshold: Tensor, threat: ThreatModel) -> None:
        """Stop the examples that have converged."""
        gain = ((buffers.delta - buffers.initial_delta) * buffers.grad).flatten(1).sum(1)
        buffers.active.logical_and_(threat.eps * threat.dual_norm(buffers.grad) - gain > stop_threshold)
