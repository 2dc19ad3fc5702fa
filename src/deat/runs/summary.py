"""A run's report in Markdown: the scores, what was trained, and every epoch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deat.evaluation.sanity import accuracy_tolerance
from deat.runs.scores import ModelScore
from deat.training.records import EpochStats
from deat.utils.files import write_atomic
from deat.utils.text import escape_markdown, format_eps


def write_summary(
    path: Path,
    record: dict[str, Any],
    scores: Sequence[ModelScore],
    history: Sequence[EpochStats],
    evaluate_command: str,
    watch_message: str | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write report.md.

    Args:
        path: The file.
        record: What run.json says of the run.
        scores: The scores of its networks.
        history: Its epochs.
        evaluate_command: The command that evaluates the run.
        watch_message: What the overfit watch saw, if it fired.
        notes: What else a reader should know.
    """
    parts = [escape_markdown(f"# {record['method']['name']} on {record['data']['name']}"), *_describe_setup(record)]
    if scores:
        parts += [
            "## Scores",
            render_score_table(scores),
            _describe_scores(record, scores),
            *map(escape_markdown, list_gradient_masking_warnings(scores, evaluate_command)),
        ]
    parts += [*map(escape_markdown, notes), "## Epochs", render_epoch_table(history)]
    parts += (
        [f"The watch saw {escape_markdown(watch_message)}. Every epoch's reading is in watch.jsonl."]
        if watch_message
        else []
    )
    write_atomic(path, ("\n\n".join(parts) + "\n").encode(), make_folder=False)


def list_gradient_masking_warnings(scores: Sequence[ModelScore], evaluate_command: str) -> list[str]:
    """A line for each model whose longer attack is the weaker one, so that its gradients mislead, and what to do."""
    return [
        f"{s.name}: FGSM leaves less than PGD-20, so gradients are masked and PGD-20's number is too high; "
        f"this tells more: {evaluate_command} --attacks natural,pgd-20,aa"
        for s in scores
        if s.accuracy.get("fgsm", 1.0) + accuracy_tolerance(s.images) < s.accuracy.get("pgd-20", 0.0)
    ]


def render_score_table(scores: Sequence[ModelScore]) -> str:
    """Scores as a Markdown table."""
    attacks = list(scores[0].accuracy)
    rows = [["model", *attacks, "backprops", "seconds"]]
    for s in scores:
        rows.append([s.name, *(f"{s.accuracy[a]:.1%}" for a in attacks), f"{s.backprops:,}", f"{s.seconds:.1f}"])
    return _render_markdown_table(rows)


def render_epoch_table(history: Sequence[EpochStats]) -> str:
    """The history as a Markdown table."""
    rows = [["epoch", "k", "alpha", "l_X", "threshold", "loss", "train", "val natural", "val robust", "backprops"]]
    for h in history:
        shares = [_format_percent(v) for v in (h.train_accuracy, h.val_natural, h.val_robust)]
        numbers = [format_eps(h.alpha), f"{h.magnitude:.5g}", "" if h.threshold is None else f"{h.threshold:.5g}"]
        rows.append([str(h.epoch + 1), str(h.k), *numbers, f"{h.loss:.4f}", *shares, f"{h.backprops:,}"])
    return _render_markdown_table(rows)


def _describe_setup(record: dict[str, Any]) -> list[str]:
    model, threat, settings = record["model"], record["threat"], record["settings"]
    return [
        f"{escape_markdown(model['name'])} ({model['parameters']:,} parameters), {threat['norm']} eps {format_eps(threat['eps'])}, "
        f"{settings['epochs']} epochs of {record['data']['train']:,} images in batches of {settings['batch_size']}, "
        f"{record['data']['held_out']:,} images held out to choose the best epoch, seed {settings['seed']}, "
        f"{record['precision']} on {record['device']}. Every setting is in run.json."
    ]


def _describe_scores(record: dict[str, Any], scores: Sequence[ModelScore]) -> str:
    return (
        f"Accuracy on {scores[0].images:,} images of the test part, which neither training nor selection reads. One "
        f"seed; attacks are {record['threat']['norm']} with one start. PGD-20 is not the strongest attack there is."
    )


def _format_percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _render_markdown_table(rows: list[list[str]]) -> str:
    cells = [[escape_markdown(cell) for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
