"""deat.evaluate: any model, any data, any attacks, in blocks that survive interruption."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.data import Data, Source, as_source
from deat.data.content import check_images
from deat.errors import DataError
from deat.evaluation.evaluation import AttackResult, Evaluation
from deat.evaluation.judge import Attacker, Judge, Ruling
from deat.evaluation.ledger import Ledger, answers, fingerprint, fingerprint_code, fingerprint_model
from deat.evaluation.named import attackers, describe, passes
from deat.evaluation.pace import Pace
from deat.evaluation.question import check_about, check_files, check_model, check_question, count_outputs
from deat.evaluation.quick import choose_compiled
from deat.evaluation.sanity import SLICE, Flag, after, before, compare, passes_after
from deat.modes import device_of
from deat.paths import tidy
from deat.ranks import ALONE, Ranks
from deat.threat import ThreatModel
from deat.threat import threat as find_threat
from deat.versions import versions

BLOCK = 500
DEFAULT = ("natural", "fgsm", "pgd-20", "cw-20")
Progress = Callable[[Pace], None]
"""Called when an evaluation begins and after each ruling."""
Tell = Callable[[Flag], None]
"""Called with a flag on the model itself, before the first attack."""
Save = Callable[[Evaluation], None]
"""Called with the Evaluation, to put it where it is safe."""
Images = tuple[Tensor, Tensor]
"""Images and labels."""
Block = tuple[Tensor, Tensor, int]
"""Images, labels and the block's number."""


