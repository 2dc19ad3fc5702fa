"""Accuracy and loss on held-out images, natural and under attack: what the best epoch is chosen by."""

from bisect import bisect_right
from functools import cached_property

import torch
from torch import Tensor, nn

from deat.data import ImageSet, LazyImages
from deat.data.sources import InterruptibleSource, Source
from deat.engine.precision import Engine
from deat.evaluation.attacks import Attack, parse_attack
from deat.evaluation.intervals import wilson_interval
from deat.evaluation.sanity.before_attack import MIN_IMAGES_FOR_CHANCE
from deat.evaluation.scoring import compute_scores
from deat.threat import ThreatModel
from deat.training.config import TrainConfig
from deat.utils.signals import Interruption


class Validator:
    """Scores a network on a held-out source; its passes are counted apart from training's."""

    def __init__(
        self,
        source: Source,
        val_attack: Attack,
        threat: ThreatModel,
        engine: Engine,
        seed: int,
        interruption: Interruption | None = None,
    ) -> None:
        self.source, self.how, self.threat, self.engine, self.seed = source, val_attack, threat, engine, seed
        self.interruption = interruption or Interruption()
        self.passes = 0

    @classmethod
    def of(
        cls,
        source: Source | None,
        config: TrainConfig,
        threat: ThreatModel,
        engine: Engine,
        interruption: Interruption,
    ) -> "Validator | None":
        """The validator that the settings ask for, if any; it can be interrupted between two batches."""
        if source is None or config.val_attack == "none":
            return None
        return cls(source, parse_attack(config.val_attack), threat, engine, config.seed, interruption)

    def __call__(self, net: nn.Module) -> tuple[float, float, float]:
        """(natural, robust) accuracy and the loss on natural images, in one host read."""
        model, both = _AutocastModel(net, self.engine), ("natural", self.how)
        images = InterruptibleSource(self.source, self.interruption)
        found = compute_scores(
            model, images, both, self.threat, self.seed, self.engine.to_memory_format, self.interruption.distributed
        )
        self.passes += (2 + 2 * self.how.steps) * len(self.source)
        natural, loss = found["natural"]
        return natural, found[self.how.name][0], loss

    @cached_property
    def chance(self) -> float:
        """The natural accuracy of a network that gives one answer for all."""
        return majority_class_share(self.source)

    @cached_property
    def chance_upper_bound(self) -> float:
        """The most that, on so many images, cannot be told from chance (95 %); chance itself where they are few."""
        n = self.source.num_examples
        if n < MIN_IMAGES_FOR_CHANCE:
            return self.chance
        return (bisect_right(range(n + 1), self.chance, key=lambda hits: wilson_interval(hits, n)[0]) - 1) / n


def majority_class_share(source: Source) -> float:
    """The share of a source's commonest label, which is what one answer for all gets at most."""
    held = getattr(source, "images", None)
    known = held.labels if isinstance(held, ImageSet | LazyImages) else None
    labels = torch.cat([y for _, y in source.epoch(0)]) if known is None else known
    return int(labels.bincount().max()) / len(labels)


class _AutocastModel(nn.Module):
    """The network as it is trained: inside the engine's autocast."""

    def __init__(self, net: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.net, self.engine = net, engine
        self.training = net.training  # not train(), which would reach into the net

    def forward(self, x: Tensor) -> Tensor:
        """The logits, computed in the engine's precision."""
        with self.engine.autocast():
            logits: Tensor = self.net(x)
        return logits
