"""Plain accuracies and losses under a few attacks, in one host read: for validation and a run's last table."""

from collections.abc import Callable, Sequence
from math import fsum

import torch
from torch import Tensor, nn

from deat.core.losses import cross_entropy
from deat.data import Source
from deat.evaluation.attacks import Attack, attack, attacked, is_right
from deat.threat import ThreatModel
from deat.utils.distributed import ALONE, Ranks
from deat.utils.seeding import derive
from deat.utils.torch_utils import device_of


def accuracies(
    model: nn.Module,
    source: Source,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Accuracy by attack on every image of a source; `prepare` lays a batch out as the model likes it."""
    found = scores(model, source, attacks, threat, seed, prepare, ranks)
    return {name: accuracy for name, (accuracy, _) in found.items()}


def scores(
    model: nn.Module,
    source: Source,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor],
    ranks: Ranks,
) -> dict[str, tuple[float, float]]:
    """Accuracy and mean cross-entropy by attack on every image of a source.

    Several processes take whole batches in turn, so that their number changes nothing.
    """
    chosen = [attack(name) for name in attacks]
    device = device_of(model)
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    sums = torch.zeros(len(chosen), 2, len(source), dtype=torch.float64, device=device)
    for batch, (x, y) in enumerate(source.epoch(0)):
        if batch % ranks.size != ranks.rank:
            continue
        images = prepare(x.to(dtype))
        for index, how in enumerate(chosen):
            generator = torch.Generator(device).manual_seed(derive(seed, f"score {how.name}", batch))
            logits = attacked(model, images, y, how, threat, generator)
            sums[index, 0, batch] = is_right(logits, y).sum()
            sums[index, 1, batch] = cross_entropy(logits, y).sum(dtype=torch.float64)
    flat = ranks.total(sums.flatten().tolist())
    means = [fsum(flat[i : i + len(source)]) / source.num_examples for i in range(0, len(flat), len(source))]
    return dict(zip([how.name for how in chosen], zip(means[::2], means[1::2], strict=True), strict=True))