def evaluate(
    model: nn.Module,
    data: Data | None,
    *,
    threat: str | ThreatModel,
    attacks: str | Sequence[str | Attacker] = DEFAULT,
    n: int | None = None,
    seed: int = 0,
    block: int = BLOCK,
    cascade: bool = False,
    sanity: bool = True,
    precision: str = "auto",
    engine: str = "auto",
    ledger: str | Path | None = None,
    save: str | Path | Save | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    tell: Tell | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Accuracy of a model on data, natural and under each attack, and under the worst of them, image by image.

    data is a loader, a Dataset, a pair of tensors or an ImageSet; `n` takes its first images only. Verdicts depend on
    model, seed and block size. With `ledger`, a file, an interrupted call goes on where it was; `save` names the
    evaluation.json that then takes its place, or is called to write it, and `about` holds what it shall say of model
    and data. `cascade` sends only survivors on. precision is what attacks compute in: "auto" is half on a GPU and fp32
    elsewhere; whom they fool is always settled in float32. engine "compile" compiles what they ask there, which pays
    for long work; "auto" does where it would. The model is checked before the first attack, and `tell` hears of a flag
    on it at once. With ranks=Ranks.join() the processes that torchrun started take blocks in turn, and all return the
    same; the first one writes.
    """
    chosen = attackers(attacks)
    check_question(chosen, n, block, seed)
    n, block, seed = None if n is None else int(n), int(block), int(seed)  # numpy's become ours
    check_model(model)
    told = {"model": type(model).__name__, "data": type(data).__name__, **check_about(about)}
    ranks.by_main(lambda: check_files(ledger, save))
    radius = find_threat(threat)
    device = device_of(model)
    source = as_source(data, batch_size=block, device=device, shuffle=False)
    source.check()
    images = source.num_examples if n is None else min(n, source.num_examples)
    compiled = choose_compiled(engine, device, images * sum(map(passes, chosen)))
    session = Session(model, radius, chosen, seed, block, cascade, n, ledger, precision, compiled, ranks)
    session.about = told
    found = session.run(source, sanity, progress or (lambda pace: None), tell or (lambda flag: None))
    if save is not None and ranks.main:
        save(found) if callable(save) else found.save(Path(save))
    session.ledger.close()  # not before what it held is safe elsewhere
    return found


class Session:
    """One evaluation: its judge, its ledger, and the order of its work."""

    def __init__(
        self,
        model: nn.Module,
        threat: ThreatModel,
        attacks: list[Attacker],
        seed: int,
        block: int,
        cascade: bool,
        n: int | None,
        ledger: str | Path | None,
        precision: str = "auto",
        compiled: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.threat, self.attacks, self.cascade, self.block = model, threat, attacks, cascade, block
        self.n, self.seed, self.ranks = n, seed, ranks
        self.device = device_of(model)
        self.about: dict[str, Any] = {}
        self.judge = Judge(model, threat, seed, precision, compiled)
        question = {"threat": repr(threat), "seed": seed, "block": block, "cascade": cascade}
        question["precision"] = self.judge.precision
        # Alone, an attack's ruling owes nothing to the others.
        order = [(a.name, describe(a, threat)) for a in attacks] if cascade else None
        self._path = Path(ledger) if ledger and ranks.main else None
        self._keeps = bool(ledger)
        self._fingerprint = fingerprint_model(model)
        code = fingerprint_code(model) if ledger else ""
        self._question = fingerprint(question, order, self._fingerprint, code)

    def run(self, source: Source, sanity: bool, progress: Progress, tell: Tell) -> Evaluation:
        """Rule on every block by every attack, with sanity checks before and after."""
        images = source.num_examples if self.n is None else min(self.n, source.num_examples)
        first, cut = look_ahead(blocks(source, self.block, images), SLICE)
        outputs = count_outputs(self.model, first[0], source.num_classes)
        early = self._check(first, source.num_classes, tell) if sanity else []
        self.ledger = self._take_up(first[0])
        pace = self._pace(images, len(first[1]) if sanity else 0)
        results, labels = self._rule_all(cut, images, progress, pace)
        classes = [str(c) for c in getattr(getattr(source, "images", None), "classes", range(source.num_classes))]
        found = Evaluation(results, labels, classes, self._settings(source, images, outputs, sanity))
        flags = [*early, *compare(found)]
        if sanity and self.ranks.main:
            pace.check()
            flags += after(found, self.judge.model, self.threat, *first)
        flags = [Flag(**flag) for flag in self.ranks.broadcast([asdict(flag) for flag in flags])]
        return Evaluation(results, labels, classes, found.settings, flags)

    def _pace(self, images: int, checked: int) -> Pace:
        """The work ahead: attacks on all images, and checks of a few."""
        total = -(-images // self.block) * len(self.attacks)
        checks = checked * passes_after(self.attacks) if self.threat.eps else 0
        return Pace(self.attacks, images, total, lambda: self.judge.counted()[0], checks=checks)

    def _rule_all(
        self, cut: Iterator[Images], images: int, progress: Progress, pace: Pace
    ) -> tuple[list[AttackResult], list[int]]:
        """Every attack's result on all blocks, of which each process takes its turn, and all labels."""
        rulings: dict[str, list[Ruling]] = {a.name: [] for a in self.attacks}
        labels: list[int] = []
        progress(pace)
        mine: Block | None = None
        for number, (x, y) in enumerate(cut):
            labels += y.tolist()
            turn = number % self.ranks.size
            mine = (x, y, number) if turn == self.ranks.rank else mine
            if turn < self.ranks.size - 1 and len(labels) < images:
                continue
            for name, ruling in self._rule(mine, pace):
                rulings[name].append(ruling)
                progress(pace)
            mine = None
        return [AttackResult.of(name, found) for name, found in rulings.items()], labels

    def _check(self, first: Images, num_classes: int, tell: Tell) -> list[Flag]:
        """Flags about the model itself, told as they are found; the first process speaks for all."""
        flags = before(self.model, *first, num_classes) if self.ranks.main else []
        for flag in flags:
            tell(flag)
        return flags

    def _take_up(self, x: Tensor) -> Ledger:
        """The ledger, with what it holds on this very question."""
        ledger = Ledger(self._question, self._path, answers(self.model, x) if self._keeps else None)
        ledger.share(self.ranks)
        return ledger

    def _rule(self, mine: Block | None, pace: Pace) -> Iterator[tuple[str, Ruling]]:
        """Every process's ruling on a block of its own, in the order of blocks, attack after attack."""
        images, alive = fingerprint(*mine[:2]) if mine and self._keeps else "", None
        for how in self.attacks:
            entry = self._entry(how, mine, images, alive, pace) if mine else None
            if entry and self.cascade and how.name != "natural":  # whose accuracy is shown, wherever it stands
                alive = entry["ruling"]["correct"]
            for held in filter(None, self.ranks.gather(entry)):
                ruling = Ruling(**held.pop("ruling"))
                pace.end(how, len(ruling.correct), made=self.ledger.add(**held, ruling=ruling))
                yield how.name, ruling

    def _entry(self, how: Attacker, mine: Block, images: str, alive: list[bool] | None, pace: Pace) -> dict[str, Any]:
        """The ledger's entry for an attack on a block: found in it, or made now."""
        x, y, number = mine
        key = f"{how.name} {fingerprint(describe(how, self.threat))[:8]}"
        ruling = self.ledger.find(number, key, images)
        if ruling is None:
            pace.begin(how, len(y))
            ruling = self.judge.rule(how, x, y, number, None if how.name == "natural" else alive)
        return {"block": number, "attack": key, "images": images, "ruling": asdict(ruling)}

    def _settings(self, source: Source, images: int, outputs: int, sanity: bool) -> dict[str, Any]:
        """All that this evaluation was asked, and of what."""
        return {
            "about": {name: tidy(value) for name, value in self.about.items()},
            "device": device_name(self.device),
            "image": list(source.shape),
            "sanity": sanity,
            "threat": {"norm": self.threat.name, "eps": self.threat.eps},
            "attacks": {a.name: describe(a, self.threat, outputs) for a in self.attacks},
            "seed": self.seed,
            "block": self.block,
            "cascade": self.cascade,
            "precision": self.judge.precision,
            "compiled": self.judge.quick is not None and self.judge.quick.compiled,
            "sample": images < source.num_examples,
            "available": source.num_examples,
            "model": self._fingerprint,
            "versions": versions(),
        }


def look_ahead(cut: Iterator[Images], count: int) -> tuple[Images, Iterator[Images]]:
    """The first images over all blocks, and the blocks, those that were read for it among them."""
    held: list[Images] = []
    while sum(len(y) for _, y in held) < count and (block := next(cut, None)) is not None:
        held.append(block)
    x, y = (torch.cat(parts)[:count] for parts in zip(*held, strict=True))
    return (x, y), chain(held, cut)


def batches(source: Source) -> Iterator[Images]:
    """A source's batches, each checked: a loader's later ones may be scaled otherwise than its first."""
    seen = 0
    for number, (x, y) in enumerate(source.epoch(0), 1):
        try:
            check_images(x, seen)
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


def device_name(device: torch.device) -> str:
    """The kind of a device, and a GPU's name."""
    return f"cuda, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
