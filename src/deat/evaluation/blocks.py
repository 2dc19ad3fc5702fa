"""What an evaluation reads of its data: blocks in order, and the few images that checks look at."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from deat.data import Source, as_source
from deat.data.checks import check_images
from deat.errors import DataError
from deat.evaluation.arguments import EvaluationRequest
from deat.evaluation.attack_registry import describe_attack
from deat.evaluation.attacks import is_natural
from deat.evaluation.judge import AttackLike, BlockResult, Judge, get_stages
from deat.evaluation.progress import EvaluationProgress, ProgressCallback
from deat.evaluation.results import AttackResult
from deat.evaluation.resume_log import ResumeLog, fingerprint, stage_result_name
from deat.utils.seeding import derive_seed

LabeledImages = tuple[Tensor, Tensor]
"""Images and labels."""
NumberedBlock = tuple[Tensor, Tensor, int]
"""Images, labels and the block's number."""


class BlockEvaluator:
    """What a judge rules on a question, kept in a ledger as it comes."""

    def __init__(self, request: EvaluationRequest, judge: Judge, resume_log: ResumeLog) -> None:
        self.asked, self.judge, self.resume_log = request, judge, resume_log

    def evaluate_all(
        self,
        blocks: Iterator[LabeledImages],
        num_images: int,
        on_progress: ProgressCallback,
        progress: EvaluationProgress,
    ) -> tuple[list[AttackResult], list[int]]:
        """Every attack's result on all blocks, of which each process takes its turn, and all labels."""
        rulings: dict[str, list[BlockResult]] = {a.name: [] for a in self.asked.attacks}
        labels: list[int] = []
        on_progress(progress)
        mine, ranks = None, self.asked.distributed
        for number, (x, y) in enumerate(blocks):
            labels += y.tolist()
            turn = number % ranks.size
            mine = (x, y, number) if turn == ranks.rank else mine
            if turn < ranks.size - 1 and len(labels) < num_images:
                continue
            for name, ruling in self._evaluate_turn(mine, on_progress, progress):
                rulings[name].append(ruling)
            mine = None
        return [AttackResult.of(name, found) for name, found in rulings.items()], labels

    def _evaluate_turn(
        self, own_block: NumberedBlock | None, on_progress: ProgressCallback, progress: EvaluationProgress
    ) -> Iterator[tuple[str, BlockResult]]:
        """Every process's ruling on a block of its own, in the order of blocks, attack after attack."""
        images, alive = fingerprint(*own_block[:2]) if own_block and self.asked.resume_log else "", None
        for how in self.asked.attacks:
            stands = None if is_natural(how) else alive
            rows = list[list[BlockResult]]()
            for stage in get_stages(how):
                entry = self._find_or_evaluate(how, stage, own_block, images, stands, progress) if own_block else None
                stands = entry["ruling"]["correct"] if entry else None
                rows.append(
                    [self._keep(stage, held, progress) for held in self.asked.distributed.all_gather(entry) if held]
                )
                on_progress(progress)
            if self.asked.cascade and not is_natural(how):  # whose accuracy is shown, wherever it stands
                alive = stands
            yield from ((how.name, BlockResult.of(stages)) for stages in zip(*rows, strict=True))

    def _find_or_evaluate(
        self,
        attack: AttackLike,
        stage: AttackLike,
        own_block: NumberedBlock,
        images_fingerprint: str,
        survivors: list[bool] | None,
        progress: EvaluationProgress,
    ) -> dict[str, Any]:
        """The ledger's entry for a stage of an attack on a block: found in it, or made now."""
        x, y, number = own_block
        key = f"{stage_result_name(attack, stage)} {fingerprint(describe_attack(attack, self.asked.threat))[:8]}"
        ruling = self.resume_log.find(number, key, images_fingerprint)
        if ruling is None:
            progress.begin(stage, len(y))
            ruling = self.judge.rule(attack, x, y, number, survivors, stage if len(get_stages(attack)) > 1 else None)
        return {"block": number, "attack": key, "images": images_fingerprint, "ruling": asdict(ruling)}

    def _keep(self, stage: AttackLike, entry: dict[str, Any], progress: EvaluationProgress) -> BlockResult:
        """An entry's ruling, written down if it is new."""
        ruling = BlockResult(**entry.pop("ruling"))
        progress.end(stage, len(ruling.correct), is_new=self.resume_log.add(**entry, ruling=ruling))
        return ruling


