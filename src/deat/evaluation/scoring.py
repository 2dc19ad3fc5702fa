"""Plain accuracies and losses under a few attacks, in one host read: for validation and a run's last table."""

from collections.abc import Callable, Sequence
from math import fsum

import torch
from torch import Tensor, nn

from deat.core.losses import cross_entropy
from deat.data import Source
from deat.evaluation.attacks import Attack, is_correct, logits_under_attack, parse_attack
from deat.threat import ThreatModel
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.seeding import derive_seed
from deat.utils.torch_utils import device_of


def compute_accuracies(
    model: nn.Module,
    source: Source,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    distributed: Distributed = SINGLE_PROCESS,
) -> dict[str, float]:
    """Accuracy by attack on every image of a source; `prepare` lays a batch out as the model likes it."""
    found = compute_scores(model, source, attacks, threat, seed, prepare, distributed)
    return {name: accuracy for name, (accuracy, _) in found.items()}


def compute_scores(
    model: nn.Module,
    source: Source,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor],
    distributed: Distributed,
) -> dict[str, tuple[float, float]]:
    """Accuracy and mean cross-entropy by attack on every image of a source.

    Several processes take whole batches in turn, so that their number changes nothing.
    """
    chosen = [parse_attack(name) for name in attacks]
    device = device_of(model)
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    sums = torch.zeros(len(chosen), 2, len(source), dtype=torch.float64, device=device)
    for batch, (x, y) in enumerate(source.epoch(0)):
        if batch % distributed.size != distributed.rank:
            continue
        images = prepare(x.to(dtype))
        for index, how in enumerate(chosen):
            generator = torch.Generator(device).manual_seed(derive_seed(seed, f"score {how.name}", batch))
            logits = logits_under_attack(model, images, y, how, threat, generator)
            sums[index, 0, batch] = is_correct(logits, y).sum()
            sums[index, 1, batch] = cross_entropy(logits, y).sum(dtype=torch.float64)
    flat = distributed.all_reduce_sum(sums.flatten().tolist())
    means = [fsum(flat[i : i + len(source)]) / source.num_examples for i in range(0, len(flat), len(source))]
    return dict(zip([how.name for how in chosen], zip(means[::2], means[1::2], strict=True), strict=True))
