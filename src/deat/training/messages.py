"""What a person should know of a training beside its numbers: before it begins, and when it has ended."""

import math
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deat.core.buffers import Budget
from deat.core.meter import EpochRecord
from deat.errors import NumericalError, UsageError
from deat.evaluation.intervals import newcombe_interval
from deat.evaluation.sanity import are_probabilities
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.numbers import format_eps
from deat.utils.paths import restore_user_paths
from deat.utils.user_code import is_file_spec

if TYPE_CHECKING:
    from deat.training.trainer import Trainer
    from deat.training.validation import Validator

FEW_HELD_OUT_IMAGES = 100
"""Held-out images below which one is worth more than a point, and epochs differ by less than chance does."""


DOMINANT_CLASS_FACTOR = 1.5
"""How many times its equal share of the held-out images makes a class one that hides all others."""


LARGE_NATURAL_DROP = 0.3
"""A fall of natural accuracy, from one epoch to the one that is kept, that no training is meant to bring."""


def find_output_problems(outputs: Tensor, num_classes: int) -> list[str]:
    """What is strange about a network's outputs, with which training works badly or not as it may be meant."""
    found = []
    if are_probabilities(outputs):
        found.append(
            "the model's outputs are probabilities: none is negative and each row sums to one. Return logits, without "
            "the softmax, which the loss takes itself; twice, the loss hardly falls."
        )
    if outputs.shape[1] > num_classes:
        found.append(
            f"the model has {outputs.shape[1]:,} outputs, and the data {num_classes:,} classes. That works, as the others "
            "learn to be no answer; a last layer of as many outputs as classes learns faster."
        )
    return found


def collect_start_notes(trainer: "Trainer") -> list[str]:
    """That few images choose the best epoch, where so few are held out."""
    n = trainer.validator.source.num_examples if trainer.validator else FEW_HELD_OUT_IMAGES
    if n >= FEW_HELD_OUT_IMAGES:
        return []
    told_apart = 100 * newcombe_interval(0.5, 0.5, n)[1]
    return [
        f"only {n} images are held out to choose the best epoch: each is worth {100 / n:.1f} points, and epochs less "
        f"than about {told_apart:.0f} points apart cannot be told apart. Hold out more (--held-out), or judge the last "
        "epoch too (--epoch last of deat evaluate)."
    ]


def collect_result_notes(trainer: "Trainer") -> list[str]:
    """That the kept weights are at chance or have lost what was known, or that k stood still, where that is so."""
    records = [EpochRecord(s.epoch, s.loss, s.train_accuracy, s.magnitude, s.examples) for s in trainer.history]
    found = (
        _chance_level_note(trainer),
        _forgetting_note(trainer),
        trainer.schedule.explain_no_growth(trainer.state, records),
    )
    return [line for line in found if line]


def _chance_level_note(trainer: "Trainer") -> str | None:
    best, validator = trainer.best.snapshot, trainer.validator
    if validator is None or best.natural is None or best.natural > validator.chance_upper_bound:
        return None
    n = validator.source.num_examples
    return (
        f"the weights that were kept (epoch {best.epoch + 1}) are at chance: without any attack {best.natural:.1%} of "
        f"{n:,} held-out images are right, and one answer for all gets {validator.chance:.1%}. Train with a smaller "
        "learning rate (lr, --lr), for more epochs or in smaller batches, or hold out more images (val, --held-out)."
        f"{_class_imbalance_note(validator)}"
    )


def _class_imbalance_note(validator: "Validator") -> str:
    """That one class is so common that answering it always looks best, where it is."""
    equal = 1 / validator.source.num_classes
    spread = math.sqrt(equal * (1 - equal) / validator.source.num_examples)
    if validator.chance <= max(
        DOMINANT_CLASS_FACTOR * equal, equal + 3 * spread
    ):  # of few images one class has more by chance
        return ""
    return (
        f" One class has {validator.chance:.0%} of these, so that a network that only knows that one looks best: take "
        "as many images of each class, to train on and to choose by (val/, or val and a loader's sampler in Python)."
    )


