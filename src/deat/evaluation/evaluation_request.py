"""The arguments of an evaluation: what they are, and the checks that refuse bad ones before any work."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.data import BatchSource
from deat.data.image_label_checks import describe_labels_out_of_range, describe_largest_label
from deat.errors import CheckpointError, UsageError
from deat.evaluation.attack_verifier import AttackLike
from deat.evaluation.attacks import is_natural
from deat.evaluation.kept_examples import AdversarialExamples
from deat.evaluation.results import read_evaluation_json
from deat.models.interface_checks import check_dtype, check_input_unmodified, describe_output, logits_hint
from deat.tasks import CLASSIFICATION, Task, get_task
from deat.threat import ThreatModel
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.float32_precision import exact_float32
from deat.utils.numbers import convert_number_fields, is_int_at_least
from deat.utils.safe_write import check_no_symlinks
from deat.utils.torch_contexts import eval_mode


@dataclass(frozen=True)
class EvaluationRequest:
    """The arguments of one `deat.evaluate` call, checked and resolved. `deat.evaluate` documents each of them."""

    model: nn.Module
    threat: ThreatModel
    attacks: list[AttackLike]
    block: int
    seed: int = 0
    cascade: bool = False
    n: int | None = None
    sanity: bool = True
    precision: str = "auto"
    engine: str = "graph"
    resume_log: str | Path | None = None
    about: dict[str, Any] = field(default_factory=dict)
    distributed: Distributed = SINGLE_PROCESS
    task: Task = CLASSIFICATION
    ball: str = ""
    examples: AdversarialExamples | None = None

    def __post_init__(self) -> None:
        convert_number_fields(self)  # NumPy numbers cannot be written as JSON

    def count_images(self, source: BatchSource) -> int:
        """Return how many images of a source are evaluated."""
        return source.num_examples if self.n is None else min(self.n, source.num_examples)


def call_on_one_image(model: nn.Module, x: Tensor) -> Any:
    """Call the model on one image and return its output, whatever it is.

    Args:
        model: The model to evaluate.
        x: At least one image, on the model's device.

    Raises:
        UsageError: The model modifies its input, or its weights are not float32.
    """
    image = x[:1].clone()
    try:
        with exact_float32(image.device), torch.no_grad(), eval_mode(model):
            output = model(image)
    except RuntimeError as error:
        check_dtype(model, image, error)
        raise
    check_input_unmodified(image, x[:1])
    return output


def count_outputs(
    logits: Any, source: BatchSource, task: Task = CLASSIFICATION, label_shape: Sequence[int] = ()
) -> int:
    """Return the number of logits, or of other outputs, in what a model has returned for one image.

    Args:
        logits: What it has returned.
        source: The data, whose number of classes is the least number of logits.
        task: What outputs and labels mean.
        label_shape: The shape of one image's label.

    Raises:
        UsageError: The model does not return what the task reads, or has fewer logits than the data has classes.
    """
    if isinstance(logits, Tensor) and logits.is_floating_point():
        if task.accepts_outputs(logits, 1, source.num_classes, label_shape):
            return max(2, logits.shape[1] if logits.dim() > 1 else 1) if task.reads_logits else source.num_classes
        if task.accepts_outputs(logits, 1, 0, label_shape):
            images = getattr(source, "images", None)
            hint = describe_labels_out_of_range(images, logits.shape[1]) or describe_largest_label(
                source, logits.shape[1]
            )
            raise UsageError(
                f"the model has {logits.shape[1]} outputs, but the data has {source.num_classes} {task.outputs_noun}."
                f"{task.explain_too_many_classes(source.num_classes) or hint}"
            )
    raise UsageError(
        f"the model answers one image with {describe_output(logits)}; let it return "
        f"{task.describe_expected_outputs(1, source.num_classes, label_shape)}."
        f"{logits_hint(logits, lambda part: task.accepts_outputs(part, 1, source.num_classes, label_shape))}"
    )


def choose_task(task: str | Task | None, data: Any) -> Task:
    """Return the task of an evaluation: the one that is given, or the data's own, or classification.

    Raises:
        UsageError: No task has this name.
    """
    if task is not None:
        return get_task(task)
    own = getattr(data, "task", None)
    return own if isinstance(own, Task) else CLASSIFICATION


def check_task(task: Task, attacks: list[AttackLike], cascade: bool) -> None:
    """Check that the attacks can be used on a task.

    Raises:
        UsageError: An attack needs what the task does not define, or `cascade` is set where answers have grades.
    """
    for attack in attacks:
        if callable(check := getattr(attack, "check_task", None)):
            check(task)
    if cascade and task.is_graded:
        raise UsageError(
            f"cascade stops attacking an example once it is wrong, and answers of {task.name} are more or less wrong. Leave "
            "cascade out."
        )


def check_about(about: Any) -> dict[str, Any]:
    """Return a copy of the values to store under `about` in evaluation.json.

    Args:
        about: A mapping of JSON values, or None.

    Raises:
        UsageError: It is no mapping, or holds a value that JSON does not have, such as NaN.
    """
    try:
        return dict(json.loads(json.dumps(dict(about or {}), allow_nan=False)))
    except (TypeError, ValueError):
        raise UsageError(f"about must be a dict of JSON values, not {about!r}.") from None


def check_output_files(resume_log: Any, save: Any) -> None:
    """Check that the files of an evaluation can be written, before hours of work rather than after.

    Args:
        resume_log: The path of the resume log, or None.
        save: The path of evaluation.json, a function that saves the result, or None.

    Raises:
        CheckpointError: A path is a symbolic link, or `save` is in a folder that cannot be written to.
        UsageError: `save` exists and is not an evaluation.json.
    """
    check_no_symlinks(Path(file) for file in (resume_log, save) if isinstance(file, str | Path))
    if isinstance(save, str | Path):
        path = Path(save).absolute()
        nearest = next(folder for folder in path.parents if folder.exists())
        if path.is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise CheckpointError(f"save {str(save)!r} cannot be written; name a file in a folder you can write to.")
        check_replaceable(Path(save), "save")


def check_replaceable(path: Path, option: str) -> None:
    """Check that a file does not exist or is an earlier evaluation.json.

    Args:
        path: The file that is to be written.
        option: The name of the argument or flag that the path was given as.

    Raises:
        UsageError: The file holds something else.
    """
    if path.exists() and read_evaluation_json(path) is None:
        raise UsageError(
            f"{option} {str(path)!r} exists and is not an evaluation.json, so it is not replaced. "
            f"Give {option} another file."
        )


def check_evaluation_arguments(
    attacks: list[AttackLike], n: int | None, block: int, seed: int = 0, threads: int | None = None
) -> None:
    """Check the attacks and numbers of an evaluation, before any data is read.

    Args:
        attacks: The attacks, whose names must differ.
        n: The number of images, or None for all.
        block: The number of images that are attacked at once.
        seed: The seed of all random draws.
        threads: The number of CPU threads, or None for the default.

    Raises:
        UsageError: There is no attack, a name is taken, or a number is not a whole number in its range.
    """
    names = [attack.name for attack in attacks]
    if not names:
        raise UsageError("no attack was named; use at least one, such as natural, pgd-20 or aa.")
    if "worst" in names:
        raise UsageError("an attack cannot be named 'worst', which means all attacks together.")
    if any(attack.name == "natural" and not is_natural(attack) for attack in attacks):
        raise UsageError("an attack cannot be named 'natural', which means no attack.")
    if len(set(names)) < len(names):
        raise UsageError(f"an attack is named twice in {names}; name each once.")
    if n is not None and not is_int_at_least(n, 1):
        raise UsageError(f"n must be a number of images >= 1, not {n!r}.")
    if not is_int_at_least(block, 1):
        raise UsageError(f"block must be a number of images >= 1, not {block!r}.")
    if not is_int_at_least(seed, 0):
        raise UsageError(f"seed must be a whole number >= 0, not {seed!r}.")
    if threads is not None and not is_int_at_least(threads, 1):
        raise UsageError(f"threads must be a whole number >= 1, not {threads!r}.")
