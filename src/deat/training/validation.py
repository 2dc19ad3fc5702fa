"""Validation: accuracy and loss on held-out images, natural and under attack, which choose the best epoch."""

from bisect import bisect_right
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deat.data import ImageSet, LazyImages
from deat.data.batch_source import BatchSource, InterruptibleSource
from deat.engine.engine import Engine
from deat.evaluation.attacks import Attack, parse_attack
from deat.evaluation.intervals import wilson_interval
from deat.evaluation.quick_scores import compute_scores
from deat.evaluation.sanity import MIN_IMAGES_FOR_CHANCE
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel
from deat.training.config import TrainConfig
from deat.utils.signals import Interruption


class ValScores(NamedTuple):
    """The scores of a network on held-out images.

    Attributes:
        natural: Natural accuracy.
        robust: Accuracy under attack.
        loss: The mean cross-entropy on natural images.
        correct: For each image, whether it is right under attack; empty for a graded task.
    """

    natural: float
    robust: float
    loss: float
    correct: list[bool]


class Validator:
    """Scores a network on held-out images.

    Args:
        source: The held-out images.
        attack: The attack of robust accuracy.
        threat: The threat model.
        engine: The engine, for its precision.
        seed: The seed of the attack.
        interruption: Ends validation between two batches.
        task: What outputs and labels mean; its first metric is the score.

    Attributes:
        passes: Forward and backward passes so far, per image; not part of training's.
    """

    def __init__(
        self,
        source: BatchSource,
        attack: Attack,
        threat: ThreatModel,
        engine: Engine,
        seed: int,
        interruption: Interruption | None = None,
        task: Task = CLASSIFICATION,
    ) -> None:
        self.task = task
        self.source, self.attack, self.threat, self.engine, self.seed = source, attack, threat, engine, seed
        self.interruption = interruption or Interruption()
        self.passes = 0

    @classmethod
    def of(
        cls,
        source: BatchSource | None,
        config: TrainConfig,
        threat: ThreatModel,
        engine: Engine,
        interruption: Interruption,
        task: Task = CLASSIFICATION,
    ) -> "Validator | None":
        """Make the validator of a configuration; None without held-out images or with val_attack `none`."""
        if source is None or config.val_attack == "none":
            return None
        return cls(source, parse_attack(config.val_attack), threat, engine, config.seed, interruption, task)

    def __call__(self, net: nn.Module) -> ValScores:
        """Score a network; for other tasks than classification, the first metric is in the place of accuracy."""
        model, attacks = AutocastModel(net, self.engine), ("natural", self.attack)
        images = InterruptibleSource(self.source, self.interruption)
        prepare, distributed = self.engine.to_memory_format, self.interruption.distributed
        scores = compute_scores(model, images, attacks, self.threat, self.seed, prepare, distributed, self.task)
        # Under a union, the examples of two balls are compared by a pass of each.
        comparisons = 2 * (len(self.threat.balls) - 1)
        self.passes += (2 + 2 * self.attack.steps * len(self.threat.balls) + comparisons) * len(self.source)
        natural, robust = scores["natural"], scores[self.attack.name]
        return ValScores(natural.accuracy, robust.accuracy, natural.loss, robust.correct)

    @cached_property
    def labels(self) -> Tensor:
        """All labels, on the CPU."""
        return read_labels(self.source)

    @cached_property
    def chance(self) -> float | None:
        """The highest natural accuracy, or first metric, of a constant answer; None if the task does not know it."""
        return self.task.chance(self.labels)

    @cached_property
    def chance_upper_bound(self) -> float | None:
        """The highest natural accuracy that does not differ significantly (95 %) from chance; chance itself for few images."""
        n = self.source.num_examples
        chance = self.chance
        if chance is None or n < MIN_IMAGES_FOR_CHANCE or self.task.is_graded:
            return chance
        return (bisect_right(range(n + 1), chance, key=lambda hits: wilson_interval(hits, n)[0]) - 1) / n


def read_labels(source: BatchSource) -> Tensor:
    """Return all labels of a source, on the CPU."""
    images = getattr(source, "images", None)
    known = images.labels if isinstance(images, ImageSet | LazyImages) else None
    labels = torch.cat([y for _, y in source.epoch(0)]) if known is None else known
    return labels.cpu()


class AutocastModel(nn.Module):
    """A network that runs inside the engine's autocast, as it is trained."""

    def __init__(self, net: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.net, self.engine = net, engine
        self.training = net.training  # not train(), which would change the network's modules

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, computed in the engine's precision."""
        with self.engine.autocast():
            logits: Tensor = self.net(x)
        return logits
