"""A set that lives whole on the device: batches by index, crops and flips made there."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from deat.data.augment import Augment, AugmentParams
from deat.data.checks import check_dataset_size, to_unit_range
from deat.data.image_set import ImageSet
from deat.engine.kernels.crop import crop, is_supported
from deat.errors import DataError
from deat.utils.distributed import BatchShard
from deat.utils.seeding import derive_seed


def epoch_order(num_examples: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
    """The order of examples in an epoch, a pure function of (seed, epoch) on every device; their own, unshuffled."""
    if not shuffle:
        return torch.arange(num_examples)
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(num_examples, generator=generator)


def num_batches(num_examples: int, batch_size: int) -> int:
    """Batches in an epoch, a short last one counted."""
    return -(-num_examples // batch_size)


def num_images_in_batch(num_examples: int, batch_size: int, step: int) -> int:
    """Images in an epoch's batch, over all processes that share it."""
    return min(batch_size, num_examples - step * batch_size)


class InMemorySource:
    """Batches of an ImageSet kept on the device in its own type, uint8 where it is bytes.

    Order and augmentation are drawn on the host once an epoch, for each image by its index, so they
    depend neither on the device nor on the batch size; within an epoch nothing is read back.
    `share` makes every batch this process's rows of it.
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
    ) -> None:
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.augment, self.shuffle, self.share = augment, shuffle, BatchShard()
        self.device = torch.device(device)
        self.num_examples, self.num_classes, self.shape = len(images), images.num_classes, images.shape
        self._x, self._y = self._to_device(images.images), self._to_device(images.labels.to(torch.int64))

    @cached_property
    def digest(self) -> str:
        """A hash by which the set is known again."""
        return self.images.digest()

    def __len__(self) -> int:
        return num_batches(self.num_examples, self.batch_size)

    def check(self) -> None:
        """Refuses content that cannot be trained on, and a set smaller than a training batch."""
        self.images.check()
        check_dataset_size(self.num_examples, self.batch_size, self.shuffle)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The epoch's batches from the first-th on: x float32 in [0, 1] and y int64, on the device."""
        order = epoch_order(self.num_examples, self.seed, epoch, shuffle=self.shuffle).to(self.device)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "augment", epoch))
        draws = self.augment.draw(self.num_examples, generator).to(self.device) if self.augment else None
        for step in range(first, len(self)):
            index = order[step * self.batch_size : (step + 1) * self.batch_size]
            index = index[self.share.rows(len(index))]
            yield self._images_at(index, draws), self._y.index_select(0, index)

    def _images_at(self, index: Tensor, params: AugmentParams | None) -> Tensor:
        """These images as they are trained on; a GPU takes one launch for them where ours can be built."""
        if self.augment and params and self._can_use_crop_kernel:
            return crop(self._x, index, params.top, params.left, params.flip, self.augment.pad)
        x = self._x.index_select(0, index)
        if self.augment and params:
            x = self.augment.apply(x, params.select(index))
        return to_unit_range(x)

    @cached_property
    def _can_use_crop_kernel(self) -> bool:
        """Whether our own kernel crops; what inherits from Augment may do so in a way of its own."""
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
