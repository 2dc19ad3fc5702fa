"""Plain accuracies under a few attacks, in one host read: for validation and for the table at a run's end."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deat.data import Source
from deat.evaluation.attacks import Attack, attack, correct
from deat.ranks import ALONE, Ranks
from deat.seeding import derive
from deat.threat import ThreatModel


def accuracies(
    model: nn.Module,
    source: Source,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Accuracy by attack on every image of a source; `prepare` lays a batch out as the model likes it.

    Several processes take whole batches in turn, so that their number changes nothing.
    """
    chosen = [attack(name) for name in attacks]
    first = next(model.parameters())
    dtype = torch.promote_types(torch.float32, first.dtype)
    sums = torch.zeros(len(chosen), dtype=torch.int64, device=first.device)
    for batch, (x, y) in enumerate(source.epoch(0)):
        if batch % ranks.size != ranks.rank:
            continue
        images = prepare(x.to(dtype))
        for index, how in enumerate(chosen):
            generator = torch.Generator(first.device).manual_seed(derive(seed, f"score {how.name}", batch))
            sums[index] += correct(model, images, y, how, threat, generator).sum()
    found = ranks.total(sums.tolist())
    return {how.name: hits / source.num_examples for how, hits in zip(chosen, found, strict=True)}