def _forgetting_note(trainer: "Trainer") -> str | None:
    """That the kept weights know far less than an epoch before them did, as where weights that were given are lost."""
    best = trainer.best.snapshot
    known = [s for s in trainer.history[: best.epoch] if s.val_natural is not None]
    once = max(known, key=lambda s: s.val_natural or 0.0, default=None)
    if once is None or best.natural is None or (once.val_natural or 0.0) - best.natural <= LARGE_NATURAL_DROP:
        return None
    return (
        f"natural accuracy fell from {once.val_natural:.1%} (epoch {once.epoch + 1}) to {best.natural:.1%} (epoch "
        f"{best.epoch + 1}, which was kept for its robustness), so training lost most of what the network knew. A "
        "smaller radius (--eps) or learning rate (lr, --lr) keeps more of it."
    )


def make_numerical_error(
    message: str, *, epoch: int, batch: int, budget: Budget, lr: float, seed: int
) -> NumericalError:
    """An error that says where training was, in words and as facts for the run's record; epoch counts from 0."""
    where = f"k {budget.k}, alpha {format_eps(budget.step_size)}, lr {lr:.4g}, seed {seed}"
    facts = {"epoch": epoch + 1, "batch": batch, "k": budget.k, "alpha": budget.step_size, "lr": lr, "seed": seed}
    return NumericalError(f"{message} It happened at {where}.", **facts)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that there was no memory left."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def is_dead_worker(error: Exception) -> bool:
    """Whether a process that loads images is gone, which torch says wherever its parent happens to be."""
    return re.match(r"DataLoader worker \(pid.*\) (exited unexpectedly|is killed by signal)", str(error)) is not None


def out_of_memory_message(epoch: int, batch_size: int) -> str:
    """What to do when memory ran out; a smaller batch is another experiment, so only the user chooses it."""
    return (
        f"out of memory in epoch {epoch + 1} with batch_size {batch_size}. Start a run with a smaller batch_size, a "
        "smaller model or precision bf16."
    )


def raise_if_nondeterministic(error: Exception) -> None:
    """Say what to do where torch has no deterministic form of an operation of the network."""
    text = str(error)
    if "deterministic" in text and "use_deterministic_algorithms" in text:
        reason = text.strip().split("\n")[0].split(". ")[0]
        raise UsageError(
            f"this network cannot be trained deterministically: {reason}. Leave --deterministic away; a resumed run is "
            "then not exact."
        ) from error


CODE_FLAGS = {"resume": ("method", "model"), "evaluate": ("model",)}
"""What each command takes that may be code."""


def format_command(
    verb: str, folder: Path, request: Mapping[str, Any], distributed: Distributed = SINGLE_PROCESS
) -> str:
    """The command that does this to a run of that request, started by as many processes as work on it now."""
    named = {what: str(request.get(what)) for what in CODE_FLAGS[verb]}
    flags = [format_code_flag(what, spec) for what, spec in named.items() if is_file_spec(spec)]
    return " ".join([_launcher_prefix(distributed), verb, shlex.quote(str(folder)), *flags])


def format_code_flag(what: str, spec: str) -> str:
    """The flag that names code of the user's, as it is recorded."""
    return f"--{what} {shlex.quote(restore_user_paths(spec))}"


def describe_stop_position(trainer: "Trainer") -> str:
    """Where a training was when it was interrupted; nothing of one that was over."""
    batch = f", after batch {trainer.step}" if trainer.step else ""
    epochs = trainer.config.epochs
    return f" in epoch {trainer.epoch + 1} of {epochs}{batch}" if trainer.epoch < epochs else ""


def describe_resume_position(trainer: "Trainer") -> str:
    """Where a training goes on that has been taken up."""
    where = f"batch {trainer.step + 1}" if trainer.step < len(trainer.train) else "its validation"
    return f"epoch {trainer.epoch + 1}" + (f", {where}" if trainer.step else "")


def _launcher_prefix(distributed: Distributed) -> str:
    """deat, as torchrun starts it where there are several processes; `--` keeps our flags from torchrun."""
    if not distributed.is_multiprocess:
        return "deat"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", distributed.size))
    if here < distributed.size:
        return f"(as this was started, in {distributed.size} processes) deat"
    return f"torchrun --standalone --nproc-per-node={here} -m -- deat"
