"""Rulings on every block by every attack and stage, found in the ledger or made now; processes take blocks in turn."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch import Tensor

from deat.evaluation.attacks import is_natural
from deat.evaluation.evaluation import AttackResult
from deat.evaluation.judge import Attacker, Judge, Ruling, stages_of
from deat.evaluation.ledger import Ledger, fingerprint, ruling_name
from deat.evaluation.named import describe
from deat.evaluation.pace import Pace, Progress
from deat.evaluation.question import Question

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
