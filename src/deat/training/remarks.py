"""What a person should know of a training beside its numbers: before it begins, and when it has ended."""

import math
from typing import TYPE_CHECKING

from torch import Tensor

from deat.evaluation.intervals import difference
from deat.evaluation.sanity import are_probabilities
from deat.schedules import EpochRecord

if TYPE_CHECKING:
    from deat.training.trainer import Trainer
    from deat.training.validation import Validator

FEW = 100
"""Held-out images below which one is worth more than a point, and epochs differ by less than chance does."""


COMMON = 1.5
"""How many times its equal share of the held-out images makes a class one that hides all others."""


FORGOT = 0.3
"""A fall of natural accuracy, from one epoch to the one that is kept, that no training is meant to bring."""


def odd_outputs(outputs: Tensor, classes: int) -> list[str]:
    """What is strange about a network's outputs, with which training works badly or not as it may be meant."""
    found = []
    if are_probabilities(outputs):
        found.append(
            "the model's outputs are probabilities: none is negative and each row sums to one. Return logits, without "
            "the softmax, which the loss takes itself; twice, the loss hardly falls."
        )
    if outputs.shape[1] > classes:
        found.append(
            f"the model has {outputs.shape[1]:,} outputs, and the data {classes:,} classes. That works, as the others "
            "learn to be no answer; a last layer of as many outputs as classes learns faster."
        )
    return found


def beforehand(trainer: "Trainer") -> list[str]:
    """That few images choose the best epoch, where so few are held out."""
    n = trainer.validator.source.num_examples if trainer.validator else FEW
    if n >= FEW:
        return []
    told_apart = 100 * difference(0.5, 0.5, n)[1]
    return [
        f"only {n} images are held out to choose the best epoch: each is worth {100 / n:.1f} points, and epochs less "
        f"than about {told_apart:.0f} points apart cannot be told apart. Hold out more (--held-out), or judge the last "
        "epoch too (--epoch last of deat evaluate)."
    ]


def afterwards(trainer: "Trainer") -> list[str]:
    """That the kept weights are at chance or have lost what was known, or that k stood still, where that is so."""
    records = [EpochRecord(s.epoch, s.loss, s.train_accuracy, s.magnitude, s.examples) for s in trainer.history]
    found = (_at_chance(trainer), _forgot(trainer), trainer.schedule.stuck(trainer.state, records))
    return [line for line in found if line]


def _at_chance(trainer: "Trainer") -> str | None:
    best, validator = trainer.best.snapshot, trainer.validator
    if validator is None or best.natural is None or best.natural > validator.luck:
        return None
    n = validator.source.num_examples
    return (
        f"the weights that were kept (epoch {best.epoch + 1}) are at chance: without any attack {best.natural:.1%} of "
        f"{n:,} held-out images are right, and one answer for all gets {validator.chance:.1%}. Train with a smaller "
        "learning rate (lr, --lr), for more epochs or in smaller batches, or hold out more images (val, --held-out)."
        f"{_unequal(validator)}"
    )


def _unequal(validator: "Validator") -> str:
    """That one class is so common that answering it always looks best, where it is."""
    equal = 1 / validator.source.num_classes
    spread = math.sqrt(equal * (1 - equal) / validator.source.num_examples)
    if validator.chance <= max(COMMON * equal, equal + 3 * spread):  # of few images one class has more by chance
        return ""
    return (
        f" One class has {validator.chance:.0%} of these, so that a network that only knows that one looks best: take "
        "as many images of each class, to train on and to choose by (val/, or val and a loader's sampler in Python)."
    )


def _forgot(trainer: "Trainer") -> str | None:
    """That the kept weights know far less than an epoch before them did, as where weights that were given are lost."""
    best = trainer.best.snapshot
    known = [s for s in trainer.history[: best.epoch] if s.val_natural is not None]
    once = max(known, key=lambda s: s.val_natural or 0.0, default=None)
    if once is None or best.natural is None or (once.val_natural or 0.0) - best.natural <= FORGOT:
        return None
    return (
        f"natural accuracy fell from {once.val_natural:.1%} (epoch {once.epoch + 1}) to {best.natural:.1%} (epoch "
        f"{best.epoch + 1}, which was kept for its robustness), so training lost most of what the network knew. A "
        "smaller radius (--eps) or learning rate (lr, --lr) keeps more of it."
    )
