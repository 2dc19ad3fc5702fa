"""Mixup, CutMix and random erasing, on whole batches before the adversary sees them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deat.data.batch_source import BatchSource
from deat.errors import UsageError
from deat.tasks import Task
from deat.training.config import TrainConfig
from deat.utils.seeding import derive_seed

MIN_ERASED_SHARE, MAX_ERASED_SHARE, MAX_ASPECT = 0.02, 1 / 3, 3.3
"""Random erasing's rectangles: their share of the image's area, and the longest side relative to the other."""


@dataclass(frozen=True)
class BatchMixing:
    """Mixes and erases images of a batch. Draws depend on the seed, the epoch and the batch alone.

    Each image is mixed with the one at the same distance from the batch's other end, with one share for the batch, from
    Beta(a, a). If both mixup and CutMix are on, each batch takes one of them, by a fair coin. Of several processes, each
    mixes its own images.

    Args:
        mixup: a of mixup (Zhang et al. 2018), which blends two images; 0 for none.
        cutmix: a of CutMix (Yun et al. 2019), which pastes a rectangle of one into the other; 0 for none.
        random_erasing: The share of images in which a random rectangle is set to the middle of the box (Zhong et al.
            2020); 0 for none.
        num_classes: The number of classes.
        seed: The seed of the run.
        fill: What erased pixels are set to.
    """

    mixup: float
    cutmix: float
    random_erasing: float
    num_classes: int
    seed: int
    fill: float = 0.5

    @classmethod
    def of(
        cls, config: TrainConfig, task: Task, train: BatchSource, box: tuple[float, float] | None
    ) -> "BatchMixing | None":
        """Make the mixing of a configuration; None where it has none.

        Raises:
            UsageError: The inputs are no images, or labels of the task cannot be mixed.
        """
        if not (config.mixup or config.cutmix or config.random_erasing):
            return None
        if (config.cutmix or config.random_erasing) and len(train.shape) != 3:
            raise UsageError(
                f"cutmix and random_erasing are for images, and inputs have shape {tuple(train.shape)}. Leave them out; "
                "mixup takes any inputs."
            )
        if config.mixup or config.cutmix:
            task.with_mixed_labels()
        fill = sum(box) / 2 if box else 0.0
        return cls(config.mixup, config.cutmix, config.random_erasing, train.num_classes, config.seed, fill)

    @property
    def mixes_labels(self) -> bool:
        """Whether labels become shares of classes."""
        return bool(self.mixup or self.cutmix)

    def apply(self, x: Tensor, y: Tensor, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Mix and erase one batch.

        Args:
            x: The inputs.
            y: The labels: class numbers, if labels are mixed.
            epoch: The epoch, from 0.
            step: The batch in the epoch, from 0.

        Returns:
            New inputs, and the labels: with mixup or CutMix the shares of each class, (B, classes).
        """
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "mixing", epoch, step))
        if self.random_erasing:
            x = self._erase(x, generator)
        return self._mix(x, y, generator) if self.mixes_labels else (x, y)

    def _mix(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        coin = bool(torch.rand((), generator=generator) < 0.5)
        cuts = bool(self.cutmix) and (coin or not self.mixup)
        share = _draw_beta(self.cutmix if cuts else self.mixup, generator)
        other = x.flip(0)
        if cuts:
            height, width = x.shape[-2:]
            side = (1 - share) ** 0.5
            rows, cols = (_draw_cut(length, side, generator) for length in (height, width))
            x = x.clone()
            x[..., rows, cols] = other[..., rows, cols]
            share = 1 - (rows.stop - rows.start) * (cols.stop - cols.start) / (height * width)
        else:
            x = torch.lerp(other, x, share)
        shares = F.one_hot(y, self.num_classes).to(torch.promote_types(x.dtype, torch.float32))
        return x, torch.lerp(shares.flip(0), shares, share)

    def _erase(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Set a rectangle of some images to the fill value, without reading the device."""
        n, (height, width) = len(x), x.shape[-2:]
        chosen, area, log_aspect, top, left = torch.rand(5, n, generator=generator, dtype=torch.float64)
        area = (MIN_ERASED_SHARE + (MAX_ERASED_SHARE - MIN_ERASED_SHARE) * area) * height * width
        ratio = MAX_ASPECT ** (2 * log_aspect - 1)
        rows = (area * ratio).sqrt().round().clamp(1, height)
        cols = (area / ratio).sqrt().round().clamp(1, width)
        first_row, first_col = (top * (height - rows + 1)).floor(), (left * (width - cols + 1)).floor()
        is_row = _is_within(torch.arange(height), first_row, rows)
        is_col = _is_within(torch.arange(width), first_col, cols)
        mask = is_row[:, None, :, None] & is_col[:, None, None, :] & (chosen < self.random_erasing)[:, None, None, None]
        return torch.where(mask.to(x.device), torch.as_tensor(self.fill, dtype=x.dtype, device=x.device), x)


def _is_within(positions: Tensor, first: Tensor, count: Tensor) -> Tensor:
    return (positions >= first[:, None]) & (positions < (first + count)[:, None])


def _draw_beta(a: float, generator: torch.Generator) -> float:
    """Draw from Beta(a, a), as X / (X + Y) of two gamma variables."""
    x, y = torch._standard_gamma(torch.full((2,), a, dtype=torch.float64), generator=generator).tolist()
    return float(x / (x + y)) if x + y > 0 else 0.5


def _draw_cut(length: int, share: float, generator: torch.Generator) -> slice:
    """Draw a part of an axis around a uniform centre, cut off at the ends."""
    centre, half = int(torch.randint(length, (), generator=generator)), int(length * share) // 2
    return slice(max(0, centre - half), min(length, centre + half))
