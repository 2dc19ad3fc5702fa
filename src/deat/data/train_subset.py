"""A part of the training images, in which the classes keep their shares."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deat.data.image_set import ImageSet
from deat.data.streaming import AnyImageSet
from deat.errors import UsageError
from deat.tasks import CLASSIFICATION, Task
from deat.utils.numbers import is_int_at_least
from deat.utils.seeding import derive_seed


def select_train_indices(class_labels: Sequence[int], num_examples: int, n_train: int) -> Tensor:
    """Choose examples at random, the same ones every time, so that each class keeps its share.

    Those of a smaller number are among those of a larger one, and no class is missing if `n_train` allows it.

    Args:
        class_labels: The class of each example; empty if it is not known, or for another task. Then all examples have
            the same chance.
        num_examples: The number of examples.
        n_train: How many to choose.

    Returns:
        The sorted indices.

    Raises:
        UsageError: If `n_train` is no whole number from 1 to `num_examples`.
    """
    if not (is_int_at_least(n_train, 1) and n_train <= num_examples):
        raise UsageError(
            f"n_train must be a whole number from 1 to {num_examples:,}, the number of training images, not {n_train!r}."
        )
    order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(derive_seed(0, "n_train")))
    classes = torch.as_tensor(class_labels)[order] if len(class_labels) else torch.zeros_like(order)
    position_in_class = torch.empty(num_examples, dtype=torch.float64)
    for label in torch.unique(classes):
        members = classes == label
        count = int(members.sum())
        position_in_class[members] = torch.arange(count, dtype=torch.float64) / count
    return order[position_in_class.argsort(stable=True)[: int(n_train)]].sort().values


def take_train_images(images: AnyImageSet, n_train: int) -> AnyImageSet:
    """Return a part of an image set; see `select_train_indices`."""
    task: Task = CLASSIFICATION
    if isinstance(images, ImageSet):
        images.check_lengths()
        task = images.task
    return images.subset(select_train_indices(task.class_labels(images.labels), len(images), n_train))
