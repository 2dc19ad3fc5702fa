"""Image sets that are on the device as a whole: batches are selected, cropped and flipped there."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from deat.data.augment import Augment, AugmentParams
from deat.data.batch_order import epoch_order, num_batches
from deat.data.image_label_checks import UNIT_BOX, Box, check_dataset_size
from deat.data.image_set import ImageSet, as_loss_labels, to_unit_range
from deat.engine.kernels.crop import crop, is_supported
from deat.errors import DataError
from deat.utils.distributed import BatchShard
from deat.utils.seeding import derive_seed


class InMemorySource:
    """Batches of an ImageSet that is copied to the device once, in its own type (uint8 stays uint8).

    Order and augmentation are drawn on the host once per epoch, for each image by its index. They depend neither on
    the device nor on the batch size, and no value is read back from the device. Set `shard` to get only this process's
    rows of each batch.

    Args:
        images: The images.
        batch_size: Images per batch.
        device: Device of the images and batches.
        seed: The run's seed.
        augment: Random crops and flips, None for none.
        shuffle: Whether to draw a random order for each epoch, as training does.
        box: The range of the images' values.

    Raises:
        DataError: If the images do not fit in the device's memory.
    """

    can_seek = True

    def __init__(
        self,
        images: ImageSet,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        augment: Augment | None = None,
        shuffle: bool = True,
        box: Box = UNIT_BOX,
    ) -> None:
        self.images, self.batch_size, self.seed, self.box = images, batch_size, seed, box
        self.augment, self.shuffle, self.shard = augment, shuffle, BatchShard()
        self.device = torch.device(device)
        self.num_examples, self.num_classes, self.shape = len(images), images.num_classes, images.shape
        labels = as_loss_labels(images.task.prepare_labels(images.labels))
        self._x, self._y = self._to_device(images.images), self._to_device(labels)

    @cached_property
    def digest(self) -> str:
        """A hash that identifies the image set."""
        return self.images.digest()

    def __len__(self) -> int:
        return num_batches(self.num_examples, self.batch_size)

    def check(self) -> None:
        """Raise DataError if the images cannot be trained on or are fewer than a training batch."""
        self.images.check(self.box)
        check_dataset_size(self.num_examples, self.batch_size, self.shuffle)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: The epoch's number.
            first: The number of the batch to start at.

        Yields:
            Images, float32 in [0, 1] or in another box, and labels, int64 for classification, on the device.
        """
        order = epoch_order(self.num_examples, self.seed, epoch, shuffle=self.shuffle).to(self.device)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "augment", epoch))
        params = self.augment.draw(self.num_examples, generator).to(self.device) if self.augment else None
        for step in range(first, len(self)):
            index = order[step * self.batch_size : (step + 1) * self.batch_size]
            index = index[self.shard.rows(len(index))]
            yield self._images_at(index, params), self._labels_at(index, params)

    def batch_indices(self, epoch: int, step: int) -> Tensor:
        """Return the indices of the images in a batch, over all processes.

        Args:
            epoch: The epoch, from 0.
            step: The batch, from 0.
        """
        order = epoch_order(self.num_examples, self.seed, epoch, shuffle=self.shuffle)
        return order[step * self.batch_size : (step + 1) * self.batch_size]

    def _images_at(self, index: Tensor, params: AugmentParams | None) -> Tensor:
        if self.augment and params and self._can_use_crop_kernel:
            return crop(self._x, index, params.top, params.left, params.flip, self.augment.pad)
        x = self._x.index_select(0, index)
        if self.augment and params:
            x = self.augment.apply(x, params.select(index))
        return to_unit_range(x)

    def _labels_at(self, index: Tensor, params: AugmentParams | None) -> Tensor:
        y = self._y.index_select(0, index)
        if self.augment and params and self.images.task.has_places:
            return self.images.task.augment_labels(y, self.augment, params.select(index))
        return y

    @cached_property
    def _can_use_crop_kernel(self) -> bool:
        # A subclass of Augment may crop in another way.
        return type(self.augment) is Augment and is_supported(self._x)

    def _to_device(self, tensor: Tensor) -> Tensor:
        try:
            return tensor.to(self.device)
        except torch.OutOfMemoryError:
            size = tensor.numel() * tensor.element_size() / 2**30
            raise DataError(
                f"a set of {size:.1f} GiB does not fit on {self.device}. Use smaller images (size), or pass a Dataset, "
                "which is loaded batch by batch."
            ) from None
