"""Messages about a training: remarks before and after it, errors with their position, and command lines to resume it."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deat.attack_schedules import Schedule, ScheduleState
from deat.core.batch_buffers import Budget
from deat.core.epoch_sums import EpochRecord
from deat.data.image_label_checks import noun_of_shape
from deat.errors import NumericalError, UsageError
from deat.evaluation.intervals import newcombe_interval
from deat.tasks import CLASSIFICATION, Task
from deat.utils.anonymize_paths import restore_user_paths
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.text import format_eps, quote_for_shell
from deat.utils.user_code import is_file_spec

if TYPE_CHECKING:
    from deat.training.trainer import Trainer
    from deat.training.validation import Validator

FEW_HELD_OUT_IMAGES = 100
"""With fewer held-out images than this, a remark is made: one image is more than a percentage point."""

DOMINANT_CLASS_FACTOR = 1.5
"""A class with more than this many times an equal share of the held-out images dominates accuracy."""

LARGE_NATURAL_DROP = 0.3
"""A fall of natural accuracy to the best epoch that calls for a remark."""

EARLIEST_EPOCH_TO_TELL = 4
"""How many epochs must be finished before a k that does not grow is reported."""


def find_output_problems(outputs: Tensor, num_classes: int, task: Task = CLASSIFICATION) -> list[str]:
    """Find problems of a network's outputs that do not prevent training.

    Args:
        outputs: The outputs for a few images, images x outputs, with their autograd graph.
        num_classes: The number of classes of the data.
        task: What outputs mean.

    Returns:
        A message for each problem.
    """
    problems = []
    if task.are_probabilities(outputs):
        problems.append(
            "the model's outputs are probabilities, those of a softmax or a sigmoid. Return logits, without it: the loss "
            "applies it itself, and applied twice it hardly lets the loss fall."
        )
    if task.reads_logits and outputs.dim() > 1 and outputs.shape[1] > num_classes:
        problems.append(
            f"the model has {outputs.shape[1]:,} outputs, and the data {num_classes:,} classes. That works, since the others "
            "learn to be never chosen, but a last layer with one output per class learns faster."
        )
    return problems


def collect_start_notes(trainer: "Trainer") -> list[str]:
    """Collect remarks to make before training: that few images are held out to choose the best epoch."""
    held_out = trainer.validator.source if trainer.validator else None
    if held_out is None or trainer.task.is_graded:  # graded epochs are not compared example by example
        return []
    n, noun = held_out.num_examples, noun_of_shape(held_out.shape)
    if n >= FEW_HELD_OUT_IMAGES:
        return []
    resolution = 100 * newcombe_interval(0.5, 0.5, n)[1]
    return [
        f"only {n} {noun} are held out to choose the best epoch: each is worth {100 / n:.1f} points, and epochs less "
        f"than about {resolution:.0f} points apart are statistically indistinguishable; of these the best natural accuracy "
        "is chosen. Hold out more (--held-out), or evaluate the last epoch too (--epoch last of deat evaluate)."
    ]


def describe_missing_growth(trainer: "Trainer") -> str | None:
    """Say once, while it can still be changed, that k has not grown; see `explain_missing_growth`."""
    return explain_missing_growth(
        trainer.schedule, trainer.schedule_state, _epoch_records(trainer), trainer.config.epochs
    )


def explain_missing_growth(
    schedule: Schedule, state: ScheduleState, records: Sequence[EpochRecord], epochs: int
) -> str | None:
    """Say once, while it can still be changed, that k has not grown.

    That is after a third of the epochs, or already after the fourth one where k is unlikely ever to grow.

    Args:
        schedule: The schedule.
        state: Its state after the last finished epoch.
        records: The records of all finished epochs.
        epochs: The number of epochs of the training.

    Returns:
        The message after that epoch; None after the others, or if k grew or does not depend on training.
    """
    num_done, third = len(records), max(EARLIEST_EPOCH_TO_TELL, -(-epochs // 3))
    if num_done not in (EARLIEST_EPOCH_TO_TELL, third) or num_done >= epochs:
        return None
    is_told_early = schedule.is_stuck(state, records[:EARLIEST_EPOCH_TO_TELL])
    if num_done != (EARLIEST_EPOCH_TO_TELL if is_told_early else third):
        return None
    reason = schedule.explain_no_growth(state, records)
    return reason and f"after {num_done} of {epochs} epochs {reason}"


def _epoch_records(trainer: "Trainer") -> list[EpochRecord]:
    return [
        EpochRecord(s.epoch, s.loss, s.train_accuracy, s.magnitude, s.examples, measured=s.measured or {})
        for s in trainer.history
    ]


def collect_result_notes(trainer: "Trainer") -> list[str]:
    """Collect remarks on a finished training: best weights at chance, lost natural accuracy, or a k that never grew."""
    notes = (
        _chance_level_note(trainer),
        _forgetting_note(trainer),
        _missing_verdicts_note(trainer),
        trainer.schedule.explain_no_growth(trainer.schedule_state, _epoch_records(trainer)),
    )
    return [note for note in notes if note]


def collect_partial_notes(trainer: "Trainer") -> list[str]:
    """Collect remarks on an interrupted training, of which at least one epoch is finished."""
    moment = "that moment" if trainer.batches_done else "the last finished epoch"
    partial = (
        f"interrupted{describe_stop_position(trainer)}: a partial result. Its model has the weights of {moment}, and "
        f"load_best() loads those of epoch {trainer.best.snapshot.epoch + 1}. With checkpoints='some/folder' the same call "
        "of fit would resume."
    )
    notes = (partial, _chance_level_note(trainer), _forgetting_note(trainer), _missing_verdicts_note(trainer))
    return [note for note in notes if note]


def _chance_level_note(trainer: "Trainer") -> str | None:
    best, validator = trainer.best.snapshot, trainer.validator
    bound = None if validator is None else validator.chance_upper_bound
    if validator is None or best.natural is None or bound is None or best.natural > bound:
        return None
    n, noun = validator.source.num_examples, noun_of_shape(validator.source.shape)
    if not validator.task.class_labels(validator.labels):
        name = validator.task.metric_names[0]
        return (
            f"the best weights (epoch {best.epoch + 1}) are no better than a constant answer: without any attack {name} is "
            f"{best.natural:.3g} on {n:,} held-out examples, and that of a constant answer is {validator.chance:.3g}. Train "
            "with a smaller learning rate (lr, --lr), for more epochs or in smaller batches."
        )
    return (
        f"the best weights (epoch {best.epoch + 1}) are at chance: without any attack {best.natural:.1%} of "
        f"{n:,} held-out {noun} are right, and a constant answer gets {validator.chance:.1%}. Train with a smaller "
        f"learning rate (lr, --lr), for more epochs or in smaller batches, or hold out more {noun} (val, --held-out)."
        f"{_class_imbalance_note(validator)}"
    )


def _class_imbalance_note(validator: "Validator") -> str:
    """Return a remark if one class is so common that always answering it looks best."""
    equal, chance = 1 / validator.source.num_classes, validator.chance or 0.0
    spread = math.sqrt(equal * (1 - equal) / validator.source.num_examples)
    # In a small sample the largest class exceeds an equal share by chance.
    if chance <= max(DOMINANT_CLASS_FACTOR * equal, equal + 3 * spread):
        return ""
    return (
        f" One class has {chance:.0%} of these, so a network that only answers that class looks best: take "
        "as many images of each class, for training and for validation (val/, or val and a loader's sampler in Python)."
    )


def _forgetting_note(trainer: "Trainer") -> str | None:
    """Return a remark if natural accuracy fell far before the best epoch, as when initial weights are lost."""
    best = trainer.best.snapshot
    validated = [s for s in trainer.history[: best.epoch] if s.val_natural is not None]
    peak = max(validated, key=lambda s: s.val_natural or 0.0, default=None)
    if peak is None or best.natural is None or (peak.val_natural or 0.0) - best.natural <= LARGE_NATURAL_DROP:
        return None
    name, style = (trainer.task.metric_names[0], ".3f") if trainer.task.is_graded else ("accuracy", ".1%")
    return (
        f"natural {name} fell from {peak.val_natural:{style}} (epoch {peak.epoch + 1}) to {best.natural:{style}} (epoch "
        f"{best.epoch + 1}, the best one), so training lost most of what the network had learnt. Take a smaller "
        "radius (--eps) or learning rate (lr, --lr)."
    )


def _missing_verdicts_note(trainer: "Trainer") -> str | None:
    """Return a remark if the best epoch was chosen among epochs of an older version, which saved no verdicts."""
    missing = [scored.epoch + 1 for scored in trainer.best.scored if scored.correct is None]
    if not missing or not trainer.best.robust or trainer.task.is_graded:
        return None
    return (
        f"epoch {missing[-1]} is from a checkpoint of an older version, without a verdict for each held-out example: it "
        "was compared with other epochs by accuracy alone."
    )


def make_numerical_error(
    message: str, *, epoch: int, batch: int, budget: Budget, lr: float, seed: int
) -> NumericalError:
    """Make an error that names the position in training.

    Args:
        message: What is wrong, and what to do.
        epoch: The epoch, from 0.
        batch: The batch of the epoch, from 1.
        budget: The number and the length of the adversary's steps.
        lr: The learning rate.
        seed: The seed of the run.

    Returns:
        The error; the position is in its message and in its facts, which are recorded with the run.
    """
    position = f"k {budget.k}, alpha {format_eps(budget.step_size)}, lr {lr:.4g}, seed {seed}"
    facts = {"epoch": epoch + 1, "batch": batch, "k": budget.k, "alpha": budget.step_size, "lr": lr, "seed": seed}
    return NumericalError(f"{message} It happened at {position}.", **facts)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def is_dead_worker(error: Exception) -> bool:
    """Return whether an error means that a process that loads images died; torch raises it at any point."""
    return re.match(r"DataLoader worker \(pid.*\) (exited unexpectedly|is killed by signal)", str(error)) is not None


def out_of_memory_message(epoch: int, batch_size: int) -> str:
    """Return what to do after memory ran out. The batch size is never changed automatically: it changes the results."""
    return (
        f"out of memory in epoch {epoch + 1} with batch_size {batch_size}. Start a run with a smaller batch_size, a "
        "smaller model or precision bf16."
    )


def raise_if_nondeterministic(error: Exception) -> None:
    """Raise a helpful error if torch has no deterministic form of an operation of the network.

    Raises:
        UsageError: That is what `error` means.
    """
    text = str(error)
    if "deterministic" in text and "use_deterministic_algorithms" in text:
        reason = text.strip().split("\n")[0].split(". ")[0]
        raise UsageError(
            f"this network cannot be trained deterministically: {reason}. Omit --deterministic; a resumed run "
            "is then not exact."
        ) from error


CODE_FLAGS = {"resume": ("method", "model"), "evaluate": ("model",)}
"""The flags of each command that may name a file of code."""


def format_command(
    verb: str, folder: Path, request: Mapping[str, Any], distributed: Distributed = SINGLE_PROCESS
) -> str:
    """Format the command line that resumes or evaluates a run.

    Args:
        verb: The command: "resume" or "evaluate".
        folder: The run's folder.
        request: The run's recorded request.
        distributed: The present processes; the command starts as many.

    Returns:
        The command line, quoted for a shell.
    """
    specs = {name: str(request.get(name)) for name in CODE_FLAGS[verb]}
    flags = [format_code_flag(name, spec) for name, spec in specs.items() if is_file_spec(spec)]
    return " ".join([_launcher_prefix(distributed), verb, quote_for_shell(str(folder)), *flags])


def format_code_flag(name: str, spec: str) -> str:
    """Format a flag that names a file of the user's code, from its recorded form."""
    return f"--{name} {quote_for_shell(restore_user_paths(spec))}"


def describe_stop_position(trainer: "Trainer") -> str:
    """Describe where training was interrupted; empty after the last epoch."""
    batch = f", after batch {trainer.batches_done}" if trainer.batches_done else ""
    epochs = trainer.config.epochs
    return f" in epoch {trainer.epoch + 1} of {epochs}{batch}" if trainer.epoch < epochs else ""


def describe_resume_position(trainer: "Trainer") -> str:
    """Describe where a training resumes."""
    part = f"batch {trainer.batches_done + 1}" if trainer.batches_done < len(trainer.train) else "its validation"
    return f"epoch {trainer.epoch + 1}" + (f", {part}" if trainer.batches_done else "")


def _launcher_prefix(distributed: Distributed) -> str:
    """Return how deat is started; for several processes by torchrun, where `--` ends torchrun's own flags."""
    if not distributed.is_multiprocess:
        return "deat"
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", distributed.size))
    if num_local < distributed.size:
        return f"(started as before, in {distributed.size} processes) deat"
    return f"torchrun --standalone --nproc-per-node={num_local} -m -- deat"
