"""Blocks of images: how they are read from the data, and how every attack is evaluated on each of them."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from deat.data import BatchSource, as_source
from deat.data.image_label_checks import UNIT_BOX, check_images
from deat.errors import DataError
from deat.evaluation.attack_registry import describe_attack
from deat.evaluation.attack_verifier import AttackLike, AttackVerifier, BlockResult, get_stages
from deat.evaluation.attacks import is_natural
from deat.evaluation.evaluation_request import EvaluationRequest
from deat.evaluation.progress import EvaluationProgress, ProgressCallback
from deat.evaluation.results import AttackResult
from deat.evaluation.resume_log import ResumeLog, stage_result_name
from deat.utils.fingerprints import fingerprint
from deat.utils.seeding import derive_seed

LabeledImages = tuple[Tensor, Tensor]
"""Images and labels."""
NumberedBlock = tuple[Tensor, Tensor, int]
"""Images, labels and the block's number."""


class BlockEvaluator:
    """Evaluates all attacks on all blocks, using the results that the resume log already has.

    Args:
        request: The evaluation's arguments.
        verifier: Attacks a block and classifies the verified examples.
        resume_log: Earlier results, to which new ones are added.
    """

    def __init__(self, request: EvaluationRequest, verifier: AttackVerifier, resume_log: ResumeLog) -> None:
        self.request, self.verifier, self.resume_log = request, verifier, resume_log

    def evaluate_all(
        self,
        blocks: Iterator[LabeledImages],
        num_images: int,
        on_progress: ProgressCallback,
        progress: EvaluationProgress,
    ) -> tuple[list[AttackResult], list[int]]:
        """Evaluate every attack on every block; several processes take the blocks in turn.

        Args:
            blocks: All blocks, in order.
            num_images: The number of images in them.
            on_progress: Called at the start, and after each result.
            progress: What it is called with.

        Returns:
            One result for each attack, and the class of each image; empty for a task without classes.
        """
        results: dict[str, list[BlockResult]] = {attack.name: [] for attack in self.request.attacks}
        labels: list[int] = []
        num_read = 0
        on_progress(progress)
        own_block, distributed = None, self.request.distributed
        for number, (x, y) in enumerate(blocks):
            num_read += len(y)
            labels += self.request.task.class_labels(y)
            turn = number % distributed.size
            own_block = (x, y, number) if turn == distributed.rank else own_block
            if turn < distributed.size - 1 and num_read < num_images:
                continue
            for name, result in self._evaluate_turn(own_block, on_progress, progress):
                results[name].append(result)
            own_block = None
        return [AttackResult.from_blocks(name, by_block) for name, by_block in results.items()], labels

    def _evaluate_turn(
        self, own_block: NumberedBlock | None, on_progress: ProgressCallback, progress: EvaluationProgress
    ) -> Iterator[tuple[str, BlockResult]]:
        """Yield attack after attack the results of every process on its own block, in the order of the blocks."""
        images_fingerprint = fingerprint(*own_block[:2]) if own_block and self.request.resume_log else ""
        survivors_so_far: list[bool] | None = None
        for attack in self.request.attacks:
            survivors = None if is_natural(attack) else survivors_so_far
            results_by_stage = list[list[BlockResult]]()
            for stage in get_stages(attack):
                entry = None
                if own_block:
                    entry = self._find_or_evaluate(attack, stage, own_block, images_fingerprint, survivors, progress)
                # A stage attacks what is left; where answers have grades, every stage attacks every image.
                survivors = entry["result"]["correct"] if entry and not self.request.task.is_graded else None
                entries = [other for other in self.request.distributed.all_gather_json(entry) if other]
                results_by_stage.append([self._store_result(stage, other, progress) for other in entries])
                on_progress(progress)
            if self.request.cascade and not is_natural(attack):  # natural always has an accuracy of its own
                survivors_so_far = survivors
            for stages in zip(*results_by_stage, strict=True):
                yield attack.name, BlockResult.from_stages(stages)

    def _find_or_evaluate(
        self,
        attack: AttackLike,
        stage: AttackLike,
        own_block: NumberedBlock,
        images_fingerprint: str,
        survivors: list[bool] | None,
        progress: EvaluationProgress,
    ) -> dict[str, Any]:
        """The arguments of `ResumeLog.add` for a stage of an attack on a block, as JSON values."""
        x, y, number = own_block
        key = f"{stage_result_name(attack, stage)} {fingerprint(describe_attack(attack, self.request.threat))[:8]}"
        result = self.resume_log.find(number, key, images_fingerprint)
        if result is None:
            progress.start_attack(stage, len(y))
            only_stage = stage if len(get_stages(attack)) > 1 else None
            result = self.verifier.attack_block(attack, x, y, number, survivors, only_stage)
        return {"block": number, "attack": key, "images": images_fingerprint, "result": result.as_json()}

    def _store_result(self, stage: AttackLike, entry: dict[str, Any], progress: EvaluationProgress) -> BlockResult:
        """Add an entry's result to the resume log and to the progress."""
        result = BlockResult.from_json(entry["result"])
        is_new = self.resume_log.add(**{**entry, "result": result})
        progress.finish_attack(stage, len(result.correct), is_new=is_new)
        return result


