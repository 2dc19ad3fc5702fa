"""What is known of runs without test figures: how their best epochs did on held-out images.

These figures stand apart: no column of the results has them, and nothing is ranked by them.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deat.evaluation.evaluator import DEFAULT
from deat.report.grouping import UNEVALUATED
from deat.report.load import OneRun, ReportRow, Spread
from deat.report.stats import Cost
from deat.runs.run_dir import WEIGHTS
from deat.training.messages import command
from deat.training.records import EpochStats
from deat.utils.paths import tidy
from deat.utils.tensor_files import note_of


@dataclass(frozen=True)
class HeldOut:
    """A row's figures over those of its seeds that have no test figures; place is the row's in the table.

    epochs are the best ones, counted from 1, of as many as were asked for.
    """

    row: str
    place: int
    seeds: tuple[int, ...]
    natural: Spread
    robust: Spread
    attack: str
    images: int
    epochs: tuple[int, ...]
    asked: int
    cost: Cost

    @classmethod
    def of(cls, row: ReportRow, place: int, runs: Sequence[tuple[OneRun, EpochStats]]) -> "HeldOut":
        """The figures of these runs of a row, each with its best epoch."""
        record, n = runs[0][0].record or {}, len(runs)
        spent = sum(run.history[-1].backprops for run, _ in runs) / n
        clock = sum(run.seconds for run, _ in runs) / n / 60
        return cls(
            row.name,
            place,
            tuple(run.seed for run, _ in runs),
            Spread(tuple(float(best.val_natural or 0) for _, best in runs)),
            Spread(tuple(float(best.val_robust or 0) for _, best in runs)),
            str(record["settings"].get("val_attack")),
            int(record["data"].get("held_out") or 0),
            tuple(best.epoch + 1 for _, best in runs),
            int(record["settings"]["epochs"]),
            Cost(spent, clock or None, any(run.concurrent_jobs > 1 for run, _ in runs)),
        )

    def as_json(self) -> dict[str, Any]:
        """The figures as a document has them."""
        shares = {
            name: {"mean": s.mean, "sd": s.sd} for name, s in (("natural", self.natural), ("robust", self.robust))
        }
        about = {"attack": self.attack, "images": self.images, "best_epochs": self.epochs, "epochs": self.asked}
        return {**shares, **about, "seeds": self.seeds, "cost": asdict(self.cost)}


def held_out(rows: Sequence[ReportRow]) -> list[HeldOut]:
    """The rows that have runs without test figures which were validated."""
    found = []
    for place, row in enumerate(rows):
        lacking = [run for run in row.runs if not run.numbers and run.status != "failed" and run.record]
        if scored := [(run, best) for run in lacking if (best := kept(run)) and _is_finite(best)]:
            found.append(HeldOut.of(row, place, scored))
    return found


def kept(run: OneRun) -> EpochStats | None:
    """The epoch whose weights a run kept as its best, which its file of them names."""
    try:
        number = json.loads(note_of(run.path / "best" / WEIGHTS) or "")["epoch"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return next((stats for stats in run.history if stats.epoch + 1 == number), None)


def _is_finite(best: EpochStats) -> bool:
    """Whether an epoch was validated, and what was found is a number."""
    return all(share is not None and math.isfinite(share) for share in (best.val_natural, best.val_robust))


def held_out_record(row: ReportRow) -> dict[str, Any]:
    """A row's figures as a table of numbers has them, one column each; empty fields where it has none."""
    one = next(iter(held_out([row])), None)
    texts = (one.attack, one.images, *(" ".join(map(str, each)) for each in (one.epochs, one.seeds))) if one else ()
    values = (one.natural.mean, one.robust.mean, *texts) if one else (None,) * 6
    names = ("natural", "robust", "attack", "images", "best_epochs", "seeds")
    return {f"held_out_{name}": value for name, value in zip(names, values, strict=True)}


def to_evaluate(rows: Sequence[ReportRow]) -> list[str]:
    """The commands that evaluate what is not evaluated yet, as the other rows are."""
    how = _asked(rows)
    lacking = [(run.path, run.record) for row in rows for run in row.runs if run.status == UNEVALUATED]
    return [tidy(command("evaluate", path, record["request"]) + how) for path, record in lacking if record]


def _asked(rows: Sequence[ReportRow]) -> str:
    """The flags that the first evaluated run was judged with, where they are not the usual ones."""
    judged = next((run.evaluation for row in rows for run in row.done if run.evaluation), None)
    if judged is None:
        return ""
    names = tuple(r.name for r in judged.results)
    attacks = "" if names == DEFAULT else f" --attacks {','.join(names)}"
    return attacks + (f" --n {len(judged.labels)}" if judged.settings["sample"] else "")
