"""What is known of runs without test figures: how their best epochs did on held-out images.

These figures stand apart: no column of the results has them, and nothing is ranked by them.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deat.evaluation.evaluator import DEFAULT_ATTACKS
from deat.report.grouping import UNEVALUATED
from deat.report.load import ReportRow, RunResults, SeedStatistics
from deat.report.stats import RowCost
from deat.runs.schema import WEIGHTS_FILE
from deat.training.messages import format_command
from deat.training.records import EpochStats
from deat.utils.paths import anonymize_paths
from deat.utils.tensor_files import read_note


@dataclass(frozen=True)
class HeldOutResult:
    """A row's figures over those of its seeds that have no test figures; place is the row's in the table.

    epochs are the best ones, counted from 1, of as many as were asked for.
    """

    row: str
    place: int
    seeds: tuple[int, ...]
    natural: SeedStatistics
    robust: SeedStatistics
    attack: str
    images: int
    epochs: tuple[int, ...]
    asked: int
    cost: RowCost

    @classmethod
    def of(cls, row: ReportRow, row_index: int, runs: Sequence[tuple[RunResults, EpochStats]]) -> "HeldOutResult":
        """The figures of these runs of a row, each with its best epoch."""
        record, n = runs[0][0].record or {}, len(runs)
        spent = sum(run.history[-1].backprops for run, _ in runs) / n
        clock = sum(run.seconds for run, _ in runs) / n / 60
        return cls(
            row.name,
            row_index,
            tuple(run.seed for run, _ in runs),
            SeedStatistics(tuple(float(best.val_natural or 0) for _, best in runs)),
            SeedStatistics(tuple(float(best.val_robust or 0) for _, best in runs)),
            str(record["settings"].get("val_attack")),
            int(record["data"].get("held_out") or 0),
            tuple(best.epoch + 1 for _, best in runs),
            int(record["settings"]["epochs"]),
            RowCost(spent, clock or None, any(run.concurrent_jobs > 1 for run, _ in runs)),
        )

    def as_json(self) -> dict[str, Any]:
        """The figures as a document has them."""
        shares = {
            name: {"mean": s.mean, "sd": s.sd} for name, s in (("natural", self.natural), ("robust", self.robust))
        }
        about = {"attack": self.attack, "images": self.images, "best_epochs": self.epochs, "epochs": self.asked}
        return {**shares, **about, "seeds": self.seeds, "cost": asdict(self.cost)}


def collect_held_out_results(rows: Sequence[ReportRow]) -> list[HeldOutResult]:
    """The rows that have runs without test figures which were validated."""
    found = []
    for place, row in enumerate(rows):
        lacking = [run for run in row.runs if not run.numbers and run.status != "failed" and run.record]
        if scored := [(run, best) for run in lacking if (best := read_best_epoch(run)) and _has_finite_scores(best)]:
            found.append(HeldOutResult.of(row, place, scored))
    return found


def read_best_epoch(run: RunResults) -> EpochStats | None:
    """The epoch whose weights a run kept as its best, which its file of them names."""
    try:
        number = json.loads(read_note(run.path / "best" / WEIGHTS_FILE) or "")["epoch"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return next((stats for stats in run.history if stats.epoch + 1 == number), None)


def _has_finite_scores(best: EpochStats) -> bool:
    """Whether an epoch was validated, and what was found is a number."""
    return all(share is not None and math.isfinite(share) for share in (best.val_natural, best.val_robust))


def get_held_out_csv_fields(row: ReportRow) -> dict[str, Any]:
    """A row's figures as a table of numbers has them, one column each; empty fields where it has none."""
    one = next(iter(collect_held_out_results([row])), None)
    texts = (one.attack, one.images, *(" ".join(map(str, each)) for each in (one.epochs, one.seeds))) if one else ()
    values = (one.natural.mean, one.robust.mean, *texts) if one else (None,) * 6
    names = ("natural", "robust", "attack", "images", "best_epochs", "seeds")
    return {f"held_out_{name}": value for name, value in zip(names, values, strict=True)}


def list_evaluate_commands(rows: Sequence[ReportRow]) -> list[str]:
    """The commands that evaluate what is not evaluated yet, as the other rows are."""
    how = _evaluate_flags(rows)
    lacking = [(run.path, run.record) for row in rows for run in row.runs if run.status == UNEVALUATED]
    return [
        anonymize_paths(format_command("evaluate", path, record["request"]) + how) for path, record in lacking if record
    ]


def _evaluate_flags(rows: Sequence[ReportRow]) -> str:
    """The flags that the first evaluated run was judged with, where they are not the usual ones."""
    judged = next((run.evaluation for row in rows for run in row.done if run.evaluation), None)
    if judged is None:
        return ""
    names = tuple(r.name for r in judged.results)
    attacks = "" if names == DEFAULT_ATTACKS else f" --attacks {','.join(names)}"
    return attacks + (f" --n {len(judged.labels)}" if judged.settings["sample"] else "")
