"""The attack inside training: its loss, start, batch-norm mode and stop rule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from deat.core.batch_buffers import Buffers
from deat.core.example_stopping import StopRule
from deat.core.remembered_starts import RememberStarts
from deat.errors import UsageError, unknown_name_error
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel
from deat.utils.numbers import check_number

InnerLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A loss for each example, (B,), as a function of (outputs, labels, reference outputs)."""

INNER_LOSSES: dict[str, tuple[str, Callable[[Task], InnerLoss]]] = {
    "ce": ("loss", lambda task: lambda outputs, y, reference: task.loss(outputs, y)),
    "kl": ("divergence", lambda task: lambda outputs, y, reference: task.divergence(reference, outputs)),
    "margin": ("margin", lambda task: lambda outputs, y, reference: task.margin(outputs, y)),
}
"""By name: the function of the task that the loss needs, and the loss; only "kl" uses the reference outputs."""


@dataclass(frozen=True)
class InnerAttack:
    """The attack inside training. The number and size of its steps come from the `Budget`.

    Args:
        loss: The loss to maximise: "ce" (the task's loss: cross-entropy, or the squared error of a regression), "kl" (the
            task's divergence from the clean answer), "margin", or a function of your own. It is called with the outputs,
            the labels and the outputs for the clean examples, and returns a loss for each example, (B,). The third
            argument is empty, unless the function has an attribute `needs_reference = True`. Records have its name.
        start: Where delta starts: "zero", "uniform" or "jitter".
        batch_norm: The mode of the network during attack steps; its own mode is restored afterwards.
        freeze: The rule that stops single examples from moving, if any.
        random_start_at_k0: Whether epochs with k = 0 use the random start; without it they are clean.
        persistent: Whether delta is carried from batch to batch, as in the original FREE.
        carries_outside_box: Whether a carried delta is limited by the ball alone, and the image that the network sees is
            clamped to [0, 1] instead, as in the paper's ImageNet code. Without `persistent` it has no effect.
        compact: Whether attack steps run on the active examples only, instead of masking the stopped ones. This reads
            the device at every step.
        leaves_ball: Whether delta is kept in the box alone, and may leave the ball, as in N-FGSM.
        start_radius: The radius of the random start in units of eps; above 1 it needs `leaves_ball`. The starts "zero" and
            "jitter" have no radius.
        remember: How each image's start follows from earlier epochs, as in FGSM-PGI; None for a random start each time.
            It is for methods that craft or replay.

    Raises:
        UsageError: If the loss is unknown or a lambda, `compact` is set without a stop rule or in train mode, or a delta
            that leaves the ball is carried, or a larger start does not leave it, or starts are carried and remembered.

    Example:
        >>> attack = deat.InnerAttack(loss="kl", start="jitter", batch_norm="eval")
    """

    loss: str | InnerLoss = "ce"
    start: str = "uniform"
    batch_norm: Literal["train", "eval"] = "train"
    freeze: StopRule | None = None
    random_start_at_k0: bool = False
    persistent: bool = False
    carries_outside_box: bool = False
    compact: bool = False
    leaves_ball: bool = False
    start_radius: float = 1.0
    remember: RememberStarts | None = None

    def __post_init__(self) -> None:
        if getattr(self.loss, "__name__", "") == "<lambda>":
            raise UsageError("the inner loss is a lambda, whose name in records would say nothing. Define it with def.")
        if not callable(self.loss) and self.loss not in INNER_LOSSES:
            hint = "Or give a function (outputs, labels, reference outputs) -> losses."
            raise unknown_name_error("inner loss", self.loss, INNER_LOSSES, hint)
        if self.compact and (self.batch_norm != "eval" or self.freeze is None):
            raise UsageError(
                "compact needs a stop rule and an attack in eval mode (fat-K, f+trades, f+mart): "
                "in train mode, batch norm would see a different batch."
            )
        check_number("start_radius", self.start_radius, lambda v: 0 < v <= 100, "above 0 and at most 100, such as 2")
        if self.start_radius > 1 and not self.leaves_ball:
            raise UsageError(
                f"start_radius {self.start_radius:g} is outside the ball, and delta is projected onto it. Set leaves_ball=True, "
                "or a radius of at most 1."
            )
        if self.leaves_ball and self.persistent:
            raise UsageError(
                "persistent carries delta from batch to batch, and a delta that leaves the ball (n-fgsm) would grow with every "
                "batch. Leave persistent out, or use a method such as fgsm or free-4."
            )
        if self.remember is not None and self.persistent:
            raise UsageError(
                "persistent starts from the delta of the batch before, and this attack (fgsm-pgi) from one that it remembers "
                "for each image. Leave persistent out."
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the logits of the clean images."""
        return bool(getattr(self.loss, "needs_reference", self.loss == "kl"))

    @property
    def has_tiny_start(self) -> bool:
        """Whether delta starts so small that half precision hardly changes the logits from the clean ones."""
        return self.needs_reference and self.start == "jitter" and not self.persistent

    def loss_fn(self, task: Task = CLASSIFICATION) -> InnerLoss:
        """Return the per-example loss to maximise, on a task.

        Args:
            task: What outputs and labels mean.
        """
        return INNER_LOSSES[self.loss][1](task) if isinstance(self.loss, str) else self.loss

    @property
    def requires(self) -> tuple[str, ...]:
        """The functions of a task that the loss needs."""
        return (INNER_LOSSES[self.loss][0],) if isinstance(self.loss, str) else ()

    def check_threat(self, threat: ThreatModel) -> None:
        """Raise UsageError for a threat model that the attack is not defined for.

        Args:
            threat: The threat model.

        Raises:
            UsageError: The attack is not defined for it.
        """
        if self.leaves_ball and len(threat.balls) > 1:
            raise UsageError(
                "n-fgsm does not project delta, and training against several threats projects it from one ball onto another. "
                "Use fgsm, or a single threat."
            )
        self._start_threat(threat)

    def _start_threat(self, threat: ThreatModel) -> ThreatModel:
        """The threat model with the radius of the start."""
        if self.start_radius == 1:
            return threat
        try:
            return replace(threat, eps=self.start_radius * threat.eps)
        except UsageError as error:
            raise UsageError(
                f"n-fgsm starts from noise of {self.start_radius:g} eps, which is too large at eps {threat.eps:g}: {error}"
            ) from None

    def initial_delta(
        self,
        threat: ThreatModel,
        x: Tensor,
        generator: torch.Generator | None,
        *,
        full_batch_size: int | None = None,
        rows: slice = slice(None),
    ) -> Tensor:
        """Return random starts; see `ThreatModel.initial_delta`.

        Args:
            threat: The threat model.
            x: The images, (B, ...).
            generator: The source of random starts.
            full_batch_size: See `ThreatModel.initial_delta`.
            rows: See `ThreatModel.initial_delta`.
        """
        return self._start_threat(threat).initial_delta(
            x, self.start, generator, full_batch_size=full_batch_size, rows=rows
        )

    @property
    def projects_to_threat(self) -> bool:
        """Whether delta is projected into ball and box, as usual."""
        return not (self.clamps_images or self.leaves_ball)

    @property
    def clamps_images(self) -> bool:
        """Whether the pixel range is kept by clamping what the network sees, and not by projecting delta."""
        return self.persistent and self.carries_outside_box

    def visible_delta(self, threat: ThreatModel, x: Tensor, delta: Tensor) -> Tensor:
        """Return the perturbation that the network sees; pixels that are clamped have no gradient.

        Args:
            threat: The threat model.
            x: The images.
            delta: Their perturbations.
        """
        return threat.clip_to_box(x + delta) - x if self.clamps_images else delta

    def project(self, threat: ThreatModel, x: Tensor, delta: Tensor) -> Tensor:
        """Project delta into the ball (not if `leaves_ball`) and into the box (not if the image is clamped instead).

        Args:
            threat: The threat model.
            x: The images.
            delta: Their perturbations.

        Returns:
            The projected perturbations.
        """
        if self.leaves_ball:
            return threat.project_to_box(x, delta)
        return threat.project_to_ball(delta) if self.clamps_images else threat.project(x, delta)

    def active_indices(self, buffers: Buffers) -> Tensor:
        """Return the indices of the active examples. Reads the device; used by `compact` only.

        Args:
            buffers: The batch's buffers.
        """
        return torch.nonzero(buffers.active).squeeze(1)


FIRST_GRADIENT_SCALE = 16.0
"""A start of 0.001 becomes 0.016, several times the spacing of bf16 between 1/2 and 1. A power of two scales exactly."""


class DeltaScale:
    """Enlarges delta for the first gradient after a tiny start, which half precision would lose.

    The factor is a device value, so that recorded moves read the current one.

    Args:
        device: The device of the game.
        enabled: Whether to scale; if not, nothing is computed.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.factor = torch.ones((), device=device) if enabled else None

    def magnify(self) -> None:
        """Begin a batch: enlarge delta for the next gradient."""
        if self.factor is not None:
            self.factor.fill_(FIRST_GRADIENT_SCALE)

    def restore(self) -> None:
        """Take the following gradients at delta itself."""
        if self.factor is not None:
            self.factor.fill_(1.0)

    def scaled_delta(self, delta: Tensor) -> Tensor:
        """Return the point at which to take the gradient, as a leaf tensor."""
        return (delta if self.factor is None else delta * self.factor).detach().requires_grad_()

    def unscale_gradient(self, grad: Tensor) -> None:
        """Divide a gradient that was taken at the scaled delta by the factor, in place."""
        if self.factor is not None:
            grad.div_(self.factor)
