"""Loss, accuracy and l_X of one epoch, summed on the device, and the single read that turns them into a record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from deat.core.batch_buffers import Buffers
from deat.errors import NumericalError
from deat.utils.distributed import SINGLE_PROCESS, Distributed


@dataclass(frozen=True)
class EpochRecord:
    """The results of one epoch, as plain numbers.

    Attributes:
        epoch: The epoch, counted from 0.
        loss: The mean training loss.
        accuracy: The share of perturbed training images that were classified correctly.
        magnitude: The gradient magnitude, l_X in the paper.
        examples: The number of images counted.
        skipped: The number of updates that a loss scaler skipped.
        num_image_steps: The number of image steps of delta under a stop rule.
        measured: The means of the method's measurements, by name.
    """

    epoch: int
    loss: float
    accuracy: float
    magnitude: float
    examples: int
    skipped: int = 0
    num_image_steps: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)


class Meter:
    """Sums loss, accuracy and l_X of an epoch on the device, in float64.

    Args:
        device: Where to sum.
        over: Whether l_X is summed over the epoch or taken from its last batch.
        distributed: The processes whose sums `read` adds.
        non_finite_hint: What the error message suggests where a loss or gradient is not finite.
        measurements: The names of the method's measurements.

    Attributes:
        sums: Loss, correct predictions, l_X, images, and the measurements.
        counts: Batches, the first batch with a non-finite value (from 1; 0 if none), skipped updates, and image steps
            under a stop rule.
    """

    def __init__(
        self,
        device: torch.device | str,
        over: Literal["epoch", "last_batch"] = "epoch",
        distributed: Distributed = SINGLE_PROCESS,
        non_finite_hint: str = "Lower the learning rate.",
        measurements: Sequence[str] = (),
    ) -> None:
        self.distributed, self.non_finite_hint, self.measurements = distributed, non_finite_hint, tuple(measurements)
        factors = [1, 1, float(over == "epoch"), 1, *[1] * len(measurements)]
        self._carry_over_factors = torch.tensor(factors, dtype=torch.float64, device=device)
        self.sums = torch.zeros_like(self._carry_over_factors)  # loss, num_correct, magnitude, examples, measurements
        self.counts = torch.zeros(4, dtype=torch.float64, device=device)  # batches, first_bad, skipped, active

    def reset(self) -> None:
        """Begin an epoch: set all sums to zero."""
        self.sums.zero_()
        self.counts.zero_()

    def add(self, buffers: Buffers, has_own_images: bool = True) -> None:
        """Add one batch; nothing but its number is added if its last update was skipped.

        Args:
            buffers: The batch's buffers, after its last update.
            has_own_images: Whether this process has images of the batch; if not, its placeholders add zeros.
        """
        ones = torch.full_like(buffers.loss, len(buffers))
        row = torch.stack((buffers.loss * ones, buffers.num_correct, buffers.magnitude.sum(), ones)).double()
        is_finite = torch.isfinite(row).all()
        if self.measurements:
            row = torch.cat((row, buffers.measured.double().sum(0)))
        row = row if has_own_images else row * 0
        self.sums.copy_(torch.where(buffers.update_applied, self.sums * self._carry_over_factors + row, self.sums))
        batches, first_bad = self.counts[0], self.counts[1]
        batches.add_(1)
        bad = buffers.update_applied & ~is_finite & (first_bad == 0)
        first_bad.copy_(torch.where(bad, batches, first_bad))

    def count_skipped(self, skipped: Tensor) -> None:
        """Count an update if the loss scaler skipped it.

        Args:
            skipped: Whether it did, as a device value.
        """
        self.counts[2].add_(skipped)

    def count_active(self, active: Tensor) -> None:
        """Count the images that one attack step moved.

        Args:
            active: Which images moved.
        """
        self.counts[3].add_(active.sum())

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sums of an unfinished epoch, for a checkpoint; reads the device."""
        return {"sums": self.sums.tolist(), "counts": self.counts.tolist()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restore the sums of an unfinished epoch, in place.

        Args:
            state: What `state_dict` returned.
        """
        self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        self.counts.copy_(torch.tensor(state["counts"], dtype=torch.float64))

    def read(self, epoch: int) -> EpochRecord:
        """Read the sums from the device, and add those of all processes.

        Args:
            epoch: The epoch, counted from 0.

        Returns:
            The record of the epoch.

        Raises:
            NumericalError: If a loss or gradient was not finite; the message names the first such batch. With several
                processes it is raised in all of them.
        """
        rows = self.distributed.all_gather_json(torch.cat((self.sums, self.counts)).tolist())
        loss, num_correct, magnitude, examples, *measured, _, _, _, active = map(sum, zip(*rows, strict=True))
        batches, _, skipped, _ = rows[0][-4:]  # the same in all processes
        first_bad = min((row[-3] for row in rows if row[-3]), default=0)
        if first_bad:
            raise NumericalError(
                f"loss or gradient stopped being finite in epoch {epoch + 1}, batch {int(first_bad)} of {int(batches)}. "
                + self.non_finite_hint,
                batch=int(first_bad),
            )
        divisor = max(1.0, examples)
        return EpochRecord(
            epoch,
            loss / divisor,
            num_correct / divisor,
            magnitude,
            int(examples),
            int(skipped),
            int(active),
            dict(zip(self.measurements, (value / divisor for value in measured), strict=True)),
        )
