"""report.md of one run: its scores, what was trained, and every epoch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deat.data.image_label_checks import noun_of_shape
from deat.evaluation.sanity import accuracy_tolerance
from deat.runs.final_scores import ModelScore
from deat.tasks import CLASSIFICATION, Task, build_task
from deat.threat import format_threat
from deat.training.epoch_records import EpochStats
from deat.utils.safe_write import write_atomic
from deat.utils.text import capitalize_sentence, escape_markdown, format_eps, format_markdown_table


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
        path: The file to write. Its folder must exist.
        record: The run's record, as in run.json.
        scores: The scores at the end of training; may be empty.
        history: The finished epochs.
        evaluate_command: The command that evaluates the run.
        watch_message: What the overfit watch acted on, if anything.
        notes: Other sentences for the reader.

    Raises:
        OSError: The file cannot be written.
    """
    task = build_task(record.get("task"))
    parts = [f"# {record['method']['name']} on {record['data']['name']}", _describe_setup(record)]
    parts = list(map(escape_markdown, parts))
    if scores:
        warnings = [] if task.is_graded else list_gradient_masking_warnings(scores, evaluate_command)
        parts += ["## Scores", render_score_table(scores, task), _describe_scores(record, scores, task)]
        parts += map(escape_markdown, warnings)
    parts += [*map(escape_markdown, notes), "## Epochs", _render_epoch_table(history, task)]
    if watch_message:
        parts += [escape_markdown(f"Overfit watch: {watch_message}. Every epoch's measurements are in watch.jsonl.")]
    write_atomic(path, ("\n\n".join(parts) + "\n").encode(), make_folder=False)


def list_gradient_masking_warnings(scores: Sequence[ModelScore], evaluate_command: str) -> list[str]:
    """List the models whose gradients are masked: the weaker attack leaves less accuracy than the stronger one.

    Args:
        scores: The scores at the end of training.
        evaluate_command: The command that evaluates the run.

    Returns:
        One line for each such model, with the command to check it.
    """
    return [
        f"{score.name}: accuracy is lower under FGSM than under PGD-20, so gradients are masked and PGD-20's number is "
        f"too high. Check it: {evaluate_command} --attacks natural,pgd-20,aa"
        for score in scores
        if score.accuracy.get("fgsm", 1.0) + accuracy_tolerance(score.images) < score.accuracy.get("pgd-20", 0.0)
    ]


def render_score_table(scores: Sequence[ModelScore], task: Task = CLASSIFICATION) -> str:
    """Render scores as a Markdown table."""
    attacks = list(scores[0].accuracy)
    rows = [
        [
            score.name,
            *(task.format_metric(score.accuracy[attack]) for attack in attacks),
            f"{score.backprops:,}",
            f"{score.seconds:.1f}",
        ]
        for score in scores
    ]
    return format_markdown_table(["model", *attacks, "backprops", "seconds"], rows)


def _render_epoch_table(history: Sequence[EpochStats], task: Task) -> str:
    header = ["epoch", "k", "alpha", "l_X", "threshold", "loss"]
    header += ["train natural", "train robust", "val natural", "val robust", "backprops"]
    rows = []
    for stats in history:
        trained = ("" if value is None else f"{value:.1%}" for value in (stats.train_natural, stats.train_robust))
        validated = (
            "" if value is None else task.format_metric(value) for value in (stats.val_natural, stats.val_robust)
        )
        rows.append(
            [
                str(stats.epoch + 1),
                str(stats.k),
                format_eps(stats.alpha),
                f"{stats.magnitude:.5g}",
                "" if stats.threshold is None else f"{stats.threshold:.5g}",
                f"{stats.loss:.4f}",
                *trained,
                *validated,
                f"{stats.backprops:,}",
            ]
        )
    return format_markdown_table(header, rows)


def _describe_setup(record: dict[str, Any]) -> str:
    model, threat, settings = record["model"], record["threat"], record["settings"]
    summary = record["method"].get("summary")
    what = f"{record['method']['name']}: {summary}. Trained with " if summary else ""
    noun = _noun(record)
    return (
        f"{what}{model['name']} ({model['parameters']:,} parameters), {format_threat(threat, with_rule=True)}, "
        f"{settings['epochs']} epochs of {record['data']['train']:,} {noun} in batches of {settings['batch_size']}, "
        f"{record['data']['held_out']:,} {noun} held out to choose the best epoch, seed {settings['seed']}, "
        f"{record['precision']} on {record['device']}. Every setting is in run.json."
    )


def _noun(record: dict[str, Any]) -> str:
    """What texts call the data's examples."""
    return noun_of_shape(record["data"].get("image"))


def _describe_norms(threat: dict[str, Any]) -> str:
    """The norm of a threat model; of a union, that each of its balls is attacked."""
    if "threats" in threat:
        return f"in every ball ({', '.join(ball['norm'] for ball in threat['threats'])}), the worst counts,"
    return str(threat["norm"])


def _describe_scores(record: dict[str, Any], scores: Sequence[ModelScore], task: Task) -> str:
    return escape_markdown(
        f"{capitalize_sentence(task.metric_names[0])} on {scores[0].images:,} test {_noun(record)}, which neither training "
        "nor the choice of the best epoch uses. "
        f"One seed; attacks are {_describe_norms(record['threat'])} with one start. PGD-20 is not the strongest attack there is."
    )
