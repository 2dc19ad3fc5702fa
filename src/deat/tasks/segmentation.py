"""Semantic segmentation: a class for each pixel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from deat.errors import DataError, UsageError
from deat.tasks.class_labels import check_class_numbers, has_integer_dtype
from deat.tasks.loss_options import LearnerOptions, check_loss_is
from deat.tasks.per_example_losses import kl_divergence, margin_loss, mart_regulariser
from deat.tasks.task import AttackLoss, ClassWeights, Task

_USUAL_VOID = 255
"""The label of pixels that do not count in most data sets."""


@dataclass(frozen=True)
class Segmentation(Task):
    """A class for each pixel, or for each position of any other grid.

    Outputs are logits (B, classes, H, W), and labels are class numbers from 0, (B, H, W), or `ignore_index`. Losses are
    means over the pixels that count. An example's score is its pixel accuracy, so that an attack turns as many pixels as
    it can. Metrics are the mean intersection over union (mIoU) of the classes that occur, and the pixel accuracy of the
    set.

    Args:
        ignore_index: The label of pixels that do not count, such as 255; None if all pixels count.
        right_share: The share of right pixels from which an image counts as right, which FAT and F+ ask for.

    Example:
        >>> deat.fit(unet, (images, masks), task=deat.tasks.Segmentation(ignore_index=255))
    """

    ignore_index: int | None = None
    right_share: float = 0.5
    name: ClassVar[str] = "segmentation"
    reads_logits: ClassVar[bool] = True
    has_places: ClassVar[bool] = True
    outputs_noun: ClassVar[str] = "classes"
    metric_names: ClassVar[tuple[str, ...]] = ("mIoU", "pixel accuracy")
    is_graded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ignore_index is not None and (
            not isinstance(self.ignore_index, int) or isinstance(self.ignore_index, bool)
        ):
            raise UsageError(f"ignore_index must be a whole number, such as 255, or None, not {self.ignore_index!r}.")
        if not 0 < self.right_share <= 1:
            raise UsageError(f"right_share must be above 0 and at most 1, such as 0.5, not {self.right_share!r}.")

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the mean cross-entropy of the pixels; see `Task.loss`."""
        return self._mean(self._cross_entropy(outputs, self._class_numbers(y)), y)

    def is_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return whether enough pixels are right; see `Task.is_right`."""
        return self.accuracy(outputs, y) >= self.right_share

    def accuracy(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the pixel accuracy of each image; see `Task.accuracy`."""
        return self._mean(self._is_pixel_right(outputs, y).float(), y)

    def divergence(self, clean_outputs: Tensor, outputs: Tensor) -> Tensor:
        """Compute the mean KL of the pixels; see `Task.divergence`. Without labels, all pixels count."""
        return kl_divergence(clean_outputs, outputs).flatten(1).mean(1)

    def margin(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the mean margin of the pixels that are still right; see `Task.margin`."""
        return self._mean(margin_loss(outputs, self._class_numbers(y)).clamp(max=0), y)

    def boosted_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the mean of MART's boosted cross-entropy; see `Task.boosted_loss`."""
        return self._mean(self._boosted_cross_entropy(outputs, self._class_numbers(y)), y)

    def weighted_divergence(self, clean_outputs: Tensor, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the mean of KL times (1 - p_y(clean)); see `Task.weighted_divergence`."""
        return self._mean(mart_regulariser(clean_outputs, outputs, self._class_numbers(y)), y)

    @property
    def attack_losses(self) -> Mapping[str, AttackLoss]:
        """The losses of any task, and "segpgd", which weighs right and wrong pixels (Gu et al., ECCV 2022)."""
        return {**super().attack_losses, "segpgd": self.segpgd_loss}

    def segpgd_loss(self, outputs: Tensor, y: Tensor, done: float) -> Tensor:
        """Compute the loss of SegPGD: pixels that are still right count more, at first alone, at last equally.

        Args:
            outputs: The network's outputs.
            y: The labels.
            done: The share of the attack's steps that are done, t / T: wrong pixels weigh t / 2T, right ones the rest.

        Returns:
            The losses, (B,).
        """
        weight = torch.where(self._is_pixel_right(outputs.detach(), y), 1 - done / 2, done / 2)
        return self._mean(weight * self._cross_entropy(outputs, self._class_numbers(y)), y)

    def for_learner(self, label_smoothing: float, class_weights: ClassWeights | None) -> Task:
        """Return the task with smoothed and weighted losses of pixels; see `Task.for_learner`."""
        check_loss_is(self, Segmentation)
        return LearnerSegmentation(self.ignore_index, self.right_share, label_smoothing, class_weights)

    def statistics(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return for each class the pixels that are right, answered and labelled."""
        counts = self._counted(y).flatten(1).double()
        answers, labels = outputs.argmax(1).flatten(1), self._class_numbers(y).flatten(1)
        zeros = counts.new_zeros(len(y), outputs.shape[1])
        right = counts * self._is_pixel_right(outputs, y).flatten(1)
        return torch.cat(
            [
                zeros.scatter_add(1, labels, right),
                zeros.scatter_add(1, answers, counts),
                zeros.scatter_add(1, labels, counts),
            ],
            1,
        )

    def summarize(self, statistics: Tensor) -> dict[str, float]:
        """Compute the mIoU of the classes that occur in labels or answers, and the pixel accuracy."""
        right, answered, labelled = statistics.sum(0).chunk(3)
        union = answered + labelled - right
        occurs = union > 0
        iou = float((right[occurs] / union[occurs]).mean()) if bool(occurs.any()) else 0.0
        return {"mIoU": iou, "pixel accuracy": float(right.sum() / labelled.sum().clamp(min=1))}

    def chance(self, labels: Tensor) -> float | None:
        """Return the mIoU of the most common class as the only answer."""
        counted = labels[self._counted(labels)]
        counts = counted.bincount() if counted.numel() else labels.new_zeros(1)
        return int(counts.max()) / max(1, int(counts.sum())) / max(1, int((counts > 0).sum()))

    def prepare_labels(self, labels: Tensor) -> Tensor:
        """Return class numbers as int64; see `Task.prepare_labels`."""
        if labels.dim() < 2 or not has_integer_dtype(labels):
            convert = ("" if has_integer_dtype(labels) else ".long()") + (".squeeze(1)" if labels.dim() == 4 else "")
            raise DataError(
                f"masks are {labels.dtype} of shape {tuple(labels.shape)}; expected whole numbers of shape (N, H, W), the "
                f"class of each pixel.{f' Pass masks{convert}.' if convert and labels.dim() > 2 else ''}"
            )
        return labels.to(torch.int64)

    def check_labels(self, labels: Tensor, num_outputs: int, dataset_index: Callable[[int], int] = int) -> None:
        """Check that pixels have class numbers below `num_outputs`, or `ignore_index`; see `Task.check_labels`."""
        hint = (
            f"Pixels that do not count are {self.ignore_index} (ignore_index)."
            if self.ignore_index is not None
            else ("If some pixels do not count, name their label: task=deat.tasks.Segmentation(ignore_index=255).")
        )
        check_class_numbers(self._class_numbers(labels), num_outputs, dataset_index, hint)

    def check_all_labels(self, labels: Tensor) -> None:
        """Check that at least one pixel counts; see `Task.check_all_labels`."""
        if not bool(self._counted(labels).any()):
            raise DataError(
                f"no pixel counts: all labels are {self.ignore_index} (ignore_index). Give the label of the pixels that do "
                "not count, or other masks."
            )

    def augment_labels(self, labels: Tensor, augment: Any, params: Any) -> Tensor:
        """Crop and flip masks; what comes from the padding does not count. See `Task.augment_labels`."""
        if not hasattr(augment, "apply_to_masks"):
            raise UsageError(
                f"masks must follow when {type(augment).__name__} moves pixels: give it apply_to_masks(masks, params, fill), "
                "as deat.Augment has it, or leave augment out."
            )
        if self.ignore_index is None and getattr(augment, "pad", 0) > 0:
            raise UsageError(
                f"augment={augment!r} pads images with pixels that have no class. Name a label for those that do not count, "
                "task=deat.tasks.Segmentation(ignore_index=255), or flip alone: deat.Augment(pad=0)."
            )
        moved: Tensor = augment.apply_to_masks(labels, params, 0 if self.ignore_index is None else self.ignore_index)
        return moved

    def describe_answers(self, outputs: Tensor, y: Tensor, classes: Sequence[str]) -> list[str]:
        """Say how many pixels are right; see `Task.describe_answers`."""
        return [f"a mask with {share:.0%} of pixels right" for share in self.accuracy(outputs, y).tolist()]

    def masks(self, outputs: Tensor) -> Tensor | None:
        """Return the predicted class of each pixel; see `Task.masks`."""
        return outputs.argmax(1)

    def count_outputs(self, labels: Tensor) -> int:
        """Return one more than the largest class number of a pixel that counts."""
        return max(int(self._class_numbers(labels).max()), 0) + 1 if labels.numel() else 1

    def describe_expected_outputs(self, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> str:
        """Describe logits for each class and pixel."""
        shape = ", ".join(map(str, (num_examples, num_outputs, *label_shape)))
        hint = ""
        if len(label_shape) > 2 and label_shape[0] == 1:
            hint = ". If this 1 is an axis of channels, remove it: masks.squeeze(1)"
        elif remedy := self.explain_too_many_classes(num_outputs):
            hint = f".{remedy.rstrip('.')}"
        return f"logits of shape ({shape}), one for each class and pixel of a mask{hint}"

    def explain_too_many_classes(self, num_outputs: int) -> str:
        """Name the setting for pixels that do not count; see `Task.explain_too_many_classes`."""
        if self.ignore_index is not None or num_outputs != _USUAL_VOID + 1:
            return ""
        return f" If pixels with the label {_USUAL_VOID} do not count: deat.tasks.Segmentation(ignore_index={_USUAL_VOID})."

    def accepts_outputs(self, outputs: Tensor, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> bool:
        """Return whether there is a logit for each class and pixel."""
        is_shape = outputs.dim() == len(label_shape) + 2 and tuple(outputs.shape[2:]) == tuple(label_shape)
        return is_shape and len(outputs) == num_examples and outputs.shape[1] >= max(2, num_outputs)

    def _class_numbers(self, y: Tensor) -> Tensor:
        """The labels with a class number where they are ignored."""
        return y if self.ignore_index is None else torch.where(y == self.ignore_index, 0, y)

    def _counted(self, y: Tensor) -> Tensor:
        return torch.ones_like(y, dtype=torch.bool) if self.ignore_index is None else y != self.ignore_index

    def _is_pixel_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.argmax(1) == y) & ~outputs.isnan().any(1)

    def _mean(self, values: Tensor, y: Tensor) -> Tensor:
        """The mean of each image over the pixels that count; 0 where none does."""
        if self.ignore_index is None:
            return values.flatten(1).mean(1)
        counted = self._counted(y).flatten(1)
        total = torch.where(counted, values.flatten(1), 0.0).sum(1)
        return total / counted.sum(1).clamp(min=1)


@dataclass(frozen=True)
class LearnerSegmentation(LearnerOptions, Segmentation):
    """Segmentation with options of training."""
