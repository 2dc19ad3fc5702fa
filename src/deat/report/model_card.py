"""The model card of a run: README.md with the metadata header that Hugging Face reads, from the run's own records."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from deat.data.image_label_checks import noun_of_shape
from deat.errors import DataError, DeatError, UsageError
from deat.evaluation.results import Evaluation
from deat.report.run_results import RunResults, load_run_results
from deat.runs.record_files import RUN_FILE, WATCH_FILE, RunRecord, read_record
from deat.runs.resolve_request import get_default_lr
from deat.runs.run_dir import has_checkpoint
from deat.runs.saved_run import load_evaluations
from deat.tasks.classification import Classification
from deat.threat import ThreatModel, format_threat
from deat.training.epoch_records import read_watch
from deat.training.overfit_watch import NOTE_ACTION
from deat.utils.text import escape_markdown, format_duration, format_eps, format_markdown_table, make_printable
from deat.utils.user_code import is_file_spec
from deat.version import VERSION

CARD_FILE = "README.md"
LICENSE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9.+-]*"
_MAX_LISTED_CLASSES = 50
_BALLS = {
    "linf": "each value may change by at most eps",
    "l2": "the Euclidean length of the change is at most eps",
    "l1": "the sum of the changes of all values is at most eps",
}


def render_model_card(
    folder: Path, *, title: str | None = None, repo: str | None = None, license: str | None = None, epoch: str = "best"
) -> str:
    """Render the model card of a run: results with intervals and flags, threat model, training, use and limits.

    Args:
        folder: The run's folder, with run.json.
        title: The card's title; by default the method, the network and the data.
        repo: The repository that the card is for, as in "you/model"; by default the folder's name stands for it.
        license: The licence of the model for the header, as Hugging Face spells it, such as "mit".
        epoch: Which weights the card is for.

    Returns:
        Markdown with a metadata header.

    Raises:
        UsageError: If the licence is no identifier, or the folder has checkpoints alone.
        DataError, CheckpointError: If the folder is no run, or a record in it is damaged.
    """
    if license is not None and not re.fullmatch(LICENSE_PATTERN, license):
        raise UsageError(
            f"license {license!r} is no identifier. Write it as Hugging Face does: mit, apache-2.0, other."
        )
    if not (folder / RUN_FILE).is_file() and has_checkpoint(folder):
        raise UsageError(f"{str(folder)!r} has checkpoints and no {RUN_FILE}: save the run with result.save(FOLDER).")
    record, results = read_record(folder), load_run_results(folder)
    raw = results.record
    if raw is None:
        raise DataError(f"{str(folder)!r} has no {RUN_FILE}.")
    found = load_evaluations(folder)
    evaluations = sorted(found.values(), key=_strength, reverse=True)
    network, data = str(raw["model"]["name"]), str(raw["data"]["name"])
    name = title or f"{raw['method']['name']} {network} on {data}"
    shape = ", ".join(map(str, record.image_shape)) or "C, H, W"
    is_image, is_classifier = len(record.image_shape) in (0, 3), isinstance(record.task, Classification)
    can_be_predicted = is_image and is_classifier and record.threat.is_plain
    needs_code = is_file_spec(network) or not record.request.model
    card: str = _template().render(
        metadata=_format_metadata(record, raw, evaluations, name, license),
        title=name,
        summary=_summarize(record, raw, evaluations, epoch),
        evaluations=[_describe_evaluation(evaluation) for evaluation in evaluations],
        threat=list(_describe_threat(record)),
        training=list(_describe_training(record, raw, results)),
        classes=_list_classes(record.classes),
        pieces={
            "code": needs_code,
            "source": json.dumps(repo or folder.resolve().name),
            "repo": repo,
            "folder": folder.resolve().name,
            "model": ", model=Net()" if needs_code else "",
            "inputs": noun_of_shape(record.image_shape or None),
            "outputs": "logits" if is_classifier else "outputs",
            "nouns": record.task.outputs_noun.capitalize(),
            "range": _format_box(record.threat),
            "can_be_predicted": can_be_predicted,
            "shape": shape,
            "normalized": raw["data"].get("normalized_by") is not None,
        },
        limits=list(_list_limits(record, raw, results, evaluations)),
        license=license,
        version=VERSION,
    )
    return card


def _strength(evaluation: Evaluation) -> tuple[bool, bool, bool, int, int]:
    """What makes an evaluation say more: attacks at all, all images, AutoAttack, many images, many attacks."""
    attacks = _attacks_of(evaluation)
    complete = not evaluation.settings.get("sample")
    return evaluation.has_worst_case, complete, "aa" in attacks, evaluation.num_images, len(attacks)


def _attacks_of(evaluation: Evaluation) -> list[str]:
    return [result.name for result in evaluation.results if result.name != "natural"]


def _format_metadata(
    record: RunRecord, raw: dict[str, Any], evaluations: Sequence[Evaluation], name: str, license: str | None
) -> str:
    """The YAML header; texts are written as JSON strings, which are YAML too."""
    is_classifier = isinstance(record.task, Classification) and len(record.image_shape) == 3
    lines = [f"license: {license}"] if license else []
    lines += ["library_name: deat", "tags:", "- adversarial-robustness", "- adversarial-training"]
    lines += [f"- {_yaml(str(raw['method']['name']))}"]
    lines += ["pipeline_tag: image-classification"] if is_classifier else []
    if not evaluations or not is_classifier:
        return "\n".join(lines)
    evaluation = evaluations[0]
    threat = format_threat(evaluation.settings["threat"])
    data = _yaml(_evaluated_data(evaluation) or str(raw["data"]["name"]))
    lines += ["model-index:", f"- name: {_yaml(name)}", "  results:"]
    lines += ["  - task:", "      type: image-classification", "    dataset:"]
    lines += [f"      name: {data}", f"      type: {data}", "      split: test", "    metrics:"]
    for attack, share in evaluation.accuracy.items():
        under = "the worst of all attacks" if attack == "worst" else attack
        label = "natural accuracy" if attack == "natural" else f"accuracy under {under}, {threat}"
        label += _sample_text(evaluation)
        lines += ["    - type: accuracy", f"      name: {_yaml(label)}", f"      value: {100 * share:.2f}"]
    return "\n".join(lines)


def _yaml(text: str) -> str:
    return json.dumps(make_printable(text), ensure_ascii=False)


def _sample_text(evaluation: Evaluation) -> str:
    if not evaluation.settings.get("sample"):
        return ""
    return f", on {evaluation.num_images:,} of {evaluation.settings['available']:,} {evaluation.inputs_noun}"


def _evaluated_data(evaluation: Evaluation) -> str:
    return str(evaluation.settings.get("about", {}).get("data") or "")


def _summarize(record: RunRecord, raw: dict[str, Any], evaluations: Sequence[Evaluation], epoch: str) -> str:
    settings, threat = raw["settings"], record.threat
    text = (
        f"{raw['model']['name']} ({raw['model'].get('parameters', 0):,} parameters), trained with {raw['method']['name']} "
        f"on {raw['data']['name']} for {settings['epochs']} epochs to resist "
        f"{_name_perturbations(threat)}. The weights are those of the {epoch} epoch."
    )
    attacked = [e for e in evaluations if e.has_worst_case]
    if not attacked or evaluations[0].task.is_graded:
        return f"{text} Its robustness was not evaluated." if not attacked else text
    best = attacked[0]
    natural = f"{best.accuracy['natural']:.2%} without an attack and " if "natural" in best.accuracy else ""
    attacks = _attacks_of(best)
    under = attacks[0] if len(attacks) == 1 else f"the worst of {', '.join(attacks[:-1])} and {attacks[-1]}"
    return f"{text} Accuracy: {natural}{best.worst:.2%} under {under}{_sample_text(best)}."


def _describe_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    settings = evaluation.settings
    about = settings.get("about", {})
    sample = f" (a sample of {settings['available']:,})" if settings.get("sample") else ""
    weights = f"The {about['epoch']} epoch's weights on" if about.get("epoch") else "On"
    data = f" of {about['data']}" if about.get("data") else ""
    intro = (
        f"{weights} {evaluation.num_images:,} test {evaluation.inputs_noun}{sample}{data}, against "
        f"{format_threat(settings['threat'])}, seed {settings['seed']}:"
    )
    is_graded = evaluation.task.is_graded
    rows = []
    for name, share in evaluation.accuracy.items():
        low, high = evaluation.intervals[name]
        shown = (
            [f"{share:.4f}", f"{low:.4f} to {high:.4f}"] if is_graded else [f"{share:.2%}", f"{low:.2%} to {high:.2%}"]
        )
        rows.append(["worst of all" if name == "worst" else name, *shown])
    notes = [f"Flag {flag.name}: {flag.seen}. {flag.advice}" for flag in evaluation.flags]
    if not evaluation.sanity_checked:
        notes.append("The sanity checks were not run, so the absence of flags means nothing.")
    elif not evaluation.flags:
        notes.append("The sanity checks raised no flag.")
    if settings.get("cascade"):
        notes.append(f"A cascade: each attack saw only the {evaluation.inputs_noun} that those before it did not fool.")
    header = ["attack", evaluation.metric, "95 % interval"]
    return {"intro": intro, "table": format_markdown_table(header, rows), "notes": notes}


def _name_perturbations(threat: ThreatModel) -> str:
    return " and ".join(f"{ball.name} perturbations of eps {format_eps(ball.eps)}" for ball in threat.balls)


def _describe_threat(record: RunRecord) -> Iterator[str]:
    threat = record.threat
    if len(threat.balls) > 1:
        yield "The attacker may use any of these, another one for each example:"
    for ball in threat.balls:
        yield f"{ball.name}, eps {format_eps(ball.eps)}: {_BALLS.get(ball.name, 'a set of its own')}."
    if threat.scale is not None:
        yield "Radii are in units of a scale of each feature, such as its deviation: scale in run.json."
    if threat.mutable is not None:
        fixed = threat.describe_fixed()
        yield f"{fixed[0]:,} of {fixed[1]:,} features cannot change: mutable in run.json."
    yield f"Perturbed values stay in {_format_box(threat)}." if threat.box else "Values have no bounds."
    yield "The attacker knows the network and its weights, and chooses each perturbation after seeing the example."


def _format_box(threat: ThreatModel) -> str:
    return f"[{threat.box[0]:g}, {threat.box[1]:g}]" if threat.box else "any range"


def _describe_training(record: RunRecord, raw: dict[str, Any], results: RunResults) -> Iterator[tuple[str, str]]:
    config, data, history = record.config, raw["data"], results.history
    yield (
        "method",
        f"{raw['method']['name']} ({raw['method'].get('summary') or 'no summary'}), rules {record.request.rules}",
    )
    noun = noun_of_shape(record.image_shape or None)
    yield "data", f"{data['train']:,} training {noun} of {data['name']}, {data.get('held_out', 0):,} held out"
    if data.get("digest"):
        yield "data digest", str(data["digest"])
    if record.request.init:
        yield "initial weights", f"{record.request.init}, SHA-256 {raw.get('digest_of_init')}"
    yield "epochs", f"{len(history)} of {config.epochs}, batches of {config.batch_size}, seed {config.seed}"
    lr = config.lr or get_default_lr(data["name"], config.optimizer)
    yield "optimiser", f"lr {lr:g} ({config.lr_schedule}), weight decay {config.weight_decay:g}"
    if history:
        yield "cost", f"{history[-1].backprops:,} backprops, {format_duration(results.train_seconds)} of training"
        yield "attack steps k", f"{min(e.k for e in history)} to {max(e.k for e in history)}"
    yield (
        "machine",
        f"{raw.get('device', 'unknown')}, {raw.get('precision', 'unknown')}, {raw.get('processes', 1)} process(es)",
    )
    yield "versions", ", ".join(f"{name} {version}" for name, version in raw.get("versions", {}).items())
    if reason := raw.get("best_epoch", {}).get("reason") if isinstance(raw.get("best_epoch"), dict) else None:
        yield "choice of the epoch", str(reason)


def _list_classes(classes: Sequence[str]) -> str:
    shown = ", ".join(classes[:_MAX_LISTED_CLASSES])
    more = len(classes) - _MAX_LISTED_CLASSES
    return f"{shown}, and {more:,} more (in run.json)" if more > 0 else shown or "Not recorded."


def _list_limits(
    record: RunRecord, raw: dict[str, Any], results: RunResults, evaluations: Sequence[Evaluation]
) -> Iterator[str]:
    threat, attacked = record.threat, [e for e in evaluations if e.has_worst_case]
    yield (
        f"The numbers are for {_name_perturbations(threat)}. They say nothing about larger "
        "ones, other norms, other kinds of changes, or other data."
    )
    if not attacked:
        yield "Robustness was not measured: no evaluation with an attack of more than one step is in the run's folder."
    elif not any("aa" in _attacks_of(e) for e in attacked):
        why = (
            ""
            if record.threat.is_plain and isinstance(record.task, Classification)
            else ", which is for images in [0, 1]"
        )
        yield f"No AutoAttack was run{why}. A stronger attack may find adversarial examples where these attacks found none."
    if attacked and attacked[0].settings.get("sample"):
        noun = attacked[0].inputs_noun
        yield f"The evaluation is of a sample of the test {noun}, and not comparable with numbers on all of them."
    yield "A value under attack is measured, not proven: it is an upper bound of the true one."
    yield f"One training run with seed {record.config.seed}: other seeds give other numbers."
    if results.history and len(results.history) < record.config.epochs:
        yield f"Training is not complete: {len(results.history)} of {record.config.epochs} epochs."
    for alarm in _read_alarms(results.path):
        yield f"The overfitting watch reported: {alarm}"
    for flag in dict.fromkeys(flag.name for e in evaluations for flag in e.flags):
        yield f"An evaluation raised the flag {flag}, see above."
    if record.task.reads_logits:
        yield "The network's probabilities are not calibrated."


def _read_alarms(folder: Path) -> Iterator[str]:
    try:
        events = list(read_watch(folder / WATCH_FILE)) if (folder / WATCH_FILE).is_file() else []
    except (OSError, ValueError, TypeError, RecursionError, DeatError):
        events = []
    yield from (f"epoch {e.epoch + 1}: {e.reason}" for e in events if e.reason and e.action != NOTE_ACTION)


@cache
def _template() -> Any:
    environment = Environment(  # of Markdown, whose texts the filter md escapes
        loader=PackageLoader("deat.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = escape_markdown
    return environment.get_template("model_card.md.j2")