def peek_images(blocks: Iterator[LabeledImages], count: int) -> tuple[LabeledImages, Iterator[LabeledImages]]:
    """The first images over all blocks, and the blocks, those that were read for it among them."""
    held: list[LabeledImages] = []
    while sum(len(y) for _, y in held) < count and (block := next(blocks, None)) is not None:
        held.append(block)
    x, y = (torch.cat(parts)[:count] for parts in zip(*held, strict=True))
    return (x, y), chain(held, blocks)


def sample_images(source: Source, num_images: int, count: int, device: torch.device) -> LabeledImages:
    """So many of the images that are judged, from all over them, since a set may be sorted."""
    return load_images_at(source, sample_indices(num_images, count), device)


def load_images_at(source: Source, indices: Tensor, device: torch.device) -> LabeledImages:
    """The images at these rising places; no others are read where they can be asked for by number."""
    part = _subset_if_indexable(source, indices)
    if part is None:
        return _pick_from_batches(source, indices)
    few = as_source(part, batch_size=len(indices), device=device, num_classes=source.num_classes, shuffle=False)
    x, y = (torch.cat(parts) for parts in zip(*few.epoch(0), strict=True))
    for place, image in zip(indices.tolist(), x, strict=True):
        check_images(image[None], partial(add, place))
    return x, y


def sample_indices(num_images: int, count: int) -> Tensor:
    """Where to look in so many images: one place in each of `count` equal stretches, the same every time.

    Where in a stretch is drawn: a fixed stride could meet one class alone, where classes take turns.
    """
    if num_images <= count:
        return torch.arange(num_images)
    edges = torch.arange(count + 1) * num_images // count
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(derive_seed(0, "places")), dtype=torch.float64)
    return edges[:-1] + (drawn * edges.diff()).long()


def _subset_if_indexable(source: Source, indices: Tensor) -> Any:
    """The data at these places, if it can be asked for by number; a loader cannot."""
    images = getattr(source, "images", None)
    if images is not None:
        return images.subset(indices)
    items = getattr(getattr(source, "loader", None), "dataset", None)
    return Subset(items.dataset, indices.tolist()) if getattr(source, "can_seek", False) and items else None


def _pick_from_batches(source: Source, indices: Tensor) -> LabeledImages:
    """The images at these places of a loader, which is read as far as the last of them."""
    wanted, seen = indices.tolist(), 0
    held: list[LabeledImages] = []
    for x, y in iter_batches(source):
        here = [place - seen for place in wanted if seen <= place < seen + len(y)]
        held.append((x[here], y[here]))
        seen += len(y)
        if seen > wanted[-1]:
            break
    found, labels = (torch.cat(parts) for parts in zip(*held, strict=True))
    return found, labels


def iter_batches(source: Source) -> Iterator[LabeledImages]:
    """A source's batches, each checked: a loader's later ones may be scaled otherwise than its first."""
    seen = 0
    for number, (x, y) in enumerate(source.epoch(0), 1):
        try:
            check_images(x, partial(add, seen))
        except DataError as error:
            raise DataError(f"batch {number} of the data: {error}") from None
        seen += len(y)
        yield x, y


def iter_blocks(source: Source, block_size: int, num_images: int) -> Iterator[LabeledImages]:
    """The first images of a source in blocks of a fixed size, whatever its own batches are."""
    held: list[LabeledImages] = []
    count = given = 0
    for x, y in iter_batches(source):
        held.append((x, y))
        count += len(y)
        while count >= block_size or (count and given + count >= num_images):
            x, y = (torch.cat(parts) for parts in zip(*held, strict=True))
            take = min(block_size, num_images - given)
            yield x[:take], y[:take]
            given += take
            held, count = [(x[take:], y[take:])], count - take
            if given == num_images:
                return
    if count:
        x, y = (torch.cat(parts) for parts in zip(*held, strict=True))
        yield x, y
