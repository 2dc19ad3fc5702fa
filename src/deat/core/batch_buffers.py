"""The tensors of one batch, which stay at their address: images, delta, gradient. And how many steps a batch gets."""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Budget:
    """How many attack steps one batch gets, and how large they are.

    Args:
        k: The number of steps of delta.
        step_size: The size of a step, in the units of the images (not in eps).
        stop_threshold: When an example stops being attacked: FAT's tau (extra steps) or
            DAT's c_t (convergence threshold); other methods ignore it.
        epoch: The epoch that the batch is in, from 0; only a warm-up reads it.
    """

    k: int
    step_size: float
    stop_threshold: float = 0.0
    epoch: int = field(default=0, compare=False, repr=False)


@dataclass
class Cost:
    """The work done so far.

    Attributes:
        backprops: Backprops, the unit of the paper's tables.
        passes: Forward and backward passes of the whole network.
    """

    backprops: int = 0
    passes: int = 0


@dataclass(eq=False)
class Buffers:
    """The static device tensors of one batch, which the moves read and write in place.

    They stay at the same memory address from batch to batch, so that a move can be recorded as a CUDA graph. Images,
    delta and its gradient have at least float32 precision, whatever precision the network computes in.

    Attributes:
        x: The clean examples.
        y: The labels, of whatever shape the task has.
        delta: The perturbation.
        grad: The gradient of each example's own loss with respect to its own delta: not divided by the batch size, not
            scaled.
        initial_delta: The perturbation at the start, for DAT and for losses that need it.
        reference_logits: The outputs for the clean examples, for the TRADES attack.
        steps_left: The steps that FAT still allows each example.
        active: Which examples still move, under a stop rule.
        loss: The mean training loss of the last update.
        num_correct: How many perturbed examples the network was right about in the last update: the sum of the task's
            accuracy.
        magnitude: The dual norm of each example's gradient, at the move that the `MagnitudeProbe` names.
        update_applied: Whether the last update was made; a loss scaler skips those that overflow.
        noise: Noise in the ball, for a penalty that needs it.
        ball: The number of the ball that each example's perturbation is in, where the threat model is a union.
        measured: The values of the method's measurements, examples x measurements.
    """

    x: Tensor
    y: Tensor
    delta: Tensor
    grad: Tensor
    initial_delta: Tensor
    reference_logits: Tensor
    steps_left: Tensor
    active: Tensor
    loss: Tensor
    num_correct: Tensor
    magnitude: Tensor
    update_applied: Tensor
    noise: Tensor
    ball: Tensor
    measured: Tensor

    @classmethod
    def allocate(cls, x: Tensor, y: Tensor, num_measurements: int = 0) -> "Buffers":
        """Allocate buffers for batches of one shape.

        Args:
            x: Images of that shape, dtype, device and memory format; their values are not used.
            y: Labels.
            num_measurements: The number of measurements of the method.

        Returns:
            Buffers filled with zeros, with every example active.
        """
        batch_size, image, scalar = len(y), torch.zeros_like(x), x.new_zeros(())
        return cls(
            x=image,
            y=torch.zeros_like(y),
            delta=image.clone(),
            grad=image.clone(),
            initial_delta=image.clone(),
            reference_logits=x.new_zeros(batch_size, 0),
            steps_left=x.new_zeros(batch_size),
            active=torch.ones(batch_size, dtype=torch.bool, device=y.device),
            loss=scalar,
            num_correct=scalar.clone(),
            magnitude=x.new_zeros(batch_size),
            update_applied=torch.ones_like(scalar, dtype=torch.bool),
            noise=x.new_zeros(batch_size, 0),
            ball=torch.zeros(batch_size, dtype=torch.int64, device=y.device),
            measured=x.new_zeros(batch_size, num_measurements),
        )

    def __len__(self) -> int:
        return len(self.y)

    def tensors(self) -> list[Tensor]:
        """Return all buffers."""
        return [getattr(self, f.name) for f in fields(self)]

    def select_rows(self, index: Tensor) -> "Buffers":
        """Copy some examples' rows of every buffer.

        Args:
            index: The indices of the examples.

        Returns:
            New buffers for these examples; scalars are shared with this object.
        """
        by_name = {f.name: getattr(self, f.name) for f in fields(self)}
        return Buffers(**{name: b.index_select(0, index) if b.dim() else b for name, b in by_name.items()})
