"""deat.evaluate: any model, any data, any attacks, in blocks that survive interruption."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.data import Source, as_source
from deat.evaluation.evaluation import AttackResult, Evaluation
from deat.evaluation.judge import Attacker, Judge, Ruling
from deat.evaluation.ledger import Ledger, fingerprint, fingerprint_model
from deat.evaluation.named import attackers, describe, passes
from deat.evaluation.pace import Pace
from deat.evaluation.question import check_about, check_model, check_question, count_outputs
from deat.evaluation.quick import choose_compiled
from deat.evaluation.sanity import Flag, after, before, compare
from deat.paths import tidy
from deat.ranks import ALONE, Ranks
from deat.threat import ThreatModel
from deat.threat import threat as find_threat
from deat.versions import versions
from deat.writing import refuse_links

BLOCK = 500
DEFAULT = ("natural", "fgsm", "pgd-20", "cw-20")
Progress = Callable[[Pace], None]
"""Called when an evaluation begins and after each ruling."""
Block = tuple[Tensor, Tensor, int]
"""Images, labels and the block's number."""


def evaluate(
    model: nn.Module,
    data: Any,
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
    save: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Accuracy of a model on data, natural and under each attack, and under the worst of them, image by image.

    data is a loader, a Dataset, a pair of tensors or an ImageSet; `n` takes its first images only. Verdicts depend on
    model, seed and block size. With `ledger`, a file, an interrupted call goes on where it was; `save` names the
    evaluation.json that then takes its place, and `about` holds what it shall say of model and data. `cascade` sends
    only survivors on. precision is what attacks compute in: "auto" is half on a GPU and fp32 elsewhere; whom they fool
    is always settled in float32. engine "compile" compiles what they ask there, which pays for long work; "auto" does
    where it would. With ranks=Ranks.join() the processes that torchrun started take blocks in turn, and all return the
    same; the first one writes.
    """
    chosen = attackers(attacks)
    check_question(chosen, n, block, seed)
    n, block, seed = None if n is None else int(n), int(block), int(seed)  # numpy's become ours
    check_model(model)
    told = {"model": type(model).__name__, "data": type(data).__name__, **check_about(about)}
    ranks.by_main(lambda: refuse_links(Path(file) for file in (ledger, save) if file is not None))
    radius = find_threat(threat)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    source = as_source(data, batch_size=block, device=device, shuffle=False)
    source.check()
    images = source.num_examples if n is None else min(n, source.num_examples)
    compiled = choose_compiled(engine, device, images * sum(map(passes, chosen)))
    session = Session(model, radius, chosen, seed, block, cascade, n, ledger, precision, compiled, ranks)
    session.about = told
    found = session.run(source, sanity, progress or (lambda pace: None))
    if save is not None and ranks.main:
        found.save(Path(save))
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
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.about: dict[str, Any] = {}
        self.judge = Judge(model, threat, seed, precision, compiled)
        question = {"threat": repr(threat), "seed": seed, "block": block, "cascade": cascade}
        question["precision"] = self.judge.precision
        # Alone, an attack's ruling owes nothing to the others.
        order = [(a.name, describe(a, threat)) for a in attacks] if cascade else None
        path = Path(ledger) if ledger and ranks.main else None
        self._keeps = bool(ledger)
        self._fingerprint = fingerprint_model(model)
        self.ledger = Ledger(fingerprint(question, order, self._fingerprint), path)
        self.ledger.share(ranks)

    def run(self, source: Source, sanity: bool, progress: Progress) -> Evaluation:
        """Rule on every block by every attack, with sanity checks before and after."""
        images = source.num_examples if self.n is None else min(self.n, source.num_examples)
        rulings: dict[str, list[Ruling]] = {a.name: [] for a in self.attacks}
        labels: list[int] = []
        total = -(-images // self.block) * len(self.attacks)
        pace = Pace(self.attacks, images, total, lambda: self.judge.counted()[0])
        progress(pace)
        first: tuple[Tensor, Tensor] | None = None
        outputs = 0
        mine: Block | None = None
        for number, (x, y) in enumerate(blocks(source, self.block, images)):
            if first is None:
                first, outputs = (x, y), count_outputs(self.model, x, source.num_classes)
            labels += y.tolist()
            turn = number % self.ranks.size
            mine = (x, y, number) if turn == self.ranks.rank else mine
            if turn < self.ranks.size - 1 and len(labels) < images:
                continue
            for name, ruling in self._rule(mine, pace):
                rulings[name].append(ruling)
                progress(pace)
            mine = None
        results = [AttackResult.of(name, found) for name, found in rulings.items()]
        classes = [str(c) for c in getattr(getattr(source, "images", None), "classes", range(source.num_classes))]
        found = Evaluation(results, labels, classes, self._settings(source, images, outputs, sanity))
        flags = self._flags(found, first if sanity else None) if self.ranks.main else []
        flags = [Flag(**flag) for flag in self.ranks.broadcast([asdict(flag) for flag in flags])]
        return Evaluation(results, labels, classes, found.settings, flags)

    def _flags(self, found: Evaluation, first: tuple[Tensor, Tensor] | None) -> list[Flag]:
        if first is None:
            return compare(found)
        return [*before(self.model, *first), *compare(found), *after(found, self.model, self.threat, *first)]

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


def blocks(source: Source, size: int, images: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first images of a source in blocks of a fixed size, whatever its own batches are."""
    held: list[tuple[Tensor, Tensor]] = []
    count = given = 0
    for x, y in source.epoch(0):
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
