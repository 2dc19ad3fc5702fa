"""Plain accuracies under a few attacks, in one host read: for validation and for the table at a run's end."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deat.data import Source
from deat.evaluation.attacks import Attack, attack, correct
from deat.seeding import derive
from deat.threat import ThreatModel


def accuracies(
    model: nn.Module,
    source: Source,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, float]:
    """Accuracy by attack on every image of a source; `prepare` lays a batch out as the model likes it."""
    chosen = [attack(name) for name in attacks]
    first = next(model.parameters())
    dtype = torch.promote_types(torch.float32, first.dtype)
    sums = torch.zeros(len(chosen), dtype=torch.int64, device=first.device)
    for batch, (x, y) in enumerate(source.epoch(0)):
        images = prepare(x.to(dtype))
        for index, how in enumerate(chosen):
            generator = torch.Generator(first.device).manual_seed(derive(seed, f"score {how.name}", batch))
            sums[index] += correct(model, images, y, how, threat, generator).sum()
    shares = (sums.double() / source.num_examples).tolist()
    return {how.name: share for how, share in zip(chosen, shares, strict=True)}
