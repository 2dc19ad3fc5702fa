"""A run's report in Markdown: the scores, what was trained, and every epoch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deat.evaluation.sanity import slack
from deat.training.records import EpochStats
from deat.utils.files import write_whole
from deat.utils.numbers import level
from deat.utils.text import markdown, plain


@dataclass(frozen=True)
class Score:
    """One row of a run's table: a model's accuracies by attack, and what training it cost."""

    name: str
    accuracy: dict[str, float]
    images: int
    backprops: int
    seconds: float


def read_scores(path: Path) -> list[Score]:
    """scores.json; a ValueError, TypeError or AttributeError for what is not one."""
    found = [Score(**score) for score in json.loads(path.read_text(encoding="utf-8"))]
    for s in found:
        numbers = [s.images, s.backprops, s.seconds, *s.accuracy.values()]
        if s.accuracy.keys() != found[0].accuracy.keys() or not all(isinstance(n, int | float) for n in numbers):
            raise ValueError(f"{path.name} holds something else")
    return [replace(s, name=plain(s.name), accuracy={plain(a): v for a, v in s.accuracy.items()}) for s in found]


def write_summary(
    path: Path,
    record: dict[str, Any],
    scores: Sequence[Score],
    history: Sequence[EpochStats],
    judging: str,
    seen: str | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write report.md; judging is the command that evaluates the run, `seen` what the watch saw, if it fired.

    notes are what else a person should know.
    """
    parts = [markdown(f"# {record['method']['name']} on {record['data']['name']}"), *_setting(record)]
    if scores:
        parts += ["## Scores", score_table(scores), _caveat(record, scores), *map(markdown, doubts(scores, judging))]
    parts += [*map(markdown, notes), "## Epochs", epoch_table(history)]
    parts += [f"The watch saw {markdown(seen)}. Every epoch's reading is in watch.jsonl."] if seen else []
    write_whole(path, ("\n\n".join(parts) + "\n").encode(), make_folder=False)


def doubts(scores: Sequence[Score], judging: str) -> list[str]:
    """A line for each model whose longer attack is the weaker one, so that its gradients mislead, and what to do."""
    return [
        f"{s.name}: FGSM leaves less than PGD-20, so gradients are masked and PGD-20's number is too high; "
        f"this tells more: {judging} --attacks natural,pgd-20,aa"
        for s in scores
        if s.accuracy.get("fgsm", 1.0) + slack(s.images) < s.accuracy.get("pgd-20", 0.0)
    ]


def score_table(scores: Sequence[Score]) -> str:
    """Scores as a Markdown table."""
    attacks = list(scores[0].accuracy)
    rows = [["model", *attacks, "backprops", "seconds"]]
    for s in scores:
        rows.append([s.name, *(f"{s.accuracy[a]:.1%}" for a in attacks), f"{s.backprops:,}", f"{s.seconds:.1f}"])
    return _markdown(rows)


def epoch_table(history: Sequence[EpochStats]) -> str:
    """The history as a Markdown table."""
    rows = [["epoch", "k", "alpha", "l_X", "threshold", "loss", "train", "val natural", "val robust", "backprops"]]
    for h in history:
        shares = [_percent(v) for v in (h.train_accuracy, h.val_natural, h.val_robust)]
        numbers = [level(h.alpha), f"{h.magnitude:.5g}", "" if h.threshold is None else f"{h.threshold:.5g}"]
        rows.append([str(h.epoch + 1), str(h.k), *numbers, f"{h.loss:.4f}", *shares, f"{h.backprops:,}"])
    return _markdown(rows)


def _setting(record: dict[str, Any]) -> list[str]:
    model, threat, settings = record["model"], record["threat"], record["settings"]
    return [
        f"{markdown(model['name'])} ({model['parameters']:,} parameters), {threat['norm']} eps {level(threat['eps'])}, "
        f"{settings['epochs']} epochs of {record['data']['train']:,} images in batches of {settings['batch_size']}, "
        f"{record['data']['held_out']:,} images held out to choose the best epoch, seed {settings['seed']}, "
        f"{record['precision']} on {record['device']}. Every setting is in run.json."
    ]


def _caveat(record: dict[str, Any], scores: Sequence[Score]) -> str:
    return (
        f"Accuracy on {scores[0].images:,} images of the test part, which neither training nor selection reads. One "
        f"seed; attacks are {record['threat']['norm']} with one start. PGD-20 is not the strongest attack there is."
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _markdown(rows: list[list[str]]) -> str:
    cells = [[markdown(cell) for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
