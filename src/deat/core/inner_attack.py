"""What the adversary maximises: inner loss, start, batch-norm mode, freeze rule. All frozen data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from deat.core.buffers import Buffers
from deat.core.losses import cross_entropy, kl_divergence, margin_loss
from deat.errors import UsageError, unknown_name_error
from deat.threat import ThreatModel

InnerLoss = Callable[[Tensor, Tensor, Tensor], Tensor]

INNER_LOSSES: dict[str, InnerLoss] = {
    "ce": lambda logits, y, reference: cross_entropy(logits, y),
    "kl": lambda logits, y, reference: kl_divergence(reference, logits),
    "margin": lambda logits, y, reference: margin_loss(logits, y),
}
"""Per-example losses of (logits, labels, reference) by name; for "kl" the reference is the clean logits."""


class FreezeRule(Protocol):
    """A rule that lets single examples stop moving, kept as a mask on the device."""

    def open(self, buffers: Buffers, level: Tensor) -> None:
        """Set the round's freeze buffers for a new batch."""

    def update(self, buffers: Buffers, logits: Tensor, level: Tensor, threat: ThreatModel) -> None:
        """Narrow r.active, from the logits and the gradient at the current iterate."""


@dataclass(frozen=True)
class Friendly:
    """FAT: once an iterate is misclassified, level (tau) more steps are granted, then the example stays."""

    def open(self, buffers: Buffers, level: Tensor) -> None:
        """Every example is active and has tau steps to spend."""
        buffers.active.fill_(True)
        buffers.steps_left.copy_(level.expand_as(buffers.steps_left))

    def update(self, buffers: Buffers, logits: Tensor, level: Tensor, threat: ThreatModel) -> None:
        """Stop the fooled examples with nothing left to spend; charge the other fooled ones."""
        fooled = logits.argmax(1) != buffers.y
        buffers.active.logical_and_(~(fooled & (buffers.steps_left <= 0)))
        buffers.steps_left.sub_((fooled & buffers.active).to(buffers.steps_left.dtype))


@dataclass(frozen=True)
class Converged:
    """DAT: an example stays once its first-order stationarity (FOSC) is at most level (c_t).

    FOSC = eps * ||g||_dual - <delta - delta_0, g>, with delta_0 the random start, as in the authors' code.
    """

    def open(self, buffers: Buffers, level: Tensor) -> None:
        """Every example is active; remember the start."""
        buffers.active.fill_(True)
        buffers.start.copy_(buffers.delta)

    def update(self, buffers: Buffers, logits: Tensor, level: Tensor, threat: ThreatModel) -> None:
        """Stop the examples that have converged."""
        moved = ((buffers.delta - buffers.start) * buffers.grad).flatten(1).sum(1)
        buffers.active.logical_and_(threat.eps * threat.dual_norm(buffers.grad) - moved > level)


@dataclass(frozen=True)
class InnerAttack:
    """The adversary's declaration.

    batch_norm is the mode of the network while A runs and is always restored. noisy keeps the random start
    in epochs with k = 0, which are clean otherwise. persistent carries delta from batch to batch (true
    FREE). compact shrinks the batch to the examples that still move instead of masking them.
    """

    loss: str = "ce"
    start: str = "uniform"
    batch_norm: Literal["train", "eval"] = "train"
    freeze: FreezeRule | None = None
    noisy: bool = False
    persistent: bool = False
    compact: bool = False

    def __post_init__(self) -> None:
        if self.loss not in INNER_LOSSES:
            raise unknown_name_error("inner loss", self.loss, INNER_LOSSES)
        if self.compact and (self.batch_norm != "eval" or self.freeze is None):
            raise UsageError(
                "compact needs a method with a freeze rule that crafts in eval mode (fat-K, f+trades, f+mart): "
                "in train mode, batch norm would see a different batch."
            )

    @property
    def needs_reference(self) -> bool:
        """Whether crafting compares with the clean logits."""
        return self.loss == "kl"

    @property
    def has_tiny_start(self) -> bool:
        """Whether it starts so near the clean image that half precision hardly tells their answers apart."""
        return self.needs_reference and self.start == "jitter" and not self.persistent

    @property
    def inner(self) -> InnerLoss:
        """The per-example loss that A ascends."""
        return INNER_LOSSES[self.loss]

    def active_indices(self, buffers: Buffers) -> Tensor:
        """The indices of the examples that still move; reads the host, so only `compact` asks."""
        return torch.nonzero(buffers.active).squeeze(1)


FIRST_GRADIENT_SCALE = 16.0
"""So that noise of 0.001 is 0.016: several steps of bf16 between 1/2 and 1, and still near. A power of two is exact."""


class DeltaScale:
    """How often the start's distance the next gradient is taken at: FAR times for the first one, then once.

    It is a device value, so that a recorded ascent follows it. Where it is not `wanted`, nothing is computed.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.times = torch.ones((), device=device) if enabled else None

    def extend(self) -> None:
        """A batch begins: look far."""
        if self.times is not None:
            self.times.fill_(FIRST_GRADIENT_SCALE)

    def restore(self) -> None:
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
