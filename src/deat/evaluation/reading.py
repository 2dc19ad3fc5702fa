"""What an evaluation reads of its data: blocks in order, and the few images that checks look at."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from deat.data import Source, as_source
from deat.data.content import check_images
from deat.errors import DataError
from deat.evaluation.rulings import Images
from deat.seeding import derive


def look_ahead(cut: Iterator[Images], count: int) -> tuple[Images, Iterator[Images]]:
    """The first images over all blocks, and the blocks, those that were read for it among them."""
    held: list[Images] = []
    while sum(len(y) for _, y in held) < count and (block := next(cut, None)) is not None:
        held.append(block)
    x, y = (torch.cat(parts)[:count] for parts in zip(*held, strict=True))
    return (x, y), chain(held, cut)


def spread_out(source: Source, images: int, count: int, device: torch.device) -> Images:
    """So many of the images that are judged, from all over them, since a set may be sorted."""
    return images_at(source, places(images, count), device)


def images_at(source: Source, index: Tensor, device: torch.device) -> Images:
    """The images at these rising places; no others are read where they can be asked for by number."""
    part = _part(source, index)
    if part is None:
        return _picked(source, index)
    few = as_source(part, batch_size=len(index), device=device, num_classes=source.num_classes, shuffle=False)
    x, y = (torch.cat(parts) for parts in zip(*few.epoch(0), strict=True))
    for place, image in zip(index.tolist(), x, strict=True):
        check_images(image[None], partial(add, place))
    return x, y


def places(images: int, count: int) -> Tensor:
    """Where to look in so many images: one place in each of `count` equal stretches, the same every time.

    Where in a stretch is drawn: a fixed stride could meet one class alone, where classes take turns.
    """
    if images <= count:
        return torch.arange(images)
    edges = torch.arange(count + 1) * images // count
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(derive(0, "places")), dtype=torch.float64)
    return edges[:-1] + (drawn * edges.diff()).long()


def _part(source: Source, index: Tensor) -> Any:
    """The data at these places, if it can be asked for by number; a loader cannot."""
    images = getattr(source, "images", None)
    if images is not None:
        return images.subset(index)
    items = getattr(getattr(source, "loader", None), "dataset", None)
    return Subset(items.dataset, index.tolist()) if getattr(source, "begins_anywhere", False) and items else None


def _picked(source: Source, index: Tensor) -> Images:
    """The images at these places of a loader, which is read as far as the last of them."""
    wanted, seen = index.tolist(), 0
    held: list[Images] = []
    for x, y in batches(source):
        here = [place - seen for place in wanted if seen <= place < seen + len(y)]
        held.append((x[here], y[here]))
        seen += len(y)
        if seen > wanted[-1]:
            break
    found, labels = (torch.cat(parts) for parts in zip(*held, strict=True))
    return found, labels


def batches(source: Source) -> Iterator[Images]:
    """A source's batches, each checked: a loader's later ones may be scaled otherwise than its first."""
    seen = 0
    for number, (x, y) in enumerate(source.epoch(0), 1):
        try:
            check_images(x, partial(add, seen))
        except DataError as error:
            raise DataError(f"batch {number} of the data: {error}") from None
        seen += len(y)
        yield x, y


def blocks(source: Source, size: int, images: int) -> Iterator[Images]:
    """The first images of a source in blocks of a fixed size, whatever its own batches are."""
    held: list[Images] = []
    count = given = 0
    for x, y in batches(source):
        held.append((x, y))
        count += len(y)
        while count >= size or (count and given + count >= images):
            x, y = (torch.cat(parts) for parts in zip(*held, strict=True))
            take = min(size, images - given)
            yield x[:take], y[:take]
            given += take
            held, count = [(x[take:], y[take:])], count - take
            if given == images:
                return
    if count:
        x, y = (torch.cat(parts) for parts in zip(*held, strict=True))
        yield x, y
