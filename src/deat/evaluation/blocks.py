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
from deat.evaluation.arguments import Question
from deat.evaluation.attack_registry import describe
from deat.evaluation.attacks import is_natural
from deat.evaluation.judge import Attacker, Judge, Ruling, stages_of
from deat.evaluation.progress import Pace, Progress
from deat.evaluation.results import AttackResult
from deat.evaluation.resume_log import Ledger, fingerprint, ruling_name
from deat.utils.seeding import derive

Images = tuple[Tensor, Tensor]
"""Images and labels."""
Block = tuple[Tensor, Tensor, int]
"""Images, labels and the block's number."""


class Rulings:
    """What a judge rules on a question, kept in a ledger as it comes."""

    def __init__(self, asked: Question, judge: Judge, ledger: Ledger) -> None:
        self.asked, self.judge, self.ledger = asked, judge, ledger

    def on_all(
        self, cut: Iterator[Images], images: int, progress: Progress, pace: Pace
    ) -> tuple[list[AttackResult], list[int]]:
        """Every attack's result on all blocks, of which each process takes its turn, and all labels."""
        rulings: dict[str, list[Ruling]] = {a.name: [] for a in self.asked.attacks}
        labels: list[int] = []
        progress(pace)
        mine, ranks = None, self.asked.ranks
        for number, (x, y) in enumerate(cut):
            labels += y.tolist()
            turn = number % ranks.size
            mine = (x, y, number) if turn == ranks.rank else mine
            if turn < ranks.size - 1 and len(labels) < images:
                continue
            for name, ruling in self._in_turn(mine, progress, pace):
                rulings[name].append(ruling)
            mine = None
        return [AttackResult.of(name, found) for name, found in rulings.items()], labels

    def _in_turn(self, mine: Block | None, progress: Progress, pace: Pace) -> Iterator[tuple[str, Ruling]]:
        """Every process's ruling on a block of its own, in the order of blocks, attack after attack."""
        images, alive = fingerprint(*mine[:2]) if mine and self.asked.ledger else "", None
        for how in self.asked.attacks:
            stands = None if is_natural(how) else alive
            rows = list[list[Ruling]]()
            for stage in stages_of(how):
                entry = self._entry(how, stage, mine, images, stands, pace) if mine else None
                stands = entry["ruling"]["correct"] if entry else None
                rows.append([self._keep(stage, held, pace) for held in self.asked.ranks.gather(entry) if held])
                progress(pace)
            if self.asked.cascade and not is_natural(how):  # whose accuracy is shown, wherever it stands
                alive = stands
            yield from ((how.name, Ruling.of(stages)) for stages in zip(*rows, strict=True))

    def _entry(
        self, how: Attacker, stage: Attacker, mine: Block, images: str, alive: list[bool] | None, pace: Pace
    ) -> dict[str, Any]:
        """The ledger's entry for a stage of an attack on a block: found in it, or made now."""
        x, y, number = mine
        key = f"{ruling_name(how, stage)} {fingerprint(describe(how, self.asked.threat))[:8]}"
        ruling = self.ledger.find(number, key, images)
        if ruling is None:
            pace.begin(stage, len(y))
            ruling = self.judge.rule(how, x, y, number, alive, stage if len(stages_of(how)) > 1 else None)
        return {"block": number, "attack": key, "images": images, "ruling": asdict(ruling)}

    def _keep(self, stage: Attacker, entry: dict[str, Any], pace: Pace) -> Ruling:
        """An entry's ruling, written down if it is new."""
        ruling = Ruling(**entry.pop("ruling"))
        pace.end(stage, len(ruling.correct), made=self.ledger.add(**entry, ruling=ruling))
        return ruling


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