def iter_blocks(source: BatchSource, block_size: int, num_images: int) -> Iterator[LabeledImages]:
    """Read the first images of a source in blocks of a fixed size, whatever the size of its batches.

    Args:
        source: The data.
        block_size: The number of images in a block; the last one may be smaller.
        num_images: How many images to read.

    Yields:
        Images and labels.

    Raises:
        DataError: A batch has images outside [0, 1].
    """
    buffered: list[LabeledImages] = []
    num_buffered = num_yielded = 0
    for x, y in iter_batches(source):
        buffered.append((x, y))
        num_buffered += len(y)
        while num_buffered >= block_size or (num_buffered and num_yielded + num_buffered >= num_images):
            x, y = _concatenate(buffered)
            size = min(block_size, num_images - num_yielded)
            yield x[:size], y[:size]
            num_yielded += size
            buffered, num_buffered = [(x[size:], y[size:])], num_buffered - size
            if num_yielded == num_images:
                return
    if num_buffered:
        yield _concatenate(buffered)


def iter_batches(source: BatchSource) -> Iterator[LabeledImages]:
    """Read the batches of a source and check the images of each, because a loader may scale batches differently.

    Raises:
        DataError: A batch has images outside [0, 1]; it is named by its number.
    """
    num_read = 0
    for number, (x, y) in enumerate(source.epoch(0), 1):
        try:
            check_images(x, partial(add, num_read), getattr(source, "box", UNIT_BOX))
        except DataError as error:
            raise DataError(f"batch {number} of the data: {error}") from None
        num_read += len(y)
        yield x, y


def peek_images(blocks: Iterator[LabeledImages], count: int) -> tuple[LabeledImages, Iterator[LabeledImages]]:
    """Look at the first images of an iterator of blocks.

    Args:
        blocks: The blocks.
        count: How many images to look at.

    Returns:
        The first images with their labels, fewer if there are no more, and an iterator of all blocks.
    """
    first_blocks: list[LabeledImages] = []
    while sum(len(y) for _, y in first_blocks) < count and (block := next(blocks, None)) is not None:
        first_blocks.append(block)
    x, y = _concatenate(first_blocks)
    return (x[:count], y[:count]), chain(first_blocks, blocks)


def sample_images(source: BatchSource, num_images: int, count: int, device: torch.device) -> LabeledImages:
    """Read a sample from all over the first images of a source, because a data set may be sorted by class.

    Args:
        source: The data.
        num_images: How many images, from the first one, to sample from.
        count: How many images to read; all of them if there are no more.
        device: Where to put them.

    Returns:
        Images and labels, the same ones every time.
    """
    return load_images_at(source, sample_indices(num_images, count), device)


def sample_indices(num_images: int, count: int) -> Tensor:
    """Choose one index in each of `count` equal stretches of `range(num_images)`, the same ones every time.

    The place in each stretch is random: a fixed stride could choose a single class where classes alternate.

    Args:
        num_images: The number of images.
        count: The number of indices; all indices if there are no more images.

    Returns:
        Rising indices, int64.
    """
    if num_images <= count:
        return torch.arange(num_images)
    edges = torch.arange(count + 1) * num_images // count
    offsets = torch.rand(count, generator=torch.Generator().manual_seed(derive_seed(0, "places")), dtype=torch.float64)
    return edges[:-1] + (offsets * edges.diff()).long()


def load_images_at(source: BatchSource, indices: Tensor, device: torch.device) -> LabeledImages:
    """Read the images at some indices, and no others if the data can be indexed.

    Args:
        source: The data.
        indices: Rising indices.
        device: Where to put the images.

    Returns:
        Images and labels.

    Raises:
        DataError: An image is outside [0, 1].
    """
    subset = _subset_if_indexable(source, indices)
    if subset is None:
        return _pick_from_batches(source, indices)
    box = getattr(source, "box", UNIT_BOX)
    part = as_source(
        subset,
        batch_size=len(indices),
        device=device,
        num_classes=source.num_classes,
        shuffle=False,
        task=getattr(source, "task", None),
        box=box,
    )
    x, y = _concatenate(list(part.epoch(0)))
    for index, image in zip(indices.tolist(), x, strict=True):
        check_images(image[None], partial(add, index), box)
    return x, y


def _subset_if_indexable(source: BatchSource, indices: Tensor) -> Any:
    """The data at these indices, or None for a loader, which cannot be indexed."""
    images = getattr(source, "images", None)
    if images is not None:
        return images.subset(indices)
    dataset = getattr(getattr(source, "loader", None), "dataset", None)
    return Subset(dataset.dataset, indices.tolist()) if getattr(source, "can_seek", False) and dataset else None


def _pick_from_batches(source: BatchSource, indices: Tensor) -> LabeledImages:
    """The images at these indices of a loader, which is read up to the last of them."""
    wanted, num_read = indices.tolist(), 0
    picked: list[LabeledImages] = []
    for x, y in iter_batches(source):
        rows = [index - num_read for index in wanted if num_read <= index < num_read + len(y)]
        picked.append((x[rows], y[rows]))
        num_read += len(y)
        if num_read > wanted[-1]:
            break
    return _concatenate(picked)


def _concatenate(parts: list[LabeledImages]) -> LabeledImages:
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)
