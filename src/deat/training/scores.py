"""The small table at a run's end: accuracy on test images, natural and under attack, beside what it cost."""

from dataclasses import dataclass

import torch
from torch import nn

from deat.data import Source
from deat.evaluation.attacks import attack, correct
from deat.seeding import derive
from deat.threat import ThreatModel


@dataclass(frozen=True)
class Score:
    """One row: a model's accuracies by attack, and what training it cost."""

    name: str
    accuracy: dict[str, float]
    images: int
    backprops: int
    seconds: float


def accuracies(
    model: nn.Module, source: Source, attacks: tuple[str, ...], threat: ThreatModel, seed: int
) -> dict[str, float]:
    """Accuracy by attack, in float32, on every image of a source."""
    device = next(model.parameters()).device
    sums = torch.zeros(len(attacks), dtype=torch.int64, device=device)
    for batch, (x, y) in enumerate(source.epoch(0)):
        for index, name in enumerate(attacks):
            generator = torch.Generator(device).manual_seed(derive(seed, "score", batch))
            sums[index] += correct(model, x, y, attack(name), threat, generator).sum()
    return dict(zip(attacks, (sums.double() / source.num_examples).tolist(), strict=True))
