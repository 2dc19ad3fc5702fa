"""deat.evaluate: any model, any data, any attacks, in blocks that survive interruption."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.data import Source, as_source
from deat.errors import UsageError
from deat.evaluation.evaluation import AttackResult, Evaluation
from deat.evaluation.judge import Attacker, Judge, Ruling
from deat.evaluation.ledger import Ledger, fingerprint, fingerprint_model
from deat.evaluation.named import attacker, describe, passes
from deat.evaluation.quick import choose_compiled
from deat.evaluation.sanity import Flag, after, before, compare
from deat.modes import evaluating
from deat.ranks import ALONE, Ranks
from deat.threat import ThreatModel
from deat.threat import threat as find_threat
from deat.versions import versions

BLOCK = 500
DEFAULT = ("natural", "fgsm", "pgd-20", "cw-20")
Progress = Callable[[int, int, str], None]
Block = tuple[Tensor, Tensor, int]
"""Images, labels and the block's number."""


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    threat: str | ThreatModel,
    attacks: Sequence[str | Attacker] = DEFAULT,
    n: int | None = None,
    seed: int = 0,
    block: int = BLOCK,
    cascade: bool = False,
    sanity: bool = True,
    precision: str = "auto",
    engine: str = "auto",
    ledger: str | Path | None = None,
    save: str | Path | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Accuracy of a model on data, natural and under each attack, and under the worst of them, image by image.

    data is a loader, a Dataset, a pair of tensors or an ImageSet; `n` takes its first images only. Verdicts depend on
    model, seed and block size. With `ledger`, a file, an interrupted call goes on where it was; `save` names the
    evaluation.json that then takes its place. `cascade` sends only survivors on. precision is what attacks compute in:
    "auto" is half on a GPU and fp32 elsewhere; whom they fool is always settled in float32. engine "compile" compiles
    what they ask there, which pays for long work; "auto" does where it would. With ranks=Ranks.join() the processes
    that torchrun started take blocks in turn, and all return the same; the first one writes.
    """
    chosen = [attacker(a) for a in attacks]
    check_question(chosen, n, block, seed)
    radius = find_threat(threat)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    source = as_source(data, batch_size=block, device=device, shuffle=False)
    source.check()
    images = source.num_examples if n is None else min(n, source.num_examples)
    compiled = choose_compiled(engine, device, images * sum(map(passes, chosen)))
    session = Session(model, radius, chosen, seed, block, cascade, n, ledger, precision, compiled, ranks)
    found = session.run(source, sanity, progress or (lambda done, total, text: None))
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
            for name, ruling in self._rule(mine):
                rulings[name].append(ruling)
                progress(sum(map(len, rulings.values())), total, name)
            mine = None
        results = [AttackResult.of(name, found) for name, found in rulings.items()]
        classes = [str(c) for c in getattr(getattr(source, "images", None), "classes", range(source.num_classes))]
        found = Evaluation(results, labels, classes, self._settings(source, images, outputs))
        flags = self._flags(found, first if sanity else None) if self.ranks.main else []
        flags = [Flag(**flag) for flag in self.ranks.broadcast([asdict(flag) for flag in flags])]
        return Evaluation(results, labels, classes, found.settings, flags)

    def _flags(self, found: Evaluation, first: tuple[Tensor, Tensor] | None) -> list[Flag]:
        if first is None:
            return compare(found)
        return [*before(self.model, *first), *compare(found), *after(found, self.model, self.threat, *first)]

    def _rule(self, mine: Block | None) -> Iterator[tuple[str, Ruling]]:
        """Every process's ruling on a block of its own, in the order of blocks, attack after attack."""
        images, alive = fingerprint(*mine[:2]) if mine and self._keeps else "", None
        for how in self.attacks:
            entry = self._entry(how, mine, images, alive) if mine else None
            if entry and self.cascade and how.name != "natural":  # whose accuracy is shown, wherever it stands
                alive = entry["ruling"]["correct"]
            for held in filter(None, self.ranks.gather(entry)):
                ruling = Ruling(**held.pop("ruling"))
                self.ledger.add(**held, ruling=ruling)
                yield how.name, ruling

    def _entry(self, how: Attacker, mine: Block, images: str, alive: list[bool] | None) -> dict[str, Any]:
        """The ledger's entry for an attack on a block: found in it, or made now."""
        x, y, number = mine
        key = f"{how.name} {fingerprint(describe(how, self.threat))[:8]}"
        ruling = self.ledger.find(number, key, images)
        if ruling is None:
            ruling = self.judge.rule(how, x, y, number, None if how.name == "natural" else alive)
        return {"block": number, "attack": key, "images": images, "ruling": asdict(ruling)}

    def _settings(self, source: Source, images: int, outputs: int) -> dict[str, Any]:
        return {
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


def count_outputs(model: nn.Module, x: Tensor, num_classes: int) -> int:
    """The number of the model's logits, which may be more than the classes that the data shows, but not fewer."""
    with torch.no_grad(), evaluating(model):
        outputs = int(model(x[:1]).shape[1])
    if outputs < num_classes:
        raise UsageError(f"the model tells {outputs} classes apart, but the data has {num_classes}.")
    return outputs


def check_question(attacks: list[Attacker], n: int | None, block: int, seed: int = 0) -> None:
    """Refuse attacks and numbers that cannot be evaluated, before any data is read."""
    names = [a.name for a in attacks]
    if not names:
        raise UsageError("no attack was named; use at least one, such as natural, pgd-20 or aa.")
    if "worst" in names:
        raise UsageError("an attack cannot be named 'worst', which is what they leave together.")
    if len(set(names)) < len(names):
        raise UsageError(f"an attack is named twice in {names}; each may stand once.")
    if n is not None and n < 1:
        raise UsageError(f"n must be a number of images >= 1, not {n}.")
    if block < 1:
        raise UsageError(f"block must be a number of images >= 1, not {block}.")
    if seed < 0:
        raise UsageError(f"seed must be a whole number >= 0, not {seed}.")
