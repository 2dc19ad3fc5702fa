"""Sums kept on the device over one epoch, and the one host read that turns them into a record."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deat.core.buffers import Buffers
from deat.errors import NumericalError
from deat.utils.distributed import SINGLE_PROCESS, Distributed


@dataclass(frozen=True)
class EpochRecord:
    """What one epoch showed: plain floats, read from the device once. Magnitude is the paper's l_X."""

    epoch: int
    loss: float
    accuracy: float
    magnitude: float
    examples: int
    skipped: int = 0
    active: int = 0


class Meter:
    """Loss, hits, l_X and examples of an epoch, with skipped steps and ascended examples, in float64.

    `over` says whether l_X is summed over the epoch or is the last batch's. first_bad is the 1-based batch
    at which loss or gradient first stopped being finite, 0 while all is well. `remedy` is what may help then.
    """

    def __init__(
        self,
        device: torch.device | str,
        over: Literal["epoch", "last_batch"] = "epoch",
        distributed: Distributed = SINGLE_PROCESS,
        non_finite_hint: str = "Lower the learning rate.",
    ) -> None:
        self.distributed, self.non_finite_hint = distributed, non_finite_hint
        self._keep = torch.tensor([1, 1, float(over == "epoch"), 1], dtype=torch.float64, device=device)
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, hits, magnitude, examples
        self.counts = torch.zeros(4, dtype=torch.float64, device=device)  # rounds, first_bad, skipped, active

    def reset(self) -> None:
        """Begin an epoch."""
        self.sums.zero_()
        self.counts.zero_()

    def add(self, buffers: Buffers, has_own_images: bool = True) -> None:
        """Count one finished round; one whose last step was skipped adds nothing, nor does a stand-in."""
        ones = torch.full_like(buffers.loss, len(buffers))
        row = torch.stack((buffers.loss * ones, buffers.num_correct, buffers.magnitude.sum(), ones)).double()
        row = row if has_own_images else row * 0
        self.sums.copy_(torch.where(buffers.valid, self.sums * self._keep + row, self.sums))
        rounds, first_bad = self.counts[0], self.counts[1]
        rounds.add_(1)
        bad = buffers.valid & ~torch.isfinite(row).all() & (first_bad == 0)
        first_bad.copy_(torch.where(bad, rounds, first_bad))

    def skip(self, skipped: Tensor) -> None:
        """Count an optimiser step that the gradient scaler skipped."""
        self.counts[2].add_(skipped)

    def count_active(self, active: Tensor) -> None:
        """Count the examples that one ascent moved."""
        self.counts[3].add_(active.sum())

    def state_dict(self) -> dict[str, list[float]]:
        """The sums of an epoch that is under way; reads the device."""
        return {"sums": self.sums.tolist(), "counts": self.counts.tolist()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on summing from there, in the same memory."""
        self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        self.counts.copy_(torch.tensor(state["counts"], dtype=torch.float64))

    def read(self, epoch: int) -> EpochRecord:
        """The epoch's record: the one host read, and where several processes share the epoch their one meeting.

        Non-finite sums raise, naming the first bad batch, in every process alike.
        """
        rows = self.distributed.all_gather(torch.cat((self.sums, self.counts)).tolist())
        loss, hits, magnitude, examples, _, _, _, active = map(sum, zip(*rows, strict=True))
        rounds, skipped = rows[0][4], rows[0][6]  # which are everybody's
        first_bad = min((row[5] for row in rows if row[5]), default=0)
        if first_bad:
            raise NumericalError(
                f"loss or gradient stopped being finite in epoch {epoch + 1}, batch {int(first_bad)} of {int(rounds)}. "
                + self.non_finite_hint,
                batch=int(first_bad),
            )
        n = max(1.0, examples)
        return EpochRecord(epoch, loss / n, hits / n, magnitude, int(examples), int(skipped), int(active))
